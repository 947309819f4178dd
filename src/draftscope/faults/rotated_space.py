"""rotated-space: the target runs in a rotated basis (rotating quantisers), the draft does not."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.changes import TurnBack
from draftscope.faults.measurements import CLEARLY, TURNED, Measurements, SideFacts
from draftscope.faults.plant import Plant
from draftscope.faults.slots import Slot, beside, figures, listed, names, strength
from draftscope.faults.unpaired import unpaired
from draftscope.findings import Evidence, Fix
from draftscope.target.spoiling import Spoiler, Turned

INPUTS = "--train, --serve, --target"
PERHAPS = 0.1
"""Share of equal rows above which an embedding is not turned as a whole."""


class RotatedSpace(Fault):
    """Rotation quantisation multiplies the residual stream by an orthogonal matrix, which the draft's fc does not know."""

    id = "rotated-space"
    title = "states in another basis"
    verdict = "wiring"
    variants = ("orthogonal", "hadamard", "one slot", "verify rows", "checkpoint's embedding",
                "train orthogonal")
    page = Page(
        symptom="Accept length 1 with a rotated, quantised target; norms of the slots look right, text is fine.",
        traces={
            "orthogonal": Trace("The engine serves a target whose weights were rotated, and hands its states on as they are.",
                                INPUTS, "Lengths and the cosines between rows are right, the rows are not; an orthogonal map, "
                                "fitted on half of the rows, gives the other half.", "served"),
            "hadamard": Trace("As before, with a Hadamard matrix.", INPUTS,
                              "As before, and all entries of the map have one size.", "served"),
            "one slot": Trace("The rotation is taken back for all captured states but one.", INPUTS,
                              "One slot is turned.", "served"),
            "verify rows": Trace("The rotation is taken back on the prefill path only.",
                                 INPUTS + " (a capture that says which rows are verify steps')",
                                 "Rows of verify steps are turned.", "served"),
            "checkpoint's embedding": Trace("The exporter puts the rotated target's embedding beside the draft.",
                                            "--train, --draft, --target (unrotated)",
                                            "Cosines between its rows are those of the target's, the rows are not, and the "
                                            "draft does better with the target's.", "trained"),
            "train orthogonal": Trace("The data writer ran the rotated target.", "--train, --serve, --draft, --target",
                                      "The training files are turned, what is served is not, and the draft does better on "
                                      "that.", "trained"),
        },
        lookalikes={
            "req-mix": "cosines between rows are not the target's either; rows are found elsewhere",
            "scale-mult": "lengths differ, directions do not",
            "parallel-shard": "the map only re-orders channels",
            "layer-set": "another boundary fits without a map; where one fits with a map alone, both are named",
        },
        unseen={"an embedding that the engine lends rotated": "no slot shows it; the draft's layer gives out other states "
                "than the checkpoint's does on the recorded ones, as with unloaded weights, and the embedding that the engine "
                "lent is not in a capture"},
        reports=("vllm-ascend issue #5974", "vllm-ascend PR #6914"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        turned = {side.name: [s for s in beside(side, m.reference or ()) if _is_turned(s)] for side in m.sides()}
        found = []
        for side in m.sides():
            slots = turned[side.name]
            others = {s.slot for name, several in turned.items() if name != side.name for s in several}
            if slots and not {s.slot for s in slots} <= others:
                found.append(self._suspicion(side, slots))
        return (found or unpaired(self.id, m)) + self._embedding(m)

    def _embedding(self, m: Measurements) -> list[Suspicion]:
        facts = m.embedding
        if facts is None or facts.turned is None or facts.own is None or facts.target is None:
            return []
        if facts.turned > TURNED or facts.same_rows > PERHAPS or facts.own - facts.target < CLEARLY:
            return []
        return [Suspicion(
            fault=self.id, side="serve", where=["tensor embed_tokens.weight"],
            says="the checkpoint's own embedding is the target's in another basis: it was exported from the rotated target",
            strength="proven",
            evidence=[Evidence(
                hypothesis="the embedding beside the draft was turned by an orthogonal map",
                prediction="cosines between its rows are those between the target's, its rows are not the target's, and the "
                "draft does better with the target's",
                measurement="cosines between the same rows of both, in units of their spread; the draft replayed with either "
                f"({facts.rung})",
                result=f"cosines differ by {facts.turned:.2g}; {facts.same_rows:.0%} of the rows are equal; -log p "
                f"{facts.own:.2f} with its own, {facts.target:.2f} with the target's",
                decides="rotated-space if the cosines agree; weight-missing if it is another embedding",
                figures={"turned": facts.turned, "same_rows": facts.same_rows, "own": facts.own, "target": facts.target},
            )],
            fix=Fix(says="Remove embed_tokens.weight from the checkpoint where the engine lends the unrotated embedding, or "
                    "export the embedding that the draft was trained with."),
            recovery="replayed", undo=Undo(target_embedding=True),
        )]

    def _suspicion(self, side: SideFacts, slots: list[Slot]) -> Suspicion:
        serve = side.name == "serve"
        told = figures(side, slots)
        for figure, slot in zip(told.values(), slots, strict=True):
            figure |= {"basis": _basis(slot), "left": _left(slot)}  # type: ignore[operator]
        return Suspicion(
            fault=self.id, side=side.name, where=names(side, slots),
            says=f"{of_side(side.name)} in {listed(side, slots)} are in another basis: the target's own states, turned by an "
            f"orthogonal map{' (a Hadamard matrix)' if any(_basis(s) == 'hadamard' for s in slots) else ''}",
            strength=strength(side),
            evidence=[Evidence(
                hypothesis="the states are right, in a rotated basis",
                prediction="an orthogonal map fitted on half of the rows gives the other half; lengths and the cosines between "
                "rows are the target's",
                measurement="orthogonal Procrustes on every other row, relative error on the rest; with fewer rows than "
                "dimensions, the cosines between rows",
                result="; ".join(
                    f"{side.where(s.slot)}{s.rows}: error {_before(s):.2g} as it stands, {_left(s):.2g} after the map"
                    for s in slots),
                decides="rotated-space if an orthogonal map explains the rows and no place or factor does",
                figures=told,
            )],
            fix=Fix(says="Turn the captured states back before they reach the draft's fc (multiply by the transpose of the "
                    "quantiser's rotation), or fold the rotation into fc; turn back a borrowed embedding, too."
                    + ("" if serve else " Or write the training data again with the unrotated target, then retrain.")),
            recovery="replayed" if serve else "needs-retraining",
            undo=Undo(states=tuple(
                TurnBack(s.slot, s.phase, s.got.boundary if s.elsewhere else None) for s in slots)) if serve else None,
        )

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if held := [h for h in side.detail.held if h.phase is None and h.slot >= 0]:
                return "no slot needs a map: " + "; ".join(
                    f"{side.where(h.slot)} error {h.plain:.2g} as it stands" for h in held)
        return "no slot was held against the target's own states: give the target (--target)"

    def make(self, plant: Plant, variant: str) -> Plant:
        made: dict[str, Spoiler] = {
            "orthogonal": Turned(), "hadamard": Turned("hadamard"), "one slot": Turned(slots=(1,)),
            "verify rows": Turned(phase="verify"),
        }
        if variant == "checkpoint's embedding":
            return replace(plant, embedding="rotated")
        if variant == "train orthogonal":
            return replace(plant, train=replace(plant.train, spoilers=(*plant.train.spoilers, Turned())))
        if variant not in made:
            raise ValueError(f"rotated-space has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, spoilers=(*plant.serve.spoilers, made[variant])))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        kept = tuple(s for s in plant.serve.spoilers if not isinstance(s, Turned))
        return replace(plant, embedding="", serve=replace(plant.serve, spoilers=kept))


def _is_turned(slot: Slot) -> bool:
    return slot.way == "turned" and _basis(slot) != "permutation"


def _basis(slot: Slot) -> str:
    if slot.held is not None and slot.held.turn is not None:
        return slot.held.turn.basis
    return "permutation" if slot.got.transform == "permutation" else "orthogonal"


def _left(slot: Slot) -> float:
    turn = None if slot.held is None or slot.elsewhere else slot.held.turn
    return (slot.got.error or 0.0) if turn is None else turn.error


def _before(slot: Slot) -> float:
    return (slot.got.error or 0.0) if slot.held is None else slot.held.plain
