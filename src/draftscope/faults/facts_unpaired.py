"""What statistics of other texts say of the served slots against the training entries."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.compare.unpaired import Coupling, Look


@dataclass(frozen=True, slots=True)
class UnpairedFacts:
    """Served slots against training entries, no token shared.

    Attributes:
        looks: one a slot.
        couplings: cosines between the slots of a row, on both sides.
        groups: what the unit of every effect is, in words.
    """

    looks: tuple[Look, ...]
    couplings: tuple[Coupling, ...]
    groups: str
