"""final-norm: the target's final norm was applied where it does not belong, left out where it does, or applied twice."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.changes import Own
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.plant import Plant
from draftscope.faults.slots import Slot, beside, figures, listed, names, strength
from draftscope.findings import Evidence, Fix
from draftscope.target.spoiling import Normed, Phase

INPUTS = "--train, --serve, --target"
HELD = 0.1
"""Error up to which a last state is the target's own before the norm."""
TIMES = {-1: "before the final norm, which is missing", 0: "before the final norm", 1: "after the final norm", 2: "after the "
         "final norm, applied twice"}


class FinalNorm(Fault):
    """Pre- and post-norm versions of the last state are confused: in the last slot, or in the teacher's state."""

    id = "final-norm"
    title = "the final norm, missing or too many"
    verdict = "wiring"
    variants = ("last slot", "last slot twice", "all slots", "verify rows of the last slot", "train last slot",
                "train last state", "train last state twice")
    page = Page(
        symptom="A draft whose last slot is the last layer accepts less than in training; or training itself stays a few percent "
        "below what the same recipe gives elsewhere, because its targets are wrong.",
        traces={
            "last slot": Trace("The engine captures the last slot behind the model's norm, or norms every captured state at the "
                               "end of the list.", INPUTS,
                               "The slot is the final norm of the state that it should hold, element by element.", "served"),
            "last slot twice": Trace("The engine norms a state that came normed already.", INPUTS,
                                     "The slot is the norm of the norm.", "served"),
            "all slots": Trace("The engine norms all captured states.", INPUTS,
                               "Every slot is the final norm of the state that it should hold.", "served"),
            "verify rows of the last slot": Trace(
                "Graphs of verify steps take the model's output, prefill the norm's input.",
                INPUTS + " (a capture that says which rows are verify steps')",
                "The slot is normed in rows of verify steps only.", "served"),
            "train last slot": Trace("The data writer takes the last entry of `output_hidden_states`, which is normed.",
                                     "--train, --serve, --draft, --target",
                                     "The training files' slot is the norm of what is served.", "trained"),
            "train last state": Trace("The data writer stores the last state after the norm in a format whose readers apply it.",
                                      "--train, --target",
                                      "The last state has root mean square 1 once divided by the norm's weight, and the file "
                                      "claims `pre`: the teacher's targets would be normed twice.", "none"),
            "train last state twice": Trace("The data writer norms the model's output, which is normed already.",
                                            "--train, --target", "The last state is the norm of the norm.", "none"),
        },
        lookalikes={
            "scale-mult": "one factor for all rows and channels; the norm has one for each row and one for each channel",
            "layer-set": "the slot is another boundary's state, with the norm or without",
            "tied-head": "the teacher is at chance with the norm and without it",
        },
        unseen={"a trainer that forgets the norm": "the files are right; only the trainer's own code, or its low top-1 against "
                "the text, shows it"},
        reports=("TorchSpec issue #169", "verl-SpeCo issue #20", "verl-SpeCo PR #21"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = []
        for side in m.sides():
            slots = [s for s in beside(side, m.reference or ()) if s.way == "normed"]
            if slots:
                found.append(self._slots(side, slots))
        if m.train is not None and (told := self._last(m.train)) is not None:
            found.append(told)
        return found

    def _slots(self, side: SideFacts, slots: list[Slot]) -> Suspicion:
        serve = side.name == "serve"
        where = listed(side, slots)
        said = "; ".join(f"{side.where(s.slot)}{s.rows} is boundary {s.want.boundary} {TIMES[s.norms]}" for s in slots)
        told = figures(side, slots)
        for figure, slot in zip(told.values(), slots, strict=True):
            figure |= _errors(side, slot.slot, slot.phase)  # type: ignore[operator]
        return Suspicion(
            fault=self.id, side=side.name, where=names(side, slots),
            says=f"{of_side(side.name)} in {where} are on the wrong side of the final norm: {said}",
            strength=strength(side),
            evidence=[Evidence(
                hypothesis="a slot holds the right state with the final norm applied, or lacks the norm that it should have",
                prediction="the error vanishes against the norm of the state (or against the state before it)",
                measurement="median relative error per row against the state as it stands, after the final norm, and after it "
                "twice",
                result=said + ": " + "; ".join(_said(side, s.slot, s.phase) for s in slots),
                decides="final-norm if only the number of norms differs; layer-set if another boundary is nearer",
                figures=told,
            )],
            fix=Fix(says="Take the state " + ("behind" if slots[0].want.norm == "post" else "before")
                    + " the final norm, as the draft was trained on it: hook the norm's "
                    + ("output." if slots[0].want.norm == "post" else "input, or the last layer's output.")
                    + ("" if serve else " Write the training data again, then retrain.")),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(states=tuple(Own(s.slot, phase=s.phase) for s in slots)) if serve else None,
        )

    def _last(self, train: SideFacts) -> Suspicion | None:
        held, claimed = train.detail.of(-1), train.detail.claimed_norm
        if held is None or (held.norms == 0 and held.plain > HELD):
            return None
        if held.norms < 2 and claimed in ("", "post" if held.norms else "pre"):
            return None
        return Suspicion(
            fault=self.id, side="train", where=["train:last"],
            says=f"the training files' last state, of which the teacher's targets are made, is {TIMES[held.norms]}"
            + (f", where the files say it is {'before' if claimed == 'pre' else 'after'} it" if claimed else ""),
            strength="proven" if held.norms == 2 else "supported",
            evidence=[Evidence(
                hypothesis="the teacher's state was taken on the wrong side of the final norm",
                prediction="the error vanishes against the target's own last state on another side of the norm than claimed",
                measurement="median relative error per row against the target's own last state as it stands, after the final "
                "norm, and after it twice",
                result=_said(train, -1, None),
                decides="final-norm if the number of norms is not the one that the files claim",
                figures=_errors(train, -1, None) | {"claimed": claimed},
            )],
            fix=Fix(says="Write the last state before the final norm, or say in the files that it is normed (`last_norm`: "
                    "`post`), then build the teacher's targets again and retrain."),
            recovery="needs-retraining",
            caveats=[] if held.norms == 2 else ["a trainer that looks at the state itself is not misled; one that goes by the "
                                               "format is"],
        )

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if held := [h for h in side.detail.held if h.phase is None]:
                return "every state is on its own side of the norm: " + "; ".join(_said(side, h.slot, None) for h in held)
        return "no state was held against the final norm: give the target (--target)"

    def make(self, plant: Plant, variant: str) -> Plant:
        last = (len(plant.serve.slots) - 1,)
        made = {
            "last slot": Normed(last), "last slot twice": Normed(last, 2), "all slots": Normed(),
            "verify rows of the last slot": Normed(last, phase="verify"),
        }
        if variant in ("train last state", "train last state twice"):
            return replace(plant, last=(*plant.last, Normed(times=2 if variant.endswith("twice") else 1)))
        if variant == "train last slot":
            return replace(plant, train=replace(plant.train, spoilers=(*plant.train.spoilers, Normed(last))))
        if variant not in made:
            raise ValueError(f"final-norm has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, spoilers=(*plant.serve.spoilers, made[variant])))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        kept = tuple(s for s in plant.serve.spoilers if not isinstance(s, Normed))
        return replace(plant, serve=replace(plant.serve, spoilers=kept))


def _errors(side: SideFacts, slot: int, phase: Phase | None) -> dict[str, float | str | None]:
    held = side.detail.of(slot, phase)
    return {} if held is None else {"as it stands": held.plain, "normed": held.normed, "normed twice": held.twice}


def _said(side: SideFacts, slot: int, phase: Phase | None) -> str:
    errors = ", ".join(f"{value:.2g} {name}" for name, value in _errors(side, slot, phase).items())
    return f"{side.where(slot)} error {errors}"
