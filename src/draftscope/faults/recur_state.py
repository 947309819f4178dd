"""recur-state: the state that one draft step hands to the next is not the one the draft was trained to receive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.eagle3.reading import Runtime
from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.fixes import setting_keys
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, runs_otherwise, tried_in_vain
from draftscope.faults.shapes import dead_after_first, later_steps
from draftscope.findings import Evidence, Fix

SAME, OTHER = 0.03, 0.1
_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_FIXES = {
    "": "Hand to each draft step the state that the step before put out, before the final norm unless the draft was trained with "
        "`norm_output`.",
    "feedback": "Make the engine feed back the state that the draft was trained to receive: see `norm_output`, which means "
                "post-norm "
                "feedback in vLLM and SGLang and a norm before lm_head in SpecForge.",
    "fed=target": "Hand the draft's own output state to the second draft step, not the target's.",
    "fed=target first": "At the hand-over from prefill to decode, send the draft's own output state (the one that its first "
                        "token "
                        "came from), not the target's states.",
    "fed=branch": "Feed back the whole stream: the last layer's residual plus what its MLP adds.",
}
_MADE: dict[str, dict[str, Any]] = {
    "target's state fed back": {"fed": "target"},
    "target's state in the first round": {"fed": "target", "fed_first": True},
    "state of the step before": {"fed": "previous"},
    "residual left out": {"fed": "branch"},
}


class RecurState(Fault):
    """The first draft is fine, later ones collapse: what is fed back is not the state that the draft learned to receive."""

    id = "recur-state"
    title = "the wrong state fed back"
    verdict = "runtime"
    variants = ("post-norm fed back", *_MADE)
    page = Page(
        symptom="The first draft position accepts as in training, the later ones hardly anything.",
        traces={
            "post-norm fed back": Trace("the engine reads `norm_output` from a file that means something else by it, and feeds "
                                        "the normed state back", _TAKES, "the state of the second draft step is the layer run on "
                                        "the normed first one", "measured"),
            "target's state fed back": Trace("the engine's second draft step receives the target's projected states of the row "
                                             "in "
                                             "place of the draft's output", _TAKES, "first drafts alike, later states other; "
                                             "alike with fed=target", "measured"),
            "target's state in the first round": Trace(
                "the hand-over from prefill to decode sends the target's state: only a request's first round is wrong", _TAKES,
                "all rounds alike but each request's first; alike with fed=target first", "measured"),
            "state of the step before": Trace("a buffer is read before it is written: from the third draft step on the state is "
                                              "one step old", _TAKES, "two drafts alike, the third not", "measured"),
            "residual left out": Trace("the engine feeds back the last branch without the stream it belongs to", _TAKES,
                                       "first drafts alike, later states other; alike with fed=branch", "measured"),
        },
        lookalikes={
            "pos-id": "positions of draft steps: the gate tries both; states of the second step fit one of them alone",
            "draft-kv": "a wrong cache changes the first draft of a round, too",
            "attn-mask": "a mask that hides the prompt or earlier drafts from draft steps: the gate tries both",
            "rope": "another rotary table changes the first draft of a round, too",
            "train-budget": "a draft trained for one step collapses from the second position on as well, in the replay of "
                            "training "
                            "states as in service",
        },
        unseen={"only counters": "a curve dead from position 2 has several causes: it is named as suspected at most"},
        reports=("CPM.cu PR #30", "ATOM PR #882", "sglang issue #10059", "sglang PR #10801", "vLLM PR #14464"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._by_stage(m) or from_trials(
            m, self.id, {"": "draft steps", "feedback": "config norm_output"}, _FIXES) or later_steps(
            m, self.id) or dead_after_first(m, self.id)

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "a wrong state fed back leaves the first draft of each round alike and no later one")

    def _by_stage(self, m: Measurements) -> list[Suspicion]:
        wrong = "post" if m.feedback == "pre" else "pre"
        stages = m.stages
        errors = {} if stages is None else stages.feedback_error
        seen = wrong in errors and m.feedback in errors and errors[wrong] < SAME and errors[m.feedback] > OTHER
        gate = m.gate_with.get(f"feedback={wrong}")
        if not seen:
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
                    config={reader: keys for reader, keys in setting_keys(m.consumer, "norm_output", m.feedback == "post").items()
                            if keys},
                ),
                recovery="replayed",
                undo=Undo(feedback=m.feedback),
                runtime=True,
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "post-norm fed back":
            return replace(plant, engine=replace(plant.engine, feedback="post"))
        if variant not in _MADE:
            raise ValueError(f"recur-state has no variant {variant!r}")
        return runs_otherwise(plant, **_MADE[variant])

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, feedback=None, runtime=Runtime()))
