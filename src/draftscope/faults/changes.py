"""What a replay changes in recorded states: which rows and channels of which slot, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.target.spoiling import Phase


@dataclass(frozen=True, slots=True)
class Own:
    """The target's own state at the reference boundary in the slot's place, with what else was measured of the slot left in.

    So that each of several faults of one slot can be undone alone.

    Attributes:
        scale, lag: factor and lag of the slot as placed, relative to the reference.
        phase: only rows of that phase; None = all.
        turned: the boundary that the recorded states were taken at, where they are in another basis, which is left in.
    """

    slot: int
    scale: float = 1.0
    lag: int = 0
    phase: Phase | None = None
    turned: int | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor on the slot, or on some of its channels (from the first to before the last; None = all)."""

    slot: int
    factor: float
    channels: tuple[int, int] | None = None
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class Shift:
    """Row t takes recorded row t + by; rows at the edge keep their own."""

    slot: int
    by: int
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class TurnBack:
    """The orthogonal map between the target's own states and those recorded, taken back.

    It is fitted on the sequences on which a repair is chosen.

    Attributes:
        boundary: of the target's own states; None = what the reference says.
    """

    slot: int
    phase: Phase | None = None
    boundary: int | None = None


Change = Own | Scale | Shift | TurnBack
