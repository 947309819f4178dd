"""scale-mult: a constant multiplier is missing, or applied twice."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo, compared_slots, of_side
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Placed

TOLERANCE = 0.02


class ScaleMult(Fault):
    """Embedding scale, muP width or residual multiplier: direction right, length off by one factor for every token."""

    id = "scale-mult"
    title = "a constant factor"
    verdict = "wiring"
    variants = ("one slot x8", "all slots x0.5", "one slot x1.2", "train one slot x8")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side, slots = compared_slots(m)
        found = [(got, _ratio(got, want)) for got, want in slots if abs(_ratio(got, want) - 1) > TOLERANCE]
        if side is None or not found:
            return []
        serve = side.name == "serve"
        text = ", ".join(f"{side.where(got.slot)} x{ratio:.4g}" for got, ratio in found)
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=[side.where(got.slot) for got, _ in found],
                says=f"{of_side(side.name)} are scaled by a constant: {text}",
                strength="proven" if side.proof in ("sweep", "pairs") else "suspected",
                evidence=[
                    Evidence(
                        hypothesis="a slot is the right state times one constant",
                        prediction="the error vanishes once the slot is divided by one factor, the same for all tokens",
                        measurement="median of <x, r> / <r, r> over rows, and the relative error after dividing by it",
                        result="; ".join(
                            f"{side.where(got.slot)}: factor {ratio:.4g}, error left {got.error or 0:.2g}" for got, ratio in found
                        ),
                        decides="scale-mult if one factor removes the error; a partial stream or another layer keeps it",
                        figures={
                            side.where(got.slot): {"factor": ratio, "error": got.error, "boundary": got.boundary}
                            for got, ratio in found
                        },
                    )
                ],
                fix=Fix(
                    says=f"Find the multiplier that is applied on one side only ({text}): embedding scale, residual or logit "
                    "multiplier, a sum over tensor-parallel ranks."
                    + ("" if serve else " Write the training data again, then retrain.")
                ),
                recovery="replayed" if serve else "needs-retraining",
                undo=Undo(scale={got.slot: 1 / ratio for got, ratio in found}) if serve else None,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        last = len(plant.serve.slots) - 1
        made = {
            "one slot x8": {last: 8.0},
            "one slot x1.2": {1: 1.2},
            "all slots x0.5": dict.fromkeys(range(last + 1), 0.5),
            "train one slot x8": {last: 8.0},
        }
        if variant not in made:
            raise ValueError(f"scale-mult has no variant {variant!r}")
        factors = tuple(made[variant].get(i, 1.0) for i in range(last + 1))
        if variant.startswith("train"):
            return replace(plant, train=replace(plant.train, scale=factors))
        return replace(plant, serve=replace(plant.serve, scale=factors))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, scale=()))


def _ratio(got: Placed, want: Placed) -> float:
    return (1.0 if got.scale is None else got.scale) / (want.scale or 1.0)
