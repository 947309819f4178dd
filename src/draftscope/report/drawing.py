"""What figures are drawn with: static SVG without script or request, and the table of a figure's data.

Colours come from the page's style sheet, so that both schemes work: `s0`.. for series, `heat`, `axis`, `grid`, `tick` (see
templates/page.css). Every string that goes in is escaped.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from draftscope.text import visible

WIDTH = 680
SERIES = 6
"""Colours there are; further series begin again, with a broken line."""
TICK_LETTERS = 96
"""Small letters that fit beside the names of rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """A figure's data: names of columns, and rows whose first cell names them."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing, what to see in it (computed from its data), and the data."""

    title: str
    says: str
    drawn: Markup
    table: Table


def figure(title: str, says: str, height: float, parts: Iterable[Markup], table: Table) -> Figure:
    """A figure whose drawing carries title and sentence for those who do not see it."""
    return Figure(title, says, framed(f"{title}. {says}", height, parts), table)


def framed(says: str, height: float, parts: Iterable[Markup]) -> Markup:
    """A drawing of that height, with what it shows in words."""
    frame = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>')
    return frame.format(WIDTH, height, visible(says), Markup("").join(parts))


def wrapped(content: str, letters: int = TICK_LETTERS, lines: int = 3) -> list[str]:
    """A remark in a few lines."""
    return textwrap.wrap(visible(content), letters, max_lines=lines, placeholder=" …") or [""]


def label(x: float, y: float, content: str, kind: str = "") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>').format(x, y, kind, visible(content))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> Markup:
    shape = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}">{}</rect>')
    return shape.format(x, y, width, height, kind, _tip(tip))


def circle(x: float, y: float, kind: str, tip: str) -> Markup:
    return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" class="{}">{}</circle>').format(x, y, kind, _tip(tip))


def dots(points: Iterable[tuple[float, float]], kind: str) -> Markup:
    """Many small points as one shape."""
    return _marks(points, "M{:.1f} {:.1f}h0", f"dots {kind}")


def crosses(points: Iterable[tuple[float, float]], kind: str) -> Markup:
    """Many small upright crosses as one shape: told from dots without their colour."""
    return _marks(points, "M{:.1f} {:.1f}m-2.6 0h5.2m-2.6 -2.6v5.2", f"crosses {kind}")


def _marks(points: Iterable[tuple[float, float]], mark: str, kind: str) -> Markup:
    path = "".join(mark.format(x, y) for x, y in points)
    return Markup('<path class="{}" d="{}"/>').format(kind, path) if path else Markup("")


def nice(low: float, high: float, most: int = 6) -> list[float]:
    """Round values within [low, high] on a plain scale, at most `most`."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * m for m in (1, 2, 5, 10) if span / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def joined(points: Sequence[tuple[float, float] | None], kind: str) -> Markup:
    """A line through the points, broken where one is missing."""
    runs: list[list[str]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(f"{point[0]:.1f},{point[1]:.1f}")
    shape = Markup('<polyline class="line {}" points="{}"/>')
    return Markup("").join(shape.format(kind, " ".join(run)) for run in runs if len(run) > 1)


def series(number: int) -> str:
    """The class of series `number`."""
    return f"s{number % SERIES}" + (" broken" if number >= SERIES else "")


def decades(low: float, high: float) -> list[float]:
    """Round values within (low, high) on a logarithmic scale, three to ten of them where there can be."""
    ends = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{step}e{power}") for power in ends for step in steps if low <= float(f"{step}e{power}") <= high]
        if len(found) <= 10:
            return found
    return found[:: math.ceil(len(found) / 10)]


def _tip(tip: str) -> Markup:
    return Markup("<title>{}</title>").format(visible(tip)) if tip else Markup("")
