"""Do the slots hold what they held?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from draftscope.boundaries import Boundary
from draftscope.diagnose.reference import equal
from draftscope.findings import Placed
from draftscope.gating.report import Slot

TIMES, ROUNDING = 2.0, 2e-3
"""A slot's median relative error has grown if it is above so many times the baseline's and rounding."""
ROWS = 0.05
"""Share of rows that may fall out of a slot before it is worse."""

SideName = Literal["train", "serve"]


def compare_slots(side: SideName, baseline: Sequence[Placed], current: Sequence[Placed]) -> tuple[list[Slot], int]:
    """Slots that moved, were lost or got worse, and how many were compared: those that the baseline had placed."""
    now = {placed.slot: placed for placed in current}
    placed = [one for one in baseline if one.boundary is not None]
    found = [slot for one in placed if (slot := _changed(side, one, now.get(one.slot))) is not None]
    return found, len(placed)


def _changed(side: SideName, was: Placed, now: Placed | None) -> Slot | None:
    def slot(what: Literal["moved", "lost", "worse"], says: str) -> Slot:
        return Slot(side=side, slot=was.slot, what=what, says=says, baseline=was, current=now)

    if now is None or now.boundary is None:
        return slot("lost", f"was {words(was)}, now holds nothing that could be placed")
    same = (was.boundary, was.norm, was.kind, was.transform) == (now.boundary, now.norm, now.kind, now.transform)
    if not equal(was, now) and not (same and not _explained(was)):
        return slot("moved", f"was {words(was)}, now is {words(now)}")
    before, after = was.error or 0.0, now.error or 0.0
    if after > max(TIMES * before, before + ROUNDING):
        return slot("worse", f"its error grew from {before:.2g} to {after:.2g}")
    if was.share is not None and now.share is not None and now.share < was.share - ROWS:
        return slot("worse", f"it holds its state in {now.share:.0%} of the rows, {was.share:.0%} before")
    return None


def _explained(placed: Placed) -> bool:
    return equal(placed, placed)


def words(placed: Placed) -> str:
    """A place with lag and factor."""
    text = str(Boundary(placed.boundary or 0, placed.norm or "pre", placed.kind or "stream"))
    text += f", lag {placed.lag:+d}" if placed.lag else ""
    text += f", times {placed.scale:.3g}" if placed.scale is not None and abs(placed.scale - 1) > 0.02 else ""
    return text if placed.transform in ("none", "lag", "scale", "lag and scale") else f"{text}, by {placed.transform}"
