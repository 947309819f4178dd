"""A checkpoint opened for lint: what would keep it from being opened, but can be read, is a finding."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftscope.eagle3.checkpoint import Checkpoint, expected_shapes, load_checkpoint
from draftscope.eagle3.dialects import describe
from draftscope.errors import DraftscopeError
from draftscope.findings import Finding
from draftscope.linting.finding import finding
from draftscope.states.tensorfile import TensorFile, read_json
from draftscope.target.parts import tensor_files

_PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")


@dataclass(slots=True)
class Opened:
    """A checkpoint, or the findings that stand in its way."""

    checkpoint: Checkpoint | None
    findings: list[Finding] = field(default_factory=list)


def open_checkpoint(folder: Path, target_layers: int | None = None) -> Opened:
    """Open a draft checkpoint.

    Raises:
        DraftscopeError: it can't be read at all.
    """
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if isinstance(raw, dict) and raw.get("quantization_config"):
        return _quantised(folder, raw, target_layers)
    try:
        return Opened(load_checkpoint(folder, target_layers=target_layers))
    except DraftscopeError:
        found = _shapes(folder, raw) if isinstance(raw, dict) else []
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
    )])


def _shapes(folder: Path, raw: dict[str, Any]) -> list[Finding]:
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
