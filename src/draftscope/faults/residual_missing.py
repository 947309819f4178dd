"""residual-missing: a slot holds a part of the residual stream: what a layer added, or the stream short of its MLP."""

from __future__ import annotations

from dataclasses import replace

from draftscope.boundaries import Boundary
from draftscope.faults.base import Fault, Suspicion, Undo, compared_slots, of_side
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix
from draftscope.target.wiring import Wiring


class ResidualMissing(Fault):
    """One half of a fused (branch, residual) pair was taken, or the capture came before the layer's last addition."""

    id = "residual-missing"
    title = "a partial stream"
    verdict = "wiring"
    variants = ("branch", "partial", "branch in one slot", "train branch")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        side, slots = compared_slots(m)
        found = [(got, want) for got, want in slots if got.kind != want.kind and got.kind in ("branch", "partial")]
        if side is None or not found:
            return []
        parts = {got.kind for got, _ in found}
        what = (
            "what a layer added, without the residual stream"
            if parts == {"branch"}
            else ("the stream short of its layer's MLP" if parts == {"partial"} else "parts of the residual stream")
        )
        serve = side.name == "serve"
        return [
            Suspicion(
                fault=self.id,
                side=side.name,
                where=[side.where(got.slot) for got, _ in found],
                says=f"{of_side(side.name)} in {', '.join(side.where(got.slot) for got, _ in found)} hold {what}",
                strength="proven" if side.proof in ("sweep", "pairs") else "suspected",
                evidence=[
                    Evidence(
                        hypothesis="a slot holds a branch or a partial sum in place of the whole residual stream",
                        prediction="it equals stream[b] - stream[b-1] (branch) or the stream before the MLP (partial), not the "
                        "stream",
                        measurement="median relative error per row against streams, branches and partial sums at every boundary",
                        result="; ".join(
                            f"{side.where(got.slot)} is the {got.kind} at boundary {got.boundary} (error {got.error or 0:.2g})"
                            for got, _ in found
                        ),
                        decides="residual-missing if a branch or partial sum fits and no stream does",
                        figures={
                            side.where(got.slot): {
                                "kind": got.kind,
                                "boundary": got.boundary,
                                "error": got.error,
                                "margin": got.margin,
                            }
                            for got, _ in found
                        },
                    )
                ],
                fix=Fix(
                    says="Capture hidden + residual: in engines with a fused residual the layer returns (branch, residual) and "
                    "the stream is their sum." + ("" if serve else " Write the training data again, then retrain.")
                ),
                recovery="replayed" if serve else "needs-retraining",
                undo=Undo(reference=frozenset(got.slot for got, _ in found)) if serve else None,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        def cut(slots: tuple[Boundary, ...], kind: str, which: range) -> tuple[Boundary, ...]:
            return tuple(Boundary(s.index, "pre", kind) if i in which else s for i, s in enumerate(slots))  # type: ignore[arg-type]

        every = range(len(plant.serve.slots))
        if variant == "train branch":
            return replace(plant, train=replace(plant.train, slots=cut(plant.train.slots, "branch", every)))
        made = {"branch": ("branch", every), "partial": ("partial", every), "branch in one slot": ("branch", range(1, 2))}
        if variant not in made:
            raise ValueError(f"residual-missing has no variant {variant!r}")
        return replace(plant, serve=replace(plant.serve, slots=cut(plant.serve.slots, *made[variant])))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, serve=replace(plant.serve, slots=Wiring.of(boundaries).slots))
