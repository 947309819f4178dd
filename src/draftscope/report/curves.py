"""The lag curve of each slot, and the norms of its rows by class of token, training beside serving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from draftscope.compare.lagging import CURVE_LAGS
from draftscope.findings import Diagnosis, Norms, Placed, RowNorms
from draftscope.report import words
from draftscope.report.drawing import WIDTH, Figure, Table, circle, decades, figure, joined, label, line, rect, series
from draftscope.text import count, number

FLOOR = 1e-4
"""Errors below it are drawn there."""
CLASSES = {"first": "first token", "sink": "sinks", "prompt": "prompt", "answer": "answer", "unknown": "not told"}
SHOWN = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles that a strip is drawn from."""
ALIKE = 0.1
FEW = 8
"""Rows from which a median is compared."""


def lags(diagnosis: Diagnosis) -> Figure | None:
    """Relative error of each slot at the place found, against the states of the tokens around; None where none was measured."""
    sides = [(name, [p for p in slots if p.lag_errors]) for name, slots in (
        ("training", diagnosis.placement.train), ("serving", diagnosis.placement.serve))]
    sides = [(name, slots) for name, slots in sides if slots]
    values = [e for _, slots in sides for placed in slots for e in placed.lag_errors if e is not None]
    if not values:
        return None
    top, depth, left, right = 28.0, 170.0, 52, 18
    ceiling = max(2.0, *values)
    width = (WIDTH - left * len(sides) - right) / len(sides)
    parts: list[Markup] = []
    numbers = sorted({placed.slot for _, slots in sides for placed in slots}, key=lambda slot: (slot < 0, slot))
    named = {slot: i for i, slot in enumerate(numbers)}
    for i, (name, slots) in enumerate(sides):
        parts += _panel(name, slots, named, left + i * (width + left), width, top, depth, ceiling)
    y = top + depth + 50
    for slot, i in named.items():
        x = left + 96 * (i % 6)
        parts += [joined([(x, y + 18 * (i // 6)), (x + 24, y + 18 * (i // 6))], f"{series(i)} d{i}"),
                  label(x + 30, y + 4 + 18 * (i // 6), words.slot_name(slot))]
    rows = tuple(
        (f"{name} {words.slot_name(placed.slot)}", words.place(placed), *(
            "–" if e is None else f"{e:.2g}" for e in placed.lag_errors)) for name, slots in sides for placed in slots)
    head = ("slot", "place found", *(f"lag {lag:+d}" if lag else "lag 0" for lag in CURVE_LAGS))
    return figure("Relative error at the place found, by lag (state of the token before or after)", _lags_say(sides),
                  y + 18 * ((len(named) - 1) // 6) + 14, parts, Table(head, rows))


def _panel(
    name: str, slots: Sequence[Placed], named: Mapping[int, int], left: float, width: float, top: float, depth: float,
    ceiling: float,
) -> list[Markup]:
    def at(column: int, error: float) -> tuple[float, float]:
        height = math.log10(max(error, FLOOR) / FLOOR) / math.log10(ceiling / FLOOR)
        return left + width * (column + 0.5) / len(CURVE_LAGS), top + depth * (1 - height)

    parts = [label(left, top - 12, name)]
    power = 0
    while 10**power * FLOOR <= ceiling:
        error = FLOOR * 10**power
        y, text = at(0, error)[1], f"{error:g}" if power else f"≤ {error:.0e}".replace("e-0", "e-")
        parts += [line(left, y, left + width, y, "grid"), label(left - 6, y + 4, text, "tick end")]
        power += 1
    for column, lag in enumerate(CURVE_LAGS):
        parts.append(label(at(column, FLOOR)[0], top + depth + 18, f"{lag:+d}" if lag else "0", "tick middle"))
    for placed in slots:
        i = named[placed.slot]
        points = [None if e is None else at(column, e) for column, e in enumerate(placed.lag_errors)]
        parts.append(joined(points, f"{series(i)} d{i}"))
        parts += [circle(*point, series(i), f"{name} {words.slot_name(placed.slot)}, lag {lag:+d}: {error:.2g}")
                  for point, lag, error in zip(points, CURVE_LAGS, placed.lag_errors, strict=False)
                  if point is not None and error is not None]
    return parts


def _lags_say(sides: Sequence[tuple[str, Sequence[Placed]]]) -> str:
    least: dict[int, list[str]] = {}
    there, elsewhere = [], []
    for name, slots in sides:
        for placed in slots:
            held = {lag: e for lag, e in zip(CURVE_LAGS, placed.lag_errors, strict=False) if e is not None}
            if held:
                best = min(held, key=lambda d: (held[d], abs(d)))
                least.setdefault(best, []).append(f"{name} {words.slot_name(placed.slot)}")
                there.append(held[best])
                elsewhere += [error for lag, error in held.items() if lag != best]
    parts = [f"at lag {f'{lag:+d}' if lag else '0'} for {', '.join(names)}" for lag, names in sorted(least.items())]
    said = "The error is least at lag 0 for every slot" if set(least) == {0} else f"The error is least {'; '.join(parts)}"
    return f"{said}: {max(there):.2g} or less there" + (f", {min(elsewhere):.2g} or more at the other lags" if elsewhere else "")


def norms(diagnosis: Diagnosis) -> Figure | None:
    """Norms by slot and class, training over serving on one logarithmic axis; None where none was measured."""
    held = diagnosis.norms
    if held is None:
        return None
    lanes = _lanes(held)
    sized = [q for _, _, sides in lanes for found in sides.values() for q in found.quantiles if q > 0]
    if not sized:
        return None
    low, high = min(sized), max(sized)
    low, high = (low / 1.5, high * 1.5) if high < 3 * low else (low / 1.1, high * 1.1)
    left, right, top, lane = 132, 16, 46, 27
    shown = [held.at.index(q) for q in SHOWN if q in held.at]

    def x(norm: float) -> float:
        return left + (WIDTH - left - right) * math.log(max(norm, low) / low) / math.log(high / low)

    y, parts, before = float(top), [], None
    for slot, name, sides in lanes:
        if slot != before:
            y += 6 if before is not None else 0
            parts.append(label(4, y + lane / 2 + 4, words.slot_name(slot)))
            before = slot
        parts.append(label(left - 8, y + lane / 2 + 4, CLASSES[name], "tick end"))
        for i, side in enumerate(words.SIDES):
            rows = sides.get(side)
            if rows is not None and len(rows.quantiles) == len(held.at):
                tip = (f"{words.SIDES[side]} {words.slot_name(slot)}, {CLASSES[name]}, {rows.rows:,} rows: median "
                       f"{rows.quantiles[held.at.index(0.5)]:.4g}")
                parts += _strip([rows.quantiles[j] for j in shown], x, y + 9 + 9 * i, "s0" if i == 0 else "s2", tip)
        y += lane
    grid = []
    for tick in decades(low, high):
        grid += [line(x(tick), top - 2, x(tick), y + 2, "grid"), label(x(tick), y + 16, f"{tick:g}", "tick middle")]
    for i, side in enumerate(words.SIDES.values()):
        grid += [rect(left + 90 * i, 4, 12, 10, "s0" if i == 0 else "s2"), label(left + 90 * i + 18, 13, side)]
    grid.append(label(left, 32, "thin: all rows; pale: 5 to 95 %; full: the middle half; mark: the median", "tick"))
    return figure(
        "Norms of the rows by slot and class of token", _norms_say(held, lanes), y + 24, grid + parts, _table(held, lanes))


Lane = tuple[int, str, dict[str, RowNorms]]


def _lanes(held: Norms) -> list[Lane]:
    """By slot and class the sides that have rows of it, the last state's behind the slots'."""
    found: dict[tuple[int, str], dict[str, RowNorms]] = {}
    for side in words.SIDES:
        for entry in getattr(held, side):
            for name, figures in entry.classes.items():
                found.setdefault((entry.slot, name), {})[side] = figures
    classes = list(CLASSES)
    order = sorted(found, key=lambda key: (key[0] < 0, key[0], classes.index(key[1])))
    return [(slot, name, found[slot, name]) for slot, name in order]


def _strip(quantiles: Sequence[float], x: Callable[[float], float], y: float, kind: str, tip: str) -> list[Markup]:
    """One side's rows of a class: whiskers, box, median."""
    least, low, first, middle, third, high, most = map(x, quantiles)
    return [
        line(least, y, max(most, least + 1), y, f"thin {kind}"),
        rect(low, y - 3, max(high - low, 1), 6, f"pale {kind}"),
        rect(first, y - 4, max(third - first, 2), 8, kind, tip),
        line(middle, y - 5, middle, y + 5, "axis"),
    ]


def _table(held: Norms, lanes: Sequence[Lane]) -> Table:
    rows = []
    for slot, name, sides in lanes:
        for side, figures in sides.items():
            quantiles = [f"{q:.4g}" for q in figures.quantiles] or ["–"] * len(held.at)
            rows.append((f"{words.SIDES[side]} {words.slot_name(slot)}, {CLASSES[name]}", f"{figures.rows:,}",
                         f"{figures.nonfinite:,}", f"{figures.zero:,}", *quantiles))
    ends = {0.0: "least", 0.5: "median", 1.0: "largest"}
    return Table(("rows of", "rows", "not finite", "zero", *(ends.get(q, f"{100 * q:.0f} %") for q in held.at)), tuple(rows))


def _norms_say(held: Norms, lanes: Sequence[Lane]) -> str:
    return _medians_say(held, lanes) + _spoilt_say(held)


def _medians_say(held: Norms, lanes: Sequence[Lane]) -> str:
    middle = held.at.index(0.5)
    medians = [(f"{words.slot_name(slot)}, {CLASSES[name]}", {side: f.quantiles[middle] for side, f in sides.items()
                if len(f.quantiles) > middle and f.rows >= FEW and f.quantiles[middle] > 0}) for slot, name, sides in lanes]
    both = [(where, values["serve"], values["train"]) for where, values in medians if len(values) == 2]
    if both:
        where, served, trained = max(both, key=lambda b: abs(math.log(b[1] / b[2])))
        close = sum(abs(served / trained - 1) <= ALIKE for _, served, trained in both)
        return (f"The medians differ most for {where}: {served:.4g} in service, {trained:.4g} in training, a factor of "
                f"{_factor(served / trained)}; {close} of {len(both)} pairs of {FEW} rows or more lie within {100 * ALIKE:.0f} %")
    one = [(where, side, value) for where, values in medians for side, value in values.items()]
    if not one:
        return f"No class has {FEW} rows or more with a norm"
    least, most = min(one, key=lambda o: o[2]), max(one, key=lambda o: o[2])
    alone = {side for _, side, _ in one}
    said = "No class has rows enough on both sides" if len(alone) == 2 else f"Only {words.SIDES[alone.pop()]} rows are at hand"
    return f"{said}: medians from {number(least[2], 3)} ({least[0]}) to {number(most[2], 3)} ({most[0]})"


def _spoilt_say(held: Norms) -> str:
    """Rows that have no norm, or none to speak of: where there are most."""
    said = ""
    for kind, name in (("nonfinite", "are not finite"), ("zero", "are zero")):
        found = [(sum(getattr(f, kind) for f in entry.classes.values()), f"{words.SIDES[side]} {words.slot_name(entry.slot)}")
                 for side in words.SIDES for entry in getattr(held, side)]
        most = max(found, default=(0, ""), key=lambda f: f[0])
        if most[0]:
            said += f"; {count(most[0], 'row')} of {most[1]} {name if most[0] > 1 else name.replace('are', 'is')}"
    return said


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.2g}"
