"""attn-mask: the draft attends to other positions in service than in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.eagle3.reading import Runtime
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, reads_otherwise, runs_otherwise, tried_in_vain
from draftscope.faults.shapes import falls_with_context

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_WINDOW = 32
_MADE: dict[str, dict[str, Any]] = {
    "draft steps blind to the prompt": {"blind_to_prompt": True},
    "draft steps blind to earlier drafts": {"blind_to_drafted": True},
}
_TWO_WAY = "rows of one pass see each other"
_FIXES = {
    "": "Let every row and draft step of the draft see all earlier rows, the prompt's included, and what it drafted before.",
    "sliding_window": "Give the draft's layers the window of its own configuration. vLLM reads `sliding_window` and "
                      "`layer_types` of "
                      "the draft; SGLang only `--speculative-draft-window-size`.",
    "two_way": "Use a causal mask in the draft.",
}


class AttnMask(Fault):
    """A sliding window that is not the draft's, or rows that are hidden from its steps."""

    id = "attn-mask"
    title = "the draft sees other rows"
    verdict = "runtime"
    variants = (f"window of {_WINDOW} applied", "window of 64 applied", "window ignored", "window off by half", *_MADE, _TWO_WAY)
    page = Page(
        symptom="Acceptance is right for short requests and falls where the context reaches a window, or falls from position 2 "
                "on.",
        traces={
            f"window of {_WINDOW} applied": Trace(
                f"the engine runs the draft's layers with a window (the target's, or a default) of {_WINDOW}; the draft has none",
                _TAKES, f"first rounds of short prompts alike, others not; alike with sliding_window={_WINDOW}", "measured"),
            "window of 64 applied": Trace("the same with a window that only longer requests reach", _TAKES,
                                          "states alike up to 64 rows, not beyond", "measured"),
            "window ignored": Trace("the draft's configuration has a window, the engine runs full attention", _TAKES,
                                    "states alike up to the window, not beyond; alike with sliding_window=None", "measured"),
            "window off by half": Trace("the engine has half the window that the draft was made with", _TAKES,
                                        "states alike up to half the window", "measured"),
            "draft steps blind to the prompt": Trace("the decode kernel's first page is left out in drafted steps", _TAKES,
                                                     "first drafts alike, later states other; alike with blind_to_prompt",
                                                     "measured"),
            "draft steps blind to earlier drafts": Trace(
                "sequence lengths are not advanced over draft steps, so that a step does not see its predecessors", _TAKES,
                "two drafts alike, the third not; alike with blind_to_drafted", "measured"),
            _TWO_WAY: Trace("the engine runs a draft of several layers without a causal mask, so that rows of a pass see later "
                            "ones", _TAKES, "every round's states off, the first request's too; alike with two_way", "measured"),
        },
        lookalikes={
            "draft-kv": "the prompt missing from the cache changes the first draft too; hidden from draft steps alone it does "
                        "not",
            "ctx-limit": "falls at the position limit or smoothly beyond the training length, a window cuts where it ends",
            "recur-state": "states of the second step fit one of the trials alone",
            "pos-id": "the same",
        },
        unseen={
            "rows of one pass see each other, in a draft of one layer": "its keys and values do not depend on what a row sees, "
                                                                        "so that the last row's output is the same",
            "a training mask that is not causal": "it shows as a low trained rung only: data and training have that, too",
        },
        reports=("SpecForge PR #427", "community Qwen3.6-27B DFlash repository, issue #6", "speculators PR #684"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return from_trials(m, self.id, {"": "draft attention", "sliding_window": "config sliding_window"}, _FIXES) or (
            falls_with_context(m, self.id))

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "a window would leave the rows before it alike and no later ones")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant in _MADE:
            return runs_otherwise(plant, **_MADE[variant])
        if variant == _TWO_WAY:
            return runs_otherwise(replace(plant, draft="two layers"), two_way=True)
        windows = {f"window of {_WINDOW} applied": _WINDOW, "window of 64 applied": 64}
        if variant in windows:
            return reads_otherwise(plant, sliding_window=windows[variant])
        window = (("sliding_window", 2 * _WINDOW), ("layer_types", ["sliding_attention"]))
        configured = replace(plant, config=(*plant.config, *window))
        if variant == "window ignored":
            return reads_otherwise(configured, sliding_window=None)
        if variant == "window off by half":
            return reads_otherwise(configured, sliding_window=_WINDOW)
        raise ValueError(f"attn-mask has no variant {variant!r}")

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        settings = {name: value for name, value in plant.engine.settings.items() if name != "sliding_window"}
        return replace(plant, engine=replace(plant.engine, runtime=Runtime(), settings=settings))
