"""A checkpoint opened for lint: what would keep it from being opened, but can be read, is a finding."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftscope.eagle3.checkpoint import Checkpoint, NoDraft, expected_shapes, load_checkpoint
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.dialects import describe
from draftscope.errors import DraftscopeError
from draftscope.faults.fixes import plain_keys
from draftscope.findings import Finding, Patch
from draftscope.linting.finding import finding
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile, read_json
from draftscope.target.parts import tensor_files

_PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")


@dataclass(slots=True)
class Opened:
    """A checkpoint, or the findings that stand in its way."""

    checkpoint: Checkpoint | None
    findings: list[Finding] = field(default_factory=list)


def open_checkpoint(folder: Path, target_layers: int | None = None, consumer: str | None = None) -> Opened:
    """Open a draft checkpoint; `consumer`: who reads it, whose keys a fix then names.

    Raises:
        DraftscopeError: it can't be read at all.
    """
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if isinstance(raw, dict) and raw.get("quantization_config"):
        return _quantised(folder, raw, target_layers)
    try:
        return Opened(load_checkpoint(folder, target_layers=target_layers))
    except NoDraft:
        raise
    except DraftscopeError:
        found = _shapes(folder, raw, consumer) if isinstance(raw, dict) else []
        if not found:
            raise
        return Opened(None, found)


def _quantised(folder: Path, raw: dict[str, Any], target_layers: int | None) -> Opened:
    """A `quantization_config` copied from the target stands over plain weights; over quantised ones it is refused as ever."""
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory(prefix="draftscope-lint-") as made:
        for file in folder.iterdir():
            if file.is_file() and file.name != "config.json":
                (Path(made) / file.name).symlink_to(file.resolve())
        (Path(made) / "config.json").write_text(json.dumps(plain))
        try:
            checkpoint = load_checkpoint(Path(made), target_layers=target_layers)
        except DraftscopeError as error:
            raise DraftscopeError(f"a quantised draft (quantization_config): {error.what}", where=str(folder),
                                  remedy=error.remedy or "Save it in bfloat16 or float32") from None
    kinds = {str(t.dtype).removeprefix("torch.") for t in checkpoint.tensors.values() if t.ndim == 2}
    method = raw["quantization_config"].get("quant_method", "?") if isinstance(raw["quantization_config"], dict) else "?"
    return Opened(replace(checkpoint, folder=folder, raw=raw), [finding(
        "quant-inherit", ["config quantization_config"], f"config.json says that the draft is quantised ({method}), its weights "
        f"are plain ({', '.join(sorted(kinds))})", "proven", "needs-serving",
        "Remove quantization_config from the draft's config.json: engines build quantised layers from it, whose scales the files "
        "lack", measured="quantization_config against dtypes and names of the tensors",
        result=f"{method}; no scale in the files", healthy="quantised weights come with their scales",
        patch=Patch(config={"quantization_config": None}),
    )])


def _shapes(folder: Path, raw: dict[str, Any], consumer: str | None) -> list[Finding]:
    """Tensors whose shape contradicts the configuration, from headers alone."""
    try:
        files = tensor_files(folder)
        stored = {name: TensorFile(file).shape(name) for name, file in files.items() if file.is_file()}
        names = {_native(name): name for name in stored}
        config = describe(raw, str(folder / "config.json")).config
    except DraftscopeError:
        return []
    known = expected_shapes(config) | {"embed_tokens.weight": (config.vocab_size, config.hidden_size),
                                       "d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    wrong = {own: (stored[own], known[name]) for name, own in names.items() if name in known and stored[own] != known[name]}
    if not wrong:
        return []
    result = "; ".join(f"{own} {list(has)}, wanted {list(wants)}" for own, (has, wants) in list(wrong.items())[:8])
    if named := _by_name(wrong, config, files, result, consumer):
        return [named]
    fc = next((own for own in wrong if _native(own) == "fc.weight"), None)
    says = f"{len(wrong)} tensors do not have the shape that config.json asks for"
    if fc is not None and len(wrong) == 1:
        slots = stored[fc][1] / config.target_hidden_size
        says = (f"fc takes {stored[fc][1]} values, which is {slots:g} slots of {config.target_hidden_size}; config.json names "
                f"{config.slots}")
    return [finding("schema-width", [f"tensor {own}" for own in list(wrong)[:8]], says, "proven", "needs-serving",
                    "Put the configuration beside the weights that it belongs to: count of layer ids, num_aux_hidden_states, "
                    "target_hidden_size and draft_vocab_size decide these shapes", measured="shapes in the files' headers",
                    result=result, healthy="shapes are those that config.json asks for",
                    figures={own: {"has": list(has), "wanted": list(wants)} for own, (has, wants) in wrong.items()})]


def _by_name(wrong: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], config: DraftConfig, files: Mapping[str, Place],
             result: str, consumer: str | None) -> Finding | None:
    """Where the tensors that are of another shape say by themselves what went wrong."""
    names = {_native(own): own for own in wrong}
    where = [f"tensor {own}" for own in list(wrong)[:8]]
    measured, healthy = "shapes and dtypes in the files' headers", "shapes are those that config.json asks for"
    if set(names) <= {"d2t", "t2d"}:
        has = wrong[next(iter(wrong))][0][0]
        return finding(
            "vocab-map", where, f"the vocabulary map has {has} entries for {config.draft_vocab_size} draft ids" if "d2t" in names
            else f"t2d is for {has} tokens, the target has {config.vocab_size}", "proven",
            "needs-retraining" if "d2t" in names else "needs-serving", "Take the map that belongs to this head: one offset per "
            "row, for this tokenizer", measured=measured, result=result, healthy=healthy,
            patch=Patch(tensors={"d2t": "from t2d"}) if "t2d" not in names else None)
    stored = {own: TensorFile(files[own]).tensor(own).dtype for own in wrong}
    packed = [own for own, (has, wants) in wrong.items() if len(has) == len(wants) == 2 and not stored[own].is_floating_point
              and has[1] < wants[1] and wants[1] % has[1] == 0]
    if packed:
        own = packed[0]
        (_, held), (_, wanted) = wrong[own]
        kind = str(stored[own]).removeprefix("torch.")
        return finding(
            "quant-inherit", [f"tensor {own}" for own in packed[:8]], f"{own} is stored packed, {wanted // held} values to each "
            f"{kind}, and config.json says nothing of it", "proven", "needs-retraining",
            "Leave the draft out of the target's quantisation and export it in bfloat16", measured=measured, result=result,
            healthy=healthy, patch=Patch(tensors={_native(own): "from source" for own in packed}))
    rows = {part: wrong[names[f"midlayer.self_attn.{part}_proj.weight"]][0][0] for part in ("q", "k", "v")
            if f"midlayer.self_attn.{part}_proj.weight" in names}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    dims = {count / heads[part] for part, count in rows.items()}
    if len(rows) == 3 and len(dims) == 1 and dims.copy().pop().is_integer():
        dim = int(dims.pop())
        return finding(
            "config-flag", ["config head_dim"], f"the projections are made for heads {dim} wide, config.json says or implies "
            f"{config.head_dim}", "proven", "needs-serving", f"Write head_dim: {dim} (it is not hidden_size / heads here)",
            measured=measured, result=result, healthy=healthy, figures={"head_dim": config.head_dim, "rows": rows},
            patch=Patch(config={"head_dim": dim}), config=plain_keys(consumer, {"head_dim": dim}))
    return None


def _native(name: str) -> str:
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
        name = name[len(prefix):]
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def widest(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype in which most of the checkpoint's values are stored."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
