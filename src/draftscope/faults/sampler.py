"""sampler: the way in which drafts are drawn, or accepted, keeps fewer than the two distributions allow."""

from __future__ import annotations

from dataclasses import replace

from draftscope.eagle3.sampling import Sampling
from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.facts_runtime import DECIDED, SamplerFacts
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Strength

_TAKES = "--serve with temperature, last_hidden, draft_token_ids and draft_states; --draft, --target (its head)"
_MADE = {
    "equality in place of rejection sampling": Sampling(1.0, draft="probabilistic", equality=True),
    "drafts drawn too cold": Sampling(1.0, draft="probabilistic", draft_temperature=0.4),
    "drafts drawn too warm": Sampling(1.0, draft="probabilistic", draft_temperature=2.0),
    "greedy drafts": Sampling(1.0),
}
DRAWN = 0.98
"""Share of drafts that are the draft's best from which it is not drawing them."""
IMPOSSIBLE = 5
COSTS = 0.1
"""Accept length."""


class Sampler(Fault):
    """Equality in place of rejection sampling, a greedy draft under a sampling target, a draft drawn at another temperature."""

    id = "sampler"
    title = "fewer drafts kept than could be"
    verdict = "runtime"
    variants = tuple(_MADE)
    page = Page(
        symptom="At temperature 0 acceptance is as in training, above it lower; texts are right.",
        traces={
            "equality in place of rejection sampling": Trace(
                "the verifier draws from the target and keeps a drawn draft only where it is the same token", _TAKES,
                "drafts that speculative sampling keeps for sure are rejected", "measured"),
            "drafts drawn too cold": Trace(
                "the draft draws at its own, lower temperature", _TAKES,
                "the drafts are likelier as draws at another temperature than the request's", "measured"),
            "drafts drawn too warm": Trace("the draft draws at a higher temperature", _TAKES, "the same", "measured"),
            "greedy drafts": Trace(
                "the draft proposes its best token while the target samples (a default of most engines)", _TAKES,
                "all drafts are the draft's argmax; kept with p(x) in place of the sum of min(p, q)", "measured"),
        },
        lookalikes={
            "train-budget": "low at temperature 0 as well",
            "recur-state": "changes states; with a sampler at fault states and logits are the replay's",
        },
        unseen={"rules of the server without states": "counters alone do not tell a rule from a weak draft: serve at "
                                                      "temperature 0 and "
                                                      "compare"},
        reports=("vLLM PR #16899",),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        facts = m.sampler
        if facts is None or facts.doubted is not None:
            return []
        return self._equality(facts) or self._greedy(facts) or self._temperature(facts)

    def why_not(self, m: Measurements) -> str:
        facts = m.sampler
        if facts is None:
            return "nothing was sampled, or the capture (--serve) lacks temperature, last states, drafts or draft states"
        if facts.doubted is not None:
            return (f"the text is likelier at temperature {facts.doubted:g} than at the {facts.temperature:g} that the capture "
                    "claims (or was cut by top-p or top-k): chances at the claimed one mean nothing")
        return (f"of {facts.drafts} drafts {facts.kept:.1%} stood, speculative sampling would have kept "
                f"{facts.expected_rejection:.1%}; as draws they are likeliest at temperature {facts.draft_temperature:g}")

    def _equality(self, facts: SamplerFacts) -> list[Suspicion]:
        spread = (facts.expected_equality * (1 - facts.expected_equality) / facts.drafts) ** 0.5
        explains = abs(facts.kept - facts.expected_equality) < 3 * spread
        beyond = facts.for_equality - facts.for_rejection > DECIDED and facts.impossible >= IMPOSSIBLE
        if facts.best > DRAWN or not (explains and beyond):
            return []
        return [_suspicion(
            facts, "proven", "drawn drafts are kept only where the target draws the same token, not by rejection sampling",
            prediction="under speculative sampling a draft with p(x) >= q(x) always stands",
            result=f"{facts.impossible} of {facts.drafts} drafts were rejected with p(x) > q(x); {facts.kept:.1%} stood, "
            f"{facts.expected_equality:.1%} expected under equality, {facts.expected_rejection:.1%} under rejection sampling",
            decides="sampler if what stood is explained by equality and impossible under rejection sampling",
            fix="Accept a drawn draft with probability min(1, p(x)/q(x)) and draw from the residual otherwise (vLLM: "
            "rejection_sample_method standard).", bound=facts.length_rejection)]

    def _greedy(self, facts: SamplerFacts) -> list[Suspicion]:
        if facts.best <= DRAWN or facts.length_overlap - facts.length < COSTS:
            return []
        found = _suspicion(
            facts, "supported", "the draft proposes its best token while the target samples: less is accepted by design",
            prediction="a greedy draft stands with p(x), drawn ones with the sum of min(p, q)",
            result=f"{facts.best:.1%} of {facts.drafts} drafts are the draft's argmax; {facts.kept:.1%} stood, "
            f"{facts.overlap:.1%} would with drawn drafts",
            decides="sampler, as a choice and no defect: the expected loss of greedy drafting at this temperature",
            fix="Draw drafts at the request's temperature where the engine can (vLLM: draft_sample_method probabilistic), or "
                "compare "
            "acceptance at temperature 0 only.", bound=facts.length_overlap)
        found.caveats.append("this is how most engines draft, and no fault of wiring")
        return [found]

    def _temperature(self, facts: SamplerFacts) -> list[Suspicion]:
        if facts.best > DRAWN or not facts.drawn_otherwise:
            return []
        return [_suspicion(
            facts, "supported", f"the drafts are drawn at temperature {facts.draft_temperature:g}, the request's is "
            f"{facts.temperature:g}",
            prediction="drafts are draws from the draft's distribution at the request's temperature",
            result=f"as draws they are likeliest at {facts.draft_temperature:g}, by {facts.temperature_gain:.1f} in "
                   f"log-likelihood "
            f"over {facts.temperature:g}; {facts.kept:.1%} stood, {facts.overlap:.1%} would at the same temperature",
            decides="sampler if the draft's own distribution at another temperature explains its drafts better",
            fix="Draw drafts at the request's own temperature, top-k and top-p.", bound=facts.length_overlap)]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in _MADE:
            raise ValueError(f"sampler has no variant {variant!r}")
        return replace(plant, sampling=_MADE[variant])

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, sampling=Sampling(1.0, draft="probabilistic"))


def _suspicion(facts: SamplerFacts, strength: Strength, says: str, *, prediction: str, result: str, decides: str, fix: str,
               bound: float) -> Suspicion:
    return Suspicion(
        fault=Sampler.id, side="serve", where=["sampler"], says=f"{says} (accept length {facts.length:.2f}; at most {bound:.2f} "
        "without)", strength=strength,
        evidence=[Evidence(
            hypothesis=says, prediction=prediction,
            measurement="the target's distribution (its head over the recorded last states) and the draft's (its head over the "
            "recorded draft states) at every draft that the target was asked about", result=result, decides=decides,
            figures={"drafts": facts.drafts, "kept": facts.kept, "rejection": facts.expected_rejection,
                     "equality": facts.expected_equality, "overlap": facts.overlap, "length": facts.length, "bound": bound})],
        fix=Fix(says=fix), recovery="bounded", runtime=True)
