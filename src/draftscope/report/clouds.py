"""Both sides' slots as clouds: channel against channel, and rows along the directions in which they vary most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from draftscope.findings import Diagnosis
from draftscope.report import words
from draftscope.report.drawing import WIDTH, Figure, Table, circle, crosses, decades, dots, figure, label, line
from draftscope.text import count, percent
from draftscope.views import SlotChannels, SlotComponents

COLUMNS = 4
NAMED = 12
"""Channels of a slot in the table: outliers, then those furthest from the diagonal."""
LABELLED = 4
APART, NEAR = 2.0, 1.0
"""Distance of the two means, in what a row lies from the mean of its own side."""
WIDER = 1.6
"""Factor of how far the rows of one side spread, against the other's, from which it is spoken of."""


def channels(diagnosis: Diagnosis) -> Figure | None:
    """A point a channel: its size in training against its size in service, on one logarithmic scale for a slot."""
    slots = diagnosis.views.channels
    if not slots:
        return None
    parts: list[Markup] = []
    size, gap, left = _panel(len(slots))
    for i, slot in enumerate(slots):
        x, y = left + (i % COLUMNS) * (size + gap), 28.0 + (i // COLUMNS) * (size + 66)
        parts += _scatter(slot, x, y, size)
    height = 28 + math.ceil(len(slots) / COLUMNS) * (size + 66) - 6
    parts += [circle(left + 6, height - 12, "outlier", ""), label(left + 16, height - 8, "outlier channel", "tick"),
              line(left + 130, height - 12, left + 154, height - 12, "equal"),
              label(left + 160, height - 8, "as large on both sides", "tick")]
    rows = [(f"{words.slot_name(slot.slot)}, channel {c}", f"{a:.4g}", f"{b:.4g}", _ratio(a, b),
             "yes" if c in slot.outliers else "") for slot in slots for c, a, b in _table(slot)]
    left_out = sum(slot.width - len(slot.channel) for slot in slots)
    title = "Size of single channels, training against serving"
    said = _channels_say(slots) + (f"; {left_out:,} channels are left out of the drawing" if left_out else "")
    return figure(title, said, height, parts,
                  Table(("channel", "training", "serving", "serving / training", "outlier"), tuple(rows)))


def _panel(count: int) -> tuple[float, float, float]:
    """Side of a panel, the gap between two, and the left margin."""
    gap, left = 38.0, 40.0
    columns = min(count, COLUMNS)
    return min(186.0, (WIDTH - left - 8 - gap * (columns - 1)) / columns), gap, left


def _scatter(slot: SlotChannels, left: float, top: float, size: float) -> list[Markup]:
    positive = [v for v in (*slot.train, *slot.serve) if v > 0]
    low, high = (min(positive), max(positive)) if positive else (0.5, 2.0)
    low, high = low / 1.3, high * 1.3

    def at(value: float) -> float:
        return size * math.log(max(value, low) / low) / math.log(high / low)

    parts = [label(left, top - 10, words.slot_name(slot.slot)), *_frame(left, top, size)]
    ticks = decades(low, high)
    for tick in ticks[:: max(1, math.ceil(len(ticks) / 3))]:
        parts += [line(left, top + size - at(tick), left + size, top + size - at(tick), "grid"),
                  line(left + at(tick), top, left + at(tick), top + size, "grid"),
                  label(left - 4, top + size - at(tick) + 4, f"{tick:g}", "tick end"),
                  label(left + at(tick), top + size + 14, f"{tick:g}", "tick middle")]
    parts.append(line(left, top + size, left + size, top, "equal"))
    parts.append(label(left + size / 2, top + size + 29, "training →", "tick middle"))
    parts.append(label(left + size, top - 10, "↑ serving", "tick end"))
    where = {c: (left + at(a), top + size - at(b)) for c, a, b in zip(slot.channel, slot.train, slot.serve, strict=True)}
    outliers = set(slot.outliers)
    parts.append(dots((p for c, p in where.items() if c not in outliers), "s0"))
    sizes = {c: (a, b) for c, a, b in zip(slot.channel, slot.train, slot.serve, strict=True)}
    for c in slot.outliers:
        parts.append(circle(*where[c], "outlier", f"channel {c}: {sizes[c][0]:.4g} in training, {sizes[c][1]:.4g} in service"))
    taken: list[tuple[float, float]] = []
    for c in sorted(slot.outliers, key=lambda c: -max(sizes[c])):
        x, y = where[c]
        near = x > left + size - 34
        at_x = x - 20 if near else x + 20
        if len(taken) == LABELLED or any(abs(at_x - u) < 30 and abs(y - v) < 12 for u, v in taken):
            continue  # it would lie on another number; its tip and the table name it
        taken.append((at_x, y))
        parts.append(label(x + (-7 if near else 7), y + 4, str(c), "tick end" if near else "tick"))
    return parts


def _frame(left: float, top: float, size: float) -> list[Markup]:
    return [line(left, top, left, top + size, "rule"), line(left, top + size, left + size, top + size, "rule")]


def _table(slot: SlotChannels) -> list[tuple[int, float, float]]:
    held = list(zip(slot.channel, slot.train, slot.serve, strict=True))
    outliers = set(slot.outliers)
    held.sort(key=lambda row: (row[0] not in outliers, -abs(math.log(max(row[1], 1e-30) / max(row[2], 1e-30)))))
    return held[: max(NAMED, min(len(outliers), 2 * NAMED))]


def _ratio(train: float, serve: float) -> str:
    return f"{serve / train:.3g}" if train else "–"


def _channels_say(slots: Sequence[SlotChannels]) -> str:
    """Where the two sides are alike, where not, and the outliers."""
    known = [slot for slot in slots if slot.alike is not None]
    if not known:
        return "Nothing can be compared"
    least, most = min(known, key=lambda s: s.alike or 0.0), max(known, key=lambda s: s.alike or 0.0)
    said = f"Of {words.slot_name(least.slot)}'s channels {percent(least.alike)} have about the same size on both sides"
    if most is not least:
        said += f", of {words.slot_name(most.slot)}'s {percent(most.alike)}"
    held = [(slot, c, max(a, b)) for slot in slots for c, a, b in zip(slot.channel, slot.train, slot.serve, strict=True)
            if c in slot.outliers]
    if not held:
        return said + "; no channel stands out of its rows"
    slot, channel, size = max(held, key=lambda h: h[2])
    return said + (f"; {count(len(held), 'channel')} stand{'s' if len(held) == 1 else ''} out of the rows, "
                   f"channel {channel} of {words.slot_name(slot.slot)} the most ({size:.3g})")


def components(diagnosis: Diagnosis) -> Figure | None:
    """A point a row, in the plane of the first two principal components of both sides taken together."""
    slots = diagnosis.views.components
    if not slots:
        return None
    size, gap, left = _panel(len(slots))
    parts: list[Markup] = []
    for i, slot in enumerate(slots):
        parts += _plane(slot, left + (i % COLUMNS) * (size + gap), 28.0 + (i // COLUMNS) * (size + 66), size)
    height = 28 + math.ceil(len(slots) / COLUMNS) * (size + 66) - 6
    parts += [dots([(left + 6, height - 12)], "s0"), label(left + 16, height - 8, "training", "tick"),
              crosses([(left + 106, height - 12)], "s2"), label(left + 116, height - 8, "serving", "tick")]
    rows = tuple(
        (f"{words.slot_name(slot.slot)}", percent(slot.explained[0]), percent(slot.explained[1]), str(len(slot.train)),
         str(len(slot.serve)), f"{apart(slot):.2f}", f"{wider(slot):.2f}") for slot in slots)
    head = ("slot", "along the first", "along the second", "training rows", "serving rows", "means apart",
            "spread, serving / training")
    return figure("Rows of both sides along their first two principal components", _components_say(slots), height, parts,
                  Table(head, rows))


def _plane(slot: SlotComponents, left: float, top: float, size: float) -> list[Markup]:
    ends = [(min(values), max(values)) for values in zip(*slot.train, *slot.serve, strict=True)]
    middle = [(low + high) / 2 for low, high in ends]
    # One scale along both, or a cloud's form would be none.
    reach = 1.12 * max(high - low for low, high in ends) / 2 or 1.0

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return (left + size * (1 + (point[0] - middle[0]) / reach) / 2, top + size * (1 - (point[1] - middle[1]) / reach) / 2)

    first, second = slot.explained
    return [
        label(left, top - 10, words.slot_name(slot.slot)), *_frame(left, top, size),
        label(left + size / 2, top + size + 16, f"first, {percent(first)} of variance →", "tick middle"),
        label(left + size, top - 10, f"↑ second, {percent(second)}", "tick end"),
        dots(map(at, slot.train), "s0"), crosses(map(at, slot.serve), "s2"),
    ]


def apart(slot: SlotComponents) -> float:
    """Distance of the two sides' means in this plane, in what a row lies from its own side's mean (root mean square)."""
    (at, near), (there, far) = _side(slot.train), _side(slot.serve)
    spread = math.sqrt((near**2 + far**2) / 2)
    distance = math.dist(at, there)
    return distance / spread if spread else 0.0 if not distance else math.inf


def wider(slot: SlotComponents) -> float:
    """How far serving rows lie from their mean in this plane, over the same of training rows."""
    (_, train), (_, serve) = _side(slot.train), _side(slot.serve)
    return serve / train if train else 1.0 if not serve else math.inf


def _side(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], float]:
    """Mean, and the root mean square distance from it."""
    count = len(points) or 1
    x, y = sum(p[0] for p in points) / count, sum(p[1] for p in points) / count
    return (x, y), math.sqrt(sum((p[0] - x) ** 2 + (p[1] - y) ** 2 for p in points) / count)


def _components_say(slots: Sequence[SlotComponents]) -> str:
    """Which slots' clouds are two, which are one of another width, and which mix."""
    told: dict[str, list[str]] = {}
    for slot in slots:
        name, distance, width = words.slot_name(slot.slot), apart(slot), wider(slot)
        if distance > APART:
            told.setdefault("two clouds, one a side", []).append(f"{name} ({distance:.1f} of its own spread apart)")
        elif not 1 / WIDER < width < WIDER:
            told.setdefault("clouds of another width", []).append(f"{name} (serving spreads {width:.2g} times as far)")
        elif distance > NEAR:
            told.setdefault("clouds side by side", []).append(f"{name} ({distance:.1f} of its own spread apart)")
        else:
            told.setdefault("one mixed cloud", []).append(name)
    return "; ".join(f"{what}: {_listed(names)}" for what, names in told.items())


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]
