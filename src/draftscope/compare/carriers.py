"""Which dimensions carry the difference of a slot, against what they vary by between the reference's own groups.

The unit of a dimension's mean is the root of two squares: the spread of the groups' means (each against all others), and what
sampling makes of it, var_a / n_a + var_b / n_b. Rows of one sequence are alike, so that there are fewer of them than are counted:
by how much is taken from the two halves of the reference, over all dimensions together. The logarithm of a standard deviation is
treated in the same way, with 1 / 2n for its sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from draftscope.compare.distances import Model, distance
from draftscope.compare.yardstick import FAR, FEWEST, others
from draftscope.compare.yardstick import FEWEST_ROWS as GROUPED_ROWS
from draftscope.scan.fingerprint import Fingerprint, RowClass, Statistics

SHOWN = 5
"""Dimensions of a slot that are named."""


class Dimension(Model):
    """A dimension in which the mean row differs: `shift` in standard deviations of A, `share` of the squared difference."""

    slot: int
    dimension: int
    mean_a: float
    mean_b: float
    shift: float | None
    share: float
    outlier: bool = Field(description="far larger than the rest of its row, on either side")
    std_a: float = 0.0
    std_b: float = 0.0
    effect: float | None = Field(None, description="of the mean, in units of what it varies by between A's groups")
    spread_effect: float | None = Field(None, description="of the logarithm of the standard deviation, likewise")
    smallest: float | None = Field(None, description="the shift of the mean that would have been seen, as `shift`")


class Carried(Model):
    """What carries the difference of a slot, over all its dimensions.

    Attributes:
        means, norms, spread: shares of the squared distance; they add up to one.
        beyond: dimensions whose mean or spread is further than three units away; `usual`: as many are so far away in a group of A
            held against the others, on average; None without groups.
        half: the fewest dimensions that carry half of the squared difference of the mean rows.
        smallest: median over dimensions of the shift that would have been seen, in standard deviations of A.
        rows_alike: by how much the rows of one sequence are alike: so many count as one.
    """

    slot: int
    means: float | None
    norms: float | None
    spread: float | None
    beyond: int
    usual: float | None
    half: int
    smallest: float | None
    rows_alike: float


class Sinks(Model):
    """Channels that stand out in the sinks (first tokens where there are none), most frequent first."""

    slot: int
    rows: Literal["sink", "first"]
    a: list[int]
    b: list[int]
    shared: int


@dataclass
class _Profile:
    """Mean, variance and log standard deviation of every dimension [H] float64."""

    rows: int
    mean: Tensor
    variance: Tensor
    log: Tensor

    @classmethod
    def of(cls, held: Statistics, floor: Tensor) -> _Profile | None:
        found = held.dimensions.result()
        if found.mean is None or found.variance is None or found.count < 2:
            return None
        return cls(found.count, found.mean, found.variance, 0.5 * found.variance.clamp_min(floor).log())


@dataclass
class _Units:
    """What the dimensions of one slot vary by: [H] spread of means and of log deviations between groups, and rows alike."""

    means: Tensor
    logs: Tensor
    alike: float
    groups: list[tuple[_Profile, _Profile]]

    def mean(self, a: _Profile, b: _Profile) -> Tensor:
        return (self.means.square() + self.alike * (a.variance / a.rows + b.variance / b.rows)).sqrt()

    def log(self, a: _Profile, b: _Profile) -> Tensor:
        return (self.logs.square() + self.alike * (0.5 / a.rows + 0.5 / b.rows)).sqrt()

    def beyond(self, a: _Profile, b: _Profile) -> int:
        """Dimensions that are far in mean or spread; those that are constant on both sides are far if their means differ."""
        return int((((b.mean - a.mean).abs() > FAR * self.mean(a, b)) | ((b.log - a.log).abs() > FAR * self.log(a, b))).sum())


def carriers(a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...]) -> tuple[list[Dimension], list[Carried]]:
    """The dimensions that carry most of each slot's difference, and how it is spread over them."""
    dimensions: list[Dimension] = []
    carried: list[Carried] = []
    for slot in range(min(a.slots, b.slots)):
        held = [f.statistics(slot, classes) for f in (a, b)]
        floor = _floor(held[0])
        one, other = (_Profile.of(h, floor) for h in held)
        if one is None or other is None:
            continue
        units = _units(a, slot, classes, one, floor)
        outliers = {c for h in held for c in h.outliers.result().channels}
        dimensions += _largest(slot, one, other, units, outliers)
        carried.append(_carried(slot, held, one, other, units))
    return dimensions, carried


def _floor(held: Statistics) -> Tensor:
    """The variance that a dimension which never varies counts as."""
    variance = held.dimensions.result().variance
    mean = torch.zeros((), dtype=torch.float64) if variance is None else variance.mean()
    return 1e-12 * mean.clamp_min(1e-300)


def _units(a: Fingerprint, slot: int, classes: tuple[RowClass, ...], whole: _Profile, floor: Tensor) -> _Units:
    groups = [part.statistics(slot, classes) for part in a.of_kind("group").values()]
    groups = [group for group in groups if group.dimensions.count >= GROUPED_ROWS]
    pairs = [] if len(groups) < FEWEST else [
        (one, rest) for group, remaining in zip(groups, others(groups), strict=True)
        if (one := _Profile.of(group, floor)) is not None and (rest := _Profile.of(remaining, floor)) is not None
    ]
    nothing = torch.zeros_like(whole.mean)
    means = torch.stack([one.mean - rest.mean for one, rest in pairs]).square().mean(0).sqrt() if pairs else nothing
    logs = torch.stack([one.log - rest.log for one, rest in pairs]).square().mean(0).sqrt() if pairs else nothing
    halves = [_Profile.of(a.statistics(slot, classes, (half,)), floor) for half in (0, 1)]
    alike = 1.0
    if halves[0] is not None and halves[1] is not None:
        expected = whole.variance * (1 / halves[0].rows + 1 / halves[1].rows)
        seen = (halves[0].mean - halves[1].mean).square()
        varies = expected > 0
        alike = max(1.0, float((seen[varies] / expected[varies]).mean())) if bool(varies.any()) else 1.0
    return _Units(means, logs, alike, pairs)


def _largest(slot: int, a: _Profile, b: _Profile, units: _Units, outliers: set[int]) -> list[Dimension]:
    """Those with the largest part of the squared difference of the means."""
    squared = (b.mean - a.mean).square()
    total = float(squared.sum())
    unit, log_unit = units.mean(a, b), units.log(a, b)
    result = []
    for d in squared.argsort(descending=True, stable=True)[:SHOWN].tolist():
        size, off = float(a.variance[d].sqrt()), float(b.mean[d] - a.mean[d])
        result.append(Dimension(
            slot=slot, dimension=d, mean_a=float(a.mean[d]), mean_b=float(b.mean[d]), shift=off / size if size > 0 else None,
            share=float(squared[d]) / total if total > 0 else 0.0, outlier=d in outliers, std_a=size,
            std_b=float(b.variance[d].sqrt()), effect=abs(off) / float(unit[d]) if unit[d] > 0 else None,
            spread_effect=float((b.log[d] - a.log[d]).abs() / log_unit[d]),
            smallest=FAR * float(unit[d]) / size if size > 0 else None,
        ))
    return result


def _carried(slot: int, held: list[Statistics], a: _Profile, b: _Profile, units: _Units) -> Carried:
    found = distance(*held)
    whole = found.total or 0.0
    means, norms, spread = (
        value**2 / whole**2 if value is not None and whole > 0 else None for value in (found.means, found.norms, found.spread))
    squared = (b.mean - a.mean).square().sort(descending=True).values
    reached = squared.cumsum(0) >= squared.sum() / 2
    varies = a.variance > 0
    smallest = FAR * units.mean(a, b)[varies] / a.variance[varies].sqrt()
    usual = [units.beyond(rest, one) for one, rest in units.groups]
    return Carried(
        slot=slot, means=means, norms=norms, spread=spread, beyond=units.beyond(a, b),
        usual=sum(usual) / len(usual) if usual else None, half=int(reached.nonzero()[0]) + 1 if squared.sum() > 0 else 0,
        smallest=float(smallest.median()) if len(smallest) else None, rows_alike=units.alike,
    )


def sinks(a: Fingerprint, b: Fingerprint) -> list[Sinks]:
    """Channels that stand out in sinks, slot by slot, where either side has such."""
    result = []
    for slot in range(min(a.slots, b.slots)):
        sunk = all(f.statistics(slot, ("sink",)).dimensions.count for f in (a, b))
        kind: Literal["sink", "first"] = "sink" if sunk else "first"
        one, other = (f.statistics(slot, (kind,)).outliers.result().channels[:8] for f in (a, b))
        if one or other:
            result.append(Sinks(slot=slot, rows=kind, a=one, b=other, shared=len(set(one) & set(other))))
    return result
