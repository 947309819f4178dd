"""What carries a difference: classes of tokens, positions, dimensions; and over several fingerprints, how it grows with time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from scipy.stats import spearmanr

from draftscope.compare.distances import Model, distance
from draftscope.compare.yardstick import FAR, Yardstick
from draftscope.scan.fingerprint import Fingerprint, RowClass, Statistics

SHOWN = 5
"""Dimensions of a slot that are named."""
FEWEST_ROWS = 8
STEPS = 4
"""Fingerprints besides the reference from which an order among them means something."""


class Effect(Model):
    """One slot against its own entry, over some of the rows; `effect` in units of the reference's groups (over ordinary rows).

    `name` is a class (`first`, `sink`, `prompt`, `answer`; `other` where answers are unknown) or a range of positions.
    """

    slot: int
    by: Literal["class", "position"]
    name: str
    rows_a: int
    rows_b: int
    distance: float
    effect: float | None


class Dimension(Model):
    """A dimension in which the mean row differs: `shift` in standard deviations of A, `share` of the squared difference."""

    slot: int
    dimension: int
    mean_a: float
    mean_b: float
    shift: float | None
    share: float
    outlier: bool = Field(description="far larger than the rest of its row, on either side")


class Sinks(Model):
    """Channels that stand out in the sinks (first tokens where there are none), most frequent first."""

    slot: int
    rows: Literal["sink", "first"]
    a: list[int]
    b: list[int]
    shared: int


class Point(Model):
    """One of several fingerprints against the first, by slot."""

    paths: list[str]
    rows: int
    distances: list[float | None]
    effects: list[float | None]
    from_previous: list[float | None]


class Series(Model):
    """Several fingerprints, in the order given, against the first.

    `trend` is Spearman's rank correlation of the largest effect with the order, None for fewer than four points.
    """

    points: list[Point]
    trend: float | None = None
    drifts: bool = False
    says: str = ""


def effects(a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...], yards: list[Yardstick]) -> list[Effect]:
    """Every slot that both have, by class of token and by range of positions."""
    told = all(any(c == "answer" for _, c, _ in f.cells) for f in (a, b))
    names: dict[RowClass, str] = {"first": "first", "sink": "sink", "answer": "answer", "other": "prompt" if told else "other"}
    places = [name for name in a.of_kind("position") if name in b.of_kind("position")]
    result = []
    for slot in range(min(a.slots, b.slots)):
        def add(by: Literal["class", "position"], name: str, one: Statistics, other: Statistics, *, slot: int = slot) -> None:
            found = distance(one, other)
            rows = other.dimensions.count
            if found.total is not None and min(one.dimensions.count, rows) >= FEWEST_ROWS:
                unit = yards[slot].unit(rows)
                result.append(Effect(slot=slot, by=by, name=name, rows_a=one.dimensions.count, rows_b=rows, distance=found.total,
                                     effect=None if unit is None else found.total / unit))

        for row_class, name in names.items():
            add("class", name, a.statistics(slot, (row_class,)), b.statistics(slot, (row_class,)))
        for name in sorted(places, key=lambda n: int(n.split()[0])):
            one, other = (f.of_kind("position")[name].statistics(slot, classes) for f in (a, b))
            add("position", name, one, other)
    return result


def dimensions(a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...]) -> list[Dimension]:
    """The dimensions that carry most of the difference of the mean rows, slot by slot."""
    result = []
    for slot in range(min(a.slots, b.slots)):
        held = [f.statistics(slot, classes) for f in (a, b)]
        one, other = (h.dimensions.result() for h in held)
        if one.mean is None or other.mean is None or one.variance is None:
            continue
        squared = (other.mean - one.mean).square()
        total = float(squared.sum())
        outliers = {c for h in held for c in h.outliers.result().channels}
        for d in squared.argsort(descending=True, stable=True)[:SHOWN].tolist():
            size = float(one.variance[d].sqrt())
            result.append(Dimension(
                slot=slot, dimension=d, mean_a=float(one.mean[d]), mean_b=float(other.mean[d]),
                shift=float(other.mean[d] - one.mean[d]) / size if size > 0 else None,
                share=float(squared[d]) / total if total > 0 else 0.0, outlier=d in outliers,
            ))
    return result


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


def series(fingerprints: Sequence[Fingerprint], classes: tuple[RowClass, ...], yards: list[Yardstick]) -> Series:
    """Each fingerprint against the first and against the one before it."""
    first = fingerprints[0]
    slots = min(f.slots for f in fingerprints)
    points = []
    for before, one in itertools.pairwise(fingerprints):
        found = [distance(first.statistics(s, classes), one.statistics(s, classes)).total for s in range(slots)]
        units = [yards[s].unit(one.statistics(s, classes).dimensions.count) for s in range(slots)]
        points.append(Point(
            paths=[o.path for o in one.origins], rows=one.rows, distances=found,
            effects=[None if d is None or u is None else d / u for d, u in zip(found, units, strict=True)],
            from_previous=[distance(before.statistics(s, classes), one.statistics(s, classes)).total for s in range(slots)],
        ))
    largest = [max((e for e in p.effects if e is not None), default=None) for p in points]
    known = [e for e in largest if e is not None]
    if len(known) < 2:
        return Series(points=points, says="too few fingerprints with rows enough for an order among them")
    trend = float(spearmanr(range(len(known)), known).statistic) if len(known) >= STEPS and len(set(known)) > 1 else None
    if max(known) <= FAR:
        says = f"no fingerprint is further than {max(known):.1f} units from the first: no drift that the texts would not make"
    elif trend is not None and trend > 0.8:
        says = (f"the distance from the first grows with the order (rank correlation {trend:+.2f}), to {known[-1]:.1f} units: "
                "drift")
    else:
        at = next(i for i, e in enumerate(known) if e > FAR)
        says = f"number {at + 2} is the first to be further than {FAR:.0f} units away ({known[at]:.1f}): a step, no drift"
    return Series(points=points, trend=trend, drifts=max(known) > FAR and trend is not None and trend > 0.8, says=says)
