"""What is compiled, and which rows it can pass over: bf16, fp16, fp32 and the 8-bit floats as they lie in a file, without a cast.

A row is read from its bytes, widened in registers and summed in float64; the interpreter's lock is released.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

KINDS = {
    torch.bfloat16: torch.int16, torch.float16: torch.uint16, torch.float32: torch.float32, torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.uint8,
}
"""Dtypes that are read compiled, and the type that tells `scan.compiled` how."""


@cache
def compiled() -> ModuleType | None:
    """The compiled functions; None without numba, or where it gives a wrong sum or none."""
    try:
        from draftscope.scan import compiled

        found = np.zeros(1)
        compiled.squares(np.array([1.0, 2.0, 3.0], np.float32), 1, 1, 2, found)
    except Exception:  # numba is missing, or does not go with this numpy, processor or LLVM
        return None
    return compiled if found[0] == 13 else None


def kept() -> bool:
    """Whether nothing has to be compiled first: it is kept from an earlier time, or numba is missing."""
    if find_spec("numba") is None:
        return True
    folder = Path(__file__).parent / "__pycache__"
    return any(folder.glob("compiled.moments-*.nbi")) or "NUMBA_CACHE_DIR" in os.environ


def fits(rows: Tensor) -> bool:
    """Whether rows [..., H] can be passed over compiled: on the CPU, of a dtype known here, values of a row side by side."""
    return (
        compiled() is not None and rows.device.type == "cpu" and rows.numel() > 0 and rows.dtype in KINDS
        and (rows.stride(-1) == 1 or rows.shape[-1] == 1) and all(step >= 0 for step in rows.stride())
    )


def flat(rows: Tensor) -> np.ndarray:
    """From the first value of rows that `fits` to their last: [n], the type of an item telling how to read it."""
    span = 1 + sum((size - 1) * step for size, step in zip(rows.shape, rows.stride(), strict=True))
    return rows.detach().as_strided((span,), (1,)).view(KINDS[rows.dtype]).numpy()


def squares(rows: Tensor) -> Tensor:
    """Sums of squares [N] float64 of rows [N, H] that `fits`; not finite where a value of the row is not."""
    held = compiled()
    assert held is not None
    found = np.empty(len(rows))
    held.squares(flat(rows), 0, rows.stride(0), rows.shape[1], found)
    return torch.from_numpy(found)


def mixed(bits: Tensor, multiplier: int, shift: int) -> Tensor | None:
    """Keys [N] of integers [N, C] int64, each column mixed in by exclusive or, product and shift; None without numba."""
    held = compiled()
    if held is None:
        return None
    found = np.zeros(len(bits), np.int64)
    held.mixed(bits.numpy(), np.int64(multiplier), np.int64(shift), found)
    return torch.from_numpy(found)
