"""token-shift: the row labelled t holds the state of another token, a constant distance away."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo, compared_slots, of_side
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix


class TokenShift(Fault):
    """State, token and label are misaligned by a constant: a gather index off by one, a roll on one side only."""

    id = "token-shift"
    title = "rows of another token"
    verdict = "wiring"
    variants = ("-1", "+1", "train +1", "train -1")
    includes = frozenset({"nonfinite"})

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side, slots = compared_slots(m)
        found = [(got, (got.lag or 0) - (want.lag or 0)) for got, want in slots if (got.lag or 0) != (want.lag or 0)]
        if side is None or not found:
            return []
        serve = side.name == "serve"
        lags = sorted({lag for _, lag in found})
        whole = len(lags) == 1 and len(found) == len(side.slots)
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=[side.where(got.slot) for got, _ in found],
                says=f"{of_side(side.name)} are shifted against their tokens: the row labelled t holds the state of token "
                f"{' or '.join(f't{lag:+d}' for lag in lags)}",
                strength="proven" if side.proof in ("sweep", "pairs") else "suspected",
                evidence=[
                    Evidence(
                        hypothesis="rows and tokens are misaligned by a constant",
                        prediction="the error against the right boundary is least at a lag other than 0",
                        measurement="median relative error at lags -2..+2 within the sequence",
                        result="; ".join(
                            f"{side.where(got.slot)}: least at lag {got.lag:+d} (error {got.error or 0:.2g})" for got, _ in found
                        ),
                        decides="token-shift if a lag along the tokens fits; layer-offset if a step along the layers does",
                        figures={
                            side.where(got.slot): {"lag": got.lag, "error": got.error, "boundary": got.boundary}
                            for got, _ in found
                        },
                    )
                ],
                fix=Fix(
                    says="Row t must hold the target's state at token t (and the embedding of token t+1): look for a gather "
                    "index or a "
                    "roll that is off by one." + ("" if serve else " Write the training data again, then retrain.")
                ),
                recovery="replayed" if serve else "needs-retraining",
                undo=None
                if not serve
                else Undo(shift=-lags[0])
                if whole
                else Undo(reference=frozenset(got.slot for got, _ in found)),
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        made = {"-1": -1, "+1": 1, "train +1": 1, "train -1": -1}
        if variant not in made:
            raise ValueError(f"token-shift has no variant {variant!r}")
        if variant.startswith("train"):
            return replace(plant, train=replace(plant.train, shift=made[variant]))
        return replace(plant, serve=replace(plant.serve, shift=made[variant]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, shift=0))
