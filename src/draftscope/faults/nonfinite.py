"""nonfinite: NaN or Inf in the states."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo, of_side
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix


class NonFinite(Fault):
    """Overflow in the capture's dtype, a broken kernel, memory never written; in weights, a training that diverged.

    It voids every other figure.
    """

    id = "nonfinite"
    title = "NaN or Inf in states or weights"
    verdict = "wiring"
    variants = ("serve rows", "train rows", "checkpoint")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = [self._in_checkpoint(m.poisoned)] if m.poisoned else []
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

    def _in_checkpoint(self, poisoned: dict[str, int]) -> Suspicion:
        counts = ", ".join(f"{name}: {count}" for name, count in poisoned.items())
        return Suspicion(
            fault=self.id,
            side="serve",
            where=[f"tensor {name}" for name in poisoned],
            says=f"the checkpoint holds NaN or Inf in {', '.join(poisoned)}",
            strength="proven",
            evidence=[
                Evidence(
                    hypothesis="weights are not finite",
                    prediction="every weight is finite if the checkpoint is sound",
                    measurement="NaN and Inf counted in every tensor of the checkpoint",
                    result=counts,
                    decides="nonfinite if there is one such value",
                    figures=dict(poisoned),
                )
            ],
            fix=Fix(says="Export from a state before the training diverged, or copy the file again if only the copy is broken."),
            recovery="needs-serving",
            caveats=["what it costs cannot be replayed without the weights"],
        )

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "serve rows":
            return replace(plant, serve=replace(plant.serve, poison=2))
        if variant == "train rows":
            return replace(plant, train=replace(plant.train, poison=2))
        if variant == "checkpoint":
            return replace(plant, poison="fc.weight")
        raise ValueError(f"nonfinite has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, poison=0), poison="")
