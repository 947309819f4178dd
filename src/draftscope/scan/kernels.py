"""Compiled passes over rows as they lie in a file: bf16, fp16 and fp32 bytes, without a cast of the whole tensor.

A row is read from its bytes, widened in registers and summed in float64; the interpreter's lock is released. Everything here is
checked against the accumulators on torch tensors, which do the work where numba is missing, for other dtypes and devices.

Tolerance: sums are of float64, in another order than torch's, so that figures agree to 1e-9 relative. A deviation is taken from
a pivot (the mean of a few of the rows), so that a channel that is large and hardly varies keeps its variance.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

PIVOT = 16
"""Rows whose mean is the pivot."""


@cache
def compiled() -> ModuleType | None:
    """The compiled functions; None without numba."""
    try:
        from draftscope.scan import compiled
    except ImportError:
        return None
    return compiled


def engine() -> str:
    """What passes over rows: `numba`, else `torch`."""
    return "torch" if compiled() is None else "numba"


def fits(rows: Tensor) -> bool:
    """Whether rows [N, H] can be passed over compiled: on the CPU, of a dtype known here, values of a row side by side."""
    return (
        compiled() is not None and rows.dim() == 2 and rows.device.type == "cpu" and rows.numel() > 0
        and rows.dtype in (torch.bfloat16, torch.float16, torch.float32) and (rows.stride(1) == 1 or rows.shape[1] == 1)
        and rows.stride(0) >= 0
    )


def _flat(rows: Tensor) -> np.ndarray:
    """From the first value of rows [N, H] to their last: [n]. bf16 as int16, fp16 as uint16: the type says how to read it."""
    kind = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}.get(rows.dtype, rows.dtype)
    span = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]
    return rows.detach().as_strided((span,), (1,)).view(kind).numpy()


def squares(rows: Tensor) -> Tensor:
    """Sums of squares [N] float64 of rows that `fits`; not finite where a value of the row is not."""
    held = compiled()
    assert held is not None
    found = np.empty(len(rows))
    held.squares(_flat(rows), rows.stride(0), rows.shape[1], found)
    return torch.from_numpy(found)


def mixed(bits: Tensor, multiplier: int, shift: int) -> Tensor | None:
    """Keys [N] of integers [N, C] int64, each column mixed in by exclusive or, product and shift; None without numba."""
    held = compiled()
    if held is None:
        return None
    found = np.zeros(len(bits), np.int64)
    held.mixed(bits.numpy(), np.int64(multiplier), np.int64(shift), found)
    return torch.from_numpy(found)


def into_histogram(norms: Tensor, histogram: Tensor, moments: Tensor, extremes: Tensor, lowest: int, per_octave: int) -> int:
    """Add norms [N] float64, finite, to the tensors of `accumulators.Norms`, in place; how many are zero."""
    held = compiled()
    assert held is not None
    return int(held.norms(norms.numpy(), histogram.numpy(), moments.numpy(), extremes.numpy(), lowest, per_octave))


class Sums:
    """Sums over rows by channel, of deviations from a pivot that the first rows set.

    Attributes:
        count: rows.
        largest: [H] float32, largest absolute value.
        exceeds: [H] int32, rows in which a channel's absolute value is above the row's bar.
    """

    MOST = 2**24
    """Rows after which sums are taken down: far below what int32 counts, and few enough for float64 to add one by one."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._pivot, self._sums, self._squares = (np.zeros(width) for _ in range(3))
        self.largest, self.exceeds = np.zeros(width, np.float32), np.zeros(width, np.int32)

    def add(self, rows: Tensor, chosen: Tensor, bars: Tensor) -> None:
        """One pass over the chosen rows, all finite.

        Args:
            rows: [N, H] that `fits`.
            chosen: [M] int64, numbers of rows, one or more.
            bars: [M] float64.
        """
        held = compiled()
        assert held is not None
        flat, starts, exact = _flat(rows), (chosen * rows.stride(0)).numpy(), bars.numpy()
        # The largest float32 that is not above the bar: a float32 exceeds either or neither.
        below = np.minimum(exact, np.finfo(np.float32).max).astype(np.float32)
        below = np.where(below > exact, np.nextafter(below, np.float32(-np.inf)), below)
        if self.count == 0:
            held.pivot(flat, starts[np.linspace(0, len(starts) - 1, min(len(starts), PIVOT)).astype(np.int64)], self._pivot)
        held.moments(flat, starts, below, self._pivot, self._sums, self._squares, self.largest, self.exceeds)
        self.count += len(starts)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and sum of the squares of the deviations from it, [H] float64 each, of one row or more."""
        shift = self._sums / self.count
        return torch.from_numpy(self._pivot + shift), torch.from_numpy(np.maximum(self._squares - self._sums * shift, 0))
