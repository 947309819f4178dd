"""On which side of the final norm a state was taken: told from the state itself."""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.target.parts import TargetParts

TOLERANCE = 0.02
"""How far the root mean square of normed rows may be from 1, and nine tenths of them from each other, in eight bits too."""
ROWS = 512
FEW = 4


def effective_weight(parts: TargetParts) -> Tensor:
    """[Ht] float32, by which the final norm multiplies a row of root mean square 1."""
    return parts.norm_weight.float() + parts.norm_offset


def taken_after_norm(parts: TargetParts, last: Tensor) -> bool | None:
    """Whether rows [T, Ht] are after the final norm: divided by its weight they have root mean square 1.

    Returns:
        None where too few rows are finite to tell.
    """
    rows = last[torch.linspace(0, len(last) - 1, min(len(last), ROWS)).long()].float()
    rows = rows[rows.isfinite().all(-1) & (rows != 0).any(-1)]
    weight = effective_weight(parts)
    used = weight.abs() > 1e-3 * weight.abs().max()
    if len(rows) < FEW or not bool(used.any()):
        return None
    squares = (rows[:, used] / weight[used]).square().mean(-1).sqrt()
    typical = float(squares.median())
    spread = float((squares - typical).abs().quantile(0.9))
    return abs(typical - 1) < TOLERANCE and spread < TOLERANCE
