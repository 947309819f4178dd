"""What a distance is told in: how far the natural groups of the reference lie from each other.

Two texts of one domain, or two domains, differ in their statistics though nothing is wrong. By how much is seen within the
reference: each group (source, file, run of sequences) against all others. What is held against it may be much smaller than a
group, hence less certain; that part is estimated from the two halves of the reference and grows with 1 / sqrt(rows).
"""

from __future__ import annotations

import math

from pydantic import Field

from draftscope.compare.distances import COMPONENTS, Component, Distance, Model, distance
from draftscope.scan.fingerprint import Fingerprint, RowClass, Statistics

FEWEST = 3
"""Groups from which their spread is one."""
FEWEST_ROWS = 16
FAR = 3.0
"""Units from which a distance is more than the texts make of it."""


class Yardstick(Model):
    """Of one entry of the reference.

    Attributes:
        groups: with rows enough; grouped: what they are.
        spread: root mean square, over groups, of the distance of a group from all others. With fewer than three groups it is the
            distance of the two halves, which is too small (`natural` false).
        sampling: squared and divided by a number of rows: what sampling adds to a squared distance.
        rows: of the entry.
    """

    entry: int
    grouped: list[str] = Field(default_factory=list)
    groups: int = 0
    natural: bool = False
    spread: Distance = Field(default_factory=Distance)
    sampling: Distance = Field(default_factory=Distance)
    rows: int = 0

    def unit(self, rows: int, component: Component = "total", against: int | None = None) -> float | None:
        """One unit, for so many rows held against the reference, or against so many; None where the reference does not tell."""
        spread, sampling, others = getattr(self.spread, component), getattr(self.sampling, component), against or self.rows
        if spread is None or sampling is None or not rows or not others:
            return None
        return max(math.hypot(spread, sampling * math.sqrt(1 / rows + 1 / others)), 1e-6)


def yardsticks(reference: Fingerprint, classes: tuple[RowClass, ...]) -> list[Yardstick]:
    """Of every entry, over rows of these classes."""
    groups = reference.of_kind("group")
    made = []
    for entry in range(len(reference.entries)):
        held = [part.statistics(entry, classes) for part in groups.values()]
        held = [one for one in held if one.dimensions.count >= FEWEST_ROWS]
        halves = distance(*(reference.statistics(entry, classes, (half,)) for half in (0, 1)))
        rows = reference.statistics(entry, classes).dimensions.count
        natural = len(held) >= FEWEST
        made.append(Yardstick(
            entry=entry, grouped=list(reference.grouped), groups=len(held), natural=natural, rows=rows,
            spread=_between(held) if natural else halves,
            # Two halves: a squared distance of sampling x (2 / rows + 2 / rows).
            sampling=_scaled(halves, math.sqrt(rows / 4)),
        ))
    return made


def others(groups: list[Statistics]) -> list[Statistics]:
    """For each group all others together."""
    before, after = [Statistics()], [Statistics()]
    for group in groups[:-1]:
        before.append(_both(before[-1], group))
    for group in groups[:0:-1]:
        after.append(_both(after[-1], group))
    return [_both(one, other) for one, other in zip(before, reversed(after), strict=True)]


def _both(one: Statistics, other: Statistics) -> Statistics:
    total = Statistics()
    total.merge(one)
    total.merge(other)
    return total


def _between(groups: list[Statistics]) -> Distance:
    found = [distance(rest, group) for rest, group in zip(others(groups), groups, strict=True)]
    return Distance(**{
        name: math.sqrt(sum(getattr(d, name) ** 2 for d in found) / len(found)) for name in COMPONENTS
        if all(getattr(d, name) is not None for d in found)
    })


def _scaled(given: Distance, factor: float) -> Distance:
    return Distance(**{name: value * factor for name in COMPONENTS if (value := getattr(given, name)) is not None})
