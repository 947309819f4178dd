"""residual-missing: a part of a residual stream in the whole one's place, in the served slots or inside the draft."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from draftscope.boundaries import Boundary, Kind
from draftscope.faults import draft_residual
from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo, of_side
from draftscope.faults.changes import Own
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.slots import Slot, beside, compared, figures, listed, names, strength
from draftscope.faults.unpaired import unpaired
from draftscope.findings import Evidence, Fix
from draftscope.target.wiring import Wiring

INPUTS = "--train, --serve, --target"


class ResidualMissing(Fault):
    """One half of a fused (branch, residual) pair was taken, or the capture came before the layer's last addition."""

    id = "residual-missing"
    title = "a partial stream"
    verdict = "wiring"
    variants = ("branch", "partial", "branch in one slot", "partial in one slot", "mlp half", "verify rows branch",
                "train branch", "train partial", *draft_residual.READINGS)
    page = Page(
        symptom="Accept length falls from the first position on; norms of the slots are too small, the more so the deeper.",
        traces={
            "branch": Trace("The engine captures what a layer returns before the residual is added.", INPUTS,
                            "Every slot equals the difference of two neighbouring boundaries, no whole stream.", "served"),
            "partial": Trace("The engine captures the residual half of the fused pair: the stream before the MLP's output is "
                             "added.", INPUTS, "Every slot equals a boundary without the MLP of its last layer.", "served"),
            "branch in one slot": Trace("One of the capture points lies before the addition.", INPUTS,
                                        "One slot is a branch, the others whole streams.", "served"),
            "partial in one slot": Trace("As before, with the residual half.", INPUTS, "One slot is a partial stream.", "served"),
            "mlp half": Trace("The engine captures the hidden half of the fused pair: what the MLP gave out.", INPUTS,
                              "Every slot equals what a layer's MLP alone added.", "served"),
            "verify rows branch": Trace("Graphs of verify steps were captured on a path that does not add the residual.",
                                        INPUTS + " (a capture that says which rows are verify steps')",
                                        "Rows of verify steps are branches, the prompt's are whole streams.", "served"),
            "train branch": Trace("The data writer's hook sits on the layer's output before the residual is added.",
                                  "--train, --serve, --draft, --target",
                                  "The training files hold branches, the capture whole streams, and the draft does better on "
                                  "the latter.", "trained"),
            "train partial": Trace("As before, with the residual half.", "--train, --serve, --draft, --target",
                                   "The training files hold partial streams.", "trained"),
            **draft_residual.TRACES,
        },
        lookalikes={
            "layer-offset": "a whole stream fits, at a neighbouring boundary",
            "scale-mult": "one factor removes the error",
            "final-norm": "the state after the final norm fits",
            "config-flag": "of the draft's own layer, `norm_before_residual` turned gives another output; both are tried",
            "weight-missing": "with other weights no reading of the checkpoint's own gives the recorded draft states",
        },
        unseen={"targets whose MLP and attention run in parallel": "they have no stream between the two, so that only branches "
                "can be told", "a draft's own residual, from captures without draft_states": "only the counts speak then; record "
                "fc_output and draft_states"},
        reports=("vLLM PR #14464", "vLLM PR #26164"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return [*self._of_slots(m), *draft_residual.recognise(self.id, m)]

    def _of_slots(self, m: Measurements) -> list[Suspicion]:
        side, slots = compared(m)
        # Slots short of other ranks' parts are near the partial sum, and are parallel-shard's.
        shared = {one.slot for rows in m.rows.values() for one in rows.shares}
        found = [s for s in slots if s.way == "placed" and s.got.kind != s.want.kind and s.slot not in shared
                 and not (shared and s.want.kind == "partial")]
        if side is None or not found:
            return unpaired(self.id, m)
        serve = side.name == "serve"
        where = listed(side, found)
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=names(side, found),
                says=f"{of_side(side.name)} in {where} hold {_what(found)}",
                strength=strength(side),
                evidence=[
                    Evidence(
                        hypothesis="a slot holds a branch or a partial sum in place of the whole residual stream",
                        prediction="it equals stream[b] - stream[b-1] (branch), what the MLP alone added, or the stream before "
                        "the MLP (partial), not the stream",
                        measurement="median relative error per row against streams, branches and partial sums at every boundary",
                        result="; ".join(
                            f"{side.where(s.slot)}{s.rows} is the {_kind(s)} at boundary {s.got.boundary} "
                            f"(error {s.got.error or 0:.2g})"
                            for s in found
                        ),
                        decides="residual-missing if a branch or partial sum fits and no stream does",
                        figures=figures(side, found),
                    )
                ],
                fix=Fix(says="Serve the states that the draft was trained on, or, better, train it anew on whole streams.")
                if all(s.got.kind == "stream" for s in found) else Fix(
                    says="Capture hidden + residual: in engines with a fused residual the layer returns (branch, residual) and "
                    "the stream is their sum." + ("" if serve else " Write the training data again, then retrain.")
                ),
                recovery="replayed" if serve else "needs-retraining",
                undo=Undo(states=tuple(Own(s.slot, s.ratio, phase=s.phase) for s in found)) if serve else None,
            )
        ]

    def why_not(self, m: Measurements) -> str:
        for side in m.sides():
            if side.slots and m.reference is not None:
                kinds = ", ".join(f"{side.where(s.slot)} {s.got.kind or 'unplaced'}" for s in beside(side, m.reference))
                return (f"no slot is nearer to a branch or partial sum than to a whole stream: {kinds}; "
                        f"{draft_residual.why_not(m)}")
        return ("no slot was held against branches and partial sums: that takes the target's weights (--target); "
                f"{draft_residual.why_not(m)}")

    def make(self, plant: Plant, variant: str) -> Plant:
        every = range(len(plant.serve.slots))
        if variant in draft_residual.READINGS:
            return draft_residual.make(plant, variant)
        if variant in ("train branch", "train partial"):
            kind: Kind = "branch" if variant.endswith("branch") else "partial"
            return replace(plant, train=replace(plant.train, slots=_cut(plant.train.slots, kind, every)))
        if variant == "mlp half":
            less = tuple((i, replace(slot, kind="partial")) for i, slot in enumerate(plant.serve.slots))
            return replace(plant, serve=replace(plant.serve, less=less))
        if variant == "verify rows branch":
            return replace(plant, serve=replace(plant.serve, verify=_cut(plant.serve.slots, "branch", every)))
        made: dict[str, tuple[Kind, range]] = {
            "branch": ("branch", every), "partial": ("partial", every), "branch in one slot": ("branch", range(1, 2)),
            "partial in one slot": ("partial", range(1, 2)),
        }
        if variant not in made:
            raise ValueError(f"residual-missing has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, slots=_cut(plant.serve.slots, *made[variant])))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        plant = draft_residual.mend(plant)
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots, verify=(), less=()))


def _cut(slots: tuple[Boundary, ...], kind: Kind, which: Container[int]) -> tuple[Boundary, ...]:
    return tuple(replace(slot, kind=kind) if i in which else slot for i, slot in enumerate(slots))


def _kind(slot: Slot) -> str:
    return "MLP's output" if slot.got.mlp else str(slot.got.kind)


def _what(slots: list[Slot]) -> str:
    kinds = {_kind(s) for s in slots}
    if kinds == {"stream"}:
        return f"whole streams where the draft was trained on the {' or the '.join(sorted({str(s.want.kind) for s in slots}))}"
    if kinds == {"MLP's output"}:
        return "the hidden half of a (hidden, residual) pair: what a layer's MLP added, without the residual stream"
    if kinds == {"branch"}:
        return "what a layer added, without the residual stream"
    if kinds == {"partial"}:
        return "the residual half of a (hidden, residual) pair: the stream short of its layer's MLP"
    return "parts of the residual stream"
