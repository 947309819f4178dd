"""Which target states an engine or a data writer puts into the draft's slots. Healthy ones take whole streams."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.boundaries import Boundary


@dataclass(frozen=True, slots=True)
class Wiring:
    """Slots as a producer fills them.

    Attributes:
        slots: where each slot is taken, in concatenation order.
        scale: one factor per slot, () = all 1.
        shift: d: the row labelled t holds the state of token t+d.
        poison: put NaN into this many rows of a request or sample.
    """

    slots: tuple[Boundary, ...]
    scale: tuple[float, ...] = ()
    shift: int = 0
    poison: int = 0

    @classmethod
    def of(cls, boundaries: tuple[int, ...]) -> Wiring:
        return cls(tuple(Boundary(b) for b in boundaries))
