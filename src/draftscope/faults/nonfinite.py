"""nonfinite: NaN or Inf in the states."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo, of_side
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix


class NonFinite(Fault):
    """Overflow in the capture's dtype, a broken kernel, memory never written. It voids every other figure."""

    id = "nonfinite"
    title = "NaN or Inf in the states"
    verdict = "wiring"
    variants = ("serve rows", "train rows")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side in m.sides():
            if not side.nonfinite:
                continue
            serve = side.name == "serve"
            places = [side.where(bad.slot) for bad in side.nonfinite]
            rows = max(bad.rows for bad in side.nonfinite)
            first = side.nonfinite[0]
            found.append(
                Suspicion(
                    fault=self.id,
                    side=side.name,
                    where=places,
                    says=f"{of_side(side.name)} hold NaN or Inf in {rows} of {first.of} rows ({', '.join(places)})",
                    strength="proven",
                    evidence=[
                        Evidence(
                            hypothesis="states are not finite",
                            prediction="every value is finite if they are sound",
                            measurement="NaN and Inf counted in every row of every slot",
                            result="; ".join(
                                f"{side.where(b.slot)}: {b.rows} of {b.of} rows, first in {b.first} row {b.first_row}"
                                for b in side.nonfinite
                            ),
                            decides="nonfinite if there is one such row",
                            figures={
                                side.where(b.slot): {"rows": b.rows, "of": b.of, "first": b.first, "first_row": b.first_row}
                                for b in side.nonfinite
                            },
                        )
                    ],
                    fix=Fix(
                        says="Find where the values overflow (float16 cannot hold the first token's state of many models; use "
                        "bfloat16) or are never written."
                        + ("" if serve else " Drop or rewrite the samples named, then retrain if they were trained on.")
                    ),
                    recovery="replayed" if serve else "needs-retraining",
                    undo=Undo(reference=frozenset(b.slot for b in side.nonfinite if b.slot >= 0)) if serve else None,
                )
            )
        return found

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "serve rows":
            return replace(plant, serve=replace(plant.serve, poison=2))
        if variant == "train rows":
            return replace(plant, train=replace(plant.train, poison=2))
        raise ValueError(f"nonfinite has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, poison=0))
