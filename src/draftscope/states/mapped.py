"""Large tensors on disk rather than in memory: room in a nameless file, and pages given back once they were read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from draftscope.states.dtypes import common

LARGE = 64 * 2**20
"""Bytes from which on a tensor is worth the trouble."""
PIECE = 32 * 2**20
"""Floats of a piece are above the size from which the allocator gives memory back at once (32 MiB at most in glibc)."""
RESERVE = 256 * 2**20
"""Of the disk's free space, never filled."""
_DONTNEED = 4
"""MADV_DONTNEED: of a mapped file the pages leave the process and stay in the system's cache; other memory would be lost."""


def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor: a large one is mapped from a temporary file without a name, as long as the disk has space."""
    size = prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(*shape, dtype=dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="draftscope-") as file:
            free = os.statvfs(file.name)
            if free.f_bavail * free.f_frsize < size + RESERVE:
                return torch.empty(*shape, dtype=dtype)
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_file(file.name, shared=True, size=prod(shape), dtype=dtype).view(*shape)
    except (OSError, RuntimeError, AttributeError):
        return torch.empty(*shape, dtype=dtype)


def fill(target: Tensor, parts: Sequence[tuple[int | slice, Tensor]]) -> None:
    """Put parts [T, ...] in their places along the second axis of target [T, L, ...], rows in pieces that are given back."""
    step = len(pieces(target)[0])
    for start in range(0, len(target), step):
        rows = slice(start, start + step)
        for place, part in parts:
            target[rows, place] = part[rows]
            release(part[rows], whole=part)
        release(target[rows], whole=target)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """`torch.stack(parts, 1)` of [T, H] each, widened to their common dtype."""
    dtype = common([part.dtype for part in parts])
    target = room((len(parts[0]), len(parts), *parts[0].shape[1:]), dtype)
    fill(target, list(enumerate(parts)))
    return target


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Rows in pieces of some megabytes."""
    return tensor.split(max(1, PIECE // max(1, tensor[:1].numel() * tensor.element_size())))


def release(piece: Tensor, *, whole: Tensor | None = None) -> None:
    """Give back the pages of a piece of a large tensor that is mapped from a file, and was not written to unless shared.

    They are read again where they are needed again. Memory that is no file's is left alone.
    """
    held = piece if whole is None else whole
    if sys.platform != "linux" or held.untyped_storage().nbytes() < LARGE or piece.numel() == 0:
        return
    page = mmap.PAGESIZE
    span = 1 + sum((size - 1) * step for size, step in zip(piece.shape, piece.stride(), strict=True))
    start = -(-piece.data_ptr() // page) * page
    end = (piece.data_ptr() + span * piece.element_size()) // page * page
    if end > start and _is_of_a_file(start, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def _is_of_a_file(start: int, end: int) -> bool:
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            low, _, high = addresses.partition(b"-")
            if int(low, 16) <= start < int(high, 16):
                return end <= int(high, 16) and inode != b"0"
    return False
