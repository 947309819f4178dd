"""layer-set: the slots hold other boundaries than the draft was trained on, and not by one common step of one."""

from __future__ import annotations

from dataclasses import replace

from draftscope.boundaries import Boundary
from draftscope.faults.base import Fault, Suspicion, Undo, of_side
from draftscope.faults.fixes import capture_boundaries
from draftscope.faults.layers import Moved, evidence, moved, name
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix
from draftscope.target.wiring import Wiring


class LayerSet(Fault):
    """Default ids in place of configured ones, a state put in front, an order changed, a slot doubled or lost."""

    id = "layer-set"
    title = "slots hold other layers"
    verdict = "wiring"
    variants = ("embedding in front", "permuted", "duplicated", "train permuted")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._placed(m) or self._assigned(m)

    def _assigned(self, m: Measurements) -> list[Suspicion]:
        """Slots that resemble another training entry than their own: candidates from unpaired statistics."""
        away = [(slot, entry, margin) for slot, entry, margin in m.assigned if slot != entry]
        if not away or m.serve is None or any(place.boundary is not None for place in m.serve.slots):
            return []
        text = ", ".join(f"slot {slot} resembles training entry {entry} (margin {margin:.2f})" for slot, entry, margin in away)
        return [
            Suspicion(
                fault=self.id,
                side="serve",
                where=[f"slot {slot}" for slot, *_ in away],
                says=f"the served slots resemble other training entries than their own: {text}",
                strength="suspected",
                evidence=[
                    Evidence(
                        hypothesis="the slots hold other layers than the draft was trained on",
                        prediction="each slot's statistics are nearest to those of its own training entry if the wiring is right",
                        measurement="norms, per-dimension means and variances of each slot against each training entry, assigned "
                        "one to one",
                        result=text,
                        decides="a candidate only: the same tokens on both sides, or the target's weights, would prove it",
                        figures={f"slot {slot}": {"entry": entry, "margin": margin} for slot, entry, margin in m.assigned},
                    )
                ],
                fix=Fix(
                    says="Place the slots first (give --target): then change the captured layers to those of the training data."
                ),
                recovery="bounded",
            )
        ]

    def _placed(self, m: Measurements) -> list[Suspicion]:
        found = moved(m)
        if found is None or found.is_offset or m.reference is None:
            return []
        side = found.side
        order = _order(m, found)
        undo = None
        if side.name == "serve":
            undo = Undo(order=order) if order else Undo(reference=frozenset(got.slot for got, _ in found.slots))
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=[side.where(got.slot) for got, _ in found.slots],
                says=f"{of_side(side.name)} are {_pattern(m, found)}",
                strength="proven" if side.proof != "none" else "suspected",
                evidence=evidence(
                    m, found, "layer-set if the displacement differs between slots; layer-offset if it is one common step of one"
                ),
                fix=capture_boundaries(side.name, m, _advice(m, found)),
                recovery="replayed" if undo else "needs-retraining",
                undo=undo,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        low, middle, high = plant.serve.slots
        made = {
            "embedding in front": (Boundary(0), low, middle),
            "permuted": (middle, high, low),
            "duplicated": (low, low, high),
        }
        if variant == "train permuted":
            return replace(plant, train=replace(plant.train, slots=(middle, high, low)))
        if variant not in made:
            raise ValueError(f"layer-set has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, slots=made[variant]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots))


def _held(m: Measurements, found: Moved) -> tuple[list[int | None], list[int | None]]:
    return [p.boundary for p in found.side.slots], [p.boundary for p in m.reference or ()]


def _order(m: Measurements, found: Moved) -> tuple[int, ...]:
    """How to put recorded slots back, where all that is wanted was recorded in another slot."""
    held, wanted = _held(m, found)
    if None in held or sorted(map(str, held)) != sorted(map(str, wanted)) or len(set(held)) < len(held):
        return ()
    return tuple(held.index(b) for b in wanted)


def _pattern(m: Measurements, found: Moved) -> str:
    held, wanted = _held(m, found)
    text = (
        "["
        + ", ".join(name(p) for p in found.side.slots)
        + f"] where {m.wanted_by} ["
        + ", ".join(name(p) for p in m.reference or ())
        + "]"
    )
    if _order(m, found):
        return f"{text}: the right states in another order"
    if held[0] == 0 and wanted[0] != 0 and held[1:] == wanted[:-1]:
        return f"{text}: the embedding was put in front, everything moved up one slot, and the last state dropped out"
    if len(set(held)) < len(held) and None not in held:
        return f"{text}: one state is there twice, another is missing"
    return text


def _advice(m: Measurements, found: Moved) -> str:
    held, wanted = _held(m, found)
    if held[0] == 0 and wanted[0] != 0:
        seen = m.train is not None and (m.train.proof == "sweep" or bool(m.train.embedding))
        return "Do not capture the embedding" + (
            ": the training data does not hold it, whatever its labels say." if seen else ", unless the draft was trained on it."
        )
    return f"Capture the layers that {m.wanted_by}, in that order."
