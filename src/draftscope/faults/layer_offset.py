"""layer-offset: every slot that moved holds the boundary just before, or just after, the one it should."""

from __future__ import annotations

from dataclasses import replace

from draftscope.boundaries import Boundary
from draftscope.faults.base import Fault, Suspicion, Undo, of_side
from draftscope.faults.fixes import capture_boundaries
from draftscope.faults.layers import evidence, moved
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.target.wiring import Wiring


class LayerOffset(Fault):
    """Two conventions of layer ids (input of block k, output of block k), one applied on each side."""

    id = "layer-offset"
    title = "slots one boundary off"
    verdict = "wiring"
    variants = ("+1", "-1", "last slot +1", "train +1")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = moved(m)
        if found is None or not found.is_offset or m.reference is None:
            return []
        side, step = found.side, found.displacements[0]
        proven = side.proof in ("sweep", "pairs")
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=[side.where(got.slot) for got, _ in found.slots],
                says=f"{of_side(side.name)} in {_slots(found.slots)} come from one boundary {'later' if step > 0 else 'earlier'} "
                f"than {m.wanted_by} ({step:+d}): two conventions of layer ids meet",
                strength="proven" if proven else "suspected",
                evidence=evidence(
                    m, found, "layer-offset if every moved slot is displaced by the same one boundary; layer-set otherwise"
                ),
                fix=capture_boundaries(
                    side.name,
                    m,
                    f"Shift the layer ids by {-step:+d}, or name them in the convention of the stack that reads them.",
                ),
                recovery="replayed" if side.name == "serve" else "needs-retraining",
                undo=Undo(reference=frozenset(got.slot for got, _ in found.slots)) if side.name == "serve" else None,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "train +1":
            return replace(plant, train=_shifted(plant.train, 1, range(len(plant.train.slots))))
        slots = plant.serve.slots
        which = {"+1": range(len(slots)), "-1": range(len(slots)), "last slot +1": [len(slots) - 1]}
        if variant not in which:
            raise ValueError(f"layer-offset has no variant {variant!r}")
        return replace(plant, serve=_shifted(plant.serve, -1 if variant == "-1" else 1, which[variant]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots))


def _shifted(wiring: Wiring, by: int, which: object) -> Wiring:
    assert isinstance(which, range | list)
    return replace(wiring, slots=tuple(Boundary(slot.index + by) if i in which else slot for i, slot in enumerate(wiring.slots)))


def _slots(slots: list[tuple[object, object]] | object) -> str:
    count = len(slots)  # type: ignore[arg-type]
    return "one slot" if count == 1 else f"{count} slots"
