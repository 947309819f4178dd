"""Other readings of a checkpoint, each named: what loaders, exporters and configurations are known to get wrong about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from draftscope.eagle3.altered import ROUNDED
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.eagle3.reading import Reading
from draftscope.faults.facts_checkpoint import Part

_LAYER = "midlayer."
_ATTENTION, _MLP = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
_PAIRS = ((f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"), (f"{_ATTENTION}k_proj.weight", f"{_ATTENTION}v_proj.weight"),
          (f"{_ATTENTION}q_proj.weight", f"{_ATTENTION}k_proj.weight"),
          (f"{_ATTENTION}q_proj.weight", f"{_ATTENTION}v_proj.weight"),
          (f"{_LAYER}input_layernorm.weight", f"{_LAYER}hidden_norm.weight"),
          (f"{_LAYER}hidden_norm.weight", f"{_LAYER}post_attention_layernorm.weight"))
_TENSORS: dict[Part, str] = {"fc": "fc.", "layer": _LAYER, "head": "lm_head."}


def apply(key: str, base: Reading) -> Reading:
    """A reading with one of these added, by its key."""
    kind, _, rest = key.partition(" ")
    if kind == "altered":
        return replace(base, altered=(*base.altered, rest))
    if kind == "lost":
        return replace(base, lost=(*base.lost, rest))
    name, _, value = key.partition("=")
    words = {"True": True, "False": False}
    settings = {**base.settings, name: words.get(value, value)}
    return replace(base, settings=settings, feedback=None if name == "norm_output" else base.feedback)


def _swaps(checkpoint: Checkpoint) -> Iterator[str]:
    held = checkpoint.tensors
    for one, two in _PAIRS:
        if one in held and two in held and held[one].shape == held[two].shape:
            yield f"altered swap {one} {two}"
    for name, tensor in held.items():
        if name.startswith(_LAYER) and tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]:
            yield f"altered transpose {name}"


def _turned(checkpoint: Checkpoint, base: Reading, names: tuple[str, ...]) -> Iterator[str]:
    config = {**checkpoint.config.model_dump(), **base.settings}
    held = {*checkpoint.tensors, *checkpoint.idle}
    needs = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight", "fc_bias": "fc.bias"}
    for name in names:
        # A switch that brings tensors of its own can be turned off, and turned on only where the file has them.
        if name not in needs or config[name] or needs[name] in held:
            yield f"{name}={not config[name]}"


def of_engine(checkpoint: Checkpoint, base: Reading, *, tied: bool = False) -> dict[Part, list[str]]:
    """What an engine may have made of each stage, by key; `tied`: the target's head is the embedding that the draft runs with."""
    layer = [name for name in checkpoint.tensors if name.startswith(_LAYER) and name.endswith("norm.weight")]
    rounded = [kind for kind in ROUNDED if kind != "codes"]
    return {
        "fc": [*_turned(checkpoint, base, ("norm_before_fc", "fc_norm", "fc_bias")), *_rounded("fc", rounded),
               "altered codes fc."],
        "layer": [*_turned(checkpoint, base, ("norm_before_residual", "double_norm")), "residual=branch", "residual=entry",
                  *_swaps(checkpoint), *(f"lost {name}" for name in layer), *_rounded("layer", rounded),
                  f"altered codes {_LAYER}", *(["lost embed_tokens."] if "embed_tokens.weight" in checkpoint.tensors else [])],
        # A head on states that no norm touched chooses as one behind a norm whose gain is 1: only that is tried.
        "head": ["altered head target first", "altered head target rows", *([] if tied else ["altered head embedding"]),
                 "lost norm.", *_rounded("head", rounded)],
    }


def _rounded(part: Part, kinds: list[str]) -> list[str]:
    return [f"altered {kind} {_TENSORS[part]}" for kind in kinds]


def slight(keys: list[str]) -> list[str]:
    """Those that change a stage by little: rounded matrices and gains."""
    return [key for key in keys if key.split()[-2:-1] in (["fp8"], ["int8"], ["int4"]) or key.startswith("lost ")]


def of_file(checkpoint: Checkpoint, base: Reading) -> list[str]:
    """What may be wrong in the file itself and is undone by reading it otherwise."""
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "fc_bias", "norm_output", "norm_before_head", "double_norm")
    maps = []
    if checkpoint.config.draft_vocab_size != checkpoint.config.vocab_size and "d2t" in checkpoint.tensors:
        maps = ["altered map -1", "altered map 1"]
    return [*_turned(checkpoint, base, switches), *_swaps(checkpoint), *maps]
