"""draft-residual: the engine's draft layer loses its residual stream."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.checking import in_engine
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant

_SAYS = {
    "branch": "the engine hands out what the draft's last layer adds, without the stream that it is added to",
    "entry": "the engine's draft loses the stream that its first layer was given: only what the layer adds goes on",
}


class DraftResidual(Fault):
    """Engines pass a pair (branch, residual) from layer to layer: a placeholder norm, or a name used twice, drops the second."""

    id = "draft-residual"
    title = "the draft's own residual lost"
    verdict = "runtime"
    variants = ("the branch alone", "the first layer's input lost")
    page = Page(
        symptom="Acceptance is low from the first position on, the states received and the checkpoint are right.",
        traces={
            "the branch alone": Trace(
                says="the engine's draft returns the output of its last feed-forward block and not the sum with the stream (a "
                     "placeholder in place of the norm that adds the two)",
                input="--draft, --serve (with fc_output and draft_states), --target",
                shows="the recorded draft states are those of the checkpoint's layer with `residual=branch`, to rounding; with "
                      "the sum they are far off", rung="measured"),
            "the first layer's input lost": Trace(
                says="the engine overwrites the residual of the first layer before it is added", rung="measured",
                input="--draft, --serve (with fc_output and draft_states), --target",
                shows="the recorded draft states are those of the checkpoint's layer with `residual=entry`, to rounding"),
        },
        lookalikes={
            "weight-missing": "with other weights no reading of the checkpoint's own gives the recorded draft states",
            "residual-missing": "there the states that the draft receives are partial: slots are placed as branch or partial",
            "config-flag": "`norm_before_residual` turned gives another layer output; both are tried",
        },
        unseen={"captures without draft_states": "then only the counts speak; record fc_output and draft_states"},
        reports=("vllm PR #14464", "vllm PR #26164"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = []
        for one in [] if m.checkpoint is None else m.checkpoint.explains("residual="):
            how = one.key.partition("=")[2]
            found.append(in_engine(
                self.id, one, ["tensor midlayer"], _SAYS[how],
                "Mend the engine's draft layer: the sum of branch and residual has to reach the final norm, and the next layer.",
                undo=Undo(settings=True)))
        return found

    def why_not(self, m: Measurements) -> str:
        error = None if m.stages is None else m.stages.layer_error
        if error is None:
            return "no draft states were recorded (draft_states beside fc_output), so the draft's layer was not held against them"
        return f"the recorded draft states are the checkpoint's layer over what was recorded before it, within {error:.2g}"

    def make(self, plant: Plant, variant: str) -> Plant:
        how = {"the branch alone": "branch", "the first layer's input lost": "entry"}.get(variant)
        if how is None:
            raise ValueError(f"draft-residual has no variant {variant!r}")
        return replace(plant, engine=replace(plant.engine, settings={**plant.engine.settings, "residual": how}))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        settings = {key: value for key, value in plant.engine.settings.items() if key != "residual"}
        return replace(plant, engine=replace(plant.engine, settings=settings))
