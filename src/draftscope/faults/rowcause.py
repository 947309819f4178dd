"""What the rows of a slot speak for: shared by the faults of rows and buffers, and by those that read a slot as a whole."""

from __future__ import annotations

from collections.abc import Iterable

from draftscope.faults.facts_rows import (
    OTHER_PLACE,
    OTHER_SEQUENCE,
    PADDING,
    RIGHT,
    SAME_SEQUENCE,
    UNKNOWN,
    ZEROS,
    Cause,
    RowFacts,
    SlotRows,
)
from draftscope.faults.measurements import Measurements, SideFacts

LEAST_ROWS = 3
LEAST = 0.01
"""Share of a slot's rows that must be wrong before they are called anything."""
HALF = 0.5
NEAR_ROWS = 2
"""Rows within which a displacement is a shift of states against tokens."""


def cause_of(rows: SlotRows) -> Cause | None:
    """What the wrong rows of a slot are a trace of; None where they are another kind of fault, or can't be told."""
    wrong = rows.rows - rows.kinds.get(RIGHT, 0)
    if wrong < max(LEAST_ROWS, LEAST * rows.rows):
        return None

    def most(*kinds: str) -> bool:
        return sum(rows.kinds.get(kind, 0) for kind in kinds) >= HALF * wrong

    if rows.shard is not None and most(ZEROS, SAME_SEQUENCE):
        return "parallel-shard"
    if most(OTHER_PLACE):
        if rows.beside and rows.later >= 0.9 * rows.kinds.get(OTHER_PLACE, 0):
            return "capture-alias"
        return "parallel-shard" if rows.whole and not rows.beside and rows.kinds.get(RIGHT, 0) else None
    if rows.last_step >= max(LEAST_ROWS, HALF * rows.steps) and rows.last_step >= 0.3 * wrong:
        return "graph-capture"
    if most(ZEROS, PADDING) and not displaced(rows):
        return "graph-capture"
    if displaced(rows) or rows.kinds.get(OTHER_SEQUENCE, 0) >= max(LEAST_ROWS, 0.1 * wrong):
        return "req-mix"
    return None


def displaced(rows: SlotRows) -> int | None:
    """The distance, of more than two rows, at which most rows found in their own sequence lie."""
    if rows.kinds.get(SAME_SEQUENCE, 0) < LEAST_ROWS or not rows.offsets:
        return None
    offset = max(rows.offsets, key=lambda d: rows.offsets[d])
    constant = rows.offsets[offset] >= HALF * sum(rows.offsets.values())
    return offset if constant and abs(offset) > NEAR_ROWS else None


def of_cause(m: Measurements, cause: Cause) -> Iterable[tuple[SideFacts, RowFacts, list[SlotRows]]]:
    """Sides with slots whose rows speak for a cause, and those slots."""
    for side in m.sides():
        facts = m.rows.get(side.name)
        found = [] if facts is None else [rows for rows in facts.slots if cause_of(rows) == cause]
        if facts is not None and found:
            yield side, facts, found


def one_buffer(facts: RowFacts, wanted: list[int | None]) -> bool:
    """Whether all slots hold one state, bit for bit, which none of them should hold before its time."""
    places = facts.places
    if len(facts.identical) < 2 or len(facts.identical) < len(places) or len(set(places)) != 1 or places[0] is None:
        return False
    known = [boundary for boundary in wanted if boundary is not None]
    return len(known) == len(places) and all(places[0] >= b for b in known) and sum(places[0] > b for b in known) >= 2


def claimed(m: Measurements, side: SideFacts) -> frozenset[int]:
    """Slots that are not to be read as a whole: their rows, channels or buffers say more."""
    facts, takes = m.rows.get(side.name), m.shapes.get("draft")
    if takes is not None and m.shapes.get(side.name, takes) != takes:
        return frozenset(range(len(side.slots)))
    if facts is None:
        return frozenset()
    found = {rows.slot for rows in facts.slots if cause_of(rows) is not None} | {held.slot for held in facts.blocks}
    found |= {share.slot for share in facts.shares}
    if one_buffer(facts, [want.boundary for want in m.reference or ()]):
        found |= set(facts.identical)
    if facts.interleaved is not None and facts.interleaved < INTERLEAVED:
        found |= set(range(len(side.slots)))
    return frozenset(found)


INTERLEAVED = 0.1
"""Relative error under which slots with their axes put right hold what they should."""


def told(side: SideFacts, found: list[SlotRows]) -> str:
    """What the rows hold, in words."""
    return "; ".join(
        f"{side.where(rows.slot)} (boundary {rows.wanted}): "
        + ", ".join(f"{count} rows {_KINDS[kind]}" for kind, count in rows.kinds.items() if count)
        + (f" (such as {rows.example})" if rows.example else "")
        for rows in found
    )


_KINDS = {
    RIGHT: "right", ZEROS: "of zeros", PADDING: "of one vector under unlike tokens", OTHER_PLACE: "of another place",
    SAME_SEQUENCE: "of other rows of the same sequence", OTHER_SEQUENCE: "of another sequence", UNKNOWN: "of no state known",
}


def phases(found: list[SlotRows], *kinds: str) -> str:
    """After a comma, whether wrong rows lie in verify steps, in prefills, or in both; nothing where that is not known."""
    if not any(rows.verify for rows in found):
        return ""
    wrong = sum(rows.kinds.get(kind, 0) for rows in found for kind in kinds)
    verify = sum(rows.verify.get(kind, 0) for rows in found for kind in kinds)
    if wrong and verify == wrong:
        return ", only in verify steps"
    return ", in both phases" if verify else ", only in prefill rows"


def figures(side: SideFacts, found: list[SlotRows]) -> dict[str, object]:
    """Figures of the evidence, by slot."""
    return {
        side.where(rows.slot): {
            "boundary": rows.wanted, "rows": dict(rows.kinds), "verify": dict(rows.verify), "places": dict(rows.places),
            "offsets": {str(d): n for d, n in sorted(rows.offsets.items(), key=lambda pair: -pair[1])[:5]},
            "of the step before": rows.last_step,
        }
        for rows in found
    }
