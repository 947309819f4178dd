"""Per-row figures of one sequence: norms, sinks, non-finite values, entries that are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.scan.tally import SINK
from draftscope.states.mapped import pieces, release

BLOCK_VALUES = 2**24
"""Values held in float32 at once."""


@dataclass(slots=True)
class RowFigures:
    """Figures of states [T, S, Ht].

    Attributes:
        norms: [T, S] float64; NaN or Inf where a value of the row is.
        bad: [T, S] bool, a value of the row is not finite; bad_values: [S] how many are.
        sinks: [T, S] bool, norm above ten times the slot's median; the first token is none.
        ordinary: [T, S] bool, finite, not zero, no sink, not the first token.
    """

    norms: Tensor
    bad: Tensor
    bad_values: Tensor
    sinks: Tensor
    ordinary: Tensor


def row_norms(states: Tensor) -> Tensor:
    """L2 norms over the last axis, float64: computed in float32 as everyone does, in float64 where that overflows."""
    blocks = []
    for block in states.split(max(1, BLOCK_VALUES // max(1, states[0].numel()))):
        x = block.float()
        norms = torch.linalg.vector_norm(x, dim=-1).double()
        over = ~norms.isfinite()
        if over.any():
            norms[over] = torch.linalg.vector_norm(block[over].double(), dim=-1)
        blocks.append(norms)
        release(block, whole=states)
    return torch.cat(blocks)


def row_figures(states: Tensor) -> RowFigures:
    """Figures of states [T, S, Ht], any float dtype."""
    norms = row_norms(states)
    bad = ~norms.isfinite()
    bad_values = torch.zeros(states.shape[1], dtype=torch.int64)
    if bad.any():
        # A norm may leave float64's range without a value that is not finite.
        index = bad.nonzero()
        counts = (~states[index[:, 0], index[:, 1]].float().isfinite()).sum(-1)
        overflowed = states[index[:, 0], index[:, 1]].double().isfinite().all(-1)
        bad[index[overflowed, 0], index[overflowed, 1]] = False
        bad_values.index_add_(0, index[:, 1], counts)
    usable = norms.where(~bad & (norms > 0), torch.nan)
    medians = usable[1:].nanmedian(0).values if len(norms) > 1 else usable.nanmedian(0).values
    first = torch.zeros_like(bad)
    first[0] = True
    sinks = (usable > SINK * medians) & ~first
    return RowFigures(norms, bad, bad_values, sinks, ~first & ~sinks & ~usable.isnan())


def same_entries(states: Tensor, norms: Tensor) -> list[tuple[int, int]]:
    """Pairs of slots that hold the same bytes in every row."""
    bits = states.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[states.element_size()])
    alike = [
        (i, j) for i in range(states.shape[1]) for j in range(i + 1, states.shape[1])
        if torch.equal(norms[:, i].nan_to_num(-1.0), norms[:, j].nan_to_num(-1.0))
    ]
    for piece in pieces(bits) if alike else ():
        alike = [(i, j) for i, j in alike if torch.equal(piece[:, i], piece[:, j])]
        release(piece, whole=bits)
    return alike


def short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
