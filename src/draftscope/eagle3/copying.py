"""A checkpoint's folder written again with some tensors changed: every other file, name, dtype and shard as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.leftover import sweep_up, temporary
from draftscope.states.tensorfile import save_tensors

_OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".safetensors"})


def check_new(out: Path) -> None:
    """Raise UsageError where no new folder could get this name: something is there, or the folder above takes none."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UsageError("is there already", where=str(out), remedy="Name a folder that is new or empty")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError("cannot be made: what lies above it is no folder, or may not be written to", where=str(out))


@contextmanager
def whole_folder(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A temporary folder beside `out`, and what gives it that name. Unless that is called nothing stays.

    Raises:
        UsageError: `out` holds something.
        DraftscopeError: the disk refuses.
    """
    check_new(out)
    sweep_up(out.absolute().parent, out.name)
    made = temporary(out)

    def keep() -> None:
        if out.is_dir():
            out.rmdir()
        made.replace(out)

    try:
        made.mkdir(parents=True)
        yield made, keep
    except OSError as error:
        raise DraftscopeError(f"cannot be written: {error.strerror or error}", where=str(out)) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_copy(checkpoint: Checkpoint, changed: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write a checkpoint's files into a folder, some tensors with other values.

    Args:
        changed: by native name, in the stored shape; cast to the stored dtype.

    Returns:
        Names of what was left where it was: sub-folders, and weights in files that were not read.

    Raises:
        DraftscopeError: a tensor is not in the safetensors files, or these are not safetensors.
    """
    spelt = {checkpoint.spelt[name]: tensor for name, tensor in changed.items() if name in checkpoint.spelt}
    if lacking := sorted(set(changed) - set(checkpoint.spelt)):
        raise DraftscopeError(f"has no tensor {lacking[0]} to change", where=str(checkpoint.folder))
    left = []
    for path in sorted(checkpoint.folder.iterdir()):
        if path.name not in checkpoint.files:
            if path.is_file() and path.suffix not in _OTHER_WEIGHTS:
                shutil.copyfile(path, folder / path.name)
            else:
                left.append(path.name)
            continue
        if path.suffix != ".safetensors":
            raise DraftscopeError("is not safetensors", where=str(path),
                                  remedy="Write the draft as safetensors first (`draftscope convert`)")
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = dict(file.metadata() or {})
        if not held.keys() & spelt.keys():
            shutil.copyfile(path, folder / path.name)
            continue
        for name in held.keys() & spelt.keys():
            held[name] = spelt[name].to(held[name].dtype)
        save_tensors(folder / path.name, held, metadata)
    return left


def rounding(tensor: Tensor, dtype: torch.dtype) -> float:
    """Relative error (Frobenius) that storing in a dtype makes."""
    exact = tensor.double()
    return float((exact.to(dtype).double() - exact).norm() / exact.norm().clamp_min(1e-300))
