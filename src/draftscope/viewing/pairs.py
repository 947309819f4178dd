"""Two diagnoses beside each other: verdict, first cause, every rung, every slot; and where they differ."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.findings import Diagnosis, Placed
from draftscope.report import words
from draftscope.text import interval, number


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both; `differs` where both have it and not the same."""

    name: str
    first: str
    second: str
    change: str = ""

    @property
    def differs(self) -> bool:
        return self.first != self.second and "–" not in (self.first, self.second)


def beside(first: Diagnosis, second: Diagnosis) -> list[Row]:
    """What can be compared, in the order of a report; rows that neither has are left out."""
    rows = [
        Row("verdict", first.verdict, second.verdict),
        Row("first cause", _cause(first), _cause(second)),
        Row("accept length now, fixed", _effect(first), _effect(second)),
        Row("findings", _findings(first), _findings(second)),
    ]
    for field, (name, _) in words.RUNGS.items():
        a, b = (getattr(one.acceptance, field) for one in (first, second))
        left, right = ("–" if rung is None else f"{number(rung.length)} {interval(rung.interval)}".strip() for rung in (a, b))
        same = a is not None and b is not None and a.k == b.k and a.length is not None and b.length is not None
        rows.append(Row(name, left, right, words.signed(b.length - a.length) if same else ""))
    for side, named in words.SIDES.items():
        slots: list[dict[int, Placed]] = [{p.slot: p for p in getattr(one.placement, side)} for one in (first, second)]
        for slot in sorted(slots[0].keys() | slots[1].keys(), key=lambda slot: (slot < 0, slot)):
            left, right = (words.place(held[slot]) if slot in held else "–" for held in slots)
            rows.append(Row(f"{named} {words.slot_name(slot)}", left, right))
    return [row for row in rows if (row.first, row.second) != ("–", "–")]


def _cause(one: Diagnosis) -> str:
    return f"{one.findings[0].fault}, {one.findings[0].strength}" if one.findings else "–"


def _findings(one: Diagnosis) -> str:
    return ", ".join(f"{found.fault} ({found.strength})" for found in one.findings) or "none"


def _effect(one: Diagnosis) -> str:
    held = one.findings[0].acceptance if one.findings else None
    return "–" if held is None else f"{number(held.length_now)} → {number(held.length_if_fixed)}"
