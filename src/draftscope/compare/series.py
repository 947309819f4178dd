"""Several fingerprints of one server in order: whether they drift away, step, or stay.

A step is one change that outweighs all others together; a drift grows from one to the next. Both are told in units of what the
reference's own groups differ by, so that texts of other days are no change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field
from scipy.stats import spearmanr

from draftscope.compare.distances import Model, distance
from draftscope.compare.yardstick import FAR, Yardstick
from draftscope.scan.fingerprint import Fingerprint, RowClass

FEWEST = 4
"""Fingerprints besides the reference from which an order among them means something."""
GROWS = 0.8
"""Rank correlation with the order from which a distance grows with it."""
OUTWEIGHS = 0.5
"""Share of all changes from one to the next from which one of them is a step."""

Course = Literal["steady", "step", "steps", "drift", "apart", "open"]


class Point(Model):
    """One of several fingerprints against the first, by slot."""

    paths: list[str]
    rows: int
    distances: list[float | None]
    effects: list[float | None] = Field(description="in units of the reference's groups")
    from_previous: list[float | None]
    changes: list[float | None] = Field(default_factory=list, description="from the one before it, in the same units")
    began: str | None = Field(None, description="time of its first file (UTC, ISO 8601); None where files have none")
    ended: str | None = Field(None, description="time of its last file")


class Series(Model):
    """Several fingerprints, in the order given, against the first.

    Attributes:
        trend: Spearman's rank correlation of the largest effect with the order, None for fewer than four points.
        course: `steady` = none is far; `step` = one change outweighs the others; `steps` = several changes, none of which does;
            `drift` = grows with the order; `apart` = all are far from the reference from the first on, and none from the one
            before; `open` = too little to tell.
        at: number of the first fingerprint after the largest change (the reference is 1), for `step` and `steps`.
        slot: the one that changed most, or is furthest.
    """

    points: list[Point]
    trend: float | None = None
    drifts: bool = False
    says: str = ""
    course: Course = "open"
    at: int | None = None
    slot: int | None = None


def series(fingerprints: Sequence[Fingerprint], classes: tuple[RowClass, ...], yards: list[Yardstick]) -> Series:
    """Each fingerprint against the first and against the one before it."""
    slots = min(f.slots for f in fingerprints)
    held = [[f.statistics(s, classes) for s in range(slots)] for f in fingerprints]
    points = []
    for number, one in enumerate(fingerprints[1:], 1):
        apart, moved = ([distance(held[other][s], held[number][s]).total for s in range(slots)] for other in (0, number - 1))
        rows = [h.dimensions.count for h in held[number]]
        before = [h.dimensions.count for h in held[number - 1]]
        times = [one_input.time for one_input in one.inputs if one_input.time > 0]
        points.append(Point(
            paths=[o.path for o in one.origins], rows=one.rows, distances=apart, from_previous=moved,
            began=_moment(min(times, default=None)), ended=_moment(max(times, default=None)),
            effects=[_units(apart[s], yards[s].unit(rows[s])) for s in range(slots)],
            changes=[_units(moved[s], yards[s].unit(rows[s], against=before[s])) for s in range(slots)],
        ))
    told = _told(points)
    known = [(p.began, p.ended) for p in points if p.began is not None and p.ended is not None]
    if any(after[1] < before[0] for before, after in itertools.pairwise(known)):
        told.says += " (the files' times are in another order)"
    return told


def _moment(time: int | None) -> str | None:
    """Nanoseconds since 1970 as text that sorts by time."""
    if time is None:
        return None
    return datetime.fromtimestamp(time // 10**9, UTC).isoformat(timespec="seconds")


def _units(value: float | None, unit: float | None) -> float | None:
    return None if value is None or unit is None else value / unit


def _largest(values: Sequence[float | None]) -> tuple[float, int] | None:
    """The largest and its slot."""
    return max(((value, slot) for slot, value in enumerate(values) if value is not None), default=None)


def _told(points: list[Point]) -> Series:
    """What the points come to."""
    furthest = [(number, *found) for number, p in enumerate(points, 2) if (found := _largest(p.effects)) is not None]
    if len(furthest) < 2:
        return Series(points=points, says="too few fingerprints with rows enough for an order among them")
    far = [effect for _, effect, _ in furthest]
    trend = float(spearmanr(range(len(far)), far).statistic) if len(far) >= FEWEST and len(set(far)) > 1 else None
    most, slot = max(((effect, slot) for _, effect, slot in furthest), key=lambda pair: pair[0])
    # The first is compared with the reference, which as a rule are training states: no change of the server.
    moves = [(number, *found) for number, p in itertools.islice(enumerate(points, 2), 1, None)
             if (found := _largest(p.changes)) is not None]
    moved = sum(change for _, change, _ in moves)
    at, change, where = max(moves, key=lambda move: move[1], default=(0, 0.0, 0))

    def told(course: Course, says: str, *, at: int | None = None, slot: int | None = slot) -> Series:
        return Series(points=points, trend=trend, drifts=course == "drift", says=says, course=course, at=at, slot=slot)

    if max(most, change) <= FAR:
        return told("steady", f"no fingerprint is further than {most:.1f} units from the first: no drift that the texts would "
                              "not make")
    if change > FAR and change > OUTWEIGHS * moved:
        back = [number for number, other, _ in moves if number > at and other > FAR]
        return told("step", f"number {at} is {change:.1f} units from the one before it (slot {where}), more than all other "
                            f"changes together: a step, no drift" + (f"; number {back[0]} changes again" if back else ""),
                    at=at, slot=where)
    if trend is not None and trend > GROWS:
        return told("drift", f"the distance from the first grows with the order (rank correlation {trend:+.2f}), to "
                             f"{far[-1]:.1f} units: drift")
    if change > FAR:
        return told("steps", f"number {at} is {change:.1f} units from the one before it (slot {where}), and not the only one: "
                             "changes, none of which outweighs the others", at=at, slot=where)
    if min(far) > FAR:
        return told("apart", f"all are {min(far):.1f} units or more from the first, and none is further than {change:.1f} from "
                             "the one before it: apart from the start, no drift")
    first = next(number for number, effect, _ in furthest if effect > FAR)
    return told("open", f"number {first} is the first to be further than {FAR:.0f} units away, and no single change is as large: "
                        "too few fingerprints to call it drift" if len(far) < FEWEST else
                        f"some are further than {FAR:.0f} units away, from number {first} on, without an order: no drift")
