"""What layer-offset and layer-set share: which slots moved, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.faults.base import compared_slots, of_side
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.findings import Evidence, Placed


@dataclass(slots=True)
class Moved:
    """Slots of one side whose stream comes from another boundary than the draft was trained on."""

    side: SideFacts
    slots: list[tuple[Placed, Placed]]

    @property
    def displacements(self) -> list[int]:
        return [(got.boundary or 0) - (want.boundary or 0) for got, want in self.slots]

    @property
    def is_offset(self) -> bool:
        """Every slot that moved is displaced by the same one boundary."""
        return set(self.displacements) in ({1}, {-1})


def moved(m: Measurements) -> Moved | None:
    """Slots whose boundary or norm differs and that cannot be told to hold the wanted one after all."""
    side, slots = compared_slots(m)
    if side is None:
        return None
    found = [
        (got, want)
        for got, want in slots
        if (got.boundary, got.norm) != (want.boundary, want.norm)
        and want.boundary is not None
        and not (want.boundary in got.candidates and got.norm == want.norm)
        # A branch or partial stream is another fault, wherever it was taken.
        and got.kind == want.kind
    ]
    return Moved(side, found) if found else None


def name(place: Placed) -> str:
    """A placed slot in words."""
    if place.boundary is None:
        return "unplaced"
    text = "the embedding" if place.boundary == 0 else f"boundary {place.boundary}"
    return f"{text} after the final norm" if place.norm == "post" else text


def evidence(m: Measurements, moved_: Moved, decides: str) -> list[Evidence]:
    """Placement of the departed side, typed."""
    side = moved_.side
    figures = {
        side.where(got.slot): {
            "holds": got.boundary,
            "norm": got.norm,
            "wanted": want.boundary,
            "error": got.error,
            "margin": got.margin,
        }
        for got, want in moved_.slots
    }
    how = {
        "sweep": "each slot held against every boundary of the target, re-run over the same tokens; argmax, median relative "
        "error per row",
        "pairs": "each served slot held against every training entry, on rows of texts that begin alike",
        "parts": "each slot held against the embedding rows of its own tokens, up to one factor",
        "none": "not placed",
    }[side.proof]
    result = "; ".join(
        f"{side.where(got.slot)} holds {name(got)}, wanted {name(want)}"
        + (f" (error {got.error:.2g}, margin {got.margin:.2f})" if got.error is not None and got.margin is not None else "")
        for got, want in moved_.slots
    )
    return [
        Evidence(
            hypothesis=f"{of_side(side.name)} come from other layers than {m.wanted_by}",
            prediction=f"slots hold {', '.join(name(p) for p in m.reference or ())} ({m.reference_from}) if the wiring is right",
            measurement=how,
            result=result,
            decides=decides,
            figures=figures,
        )
    ]
