"""What layer-offset and layer-set share: which slots moved, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.faults.base import Undo, of_side
from draftscope.faults.changes import Own
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.slots import Slot, compared, figures, in_words
from draftscope.findings import Evidence, Placed
from draftscope.target.spoiling import Phase


@dataclass(slots=True)
class Moved:
    """Slots of one side whose boundary is not what it should be, in all rows or in those of one phase.

    Attributes:
        held: what every slot holds in these rows, moved or not.
    """

    side: SideFacts
    phase: Phase | None
    slots: list[Slot]
    held: list[Placed]

    @property
    def displacements(self) -> list[int]:
        return [(s.got.boundary or 0) - (s.want.boundary or 0) for s in self.slots]

    @property
    def is_offset(self) -> bool:
        """Every slot that moved is displaced by the same one boundary."""
        return set(self.displacements) in ({1}, {-1})

    @property
    def rows(self) -> str:
        """Which rows, in words; empty for all."""
        return in_words(self.phase)

    def undo(self) -> Undo | None:
        """The target's own states in their place, what else befell them left in; None for training files."""
        if self.side.name != "serve":
            return None
        return Undo(states=tuple(
            Own(s.slot, phase=s.phase, turned=s.got.boundary) if s.elsewhere else
            Own(s.slot, s.ratio, (s.got.lag or 0) - (s.want.lag or 0), s.phase) for s in self.slots))


def moved(m: Measurements) -> list[Moved]:
    """Slots whose boundary differs and that cannot be told to hold the wanted one after all, by phase."""
    side, slots = compared(m)
    if side is None:
        return []
    away = [s for s in slots if _away(s)]
    found = []
    for phase in dict.fromkeys(s.phase for s in away):
        whole = side.slots if phase is None else side.detail.phases[phase]
        found.append(Moved(side, phase, [s for s in away if s.phase == phase], list(whole)))
    return found


def _away(slot: Slot) -> bool:
    got, want = slot.got, slot.want
    if slot.elsewhere:
        return got.kind == want.kind
    return (
        slot.way == "placed"
        # The same state on the other side of the final norm, a branch or a partial stream are other faults, wherever taken.
        and got.kind == want.kind
        and got.boundary != want.boundary
        and want.boundary is not None
        and not (want.boundary in got.candidates and got.norm == want.norm)
    )


def name(place: Placed) -> str:
    """A placed slot in words."""
    if place.boundary is None:
        return "unplaced"
    text = "the embedding" if place.boundary == 0 else f"boundary {place.boundary}"
    return f"{text} after the final norm" if place.norm == "post" else text


def evidence(m: Measurements, found: Moved, decides: str) -> list[Evidence]:
    """Placement of the departed side, typed."""
    side = found.side
    how = {
        "sweep": "each slot held against every boundary of the target, re-run over the same tokens; argmax, median relative "
        "error per row",
        "pairs": "each served slot held against every training entry, on rows of texts that begin alike",
        "parts": "each slot held against the embedding rows of its own tokens, up to one factor",
        "none": "not placed",
    }[side.proof]
    if side.detail.phases:
        how += "; the prompt's rows and rows of verify steps also on their own"
    if any(s.elsewhere for s in found.slots):
        how += "; a slot in another basis by the cosines between its rows, which no basis changes"
    result = "; ".join(
        f"{side.where(s.slot)}{s.rows} holds {name(s.got)}, wanted {name(s.want)}"
        + (f" (error {s.got.error:.2g}, margin {s.got.margin:.2f})"
           if s.got.error is not None and s.got.margin is not None else "")
        for s in found.slots
    )
    held = {key: {"holds": value["boundary"], **value} for key, value in figures(side, found.slots).items()}  # type: ignore[dict-item,index]
    return [
        Evidence(
            hypothesis=f"{of_side(side.name)} come from other layers than {m.wanted_by}",
            prediction=f"slots hold {', '.join(name(p) for p in m.reference or ())} ({m.reference_from}) if the wiring is right",
            measurement=how,
            result=result,
            decides=decides,
            figures=held,
        )
    ]
