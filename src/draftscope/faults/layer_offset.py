"""layer-offset: every slot that moved holds the boundary just before, or just after, the one it should."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, of_side
from draftscope.faults.fixes import capture_boundaries
from draftscope.faults.layers import Moved, evidence, moved
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.slots import beside, names, strength
from draftscope.target.wiring import Wiring

INPUTS = "--train, --serve, --target"


class LayerOffset(Fault):
    """Two conventions of layer ids (input of block k, output of block k), one applied on each side."""

    id = "layer-offset"
    title = "slots one boundary off"
    verdict = "wiring"
    variants = ("+1", "-1", "last slot +1", "first slot -1", "verify rows +1", "prefill rows +1", "train +1", "train -1")
    page = Page(
        symptom="Accept length a little to clearly lower than in training, already at the first position; nothing crashes, norms "
        "look healthy.",
        traces={
            "+1": Trace("The engine adds one to layer ids that already count outputs of blocks.", INPUTS,
                        "Every slot's least error lies at the boundary after the one that the training files hold.", "served"),
            "-1": Trace("The engine takes the input of the block whose output is meant.", INPUTS,
                        "Every slot's least error lies one boundary before.", "served"),
            "last slot +1": Trace("Only the last id is converted, or clipped at the last layer.", INPUTS,
                                  "One slot is displaced by one, the others are right.", "served"),
            "first slot -1": Trace("Only the first id is read in the other convention.", INPUTS,
                                   "One slot is displaced by one, the others are right.", "served"),
            "verify rows +1": Trace("CUDA graphs of verify steps were captured with ids in another convention than prefill.",
                                    INPUTS + " (a capture that says which rows are verify steps')",
                                    "Rows of verify steps are displaced by one, those of the prompt are right.", "served"),
            "prefill rows +1": Trace("Prefill runs another path (eager, chunked) than decoding, with other ids.",
                                     INPUTS + " (a capture that says which rows are verify steps')",
                                     "The prompt's rows are displaced by one, those of verify steps are right.", "served"),
            "train +1": Trace("The writer of the training data counts outputs where the trainer's configuration counts inputs.",
                              "--train, --serve, --draft, --target",
                              "The training files hold other boundaries than configuration and capture, and the draft does "
                              "better on what is served.", "trained"),
            "train -1": Trace("As before, the other way round.", "--train, --serve, --draft, --target",
                              "As before, one boundary earlier.", "trained"),
        },
        lookalikes={
            "layer-set": "moved slots are displaced by different amounts or by more than one",
            "token-shift": "the least error lies at a lag along the tokens, at the right boundary",
            "residual-missing": "a branch or partial sum fits, no whole stream does",
            "target-quant": "the right boundary is nearest; its error grows with depth",
        },
        unseen={"boundaries that the target makes equal": "where two neighbouring boundaries hold the same states within "
                "rounding, no measurement tells which was taken, and nothing is lost"},
        reports=("sglang PR #25454", "sglang PR #32334", "SpecForge PR #239"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return [self._suspicion(m, found) for found in moved(m) if found.is_offset]

    def _suspicion(self, m: Measurements, found: Moved) -> Suspicion:
        side, step = found.side, found.displacements[0]
        return Suspicion(
            fault=self.id,
            side=side.name,
            where=names(side, found.slots),
            says=f"{of_side(side.name)} in {_slots(found)}{found.rows} come from one boundary "
            f"{'later' if step > 0 else 'earlier'} than {m.wanted_by} ({step:+d}): two conventions of layer ids meet",
            strength=strength(side),
            evidence=evidence(
                m, found, "layer-offset if every moved slot is displaced by the same one boundary; layer-set otherwise"
            ),
            fix=capture_boundaries(
                side.name,
                m,
                f"Shift the layer ids by {-step:+d}, or name them in the convention of the stack that reads them"
                + (f"; only the path that makes the rows{found.rows} needs it." if found.phase else "."),
            ),
            recovery="replayed" if side.name == "serve" else "needs-retraining",
            undo=found.undo(),
        )

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if side.slots and m.reference is not None:
                held = ", ".join(f"{side.where(s.slot)} at {s.got.boundary} (wanted {s.want.boundary})"
                                 for s in beside(side, m.reference))
                return f"no common step of one boundary: {held}"
        return "no slot was placed: give training states, a capture and the target (--train, --serve, --target)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant in ("train +1", "train -1"):
            return replace(plant, train=_shifted(plant.train, int(variant[-2:]), range(len(plant.train.slots))))
        slots = plant.serve.slots
        every, off = range(len(slots)), _shifted(plant.serve, 1, range(len(slots))).slots
        if variant == "verify rows +1":
            return replace(plant, serve=replace(plant.serve, verify=off))
        if variant == "prefill rows +1":
            return replace(plant, serve=replace(plant.serve, slots=off, verify=slots))
        which = {"+1": every, "-1": every, "last slot +1": range(len(slots) - 1, len(slots)), "first slot -1": range(1)}
        if variant not in which:
            raise ValueError(f"layer-offset has no variant {variant!r}")
        return replace(plant, serve=_shifted(plant.serve, int(variant[-2:]), which[variant]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots, verify=()))


def _shifted(wiring: Wiring, by: int, which: Container[int]) -> Wiring:
    return replace(wiring, slots=tuple(
        replace(slot, index=slot.index + by) if i in which else slot for i, slot in enumerate(wiring.slots)))


def _slots(found: Moved) -> str:
    return "one slot" if len(found.slots) == 1 else f"{len(found.slots)} slots"
