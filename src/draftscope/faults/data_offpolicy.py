"""data-offpolicy: the training answers are not this target's, or not of what is served."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.facts_data import PolicyFacts
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.template import difference
from draftscope.faults.writing import Author
from draftscope.findings import Evidence, Fix

OWN = 0.9
"""Share of tokens that are the target's first choice from which the answers are its own greedy text."""
EXCESS, SURELY = 0.15, 0.05
"""-log p over the entropy of the target, from which text is not drawn from it, and the lower end of its interval."""
TAIL, TAIL_SHARE = 2.0, 0.02
"""By how much unlikely tokens are more frequent than in the target's own text, at the temperature that fits best."""
SPREADS = 4.0
"""Standard errors by which the target's first choice is taken too seldom where it is sure: another was sure of something else."""
HOTTEST = 2.0
"""Temperature beyond which nobody samples training answers."""
PACKED = 0.1
"""Documents behind another one, by sample, from which the answers are not judged."""
CHANCE = 0.1
"""Agreement below which recorded states may be those of something else altogether."""
BELOW, THINNER, DROP = 0.5, 0.8, 1.2
AUTHORS = {"train other model": "other model", "train other hand": "other hand", "train stale target": "stale target"}


class DataOffpolicy(Fault):
    """Answers by another model or by people, by an older version of the target, or of another domain than is served."""

    id = "data-offpolicy"
    title = "answers that the target does not write"
    verdict = "data"
    variants = (*AUTHORS, "other domain served")
    page = Page(
        symptom="training goes well, acceptance stays below what the same recipe gives elsewhere, and differs by kind of "
                "question",
        traces={
            "train other model": Trace("the answers were taken from a data set as they were (ShareGPT), written by another model",
                                       "--train, --target", "the target finds the answers less likely than its own would be, and "
                                       "unlikely tokens are too frequent at any temperature", "reference"),
            "train other hand": Trace("the answers are by people, or taken over from other questions", "--train, --target",
                                      "the same, more strongly", "reference"),
            "train stale target": Trace("the target was tuned further after the data was made", "--train, --target",
                                        "the recorded states agree with the answers, the target run again does not",
                                        "reference"),
            "other domain served": Trace("the draft is used for what its training data does not hold", "--train, --serve, "
                                                                                                       "--target",
                                         "requests are made of token pairs that training samples lack, and accept less",
                                         "reference"),
        },
        lookalikes={
            "template": "the target writes the answers; their frame differs",
            "train-budget": "low on training states too",
            "token-shift": "the last state predicts the text at another row",
            "final-norm": "the last state predicts the text under the other reading of the norm, which is taken here",
            "lossmask-span": "a mask on user turns makes the text look like another's: it is judged first",
            "target-quant": "the target run again agrees with the answers nearly always",
        },
        unseen={
            "sampling at a high temperature": "no fault: such text is as unlikely as the target's own at that temperature, "
                                              "and is "
                                              "told apart by that",
            "a domain that differs in meaning alone": "text of the same tokens; hand over captures of each kind and compare them",
        },
        reports=("SafeAILab/EAGLE issue #106", "z-lab/dflash issue #119"))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._answers(m) + self._domain(m)

    def _answers(self, m: Measurements) -> list[Suspicion]:
        policy, mask = m.data.policy, m.data.mask
        if policy is None or not _foreign(policy):
            return []
        if mask is not None and (mask.other_share > SURELY or mask.other_sample or mask.displaced > SURELY):
            return []  # what is supervised is not the answers
        if mask is not None and (mask.last_agreement or 0) > OWN - CHANCE:
            return []  # the last answers are the target's own
        leak = m.data.leak
        if leak is not None and m.train is not None and leak.documents > PACKED * m.train.sequences:
            return []  # what the target says of a packed document depends on those before it
        stale = policy.again is not None and policy.recorded is not None and policy.recorded > policy.again + 2 * CHANCE
        who = ("the training answers and states are of another version of this target" if stale else
               "the training answers were not written by this target")
        span = "" if policy.interval is None else f" ({policy.interval[0]:.2f} to {policy.interval[1]:.2f})"
        again = "" if not stale else f"; the recorded states agree with {policy.recorded:.0%}"
        sure = f"where it is surest its first choice is taken {policy.sureness:+.1f} standard errors from that"
        source = "run again over the training tokens" if policy.by == "again" else "by the recorded last states and its head"
        return [Suspicion(
            fault=self.id, side="train", where=["train:answers"],
            # Recorded last states may be wrong themselves; the target run again is not.
            strength="supported" if policy.by == "again" else "suspected",
            says=f"{who}: its first choice is {policy.agreement:.0%} of their tokens",
            evidence=[Evidence(
                hypothesis="the answers come from another author",
                prediction="own text has a -log p of about the target's entropy, or less, and few tokens that it finds unlikely",
                measurement=f"the target's distribution over {policy.tokens} answer tokens of {policy.sequences} samples, "
                            f"{source}",
                result=f"-log p {policy.nll:.2f} against an entropy of {policy.entropy:.2f}: {policy.excess:+.2f}{span}; at "
                f"temperature {policy.temperature:g}, which fits best, {policy.tail:.1%} of the tokens are less likely than 1 in "
                f"1000, where its own text would have {policy.tail_expected:.1%}; {sure}{again}",
                decides="data-offpolicy where no temperature of the target explains the text; text sampled hot fits one; "
                        "template "
                "where the answers are its own",
                figures={"agreement": policy.agreement, "nll": policy.nll, "entropy": policy.entropy, "tail": policy.tail,
                         "tail_expected": policy.tail_expected,
                         "sureness": policy.sureness, "temperature": policy.temperature,
                         "recorded": policy.recorded, "again": policy.again})],
            fix=Fix(says="Let the target answer the prompts itself and train on that (`draftscope prepare`; SpecForge: "
                         "regenerate the "
                         "data with the target before training; speculators: response regeneration)."
                    + (" Extract states with the target as it is served." if stale else "")),
            recovery="needs-retraining",
            caveats=["what it costs takes training on the target's own answers; drafts trained on others' text still accept "
                     "some"])]

    def _domain(self, m: Measurements) -> list[Suspicion]:
        domain = m.data.domain
        if domain is None or domain.below < BELOW or domain.served > THINNER * domain.own[1]:
            return []
        if m.data.template is not None and difference(m.data.template) is not None:
            return []  # rendered otherwise, the target answers otherwise
        trained = m.rungs.get("trained")
        served = m.rungs.get("reference") or m.rungs.get("served")
        falls = (trained is not None and served is not None and trained.length is not None and served.length is not None
                 and trained.length > DROP * served.length)
        lengths = f"; accept length {trained.length:.2f} on training states, {served.length:.2f} on the served text" if (
            trained is not None and served is not None and trained.length and served.length) else ""
        halves = "" if domain.near is None or domain.far is None else (
            f"; the better covered half accepts {domain.near:.2f} drafts a step, the other {domain.far:.2f}")
        return [Suspicion(
            fault=self.id, side="serve", where=[], strength="supported" if falls else "suspected",
            says=f"what is served is of another kind than the training data: {domain.below:.0%} of the requests are less "
                 "alike to it "
            "than nineteen in twenty training samples are to the others",
            evidence=[Evidence(
                hypothesis="the served domain is not in the training data",
                prediction="requests are made of the token pairs of training samples as much as these are of one another's",
                measurement=f"share of neighbouring token pairs of {domain.requests} requests that training samples hold",
                result=f"{domain.served:.0%}; of a training sample the others hold {domain.own[1]:.0%} (lowest twentieth "
                f"{domain.own[0]:.0%}){lengths}{halves}",
                decides="data-offpolicy (domain) where the text is another and acceptance on the target's own states falls "
                        "with it",
                figures={"served": domain.served, "own": list(domain.own), "below": domain.below, "near": domain.near,
                         "far": domain.far})],
            fix=Fix(says="Add prompts such as are served to the training data, answered by the target, and retrain."),
            recovery="needs-retraining",
            caveats=["with few training samples at hand, those of the served kind may be among the ones not given"])]

    def why_not(self, m: Measurements) -> str:
        policy = m.data.policy
        if policy is None:
            return "takes training states with masks and the target, or its final norm and head (--train, --target)"
        if policy.lag:
            return f"the last state predicts tokens {policy.lag:+d} rows on: states and tokens do not stand together"
        return (f"the target's first choice is {policy.agreement:.0%} of the answers' tokens; their -log p is "
                f"{policy.excess:+.2f} "
                f"from its entropy, {policy.tail:.1%} of them are unlikely where {policy.tail_expected:.1%} would be")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "other domain served":
            return replace(plant, texts=replace(plant.texts, domain="other"))
        if variant not in AUTHORS:
            raise ValueError(f"data-offpolicy has no variant {variant!r}")
        return replace(plant, texts=replace(plant.texts, author=cast(Author, AUTHORS[variant])))


def _foreign(policy: PolicyFacts) -> bool:
    """Whether no temperature of the target explains the text."""
    if policy.lag or policy.agreement >= OWN or policy.excess < EXCESS:
        return False
    if policy.interval is not None and policy.interval[0] < SURELY:
        return False
    if policy.by == "recorded" and policy.agreement < CHANCE:
        return False
    stale = policy.recorded is not None and policy.again is not None and policy.recorded > max(OWN, policy.again + 2 * CHANCE)
    tail = policy.tail > max(TAIL * policy.tail_expected, policy.tail_expected + TAIL_SHARE)
    return stale or tail or policy.temperature > HOTTEST or policy.sureness < -SPREADS
