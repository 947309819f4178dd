"""nonfinite: NaN or Inf in the states."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.facts_rows import Unfit
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix
from draftscope.target.rows import Filled, On, Overflowing
from draftscope.target.spoiling import Spoiler

_SPOILERS: dict[str, Spoiler] = {
    "some channels": On(Filled(float("nan")), channels=(3, 4, 40)),
    "the first token": On(Filled(float("inf")), until=1),
    "one slot": On(Filled(float("nan")), slots=(1,), every=7),
    "long rows only": On(Filled(float("nan")), since=64),
    "verify rows": On(Filled(float("nan")), phase="verify", every=3),
    "overflow": Overflowing(2.0),
}
_WEIGHTS = {"checkpoint": "fc.weight", "checkpoint: head": "lm_head.weight", "checkpoint: norm": "norm.weight"}


class NonFinite(Fault):
    """Overflow in the capture's dtype, a broken kernel, memory never written; in weights, a training that diverged.

    It voids every other figure.
    """

    id = "nonfinite"
    title = "NaN or Inf in states or weights"
    verdict = "wiring"
    variants = ("serve rows", *_SPOILERS, "train rows", "train some channels", "train overflow", "train last state", *_WEIGHTS)
    page = Page(
        symptom="acceptance of exactly 0 or exactly K, a loss of NaN, or a server that rejects everything after some length",
        traces={
            **{name: Trace(
                says=f"the engine hands the draft values that are not finite: {name}", input="--serve",
                shows="NaN or Inf counted by slot, channel and row", rung="served",
            ) for name in ("serve rows", *_SPOILERS)},
            **{f"train {name}": Trace(
                says="the data writer stores values that are not finite", input="--train", shows="the same in the training files",
                rung="trained",
            ) for name in ("rows", "some channels", "overflow", "last state")},
            **{name: Trace(
                says=f"{tensor} holds such values", input="--draft", shows="NaN or Inf in a tensor of the file", rung="served",
            ) for name, tensor in _WEIGHTS.items()},
        },
        lookalikes={"graph-capture": "memory never written may hold anything; zeros and old rows are finite"},
        unseen={"logits that overflow in the engine alone": "states and weights are finite; the engine's own log shows it"},
        reports=("speculators PR #615",),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = [self._in_checkpoint(m.poisoned)] if m.poisoned else []
        for side in m.sides():
            if not side.nonfinite:
                continue
            serve = side.name == "serve"
            places = [side.where(bad.slot) for bad in side.nonfinite]
            most = max(side.nonfinite, key=lambda bad: bad.rows)
            found.append(
                Suspicion(
                    fault=self.id,
                    side=side.name,
                    where=places,
                    says=f"{of_side(side.name)} hold NaN or Inf in {most.rows} of {most.of} rows ({', '.join(places)})"
                    + _where(m.rows[side.name].unfit if side.name in m.rows else {}),
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

    def why_not(self, m: Measurements) -> str:
        looked = [f"every value in {side.tokens} rows of {side.name} is finite" for side in m.sides() if not side.nonfinite]
        return "; ".join(looked) or "no states were given (--train, --serve)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in self.variants:
            raise ValueError(f"nonfinite has no variant {variant!r}")
        if variant in _WEIGHTS:
            return replace(plant, poison=_WEIGHTS[variant])
        if variant == "train last state":
            return replace(plant, last=(On(Filled(float("nan")), every=9),))
        if variant in ("serve rows", "train rows"):
            side = variant.removesuffix(" rows")
            return replace(plant, **{side: replace(getattr(plant, side), poison=2)})
        side = "train" if variant.startswith("train") else "serve"
        made = _SPOILERS[variant.removeprefix("train ")]
        return replace(plant, **{side: replace(getattr(plant, side), spoilers=(made,))})

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, poison=0, spoilers=()), poison="")


def _where(unfit: dict[int, Unfit]) -> str:
    """Which values they are, and what the places have in common."""
    if not unfit:
        return ""
    one = max(unfit.values(), key=lambda found: found.nan + found.inf)
    said = [f"{one.nan} NaN and {one.inf} Inf" if one.nan and one.inf else f"{one.nan} NaN" if one.nan else f"{one.inf} Inf"]
    if one.channels < one.of:
        said.append(f"in {one.channels} of {one.of} channels")
    if one.last == one.since:
        said.append(f"always in row {one.since}")
    elif one.since >= LATE and one.sequences == one.longer:
        said.append(f"from row {one.since} on, in every sequence that is so long")
    return ": " + ", ".join(said)


LATE = 16
"""Row from which values that only then cease to be finite point to the length."""
