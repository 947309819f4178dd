"""token-shift: the row labelled t holds the state of another token, a constant distance away."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo, compared_slots, of_side
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Placed

PARTLY, WHOLE = 0.1, 0.9


class TokenShift(Fault):
    """State, token and label are misaligned by a constant: a gather index off by one, a roll on one side only."""

    id = "token-shift"
    title = "rows of another token"
    verdict = "wiring"
    variants = ("-1", "+1", "train +1", "train -1")
    includes = frozenset({"nonfinite"})

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side, slots = compared_slots(m)
        found = [(got, shift, share) for got, want in slots for shift, share in [_shift(got, want)] if shift]
        if side is None or not found:
            return []
        serve = side.name == "serve"
        lags = sorted({shift for _, shift, _ in found})
        whole = len(lags) == 1 and len(found) == len(side.slots) and min(share for *_, share in found) > WHOLE
        partly = "" if whole else f", in {max(share for *_, share in found):.0%} of the rows"
        undo = Undo(shift=-lags[0]) if whole else Undo(reference=frozenset(got.slot for got, *_ in found))
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=[side.where(got.slot) for got, *_ in found],
                says=f"{of_side(side.name)} are shifted against their tokens: the row labelled t holds the state of token "
                f"{' or '.join(f't{shift:+d}' for shift in lags)}{partly}",
                strength="proven" if side.proof in ("sweep", "pairs") else "suspected",
                evidence=[
                    Evidence(
                        hypothesis="rows and tokens are misaligned by a constant",
                        prediction="the error against the right boundary is least at a lag other than 0",
                        measurement="relative error of every row at lags -2..+2 within its sequence",
                        result="; ".join(
                            f"{side.where(got.slot)}: lag {shift:+d} fits {share:.0%} of the rows (error {got.error or 0:.2g})"
                            for got, shift, share in found
                        ),
                        decides="token-shift if a lag along the tokens fits; layer-offset if a step along the layers does",
                        figures={
                            side.where(got.slot): {"lag": shift, "share": share, "boundary": got.boundary, "shares": got.shares}
                            for got, shift, share in found
                        },
                    )
                ],
                fix=Fix(
                    says="Row t must hold the target's state at token t (and the embedding of token t+1): look for a gather "
                    "index "
                    "or a roll that is off by one." + ("" if serve else " Write the training data again, then retrain.")
                ),
                recovery="replayed" if serve else "needs-retraining",
                undo=undo if serve else None,
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


def _shift(got: Placed, want: Placed) -> tuple[int, float]:
    """By how many tokens a slot's rows are displaced (0 = not), and the share of rows that are.

    An engine that errs inside the block of rows of one pass leaves the block's edge rows in place, so that with few accepted
    drafts only the prompt's rows show it.
    """
    lag = (got.lag or 0) - (want.lag or 0)
    if lag:
        return lag, got.shares.get(f"lag {got.lag:+d}", got.share or 0.0)
    shares = {int(name[4:]): share for name, share in got.shares.items() if name.startswith("lag ") and share >= PARTLY}
    if want.lag or not shares:
        return 0, 0.0
    best = max(shares, key=lambda shift: shares[shift])
    return best, shares[best]
