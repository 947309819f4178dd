"""Draft checkpoints: opened in either dialect, checked, turned into a `Draft`, and saved.

Tensor names in memory are the native dialect's (`fc`, `midlayer.*`, `norm`, `lm_head`). A missing tensor is no error, since
engines don't refuse it either: it stays at its initial value there, and here.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.dialects import describe, native_config
from draftscope.eagle3.model import Draft
from draftscope.eagle3.reading import D2T, Reading
from draftscope.errors import DraftscopeError

if TYPE_CHECKING:
    from draftscope.target.parts import TargetParts

_PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")
_RENAMED = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2.",
            "layers.0.": "midlayer.", "midlayer.0.": "midlayer."}
_REFUSED = (
    (re.compile(r"(layers|midlayer)\.[1-9]\d*\."), "a second decoder layer"),
    (re.compile(r"self_attn\.(q|k|v|o)_proj\.bias$"), "an attention bias"),
    (re.compile(r"mlp\.\w+\.bias$"), "a bias in the MLP"),
    (re.compile(r"^fc\.bias$"), "a bias on fc"),
    (re.compile(r"kv_a_proj|kv_b_proj|q_a_proj"), "multi-head latent attention (MLA)"),
    (re.compile(r"weight_(scale|packed)|\.qweight$"), "a quantised weight"),
)


@dataclass(slots=True)
class Checkpoint:
    """A draft checkpoint as found.

    Attributes:
        raw: config.json as it is.
        tensors: under native names, in the dtypes stored; `d2t` [D] is an offset map, `t2d` [V] a mask.
        missing: tensors that the configuration asks for and the files lack.
        unexpected: names in the files that the configuration has no use for, as spelt there.
        layer_ids, layer_ids_key: the file's own layer ids and the key that held them (`config.boundaries` translates them).
        notes: what was renamed or stripped on the way.
        spelt: name in the files of every tensor, by native name; loaders that know fewer names than this one go by it.
    """

    folder: Path
    config: DraftConfig
    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    layer_ids: tuple[int, ...] | None = None
    layer_ids_key: str = ""
    notes: tuple[str, ...] = ()
    spelt: dict[str, str] = field(default_factory=dict)


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that a configuration asks for, under native names."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Draft(config).named_parameters()}


def load_checkpoint(folder: Path | str, *, target_layers: int | None = None) -> Checkpoint:
    """Open a draft checkpoint.

    Args:
        folder: holds config.json and safetensors (one file, or several with or without an index).
        target_layers: decoder layers of the target; without it a configuration that names no layer ids has no boundaries.

    Raises:
        DraftscopeError: not a draft, another file format, a truncated file, a shape that contradicts the configuration, or
            something that the draft model here can't honour.
    """
    folder = Path(folder)
    raw = _read_config(folder / "config.json")
    stored, prefixes = _read_tensors(folder)
    tensors: dict[str, Tensor] = {}
    spelt: dict[str, str] = {}
    for name, (own, tensor) in stored.items():
        for pattern, what in _REFUSED:
            if pattern.search(name):
                raise DraftscopeError(f"{what} (tensor {own}) is not supported", where=str(folder))
        for old, new in _RENAMED.items():
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        tensors[name], spelt[name] = tensor, own
    described = describe(raw, str(folder / "config.json"), qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
                         target_layers=target_layers)
    config = described.config
    if not any(name.startswith(("fc.", "midlayer.", "lm_head.")) for name in tensors):
        raise DraftscopeError("no tensor of an EAGLE-3 draft (fc, midlayer or layers.0, lm_head) in the files", where=str(folder))
    _refuse_unnormed_head(raw, tensors, folder)

    shapes = expected_shapes(config)
    optional = {"embed_tokens.weight": (config.vocab_size, config.hidden_size), "d2t": (config.draft_vocab_size,),
                "t2d": (config.vocab_size,)}
    known = shapes | optional
    for name, tensor in tensors.items():
        if name in known and tuple(tensor.shape) != known[name]:
            raise DraftscopeError(f"tensor {spelt[name]} has shape {list(tensor.shape)}, the configuration asks for "
                                  f"{list(known[name])}", where=str(folder),
                                  remedy="config.json and weights do not belong together")
    needed = [*shapes, *(["d2t"] if config.draft_vocab_size != config.vocab_size else [])]
    return Checkpoint(
        folder=folder, config=config, raw=raw, tensors={n: t for n, t in tensors.items() if n in known},
        missing=tuple(n for n in needed if n not in tensors), unexpected=tuple(spelt[n] for n in tensors if n not in known),
        layer_ids=described.layer_ids, layer_ids_key=described.layer_ids_key,
        notes=tuple(f"prefix {p} stripped from tensor names" for p in prefixes), spelt=spelt,
    )


def build_draft(checkpoint: Checkpoint, parts: TargetParts | None = None, reading: Reading | None = None) -> Draft:
    """The draft as a reading makes it: float32, eval mode.

    Tensors that are missing, or `lost` by the reading, stay at a seeded initial value (norms 1, matrices N(0, 0.02), as the
    engines leave them); those that the settings in effect have no use for are dropped. The embedding is the checkpoint's own,
    else the target's; a head that is absent over the whole vocabulary is the target's. Target ids beyond the vocabulary, as
    a map of the wrong meaning yields, are clamped to the last id.

    Raises:
        DraftscopeError: an unknown setting, or one that contradicts a tensor's shape.
    """
    reading = reading or Reading()
    settings = dict(reading.settings)
    if reading.feedback is not None:
        settings["norm_output"] = reading.feedback == "post"
    where = str(checkpoint.folder)
    try:
        config = DraftConfig.model_validate(checkpoint.config.model_dump() | settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise DraftscopeError(f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}", where=where) from None
    draft = Draft(config)
    held = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(reading.lost)} if reading.lost else checkpoint.tensors
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            tensor = held.get(name)
            if tensor is None and name == "lm_head.weight" and _shares_head(config, parts) and name in checkpoint.missing:
                assert parts is not None
                tensor = parts.head
            if tensor is None:
                parameter.copy_(initial_value(name, parameter, reading.seed))
            elif tensor.shape != parameter.shape:
                raise DraftscopeError(f"tensor {name} has shape {list(tensor.shape)}, the settings in effect ask for "
                                      f"{list(parameter.shape)}", where=where)
            else:
                parameter.copy_(tensor)
    draft.target_ids = target_ids(held.get("d2t"), config, reading.d2t)
    embedding = held.get("embed_tokens.weight")
    if embedding is None and parts is not None:
        embedding = parts.embedding
        if embedding.shape[1] != config.hidden_size:
            raise DraftscopeError(f"the checkpoint has no embedding, and the target's is {embedding.shape[1]} wide, the draft "
                                  f"{config.hidden_size}", where=where)
    elif embedding is None and "embed_tokens." in reading.lost:
        # An engine that puts the target's embedding in its place; with no target at hand the draft's own has to do.
        embedding = checkpoint.tensors.get("embed_tokens.weight")
    draft.embedding = None if embedding is None else embedding.float()
    return draft.float().eval().requires_grad_(False)


def initial_value(name: str, like: Tensor, seed: int) -> Tensor:
    """What a tensor holds before anything is loaded: norms ones, matrices N(0, 0.02), by name and seed alone."""
    if like.ndim == 1:
        return torch.ones(like.shape)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(like.shape, generator=draw) * 0.02


def target_ids(d2t: Tensor | None, config: DraftConfig, meaning: D2T = "offset") -> Tensor:
    """Target id of every draft id [D] int64; without a map the draft ids themselves."""
    own = torch.arange(config.draft_vocab_size)
    if d2t is None or meaning == "zero":
        ids = own
    else:
        ids = d2t.long() if meaning == "absolute" else own + d2t.long()
    return ids.clamp(0, config.vocab_size - 1)


def save_native(folder: Path | str, draft: Draft, d2t: Tensor | None, *, dtype: torch.dtype = torch.bfloat16,
                target_layers: int | None = None, extra: Mapping[str, Any] | None = None) -> None:
    """Save a draft as SGLang and vLLM read it; both files are replaced atomically.

    Default boundaries are left unsaid, because there the engines agree. Others are written as
    `eagle_config.eagle_aux_hidden_state_layer_ids` in SGLang's and SpecForge's meaning, id = boundary - 1. vLLM's V1 runner
    takes these ids raw, one layer lower, and its V2 runner ignores them for the defaults: for vLLM add a top-level key of the
    same name that holds the boundaries themselves (SGLang does not look there). The embedding is not saved: it is the target's.

    Args:
        d2t: [D] int64 offsets; None where the draft's vocabulary is the target's.
        target_layers: decoder layers of the target, so that default boundaries are known to be such.
        extra: further keys for config.json; they win.
    """
    folder = Path(folder)
    config = draft.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in draft.named_parameters()}
    if d2t is not None:
        tensors["d2t"] = d2t.long().contiguous()
        chosen = torch.zeros(config.vocab_size, dtype=torch.bool)
        chosen[target_ids(d2t, config)] = True
        tensors["t2d"] = chosen
    temporary = folder / ".model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")
    text = json.dumps(native_config(config, dtype, target_layers) | dict(extra or {}), indent=2) + "\n"
    temporary = folder / ".config.json.part"
    temporary.write_text(text)
    os.replace(temporary, folder / "config.json")


def _shares_head(config: DraftConfig, parts: TargetParts | None) -> bool:
    return parts is not None and tuple(parts.head.shape) == (config.draft_vocab_size, config.hidden_size)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise DraftscopeError("no config.json here", where=str(path.parent),
                              remedy="Give the folder of a draft checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DraftscopeError(f"not readable as JSON: {error}", where=str(path)) from None
    if not isinstance(raw, dict):
        raise DraftscopeError("not a JSON object", where=str(path))
    return raw


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DraftscopeError(f"not a safetensors index: {error}", where=str(index)) from None
        files = [folder / Path(str(name)).name for name in names]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if files:
        return files
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    what = f"weights only in {pickled[0]}, which would have to be unpickled" if pickled else "no safetensors file here"
    raise DraftscopeError(what, where=str(folder), remedy="Save the draft as safetensors" if pickled else "")


def _read_tensors(folder: Path) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """Tensors by name without wrappers' prefixes, each with the name as spelt; and the prefixes that were there."""
    found: dict[str, tuple[str, Tensor]] = {}
    prefixes: list[str] = []
    for path in _weight_files(folder):
        try:
            with safe_open(path, "pt") as f:
                for own in f.keys():  # noqa: SIM118 (not a dict)
                    name = own
                    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
                        name = name[len(prefix) :]
                        if prefix not in prefixes:
                            prefixes.append(prefix)
                    if name in found:
                        raise DraftscopeError(f"tensors {found[name][0]} and {own} are both {name}", where=str(path))
                    found[name] = (own, f.get_tensor(own))
        except FileNotFoundError:
            raise DraftscopeError("the index names this file, but it is not there", where=str(path)) from None
        except (SafetensorError, OSError) as error:
            raise DraftscopeError(f"truncated, or not safetensors: {error}", where=str(path)) from None
    return found, prefixes


def _refuse_unnormed_head(raw: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """SpecForge's `norm_output: false` trains the head on states that no norm has touched; its norm stays at ones.

    Elsewhere the key means the feedback and false is the default, so it is believed only where the norm shows no training.
    """
    norm = tensors.get("norm.weight")
    untrained = norm is None or bool((norm == 1).all())
    if raw.get("norm_output") is False and "speculators_model_type" not in raw and untrained:
        raise DraftscopeError("norm_output: false with an untrained final norm (SpecForge: a head on un-normed states) is not "
                              "supported", where=str(folder / "config.json"), remedy="Train with norm_output: true")
