"""Figures as static SVG: no script, no request, colours from the page's style sheet so that both schemes work.

Each function returns `Markup`; every string that goes in is escaped. The classes used (`s0`.. for series, `heat`, `axis`,
`grid`, `tick`) are defined in templates/page.css.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from draftscope.findings import Diagnosis, Placed
from draftscope.report import words
from draftscope.text import interval, visible

WIDTH = 680


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Errors by slot (row) and boundary (column); None where nothing was measured. `marked` is each row's placed column."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[int | None, ...]


def ladder(diagnosis: Diagnosis) -> Markup:
    """Accept length by rung, with its interval; a missing rung says why."""
    k = words.most_drafted(diagnosis.acceptance)
    left, right, step = 84, 120, 34
    span = WIDTH - left - right
    rungs = words.rungs(diagnosis)
    height = step * len(rungs) + 30

    def x(length: float) -> float:
        return left + span * max(0.0, min((length - 1) / k, 1.0))

    parts = []
    for tick in range(1, k + 2):
        parts += [_line(x(tick), 6, x(tick), height - 24, "grid"), _text(x(tick), height - 8, str(tick), "tick middle")]
    for row, (name, rung, remark) in enumerate(rungs):
        middle = 8 + step * row + step / 2
        parts.append(_text(left - 8, middle + 4, name, "end"))
        if rung is None or rung.length is None:
            parts.append(_text(left + 6, middle + 4, remark if rung is None else "no length: no walk on this text", "tick"))
            continue
        tip = f"{name}: {rung.length:.2f} {interval(rung.interval)} {remark}"
        parts.append(_rect(left, middle - 9, max(x(rung.length) - left, 1), 18, f"s{row}", tip))
        end = x(rung.length)
        if rung.interval is not None:
            low, high = x(rung.interval[0]), x(rung.interval[1])
            parts += [_line(low, middle, high, middle, "axis"), _line(low, middle - 5, low, middle + 5, "axis"),
                      _line(high, middle - 5, high, middle + 5, "axis")]
            end = max(end, high)
        parts.append(_text(end + 8, middle + 4, f"{rung.length:.2f} {interval(rung.interval)}".rstrip()))
    return _svg(height, "Accept length by rung", parts)


def positions(diagnosis: Diagnosis) -> Markup:
    """Joint acceptance per draft position, one line per rung."""
    held = [(i, name, rung) for i, (name, rung, _) in enumerate(words.rungs(diagnosis)) if rung is not None and rung.joint]
    if not held:
        return Markup("")
    k = max(len(rung.joint) for _, _, rung in held)
    left, top, height = 44, 12, 230
    span, depth = WIDTH - left - 130, height - top - 36

    def at(position: int, value: float) -> tuple[float, float]:
        return left + span * (position + 0.5) / k, top + depth * (1 - value)

    parts = []
    for tick in range(0, 11, 2):
        y = at(0, tick / 10)[1]
        parts += [_line(left, y, left + span, y, "grid"), _text(left - 6, y + 4, f"{tick / 10:.1f}", "tick end")]
    parts += [_text(at(i, 0)[0], height - 18, str(i + 1), "tick middle") for i in range(k)]
    parts.append(_text(left + span / 2, height - 2, "draft position", "tick middle"))
    for row, (i, name, rung) in enumerate(held):
        points = [at(p, value) for p, value in enumerate(rung.joint)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(Markup('<polyline class="line s{}" points="{}"/>').format(i, joined))
        parts += [_circle(x, y, f"s{i}", f"{name}, position {p + 1}: {rung.joint[p]:.3f}") for p, (x, y) in enumerate(points)]
        y = top + 12 + 20 * row
        parts += [_rect(left + span + 16, y - 9, 12, 12, f"s{i}"), _text(left + span + 34, y + 2, name)]
    return _svg(height, "Joint acceptance per draft position, by rung", parts)


def heatmaps(diagnosis: Diagnosis) -> list[Heatmap]:
    """Errors of both sides by boundary, as far as the placement kept them."""
    sides = {"Training": diagnosis.placement.train, "Serving": diagnosis.placement.serve}
    return [_heatmap(side, slots) for side, slots in sides.items() if any(placed.errors for placed in slots)]


def _heatmap(side: str, slots: Sequence[Placed]) -> Heatmap:
    count = max(len(placed.errors) for placed in slots)
    return Heatmap(
        title=f"{side}: median relative error of each slot against every boundary",
        rows=tuple("last" if placed.slot < 0 else f"slot {placed.slot}" for placed in slots),
        columns=tuple(map(str, range(count))),
        values=tuple(tuple(_finite(e) for e in placed.errors) + (None,) * (count - len(placed.errors)) for placed in slots),
        marked=tuple(placed.boundary if placed.boundary is not None and placed.boundary < count and placed.kind == "stream"
                     and placed.norm == "pre" else None for placed in slots),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def heatmap(data: Heatmap) -> Markup:
    """The darker, the smaller the error (on a logarithmic scale down to 1e-4); the place found is framed."""
    left, top, cell = 62, 8, 26
    side = min(40.0, (WIDTH - left - 8) / max(len(data.columns), 1))
    height = top + cell * len(data.rows) + 26
    parts = []
    every = max(1, math.ceil(22 / side))
    for r, (name, values) in enumerate(zip(data.rows, data.values, strict=True)):
        parts.append(_text(left - 8, top + cell * r + cell / 2 + 4, name, "end"))
        for c, value in enumerate(values):
            tip = f"{name}, boundary {data.columns[c]}: " + ("not measured" if value is None else f"{value:.2g}")
            kind = "empty" if value is None else f"heat h{_shade(value)}"
            parts.append(_rect(left + side * c, top + cell * r, max(side - 1, 1), cell - 2, kind, tip))
        mark = data.marked[r]
        if mark is not None:
            parts.append(_rect(left + side * mark - 1, top + cell * r - 1, max(side + 1, 3), cell, "frame"))
    for c in range(0, len(data.columns), every):
        parts.append(_text(left + side * (c + 0.5), height - 8, data.columns[c], "tick middle"))
    return _svg(height, data.title, parts)


def _shade(error: float) -> int:
    """0 (an error of 1 or more) to 10 (1e-4 or less)."""
    return max(0, min(10, round(-2.5 * math.log10(max(error, 1e-30)))))


def _svg(height: float, label: str, parts: Sequence[Markup]) -> Markup:
    frame = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>')
    return frame.format(WIDTH, height, visible(label), Markup("").join(parts))


def _text(x: float, y: float, content: str, kind: str = "") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>').format(x, y, kind, visible(content))


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> Markup:
    title = Markup("<title>{}</title>").format(visible(tip)) if tip else Markup("")
    shape = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}">{}</rect>')
    return shape.format(x, y, width, height, kind, title)


def _circle(x: float, y: float, kind: str, tip: str) -> Markup:
    shape = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" class="{}"><title>{}</title></circle>')
    return shape.format(x, y, kind, visible(tip))
