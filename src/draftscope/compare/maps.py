"""By what map rows differ from the states that they should be: a factor on some channels, an orthogonal map, the final norm.

Unlike placement, which looks for the place, these take the place as known, so that weak maps are seen, too. x [N, H] are the
rows found and r [N, H] the rows they should be; maps are fitted on every other row and judged on the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftscope.compare.transforms import TINY, fit_orthogonal, permuted

FEWEST = 8
"""Rows below which nothing is fitted."""
CHANNEL = 0.02
"""Relative error up to which a channel's own factor explains it, beyond that of the channels left alone."""
SAME = 0.02
"""Factors closer than this are one."""
HADAMARD = 0.1
"""How far the entries of a Hadamard matrix may be from one size."""
FEW = 64
"""A factor on less than one channel in so many is none: outliers of a quantised target are as few."""
BETTER = 0.25
"""Share of the error that a map has to leave at most, to explain it."""
MAPPED = 0.1
"""Error up to which a map explains."""

Basis = Literal["orthogonal", "hadamard", "permutation"]


@dataclass(frozen=True, slots=True)
class Part:
    """One factor on some of the channels, the others as they should be.

    Attributes:
        factor: on these channels. channels: how many of `of`; first, last: the lowest and the highest of them.
        error: median relative error after the factor is taken off.
    """

    factor: float
    channels: int
    of: int
    first: int
    last: int
    error: float

    @property
    def whole_run(self) -> bool:
        """Whether the channels are neighbours: a shard of a tensor-parallel target."""
        return self.last - self.first + 1 == self.channels


@dataclass(frozen=True, slots=True)
class Turn:
    """An orthogonal map: median relative error on rows it was not fitted on, and what it looks like."""

    error: float
    basis: Basis


def error_of(x: Tensor, r: Tensor) -> Tensor:
    """|x - r| / |r| of rows [N, H]: [N]; the difference itself counts where r is zero."""
    return (x - r).norm(dim=-1) / r.norm(dim=-1).clamp_min(TINY)


def median_error(x: Tensor, r: Tensor) -> float:
    """The median over rows; infinite without rows."""
    return float(error_of(x, r).median()) if len(x) else float("inf")


def partial_factor(x: Tensor, r: Tensor) -> Part | None:
    """The factor on a part of the channels that explains the difference; None where there is none.

    Every channel gets a factor of its own by least squares; they must come in two groups, 1 and one other, and taking the
    other off must leave a quarter of the error at most.
    """
    if len(x) < FEWEST:
        return None
    fit_x, fit_r = x[::2].double(), r[::2].double()
    power = fit_r.square().sum(0)
    factors = (fit_x * fit_r).sum(0) / power.clamp_min(TINY)
    noise = ((fit_x - factors * fit_r).square().sum(0) / power.clamp_min(TINY)).sqrt()
    slack = SAME + CHANNEL + 2 * noise
    off = (factors - 1).abs() > slack
    if int(off.sum()) < max(2, len(off) // FEW) or bool(off.all()):
        return None
    factor = float(factors[off].median())
    away = (factors[off] - factor).abs() <= slack[off] * max(1.0, abs(factor))
    if abs(factor - 1) <= SAME or float(away.double().mean()) < 0.9:
        return None
    chosen = off.nonzero().squeeze(-1)
    mended = x[1::2].double()
    if factor != 0:
        mended = torch.where(off, mended / factor, mended)
    before, after = median_error(x[1::2].double(), r[1::2].double()), median_error(mended, r[1::2].double())
    if not after < BETTER * before:
        return None
    return Part(factor, len(chosen), len(factors), int(chosen.min()), int(chosen.max()), after)


def turn_of(x: Tensor, r: Tensor) -> Turn | None:
    """The orthogonal map that takes r to x, where one explains what a factor does not; None with fewer rows than determine it."""
    if len(x) // 2 < x.shape[1] or len(x) < FEWEST:
        return None
    matrix, factor = fitted_turn(x[::2], r[::2])
    held = x[1::2].double() / factor
    before, after = median_error(held, r[1::2].double()), median_error(held, r[1::2].double() @ matrix)
    if not (after < BETTER * before and after < MAPPED):
        return None
    if permuted(x, r):
        return Turn(after, "permutation")
    size = matrix.abs() * len(matrix) ** 0.5
    return Turn(after, "hadamard" if float((size - 1).abs().median()) < HADAMARD else "orthogonal")


def fitted_turn(x: Tensor, r: Tensor) -> tuple[Tensor, float]:
    """The orthogonal matrix [H, H] and the factor with which r @ matrix * factor is nearest to x, in float64."""
    x, r = x.double(), r.double()
    factor = float((x.norm(dim=-1) / r.norm(dim=-1).clamp_min(TINY)).median())
    return fit_orthogonal(x, r), factor if factor > 0 else 1.0


def norm_errors(x: Tensor, r: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
    """Median errors of x against r as it stands, after the norm, and after the norm of the norm."""
    once = norm(r.float())
    return median_error(x.float(), r.float()), median_error(x.float(), once), median_error(x.float(), norm(once))
