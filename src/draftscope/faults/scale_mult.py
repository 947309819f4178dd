"""scale-mult: a constant multiplier is missing, or applied twice."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.changes import Change, Own, Scale
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.plant import Plant
from draftscope.faults.slots import SAME_SCALE, Slot, beside, compared, figures, names, strength
from draftscope.findings import Evidence, Fix
from draftscope.target.spoiling import Scaled, Spoiler

INPUTS = "--train, --serve, --target"
PHASED = INPUTS + " (a capture that says which rows are verify steps')"
NOTHING = 1e-3
"""A factor below which a slot or channel holds nothing at all."""


class ScaleMult(Fault):
    """Embedding scale, muP width or residual multiplier: direction right, length off by one factor for every token."""

    id = "scale-mult"
    title = "a constant factor"
    verdict = "wiring"
    variants = ("one slot x8", "all slots x0.5", "one slot x1.2", "half of the channels x2", "half of the channels x1.2",
                "verify rows x8", "prefill rows x0.5", "train one slot x8", "train half of the channels x2")
    page = Page(
        symptom="Accept length falls, much with a strong factor and hardly with a weak one; cosines between training and serving "
        "states are 1.",
        traces={
            "one slot x8": Trace("A muP or residual multiplier is applied to one captured state only.", INPUTS,
                                 "One factor removes the slot's error.", "served"),
            "all slots x0.5": Trace("A width multiplier is applied twice, or on one side only.", INPUTS,
                                    "One factor removes the error of every slot.", "served"),
            "one slot x1.2": Trace("As before, weak: acceptance hardly shows it, states do.", INPUTS,
                                   "The error is 0.2 and vanishes with one factor.", "served"),
            "half of the channels x2": Trace("One tensor-parallel rank's half is summed twice.", INPUTS,
                                             "Each channel has a factor of its own: 1 on the first half, 2 on the second.",
                                             "served"),
            "half of the channels x1.2": Trace("As before, weak.", INPUTS, "As before, 1 and 1.2.", "served"),
            "verify rows x8": Trace("The multiplier is baked into the graphs of verify steps only.", PHASED,
                                    "Rows of verify steps carry the factor, the prompt's do not.", "served"),
            "prefill rows x0.5": Trace("The multiplier is missing on the prefill path only.", PHASED,
                                       "The prompt's rows carry the factor, those of verify steps do not.", "served"),
            "train one slot x8": Trace("The data writer applies the multiplier, the engine does not.",
                                       "--train, --serve, --draft, --target",
                                       "The training files carry the factor, and the draft does better without.", "trained"),
            "train half of the channels x2": Trace("The data writer gathers one rank's half twice.",
                                                   "--train, --serve, --target",
                                                   "The training files carry the factor on these channels.", "trained"),
        },
        lookalikes={
            "residual-missing": "the cosine is below 1, and a branch or partial sum fits without a factor",
            "final-norm": "every row has a factor of its own, and every channel one, the norm's gain",
            "parallel-shard": "channels that hold nothing, or another shard's: no factor explains them",
            "rotated-space": "lengths are right, directions are not",
            "target-quant": "no factor removes the error",
        },
        unseen={"factors within 2 %": "smaller ones are not told from a target of another precision"},
        reports=("SpecForge PR #886",),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side, slots = compared(m)
        found = []
        if side is not None:
            whole = _joined([s for s in slots if s.way == "placed" and abs(s.ratio - 1) > SAME_SCALE])
            if whole:
                found.append(self._suspicion(side, whole))
        for one in m.sides():
            parts = [s for s in beside(one, m.reference or ()) if s.way == "part" and _factor(s) > NOTHING]
            if parts and not _shared(m, one, parts):
                found.append(self._suspicion(one, parts))
        return found

    def _suspicion(self, side: SideFacts, found: list[Slot]) -> Suspicion:
        serve = side.name == "serve"
        text = ", ".join(f"{side.where(s.slot)} x{_factor(s):.4g}{_channels(s)}{s.rows}" for s in found)
        more = [{"factor": _factor(s), "left": _left(s)} for s in found]
        told = figures(side, found)
        for figure, extra in zip(told.values(), more, strict=True):
            figure |= extra  # type: ignore[operator]
        return Suspicion(
            fault=self.id,
            side=side.name,
            where=names(side, found),
            says=f"{of_side(side.name)} are scaled by a constant: {text}",
            strength=strength(side),
            evidence=[
                Evidence(
                    hypothesis="a slot, or some of its channels, is the right state times one constant",
                    prediction="the error vanishes once the slot is divided by one factor, the same for all tokens",
                    measurement="median of <x, r> / <r, r> over rows, and by channel; the relative error after dividing by it",
                    result="; ".join(
                        f"{side.where(s.slot)}{s.rows}: factor {_factor(s):.4g}{_channels(s)}, error left {_left(s):.2g}"
                        for s in found
                    ),
                    decides="scale-mult if one factor removes the error; a partial stream or another layer keeps it",
                    figures=told,
                )
            ],
            fix=Fix(
                says=f"Find the multiplier that is applied on one side only ({text}): embedding scale, residual or logit "
                "multiplier, a sum over tensor-parallel ranks."
                + ("" if serve else " Write the training data again, then retrain.")
            ),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(states=tuple(_undone(s) for s in found)) if serve else None,
        )

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if side.slots and m.reference is not None:
                factors = ", ".join(f"{side.where(s.slot)} x{s.ratio:.3g}" for s in beside(side, m.reference))
                return f"every factor is within {SAME_SCALE:.0%} of 1, on all channels: {factors}"
        return "no slot was held against the state that it should be: give the target (--target)"

    def make(self, plant: Plant, variant: str) -> Plant:
        last = len(plant.serve.slots) - 1
        made: dict[str, Spoiler] = {
            "one slot x8": Scaled(8.0, (last,)),
            "one slot x1.2": Scaled(1.2, (1,)),
            "all slots x0.5": Scaled(0.5),
            "half of the channels x2": Scaled(2.0, channels=(0.5, 1.0)),
            "half of the channels x1.2": Scaled(1.2, channels=(0.5, 1.0)),
            "verify rows x8": Scaled(8.0, (last,), phase="verify"),
            "prefill rows x0.5": Scaled(0.5, phase="prefill"),
        }
        name = variant.removeprefix("train ")
        if variant not in self.variants or name not in made:
            raise ValueError(f"scale-mult has no variant {variant!r}")
        if name != variant:
            return replace(plant, train=replace(plant.train, spoilers=(*plant.train.spoilers, made[name])))
        return replace(plant, serve=replace(plant.serve, spoilers=(*plant.serve.spoilers, made[name])))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        kept = tuple(s for s in plant.serve.spoilers if not isinstance(s, Scaled))
        return replace(plant, serve=replace(plant.serve, scale=(), spoilers=kept))


def _joined(slots: list[Slot]) -> list[Slot]:
    """Slots whose two phases carry the same factor, though they differ otherwise, as one."""
    found: list[Slot] = []
    for slot in slots:
        if found and found[-1].slot == slot.slot and abs(found[-1].ratio / slot.ratio - 1) <= SAME_SCALE:
            found[-1] = replace(found[-1], phase=None)
        else:
            found.append(slot)
    return found


def _shared(m: Measurements, side: SideFacts, parts: list[Slot]) -> bool:
    """Whether the other side carries the same factors on the same channels: then nothing departs."""
    others = [o for o in m.sides() if o is not side]
    seen = {(s.slot, round(_factor(s), 2)) for o in others for s in beside(o, m.reference or ()) if s.way == "part"}
    return all((s.slot, round(_factor(s), 2)) in seen for s in parts)


def _factor(slot: Slot) -> float:
    part = slot.held.part if slot.way == "part" and slot.held is not None else None
    return slot.ratio if part is None else part.factor


def _left(slot: Slot) -> float:
    part = slot.held.part if slot.way == "part" and slot.held is not None else None
    return (slot.got.error or 0.0) if part is None else part.error


def _undone(slot: Slot) -> Change:
    part = slot.held.part if slot.way == "part" and slot.held is not None else None
    if part is not None and not part.whole_run:
        return Own(slot.slot, phase=slot.phase)
    return Scale(slot.slot, 1 / _factor(slot), None if part is None else (part.first, part.last + 1), slot.phase)


def _channels(slot: Slot) -> str:
    part = slot.held.part if slot.way == "part" and slot.held is not None else None
    if part is None:
        return ""
    if not part.whole_run:
        return f" on {part.channels} of {part.of} channels"
    return f" on channels {part.first} to {part.last} of {part.of}"
