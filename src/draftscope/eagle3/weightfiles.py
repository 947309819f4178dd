"""The files that hold a draft's weights, and the native names of what is in them.

Safetensors first, as engines do; else files of `torch.save`, loaded as tensors alone; one file or shards, with or without an
index. Nothing outside the folder is opened, whatever an index says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.tensorfile import read_index
from draftscope.states.torchfile import load_tensors, owns_its_data

PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")
_RENAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."), (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."), (re.compile(r"^(layers|midlayer)\.0+\."), "midlayer."),
    (re.compile(r"^midlayer\.(\d+)\."), r"layers.\1."),
)
_TRAINING_STATES = ("training_state.pt",)
_INNER = ("draft_state_dict", "state_dict", "model_state_dict", "model")
_QUANTISED = re.compile(r"weight_(scale|packed|zero_point)|\.(qweight|qzeros|g_idx|scales)$")


@dataclass(slots=True)
class Weights:
    """Tensors as found.

    Attributes:
        tensors: under native names, in the dtypes stored, mapped from the files where these allow it.
        spelt: native name to the name in the files.
        prefixes: wrappers' prefixes that were stripped.
        files: that were read, in order.
        notes: what deserves saying about the files.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    spelt: dict[str, str] = field(default_factory=dict)
    prefixes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_weights(folder: Path) -> Weights:
    """Every tensor of a checkpoint folder.

    Raises:
        DraftscopeError: no weights, a shard that is missing or cut, an index that leads elsewhere, a pickle that names more
            than tensors, quantised weights, or two tensors that are one by their native names. File and tensor are named.
    """
    found = Weights()
    files, listed = _files(folder, found.notes)
    where: dict[str, Path] = {}
    for path in files:
        for own, tensor in _tensors(path):
            name = _native(own, found.prefixes)
            if _QUANTISED.search(name):
                raise DraftscopeError(f"a quantised weight (tensor {own}) is not supported", where=str(path),
                                      remedy="Save it in bfloat16 or float32")
            if name in found.tensors:
                other = found.spelt[name] + (f" in {where[name].name}" if where[name] != path else "")
                raise DraftscopeError(f"tensors {other} and {own} are both {name}", where=str(path),
                                      remedy="One of them is a leftover of another layout: remove it")
            found.tensors[name], found.spelt[name], where[name] = tensor, own, path
        found.files.append(path)
    own_names = set(found.spelt.values())
    if lost := sorted(name for name in listed if name not in own_names):
        found.notes.append(f"the index names {len(lost)} tensors that its files lack: {', '.join(lost[:6])}")
    return found


def _native(own: str, prefixes: list[str]) -> str:
    name = own
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name[len(prefix) :]
        if prefix not in prefixes:
            prefixes.append(prefix)
    for pattern, new in _RENAMED:
        name, times = pattern.subn(new, name, count=1)
        if times:
            break
    return name


def _files(folder: Path, notes: list[str]) -> tuple[list[Path], Mapping[str, Any]]:
    """Files to read, and what an index promises."""
    pickled = [*sorted(folder.glob("*.bin")), *(folder / name for name in _TRAINING_STATES if (folder / name).is_file())]
    for index, single, suffix in (
        ("model.safetensors.index.json", "model.safetensors", ".safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", ".bin"),
    ):
        if (folder / index).is_file():
            return _indexed(folder, folder / index)
        if (folder / single).is_file():
            files = [folder / single]
        else:
            files = sorted(p for p in folder.glob(f"*{suffix}") if not p.name.startswith(".") and p.name != "training_args.bin")
        if files:
            if suffix == ".safetensors" and pickled:
                notes.append(f"{pickled[0].name} is there as well; the safetensors were read")
            return files, {}
    if pickled:
        return [path for path in pickled if path.name in _TRAINING_STATES] or pickled, {}
    other = sorted(p.name for pattern in ("*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    held = f"; it holds {other[0]}" if other else ""
    raise DraftscopeError(f"no weights here (safetensors, or .bin of torch.save){held}", where=str(folder),
                          remedy="Save the draft as safetensors" if other else "")


def _indexed(folder: Path, index: Path) -> tuple[list[Path], Mapping[str, Any]]:
    listed = read_index(index)
    return [folder / name for name in sorted(set(listed.values()))], listed


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    if not path.is_file():
        raise DraftscopeError("the index names this file, but it is not there", where=str(path),
                              remedy="Copy the missing shard")
    if path.suffix != ".safetensors":
        yield from _pickled(path)
        return
    name = ""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        where = f"{path}, tensor {name}" if name else str(path)
        raise DraftscopeError(f"truncated, or not safetensors: {' '.join(str(error).split())[:200]}", where=where,
                              remedy="Copy or write it again") from None


def _pickled(path: Path) -> Iterator[tuple[str, Tensor]]:
    held = load_tensors(path)
    inner = next((held[key] for key in _INNER if isinstance(held, dict) and isinstance(held.get(key), dict)), held)
    if not isinstance(inner, dict) or not any(isinstance(value, Tensor) for value in inner.values()):
        raise DraftscopeError("holds no tensors by name", where=str(path), remedy="Save the draft's state_dict")
    for name, value in inner.items():
        where = f"{path}, tensor {name}"
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DraftscopeError(f"is no tensor but {type(value).__name__}", where=where, remedy="Save the draft's state_dict")
        if not owns_its_data(value):
            raise DraftscopeError("declares more values than the file holds", where=where, remedy="Save it contiguous")
        yield name, value
