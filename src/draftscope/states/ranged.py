"""Safetensors files that are read by ranges: the header, then the bytes of what is asked for.

The layout is that of the safetensors format: eight bytes with the header's length, a JSON object that gives every tensor dtype,
shape and offsets, then the tensors behind each other.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from math import prod
from typing import Any

import torch
from torch import Tensor

from draftscope.states.mapped import LARGE, PIECE, release, room
from draftscope.states.places import Remote

FIRST = 2**16
LONGEST = 100_000_000
"""Bytes of a header at most, as the library has it."""
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "F64": torch.float64,
    "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_headers: OrderedDict[tuple[Remote, int], dict[str, Any]] = OrderedDict()
KEPT = 128


class Ranged:
    """An open file: names, metadata and shapes from the header, tensors or rows of them by ranges.

    Raises:
        ValueError: no header, or one that does not add up with the file's size.
        OSError: no such file.
        DraftscopeError: it cannot be reached.
    """

    def __init__(self, path: Remote) -> None:
        self.path = path
        size = path.size()
        key = (path, size)
        if key not in _headers:
            _headers[key] = _header(path, size)
            while len(_headers) > KEPT:
                _headers.popitem(last=False)
        held = _headers[key]
        self._start: int = held["start"]
        self._tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = held["tensors"]
        self.metadata: dict[str, str] = held["metadata"]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1]

    def tensor(self, name: str) -> Tensor:
        """The whole tensor; a large one lies on disk."""
        dtype, shape, start = self._tensors[name]
        size = prod(shape) * dtype.itemsize
        if size < LARGE:
            return self._read(start, size, dtype).view(shape)
        target = room((size,), torch.uint8)
        for at in range(0, size, PIECE):
            piece = target[at : at + PIECE]
            piece.copy_(self._read(start + at, len(piece), torch.uint8))
            release(piece, whole=target)
        return target.view(dtype).view(shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 along the first axis; only their bytes travel."""
        dtype, shape, begins = self._tensors[name]
        start, stop, _ = slice(start, stop).indices(shape[0])
        row = prod(shape[1:]) * dtype.itemsize
        count = max(0, stop - start)
        return self._read(begins + start * row, count * row, dtype).view(count, *shape[1:])

    def _read(self, start: int, size: int, dtype: torch.dtype) -> Tensor:
        if size == 0:
            return torch.empty(0, dtype=dtype)
        held = self.path.read_range(self._start + start, self._start + start + size)
        if len(held) != size:
            raise ValueError(f"{len(held)} of {size} bytes came")
        return torch.frombuffer(bytearray(held), dtype=dtype)


def _header(path: Remote, size: int) -> dict[str, Any]:
    first = path.read_range(0, min(FIRST, size))
    if len(first) < 8:
        raise ValueError("header too small")
    length = int.from_bytes(first[:8], "little")
    if length > min(LONGEST, size - 8):
        raise ValueError(f"the header claims {length} bytes of {size}")
    text = first[8 : 8 + length]
    if len(text) < length:
        text += path.read_range(8 + len(text), 8 + length)
    try:
        held = json.loads(text.decode())
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(held, dict):
        raise ValueError("the header is no JSON object")
    metadata = held.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata are no texts")
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
    spans = []
    for name, entry in held.items():
        dtype, shape, (start, end) = _entry(name, entry)
        if end - start != prod(shape) * dtype.itemsize or start < 0:
            raise ValueError(f"tensor {name} has {end - start} bytes for shape {list(shape)}")
        spans.append((start, end))
        tensors[name] = dtype, shape, start
    at = 0
    for start, end in sorted(spans):
        if start != at:
            raise ValueError(f"a gap or overlap at byte {at} of the tensors")
        at = end
    if 8 + length + at != size:
        raise ValueError(f"the header describes {8 + length + at} bytes, the file has {size}")
    return {"start": 8 + length, "tensors": tensors, "metadata": metadata}


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    try:
        shape, offsets = entry["shape"], entry["data_offsets"]
        if all(isinstance(n, int) and n >= 0 for n in [*shape, *offsets]) and entry["dtype"] in DTYPES:
            return DTYPES[entry["dtype"]], tuple(shape), (offsets[0], offsets[1])
    except (KeyError, TypeError, IndexError):
        pass
    raise ValueError(f"tensor {name} is not described as one")
