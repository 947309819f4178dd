"""A comparison of fingerprints as a page: what each slot looks like, what carries its difference, and several in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from draftscope.compare.carriers import Carried
from draftscope.compare.distances import Distance
from draftscope.compare.effects import Effect
from draftscope.compare.series import Point, Series
from draftscope.compare.statistics import Comparison
from draftscope.compare.unpaired import Look
from draftscope.compare.yardstick import FAR
from draftscope.report.drawing import WIDTH, Figure, Table, circle, decades, figure, joined, label, line, series
from draftscope.report.html import render
from draftscope.text import number, percent, visible

LEAST = 0.05
"""Units below which effects are drawn there."""


def comparison_page(comparison: Comparison) -> str:
    """The page's text."""
    told = comparison.series
    return render(
        "comparison.html", title="draftscope: comparison", comparison=comparison, heading=heading(comparison),
        effects=effects_figure(comparison), series=None if told is None else series_figure(told),
        carried=[carried_says(each, comparison) for each in comparison.carried], unit=unit_says(comparison),
        distances=_distances(comparison), number=number, percent=percent,
    )


def heading(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    if comparison.series is not None and comparison.series.course != "open":
        return comparison.series.says
    far = [look for look in comparison.looks if look.kind not in ("own", "unknown")]
    unknown = [look for look in comparison.looks if look.kind == "unknown"]
    if far:
        return "; ".join(f"slot {look.slot}: {look.says}" for look in far)
    if unknown:
        return "; ".join(f"slot {look.slot}: {look.says}" for look in unknown)
    return "No slot differs from its training entry by more than the texts make of it"


def unit_says(comparison: Comparison) -> str:
    """What one unit is."""
    yard = comparison.yardsticks[0] if comparison.yardsticks else None
    return (f"what {yard.groups} groups of A ({', '.join(yard.grouped)}) differ by" if yard and yard.natural
            else "the distance of A's two halves")


def carried_says(carried: Carried, comparison: Comparison) -> str:
    """How a slot's difference is spread over dimensions, and what other shares of rows make of it."""
    width = comparison.a.width
    said = f"slot {carried.slot}: {carried.beyond:,} of {width:,} dimensions are further than {FAR:.0f} units away"
    if carried.usual is not None:
        said += f" ({carried.usual:.1f} in a group of A, on average)"
    said += f"; {carried.half:,} carry half of the difference of the mean rows"
    if carried.means is not None:
        said += f"; of the distance, means make {percent(carried.means)}, norms {percent(carried.norms)}, spreads " + percent(
            carried.spread)
    if carried.smallest is not None:
        said += f"; a shift of {carried.smallest:.2g} standard deviations of one dimension would have been seen"
    mixed = [m for m in comparison.mixes if m.slot == carried.slot and abs(m.share) >= 0.1]
    for mix in mixed:
        said += f"; {percent(mix.share)} of it is that rows of each {mix.by} are more or fewer in B than in A"
    return said


Lane = tuple[int, str, float | None, str]


def effects_figure(comparison: Comparison) -> Figure | None:
    """Every slot in units, whole, by class and by position; None where no slot has rows enough."""
    lanes: list[Lane] = []
    for look in comparison.looks:
        told = [e for e in comparison.effects if e.slot == look.slot]
        if look.effect is None and not told:
            continue
        lanes.append((look.slot, "all rows compared", look.effect, _look_tip(look)))
        lanes += [(e.slot, e.name if e.by == "class" else f"rows {e.name}", e.effect, _effect_tip(e)) for e in told]
    known = [effect for _, _, effect, _ in lanes if effect is not None]
    if not known:
        return None
    low, high = max(min(*known, FAR / 3), LEAST) / 1.3, max(*known, FAR * 2) * 1.3
    left, right, top, lane = 210, 16, 8, 19

    def x(effect: float) -> float:
        return left + (WIDTH - left - right) * math.log(max(effect, low) / low) / math.log(high / low)

    parts, y, before = [], float(top), None
    for slot, name, effect, tip in lanes:
        if slot != before:
            y += 8 if before is not None else 0
            parts.append(label(4, y + 13, f"slot {slot}"))
            before = slot
        parts.append(label(left - 8, y + 13, name, "tick end"))
        if effect is not None:
            parts += [line(x(low), y + 9, x(effect), y + 9, f"thin {series(slot)}"), circle(x(effect), y + 9, series(slot), tip)]
        y += lane
    grid = []
    for tick in decades(low, high):
        grid += [line(x(tick), top - 4, x(tick), y + 2, "grid"), label(x(tick), y + 16, f"{tick:g}", "tick middle")]
    grid += [line(x(FAR), top - 4, x(FAR), y + 2, "axis"), label(x(FAR), y + 32, "further than the texts make of it", "tick")]
    rows = tuple((f"slot {look.slot}, all rows compared", "–", "–", number(look.distance, 3), number(look.effect),
                  number(look.smallest, 3), "–") for look in comparison.looks)
    rows += tuple((f"slot {e.slot}, {e.name}", f"{e.rows_a:,}", f"{e.rows_b:,}", number(e.distance, 3), number(e.effect),
                   number(e.smallest, 3), percent(e.share)) for e in comparison.effects)
    head = ("rows of", "rows of A", "rows of B", "distance", "units", "smallest seen", "share of the difference")
    return figure("Distance of each slot from its own entry, in units", _effects_say(lanes), y + 40, grid + parts,
                  Table(head, rows))


def _look_tip(look: Look) -> str:
    return f"slot {look.slot}: {look.says}"


def _effect_tip(effect: Effect) -> str:
    share = "" if effect.share is None else f", {percent(effect.share)} of the difference"
    return (f"slot {effect.slot}, {effect.name}: {number(effect.effect)} units, distance {effect.distance:.3g}{share}; "
            f"{effect.rows_a:,} and {effect.rows_b:,} rows")


def _effects_say(lanes: Sequence[Lane]) -> str:
    far = [(effect, slot, name) for slot, name, effect, _ in lanes if effect is not None and effect > FAR]
    known = [(effect, slot, name) for slot, name, effect, _ in lanes if effect is not None]
    effect, slot, name = max(known)
    furthest = f"the furthest is slot {slot}, {name}, at {effect:.1f}"
    if not far:
        return f"None of {len(known)} is further than {FAR:.0f} units; {furthest}"
    return f"{len(far)} of {len(known)} are further than {FAR:.0f} units; {furthest}"


def series_figure(told: Series) -> Figure:
    """Each fingerprint's distance from the reference by slot, in the order given."""
    slots = max((len(p.effects) for p in told.points), default=0)
    known = [e for p in told.points for e in p.effects if e is not None]
    left, right, top, depth = 52, 110, 10.0, 220.0
    low, high = LEAST, max(*known, 2 * FAR) * 1.3 if known else 10.0
    low = min(max(min(known, default=low), LEAST), FAR / 3) / 1.3
    columns = max(len(told.points), 1)

    def at(column: int, effect: float) -> tuple[float, float]:
        height = math.log(max(effect, low) / low) / math.log(high / low)
        return left + (WIDTH - left - right) * (column + 0.5) / columns, top + depth * (1 - height)

    parts = []
    for tick in decades(low, high):
        y = at(0, tick)[1]
        parts += [line(left, y, WIDTH - right, y, "grid"), label(left - 6, y + 4, f"{tick:g}", "tick end")]
    y = at(0, FAR)[1]
    parts += [line(left, y, WIDTH - right, y, "axis"), label(WIDTH - right + 6, y + 4, "far", "tick")]
    parts += [label(at(i, low)[0], top + depth + 16, str(i + 2), "tick middle")
              for i in range(0, columns, math.ceil(columns / 24))]
    parts.append(label((left + WIDTH - right) / 2, top + depth + 32, "fingerprint, in the order given (A is 1)", "tick middle"))
    for slot in range(slots):
        parts += _course(slot, told.points, at)
        y = top + 14 + 20 * slot
        parts += [joined([(WIDTH - right + 8, y - 4), (WIDTH - right + 32, y - 4)], f"{series(slot)} d{slot % 6}"),
                  label(WIDTH - right + 38, y, f"slot {slot}")]
    head = ("fingerprint", "files from", "to", "rows",
            *(f"slot {s} {what}" for s in range(slots) for what in ("units", "from the one before")))
    rows = tuple(
        (f"{i} {', '.join(visible(path) for path in p.paths)}", p.began or "–", p.ended or "–", f"{p.rows:,}", *(
            cell for s in range(slots) for cell in (number(p.effects[s]), number(p.changes[s] if p.changes else None))))
        for i, p in enumerate(told.points, 2))
    return figure("Distance from A by fingerprint, in units", told.says, top + depth + 40, parts, Table(head, rows))


def _course(slot: int, points: Sequence[Point], at: Callable[[int, float], tuple[float, float]]) -> list[Markup]:
    found = [(i, p.effects[slot]) for i, p in enumerate(points)]
    places = [None if effect is None else at(i, effect) for i, effect in found]
    return [joined(places, f"{series(slot)} d{slot % 6}")] + [
        circle(*at(i, effect), series(slot), f"fingerprint {i + 2}, slot {slot}: {effect:.2f} units")
        for i, effect in found if effect is not None]


def _distances(comparison: Comparison) -> Table:
    def cell(found: Distance) -> str:
        return number(found.total, 3)

    head = ("B", *(f"A {e.entry} {visible(e.label, 16)}" for e in comparison.a.entries), "B's halves")
    rows = [(f"{e.entry} {visible(e.label, 24)}", *map(cell, row), cell(halves)) for e, row, halves in zip(
        comparison.b.entries, comparison.distances, comparison.split_half_b, strict=True)]
    rows.append(("A's halves", *map(cell, comparison.split_half_a), "–"))
    return Table(head, tuple(rows))
