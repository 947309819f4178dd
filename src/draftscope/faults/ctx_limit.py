"""ctx-limit: the draft is asked beyond its position limit, or beyond the lengths that it was trained on."""

from __future__ import annotations

from dataclasses import replace

from draftscope.eagle3.reading import Runtime
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.runtimes import from_trials, runs_otherwise, tried_in_vain
from draftscope.findings import Evidence, Fix

_TAKES = "--serve with its verify steps, --draft (and --target for its embedding)"
_LIMITS = {"positions end at the limit": 64, "positions end early": 32}
FEWEST, FALLS, CERTAIN = 50, 0.8, 4.0
"""Rounds on either side; share of the acceptance within that is left beyond; standard errors of the difference."""
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
        unseen={"trained on short sequences only": "told on data that reach beyond the longest training sequence, not planted "
                                                   "here: it takes a draft trained so",
                "engine stops drafting": "vLLM drafts no longer beyond the limit: such steps are not recorded at all"},
        reports=("SpecForge issue #249", "SpecForge PR #271", "sglang issue #6783", "speculators PR #684"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return from_trials(m, self.id, {"": "config max_position_embeddings"}, _FIXES) or self._beyond_training(m)

    def _beyond_training(self, m: Measurements) -> list[Suspicion]:
        """An engine that does as it should, and a draft that was never shown so long a context."""
        facts = m.lengths
        right = (m.gate is not None and m.gate.passed) or (m.runtime is not None and m.runtime.settled)
        if facts is None or facts.within is None or facts.beyond is None or not right:
            return []
        within, beyond = facts.within, facts.beyond
        if min(within.rounds, beyond.rounds) < FEWEST or beyond.first > FALLS * within.first:
            return []
        pooled = (within.first * within.rounds + beyond.first * beyond.rounds) / (within.rounds + beyond.rounds)
        spread = (pooled * (1 - pooled) * (1 / within.rounds + 1 / beyond.rounds)) ** 0.5
        if within.first - beyond.first < CERTAIN * spread:
            return []
        stretches = "; ".join(f"{one.start} to {one.end}: {one.length:.2f}" for one in facts.stretches)
        return [Suspicion(
            fault=self.id, side="serve", where=["context"], strength="supported", recovery="needs-retraining",
            says=f"beyond {facts.trained} tokens, the longest training sequence, the draft accepts {beyond.length:.2f} in place "
            f"of {within.length:.2f}: it was trained on shorter contexts; the wiring is not at fault",
            evidence=[Evidence(
                hypothesis="the draft does not know contexts as long as those served",
                prediction="acceptance holds up to the longest training sequence and decays beyond, in replay as in the engine",
                measurement="recorded counts by the position that their round starts from; the gate",
                result=f"accept length by context {stretches}; first draft {within.first:.0%} of {within.rounds} rounds within, "
                f"{beyond.first:.0%} of {beyond.rounds} beyond",
                decides="ctx-limit where replay gives the engine's counts at every length: a window or a limit of the engine's "
                "would not come out in it",
                figures={"trained": facts.trained, "within": within.length, "beyond": beyond.length})],
            fix=Fix(says=f"Train on sequences as long as those served, or do not draft beyond {facts.trained} tokens."),
            caveats=[f"at most {within.length:.2f} there, if long contexts came to accept as short ones do",
                     "what is written late in an answer may be harder to guess whatever the training"])]

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
