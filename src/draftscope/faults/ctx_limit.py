"""ctx-limit: the draft is asked beyond its position limit, or beyond the lengths that it was trained on."""

from __future__ import annotations

from dataclasses import replace

from draftscope.eagle3.reading import Runtime
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, runs_otherwise, tried_in_vain

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_LIMITS = {"positions end at the limit": 64, "positions end early": 32}
_FIXES = {
    "": "Raise `max_position_embeddings` in the draft's configuration to the lengths that are served (the rotary table grows "
        "with it), "
        "or do not draft beyond it.",
}


class CtxLimit(Fault):
    """Beyond the limit an engine stops counting positions; beyond the training length the draft itself decays."""

    id = "ctx-limit"
    title = "context beyond the draft's"
    verdict = "training"
    variants = tuple(_LIMITS)
    page = Page(
        symptom="Short requests accept as in training, long ones hardly anything.",
        traces={
            "positions end at the limit": Trace("the engine's rotary table ends at the draft's `max_position_embeddings`, and "
                                                "rows "
                                                "beyond it take the last entry", _TAKES,
                                                "states alike up to that position and no later; alike with table=64", "measured"),
            "positions end early": Trace("the same with a limit within the prompt", _TAKES, "alike with table=32", "measured"),
        },
        lookalikes={
            "attn-mask": "a window cuts what is seen from its size on, wherever the row stands; both are tried",
            "rope": "off at every distance, not from a position on",
            "draft-kv": "goes by round or request, not by position",
        },
        unseen={"engine stops drafting": "vLLM drafts no longer beyond the limit: such steps are not recorded at all"},
        reports=("SpecForge issue #249", "SpecForge PR #271", "sglang issue #6783", "speculators PR #684"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return from_trials(m, self.id, {"": "config max_position_embeddings"}, _FIXES)

    def why_not(self, m: Measurements) -> str:
        return tried_in_vain(m, "a limit would leave the rows before it alike and no later ones")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in _LIMITS:
            raise ValueError(f"ctx-limit has no variant {variant!r}")
        limit = _LIMITS[variant]
        return runs_otherwise(replace(plant, config=(*plant.config, ("max_position_embeddings", limit))), table=limit)

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, runtime=Runtime()),
                       config=tuple(pair for pair in plant.config if pair[0] != "max_position_embeddings"))
