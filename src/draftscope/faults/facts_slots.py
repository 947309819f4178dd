"""Figures of slots held against the states that they should hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftscope.compare.maps import BETTER, MAPPED, Part, Turn
from draftscope.findings import Placed
from draftscope.target.spoiling import Phase


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of one slot against the target's own states at one boundary. Errors are medians of relative errors over rows.

    Attributes:
        slot: its number, -1 the last state.
        phase: the rows are of that phase alone; None = all.
        boundary: of the states held against, before any norm.
        rows: neither first tokens nor sinks.
        plain: error as it stands. normed, twice: against the state after the final norm, and after it twice; infinite where the
            norm is not at hand.
        part: a factor on some channels that explains the difference; turn: an orthogonal map that does.
    """

    slot: int
    phase: Phase | None
    boundary: int
    rows: int
    plain: float
    normed: float
    twice: float
    part: Part | None = None
    turn: Turn | None = None

    @property
    def norms(self) -> int:
        """How often the final norm was applied: 0, 1 or 2; 0 where neither explains the rows."""
        best = min(self.normed, self.twice)
        if best > MAPPED or best > BETTER * self.plain:
            return 0
        return 1 if self.normed <= self.twice else 2


@dataclass(slots=True)
class SlotFacts:
    """One side's slots in more detail than their places.

    Attributes:
        phases: slots as placed from the rows of one phase alone; of a capture that tells the phases apart.
        held: against what they should hold.
        claimed_norm: what the training files say of their last state: `pre`, `post`, or "" where they say nothing.
        stored_in: the dtype of the states as stored; resolution: the relative error that storing in it makes.
        rounded: the slots' error against the target run with its weights rounded, by precision, where that was tried.
    """

    phases: dict[Phase, list[Placed]] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    claimed_norm: str = ""
    stored_in: str = ""
    rounded: dict[str, float] = field(default_factory=dict)

    @property
    def resolution(self) -> float:
        return {"float32": 1e-5, "float16": 1e-3}.get(self.stored_in, 4e-3)

    def of(self, slot: int, phase: Phase | None = None) -> Held | None:
        """The figures of a slot; None where it was not held against anything."""
        return next((h for h in self.held if h.slot == slot and h.phase == phase), None)
