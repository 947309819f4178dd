"""Which dtypes states may have, and which one holds several of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WIDE = torch.bfloat16
"""Holds every value of every eight-bit float."""
_FLOATS = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
NARROW = frozenset(dtype for dtype in _FLOATS if dtype.itemsize == 1 and not str(dtype).endswith("_x2"))
FLOATS = frozenset(dtype for dtype in _FLOATS if dtype.itemsize > 1) | NARROW
"""Dtypes of one value an element. Two values to a byte (float4_e2m1fn_x2) mean nothing without a layout and scales."""


def is_floats(dtype: torch.dtype) -> bool:
    """Whether states may be of this dtype."""
    return dtype in FLOATS


def common(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that holds the values of all of these."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    found, *others = [WIDE if dtype in NARROW else dtype for dtype in dtypes]
    for dtype in others:
        found = torch.promote_types(found, dtype)
    return found
