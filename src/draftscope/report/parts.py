"""Acceptance by context length and by kind of prompt, and the training's own curve."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from draftscope.findings import Diagnosis
from draftscope.report.drawing import WIDTH, Figure, Table, circle, figure, joined, label, line, nice, series
from draftscope.text import interval, number
from draftscope.views import Breakdown, Learning, Part

RUNGS = ("trained", "reference", "served", "as read", "measured")
"""In this order they have their colours, as on the ladder."""
TITLES = {"context": "Accept length by the position at which a round starts", "kind": "Accept length by kind of prompt"}
CELLS = {"context": "positions", "kind": "kind"}
FEW = 20
"""Rounds from which a part is spoken of."""


def breakdown(diagnosis: Diagnosis, by: str) -> Figure | None:
    """A row a part, a mark a rung; None where nothing was broken down so."""
    held = [one for one in diagnosis.views.breakdowns if one.by == by and any(part.length is not None for part in one.parts)]
    if not held:
        return None
    names = list(dict.fromkeys(part.name for one in held for part in one.parts))
    k = max(one.k for one in held)
    left, right, top, lane = 128.0, 16.0, 40.0, 15.0

    def x(length: float) -> float:
        return left + (WIDTH - left - right) * max(0.0, min((length - 1) / k, 1.0))

    parts, y = [], top
    for name in names:
        parts.append(label(left - 10, y + lane * len(held) / 2 + 4, name, "end"))
        for row, one in enumerate(held):
            part = next((p for p in one.parts if p.name == name), None)
            if part is not None and part.length is not None:
                parts += _mark(one, part, x, y + lane * (row + 0.5))
        y += lane * len(held) + 10
        parts.append(line(left, y - 5, WIDTH - right, y - 5, "grid"))
    grid = []
    for tick in range(1, k + 2, math.ceil(k / 12)):
        grid += [line(x(tick), top - 4, x(tick), y - 5, "grid"), label(x(tick), y + 10, str(tick), "tick middle")]
    for i, one in enumerate(held):
        grid += [circle(left + 6 + 110 * i, 14, _colour(one), ""), label(left + 16 + 110 * i, 18, one.rung)]
    rows = tuple(
        (f"{one.rung}, {part.name}", number(part.length), interval(part.interval) or "–", number(part.first),
         f"{part.rounds:,}", f"{part.sequences:,}") for one in held for part in one.parts)
    head = (f"rung, {CELLS[by]}", "accept length", "95 %", "first position", "rounds", "sequences")
    return figure(TITLES[by], _parts_say(held), y + 16, grid + parts, Table(head, rows))


def _colour(one: Breakdown) -> str:
    return series(RUNGS.index(one.rung) if one.rung in RUNGS else len(RUNGS))


def _mark(one: Breakdown, part: Part, x: object, y: float) -> list[Markup]:
    assert callable(x) and part.length is not None
    tip = f"{one.rung}, {part.name}: {part.length:.2f} {interval(part.interval)}, {part.rounds} rounds"
    parts = []
    if part.interval is not None:
        low, high = x(part.interval[0]), x(part.interval[1])
        parts.append(line(low, y, high, y, f"thin {_colour(one)}"))
    kind = _colour(one) if part.rounds >= FEW else f"{_colour(one)} pale"
    return [*parts, circle(x(part.length), y, kind, tip)]


def _parts_say(held: Sequence[Breakdown]) -> str:
    """Of the lowest rung with parts enough: where acceptance is least and most; then whether training has the same shape."""
    one = held[-1]
    known = [part for part in one.parts if part.length is not None and part.rounds >= FEW]
    if len(known) < 2:
        return f"Too few rounds in more than one part ({FEW} are asked for) to compare them"
    least, most = min(known, key=_length), max(known, key=_length)
    said = (f"{one.rung[:1].upper() + one.rung[1:]}, acceptance is least for {least.name} ({_length(least):.2f}) and most for "
            f"{most.name} ({_length(most):.2f}); {_chance(least, most)}")
    other = held[0]
    pairs = [(part, p) for p in known for part in other.parts if part.name == p.name and part.length is not None
             and part.rounds >= FEW]
    if other is one or len(pairs) < 2:
        return said
    drops = [(_length(above) - _length(below), below.name) for above, below in pairs]
    worst, mildest = max(drops), min(drops)
    if worst[0] <= 0.05:
        return f"{said}; no part lies clearly below {other.rung}"
    return (f"{said}; against {other.rung} it loses most for {worst[1]} ({worst[0]:.2f}) and least for {mildest[1]} "
            f"({mildest[0]:.2f})")


def _length(part: Part) -> float:
    return part.length or 0.0


def _chance(least: Part, most: Part) -> str:
    if least.interval is None or most.interval is None:
        return "an interval is missing, so that chance is not excluded"
    return "the intervals do not overlap" if least.interval[1] < most.interval[0] else "the intervals overlap"


def learning(diagnosis: Diagnosis) -> Figure | None:
    """The training's loss by step, with what was held out and where it was resumed; None without a log."""
    curve = diagnosis.views.learning
    if curve is None or len(curve.loss) < 2:
        return None
    left, right, top, depth = 52.0, 60.0, 24.0, 190.0
    steps = [*curve.step, *curve.held_step]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    held = [v for v in curve.held if math.isfinite(v)]
    values = [*curve.loss, *(held if curve.held_what == "loss" else [])]
    high = max(values)
    if curve.uniform is not None and curve.uniform < 1.5 * high:
        high = max(high, curve.uniform)
    low = 0.0

    def at(step: float, value: float) -> tuple[float, float]:
        share = (value - low) / (high * 1.05 - low or 1.0)
        return left + (WIDTH - left - right) * (step - first) / (last - first), top + depth * (1 - share)

    parts = []
    for tick in nice(low, high * 1.05, 5):
        y = at(first, tick)[1]
        parts += [line(left, y, WIDTH - right, y, "grid"), label(left - 6, y + 4, f"{tick:g}", "tick end")]
    for tick in nice(first, last, 6):
        parts.append(label(at(tick, low)[0], top + depth + 17, f"{tick:,.0f}", "tick middle"))
    parts.append(label(left, top - 10, "loss", "tick"))
    parts.append(label((left + WIDTH - right) / 2, top + depth + 34, "step", "tick middle"))
    if curve.uniform is not None and curve.uniform <= high:
        y = at(first, curve.uniform)[1]
        parts += [line(left, y, WIDTH - right, y, "equal"), label(WIDTH - right, y - 5, "knows nothing", "tick end")]
    for step in curve.restarts:
        x = at(step, low)[0]
        parts += [line(x, top, x, top + depth, "lost"), label(x + 4, top + 10, "restart", "tick bad")]
    parts.append(joined(_in_order(curve.step, [at(s, v) for s, v in zip(curve.step, curve.loss, strict=True)]), "s0"))
    if held:
        parts += _held(curve, at, left, right, top, depth)
    rows = tuple((f"{s:,}", f"{v:.4g}", "–" if not curve.rate or curve.rate[i] is None else f"{curve.rate[i]:.3g}")
                 for i, (s, v) in enumerate(zip(curve.step, curve.loss, strict=True)))
    rows += tuple((f"{s:,}, held out", f"{v:.4g}" if curve.held_what == "loss" else f"{curve.held_what} {v:.4g}", "–")
                  for s, v in zip(curve.held_step, curve.held, strict=True))
    return figure(f"The training's own log ({curve.format}, {curve.records:,} records)", _learning_says(curve), top + depth + 42,
                  parts, Table(("step", "loss", "learning rate"), rows))


def _in_order(steps: Sequence[int], points: Sequence[tuple[float, float]]) -> list[tuple[float, float] | None]:
    """Broken where the steps begin again."""
    out: list[tuple[float, float] | None] = []
    for i, point in enumerate(points):
        if i and steps[i] <= steps[i - 1]:
            out.append(None)
        out.append(point)
    return out


def _held(curve: Learning, at: object, left: float, right: float, top: float, depth: float) -> list[Markup]:
    """Held-out figures: losses on the loss's own scale, others on one of their own at the right."""
    assert callable(at)
    if curve.held_what == "loss":
        points = [at(s, v) for s, v in zip(curve.held_step, curve.held, strict=True)]
    else:
        low, high = min(curve.held), max(curve.held)
        low, high = (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)) if low == high else (low, high)
        points = [(at(s, 0)[0], top + depth * (1 - 0.1 - 0.8 * (v - low) / (high - low)))
                  for s, v in zip(curve.held_step, curve.held, strict=True)]
    name = f"held out: {curve.held_what}"
    parts = [joined(points, "s2 d1"), label(WIDTH - right, top - 10, name, "tick end")]
    return parts + [circle(x, y, "s2", f"{name} {v:.4g} at step {s:,}")
                    for (x, y), s, v in zip(points, curve.held_step, curve.held, strict=True)]


def _learning_says(curve: Learning) -> str:
    edge = max(1, len(curve.loss) // 20)
    begin, end = sum(curve.loss[:edge]) / edge, sum(curve.loss[-edge:]) / edge
    said = f"The loss goes from {begin:.3g} to {end:.3g} in {curve.step[-1]:,} steps"
    if curve.uniform is not None:
        said += f" ({curve.uniform:.3g} would be knowing nothing)"
    if curve.held:
        best = (min if curve.held_what == "loss" else max)(curve.held)
        at = curve.held_step[curve.held.index(best)]
        said += f"; held out, {curve.held_what} is best at step {at:,} ({best:.3g}) and ends at {curve.held[-1]:.3g}"
    if curve.restarts:
        said += f"; resumed, or jumping, at step {', '.join(f'{s:,}' for s in curve.restarts[:4])}"
    return said
