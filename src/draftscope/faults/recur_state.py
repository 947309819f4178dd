"""recur-state: the state that one draft step hands to the next is not the one the draft was trained to receive."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix

SAME, OTHER = 0.03, 0.1


class RecurState(Fault):
    """The first draft is fine, later ones collapse: the post-norm state is fed back to a draft trained on the other."""

    id = "recur-state"
    title = "the wrong state fed back"
    verdict = "runtime"
    variants = ("post-norm fed back",)

    def recognise(self, m: Measurements) -> list[Suspicion]:
        wrong = "post" if m.feedback == "pre" else "pre"
        stages = m.stages
        errors = {} if stages is None else stages.feedback_error
        seen = wrong in errors and m.feedback in errors and errors[wrong] < SAME and errors[m.feedback] > OTHER
        gate = m.gate_with.get(f"feedback={wrong}")
        explains = not errors and gate is not None and gate.passed and m.gate is not None and not m.gate.passed
        if not (seen or explains):
            return []
        states = ", ".join(f"{name}-norm fed back: error {error:.2g}" for name, error in errors.items())
        counts = (
            f"with feedback={wrong} the replay gives the recorded counts in {gate.share:.1%} of {gate.steps} steps"
            if gate
            else ""
        )
        if gate and m.gate:
            counts += f", as read in {m.gate.share:.1%}"
        return [
            Suspicion(
                fault=self.id,
                side="serve",
                where=["config norm_output"],
                says=f"the engine feeds the {wrong}-norm state back between draft steps; the draft was trained on the "
                f"{m.feedback}-norm one",
                strength="proven",
                evidence=[
                    Evidence(
                        hypothesis="the state handed from one draft step to the next is the wrong one",
                        prediction=f"the recorded state of the second step is the layer run on the {m.feedback}-norm state of "
                        "the first",
                        measurement="the second draft step run offline from the recorded first, both ways; the recorded counts "
                        "replayed both ways",
                        result="; ".join(text for text in (states, counts) if text),
                        decides="recur-state if the other state reproduces the engine's second step",
                        figures={"feedback_error": errors, "gate": None if gate is None else gate.share},
                    )
                ],
                fix=Fix(
                    says=f"Make the engine feed back the {m.feedback}-norm state. The key `norm_output` means post-norm feedback "
                    "in vLLM and SGLang, and only a norm before lm_head in SpecForge: do not carry it over.",
                    config={name: {"norm_output": m.feedback == "post"} for name in ("vllm@0.32", "sglang@0.5.23")},
                ),
                recovery="replayed",
                undo=Undo(feedback=m.feedback),
                runtime=True,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant != "post-norm fed back":
            raise ValueError(f"recur-state has no variant {variant!r}")
        return replace(plant, engine=replace(plant.engine, feedback="post"))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, feedback=None))
