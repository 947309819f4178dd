"""The ladder, acceptance by position, and the errors of every slot at every boundary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from draftscope.findings import Diagnosis, Placed
from draftscope.report import words
from draftscope.report.drawing import WIDTH, Figure, Table, circle, figure, joined, label, line, rect, series, wrapped
from draftscope.text import interval, number


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Errors by slot (row) and boundary (column); None where nothing was measured. `marked` is each row's placed column."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[int | None, ...]


def ladder(diagnosis: Diagnosis) -> Figure:
    """Accept length by rung with its interval, and between known rungs the drop with all that it spans."""
    k = words.most_drafted(diagnosis.acceptance)
    left, right = 84, 130
    span = WIDTH - left - right
    gaps = {gap.lower: gap for gap in words.gaps(diagnosis)}

    def x(length: float) -> float:
        return left + span * max(0.0, min((length - 1) / k, 1.0))

    parts, y = [], 6.0
    for row, (name, rung, remark) in enumerate(words.rungs(diagnosis)):
        if name in gaps:
            drawn, y = _gap(gaps[name], x, left, y)
            parts += drawn
        if rung is None or rung.length is None:
            parts.append(label(left - 8, y + 15, name, "end"))
            for text in wrapped(remark if rung is None else "no length: no walk on this text"):
                parts.append(label(left + 6, y + 15, text, "tick"))
                y += 15
            y += 9
            continue
        middle, end = y + 12, x(rung.length)
        parts.append(label(left - 8, middle + 4, name, "end"))
        parts.append(rect(left, middle - 9, max(end - left, 1), 18, series(row),
                          f"{name}: {rung.length:.2f} {interval(rung.interval)} {remark}"))
        if rung.interval is not None:
            low, high = x(rung.interval[0]), x(rung.interval[1])
            parts += [line(low, middle, high, middle, "axis"), line(low, middle - 5, low, middle + 5, "axis"),
                      line(high, middle - 5, high, middle + 5, "axis")]
            end = max(end, high)
        parts.append(label(end + 8, middle + 4, f"{rung.length:.2f} {interval(rung.interval)}".rstrip()))
        y += 24
    grid = []
    known = any(rung is not None for _, rung, _ in words.rungs(diagnosis))
    for tick in range(1, k + 2, math.ceil(k / 12)) if known else ():
        grid += [line(x(tick), 4, x(tick), y + 4, "grid"), label(x(tick), y + 18, str(tick), "tick middle")]
    rows = [
        (name, number(rung.length), interval(rung.interval) or "–", str(rung.k), remark) if rung
        else (name, "–", "–", "–", remark) for name, rung, remark in words.rungs(diagnosis)
    ]
    rows += [
        (f"{gap.upper} to {gap.lower}", "–" if gap.drop is None else words.signed(-gap.drop), "–", "–", f"spans {gap.spans}")
        for gap in gaps.values()
    ]
    return figure("Accept length by rung", words.ladder(diagnosis), y + 24, grid + parts,
                  Table(("rung", "accept length", "95 %", "K", "remark"), tuple(rows)))


def _gap(gap: words.Gap, x: Callable[[float], float], left: float, y: float) -> tuple[list[Markup], float]:
    """A step of the ladder: a bracket over what is lost, and in words what it spans."""
    parts = []
    if gap.drop is None:
        said = f"not compared: another K; spans {gap.spans}"
    elif gap.falls:
        low, high = x(gap.below), x(gap.above)
        kind = "lost" if gap.apart else "unsure"
        parts += [rect(low, y + 3, high - low, 5, kind, f"{gap.upper} to {gap.lower}: {words.signed(-gap.drop)}"),
                  line(high, y, high, y + 11, kind), line(low, y, low, y + 11, kind)]
        y += 10
        said = f"{words.signed(-gap.drop)} across {gap.spans}" + ("" if gap.apart else " (may be chance)")
    else:
        said = f"{words.signed(-gap.drop)} across {gap.spans}"
    for text in wrapped(said):
        parts.append(label(left + 6, y + 14, text, "tick bad" if gap.falls and gap.apart else "tick"))
        y += 14
    return parts, y + 8


def positions(diagnosis: Diagnosis) -> Figure | None:
    """Joint acceptance per draft position, one line per rung; None where no rung has it."""
    known = [(i, name, rung) for i, (name, rung, _) in enumerate(words.rungs(diagnosis)) if rung is not None]
    held = [one for one in known if words.shares(one[2])]
    if not held:
        return None
    k = max(len(rung.joint) for _, _, rung in held)
    left, top, height = 44, 12, 230
    span, depth = WIDTH - left - 130, height - top - 36

    def at(position: int, value: float) -> tuple[float, float]:
        return left + span * (position + 0.5) / k, top + depth * (1 - value)

    parts = []
    for tick in range(0, 11, 2):
        y = at(0, tick / 10)[1]
        parts += [line(left, y, left + span, y, "grid"), label(left - 6, y + 4, f"{tick / 10:.1f}", "tick end")]
    parts += [label(at(i, 0)[0], height - 18, str(i + 1), "tick middle") for i in range(0, k, math.ceil(k / 16))]
    parts.append(label(left + span / 2, height - 2, "draft position", "tick middle"))
    for row, (i, name, rung) in enumerate(held):
        points = [at(p, value) for p, value in enumerate(rung.joint)]
        parts.append(joined(points, f"{series(i)} d{i}"))
        parts += [circle(x, y, series(i), f"{name}, position {p + 1}: {rung.joint[p]:.3f}") for p, (x, y) in enumerate(points)]
        y = top + 12 + 20 * row
        parts += [joined([(left + span + 10, y - 3), (left + span + 34, y - 3)], f"{series(i)} d{i}"),
                  label(left + span + 40, y + 2, name)]
    rows = tuple(
        (str(p + 1), *(cell for _, _, rung in held for cell in _accepted(rung.joint, rung.conditional, p))) for p in range(k))
    head = ("position", *(f"{name} {kind}" for _, name, _ in held for kind in ("joint", "conditional")))
    said = "; ".join(_at_position([(name, rung.joint[p]) for _, name, rung in held if p < len(rung.joint)], p)
                     for p in sorted({0, k - 1}))
    return figure("Share of draft tokens accepted at each position, joint", said[:1].upper() + said[1:], height, parts,
                  Table(head, rows))


def _accepted(joint: Sequence[float], conditional: Sequence[float | None], position: int) -> tuple[str, str]:
    held = [values[position] if position < len(values) else None for values in (joint, conditional)]
    return number(held[0], 3), number(held[1], 3)


def _at_position(values: list[tuple[str, float]], position: int) -> str:
    lowest, highest = min(values, key=lambda v: v[1]), max(values, key=lambda v: v[1])
    text = f"at position {position + 1} "
    if len(values) == 1:
        return text + f"{values[0][0]} accepts {values[0][1]:.2f}"
    if f"{lowest[1]:.2f}" == f"{highest[1]:.2f}":
        return text + f"{'both' if len(values) == 2 else f'all {len(values)}'} rungs accept {lowest[1]:.2f}"
    return text + f"acceptance lies between {lowest[1]:.2f} ({lowest[0]}) and {highest[1]:.2f} ({highest[0]})"


def heatmaps(diagnosis: Diagnosis) -> list[Heatmap]:
    """Errors of both sides by boundary, as far as the placement kept them."""
    sides = {"Training": diagnosis.placement.train, "Serving": diagnosis.placement.serve}
    return [_heatmap(side, slots) for side, slots in sides.items() if any(placed.errors for placed in slots)]


def _heatmap(side: str, slots: Sequence[Placed]) -> Heatmap:
    count = max(len(placed.errors) for placed in slots)
    return Heatmap(
        title=f"{side}: median relative error of each slot against every boundary",
        rows=tuple(words.slot_name(placed.slot) for placed in slots),
        columns=tuple(map(str, range(count))),
        values=tuple(tuple(_finite(e) for e in placed.errors) + (None,) * (count - len(placed.errors)) for placed in slots),
        marked=tuple(placed.boundary if placed.boundary is not None and placed.boundary < count and placed.kind == "stream"
                     and placed.norm == "pre" else None for placed in slots),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def heatmap(data: Heatmap) -> Figure:
    """The fuller the colour, the smaller the error (on a logarithmic scale down to 1e-4); the place found is framed."""
    left, top, cell = 62, 8, 26
    side = min(40.0, (WIDTH - left - 8) / max(len(data.columns), 1))
    height = top + cell * len(data.rows) + 48
    parts = []
    every = max(1, math.ceil(22 / side))
    for r, (name, values) in enumerate(zip(data.rows, data.values, strict=True)):
        parts.append(label(left - 8, top + cell * r + cell / 2 + 4, name, "end"))
        for c, value in enumerate(values):
            tip = f"{name}, boundary {data.columns[c]}: " + ("not measured" if value is None else f"{value:.2g}")
            kind = "empty" if value is None else f"heat h{_shade(value)}"
            parts.append(rect(left + side * c, top + cell * r, max(side - 1, 1), cell - 2, kind, tip))
        mark = data.marked[r]
        if mark is not None:
            parts.append(rect(left + side * mark - 1, top + cell * r - 1, max(side + 1, 3), cell, "frame"))
    below = top + cell * len(data.rows)
    for c in range(0, len(data.columns), every):
        parts.append(label(left + side * (c + 0.5), below + 14, data.columns[c], "tick middle"))
    for i, (error, text) in enumerate(((1.0, "error 1"), (0.1, "0.1"), (0.01, "0.01"), (1e-3, "1e-3"), (1e-4, "1e-4 or less"))):
        parts += [rect(left + 74 * i, below + 26, 14, 12, f"heat h{_shade(error)}"),
                  label(left + 74 * i + 19, below + 36, text, "tick")]
    parts += [rect(left + 420, below + 26, 14, 12, "frame"), label(left + 440, below + 36, "the place found", "tick")]
    rows = tuple(
        (column, *(number(v, 2) if v is not None and v >= 0.1 else "–" if v is None else f"{v:.2g}" for v in held))
        for column, *held in zip(data.columns, *data.values, strict=True))
    return figure(data.title, _heatmap_says(data), height, parts, Table(("boundary", *data.rows), rows))


def _heatmap_says(data: Heatmap) -> str:
    least, otherwise, unplaced = [], [], []
    for name, values, mark in zip(data.rows, data.values, data.marked, strict=True):
        held = {c: value for c, value in enumerate(values) if value is not None}
        if not held:
            continue
        nearest = min(held, key=lambda c: held[c])
        least.append(f"{name} at {data.columns[nearest]} ({held[nearest]:.2g})")
        if mark is None:
            unplaced.append(name)
        elif mark != nearest:
            otherwise.append(f"{name} at {data.columns[mark]}")
    if not least:
        return "Nothing was measured"
    said = f"The error is least for {_listed(least)}"
    if otherwise:
        said += f"; placed by another reading than this plain error: {_listed(otherwise)}"
    if unplaced:
        said += f"; {_listed(unplaced)}: no place among these was found"
    return said


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]


def _shade(error: float) -> int:
    """0 (an error of 1 or more) to 10 (1e-4 or less)."""
    return max(0, min(10, round(-2.5 * math.log10(max(error, 1e-30)))))
