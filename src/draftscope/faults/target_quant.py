"""target-quant: the target serves at another precision than the one whose states the draft was trained on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.changes import Own
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.plant import Plant
from draftscope.faults.slots import WHOLE, beside
from draftscope.findings import Evidence, Fix
from draftscope.target.quantised import PRECISIONS

BEYOND = 3.0
"""How many times the training files' own error at the same boundary."""
ROUNDING = 0.03
"""Error at the deepest boundary that other kernels and bfloat16, summed over many layers, explain."""
UNKNOWN = 0.06
"""The same where no training files show what this target's own error is."""
FAR = 0.3
EXPLAINED = 0.25
"""Share of the error that rounded weights leave at most, to explain it."""
GROWS = 0.9
"""An error may fall by a tenth from one boundary to the next deeper one and still count as growing."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Errors by boundary, ascending: served, and of the training files where they have the same boundary."""

    served: dict[int, float]
    trained: dict[int, float]

    @property
    def deepest(self) -> tuple[int, float]:
        return max(self.served.items())

    @property
    def grows(self) -> bool:
        errors = [error for _, error in sorted(self.served.items())]
        return all(b >= GROWS * a for a, b in itertools.pairwise(errors)) and errors[-1] > errors[0]


class TargetQuant(Fault):
    """Weights of the serving target rounded to few bits: its states are nearly, and not quite, those of training."""

    id = "target-quant"
    title = "a target of another precision"
    verdict = "data"
    variants = ("int8", "fp8", "int4")
    page = Page(
        symptom="Accept length a few percent below training with a quantised target. It is often blamed for far more than that.",
        traces={
            "int8": Trace("The engine serves weights rounded to eight bits; the training states came from unrounded ones.",
                          "--train, --serve, --target (the target as trained on)",
                          "Every slot is at its boundary, with an error beyond the training files'; the target with its "
                          "weights rounded comes nearer.",
                          "served"),
            "fp8": Trace("As before, eight-bit floats.", "--train, --serve, --target (the target as trained on)", "As before.",
                         "served"),
            "int4": Trace("As before, four bits in groups.", "--train, --serve, --target (the target as trained on)",
                          "As before, larger.", "served"),
        },
        lookalikes={
            "scale-mult": "a factor removes the error",
            "layer-offset": "another boundary is nearer",
            "nonfinite": "single rows are far off, others are exact",
            "data-offpolicy": "the states agree, the text is another model's",
        },
        unseen={"other weights of the same shape": "a fine-tuned or newer target differs as smoothly; files, not states, tell "
                "them apart", "a quantised target whose draft was trained on its own states": "nothing departs, and "
                "nothing is lost"},
        reports=("vLLM issue #9534",),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = growth(m)
        if found is None or m.serve is None:
            return []
        boundary, error = found.deepest
        same = _same(m, error)
        yardstick = found.trained.get(boundary, max(found.trained.values(), default=0.0))
        least = max(BEYOND * yardstick, ROUNDING) if found.trained else UNKNOWN
        if same is None and not (least < error < FAR and found.grows):
            return []
        what = "weights of another precision (or another revision) than the one trained on" if same is None else (
            f"the given weights, rounded to {same}")
        tried = ", ".join(f"{e:.2g} as {name}" for name, e in m.serve.detail.rounded.items()) or "not tried"
        return [Suspicion(
            fault=self.id, side="serve", where=[m.serve.where(p.slot) for p in m.serve.slots],
            says=f"the served states are this target's up to a small error, {error:.2%} at boundary {boundary}: the target that "
            f"serves has {what}",
            strength="proven" if same is not None else "supported" if found.trained else "suspected",
            evidence=[Evidence(
                hypothesis="the serving target's weights are rounded to fewer bits than those that made the training states",
                prediction="every slot stays at its boundary, in every row, with a small error that grows smoothly with depth; "
                "training states of the same target show only rounding of states; the target run with rounded weights comes "
                "nearer",
                measurement="median relative error of the served states, and of the training files', against the target's own "
                "states by boundary; and of the served states against the target with its weights rounded",
                result=f"served: {_by_boundary(found.served)}; training files: {_by_boundary(found.trained)}; against rounded "
                f"weights: {tried}",
                decides="target-quant if rounded weights explain the error, or if it grows smoothly, in all rows, beyond what "
                "the training files show; a fault of wiring moves, scales or replaces whole states",
                figures={"served": found.served, "trained": found.trained, "rounded": dict(m.serve.detail.rounded)},
            )],
            fix=Fix(says="Train (or fine-tune) the draft on states of the target as it serves, or serve the precision that it "
                    "was trained on. What it costs is bounded by the figures here: look for another cause of more."),
            recovery="replayed",
            undo=Undo(states=tuple(Own(p.slot) for p in m.serve.slots)),
            caveats=[] if same is not None else ["a fine-tuned or newer target of the same shape looks the same: compare "
                                                 "checksums of the weights"],
        )]

    def why_not(self, m: Measurements) -> str:
        found = growth(m)
        if found is None:
            return ("not every slot is at its boundary in all of its rows, or none was held against the target's own states "
                    "(--serve, --target)")
        return (f"the served states' error is what rounding of states gives: {_by_boundary(found.served)} by boundary, training "
                f"files {_by_boundary(found.trained)}")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in PRECISIONS:
            raise ValueError(f"target-quant has no variant {variant!r}")
        return replace(plant, precision=variant)

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, precision="")


def growth(m: Measurements) -> Growth | None:
    """Errors by boundary, where every served slot is where it should be in nearly all of its rows."""
    serve, train = m.serve, m.train
    if serve is None or m.reference is None or not serve.detail.held:
        return None
    slots = beside(serve, m.reference)
    if not slots or not all(
        s.way == "placed" and s.phase is None and s.got.boundary == s.want.boundary and s.got.norm == s.want.norm == "pre"
        and s.got.transform == "none" and (s.got.share or 0.0) > WHOLE for s in slots
    ):
        return None
    return Growth(_errors(serve), {} if train is None else _errors(train))


def _errors(side: SideFacts) -> dict[int, float]:
    return {h.boundary: h.plain for h in side.detail.held if h.phase is None and not h.norms and h.plain < FAR}


def _same(m: Measurements, error: float) -> str | None:
    """The rounding of the weights that explains the error."""
    tried = {} if m.serve is None else m.serve.detail.rounded
    best = min(tried, key=lambda name: tried[name], default=None)
    return best if best is not None and tried[best] < EXPLAINED * error else None


def _by_boundary(errors: dict[int, float]) -> str:
    return ", ".join(f"{error:.2g} at {b}" for b, error in sorted(errors.items())) or "none"
