"""train-budget: the draft has learned too little; training and serving agree with each other, so there is nothing to repair."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion
from draftscope.faults.checking import spoilt
from draftscope.faults.measurements import CLEARLY, LEARNED, Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix

# A draft that knows little more than how often each token occurs.
POSITION_1 = 0.35


class TrainBudget(Fault):
    """Too few tokens or steps."""

    id = "train-budget"
    title = "too little training"
    verdict = "training"
    variants = ("few sequences",)

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._on_fresh_prompts(m) + self._everywhere(m)

    def _on_fresh_prompts(self, m: Measurements) -> list[Suspicion]:
        """A server that serves training prompts as well as replay has them, and others worse."""
        if m.live is None or m.live.separates != "text":
            return []
        return [Suspicion(
            fault=self.id, side="train", where=[],
            says="the draft does clearly worse on fresh prompts than on those of its training",
            strength="supported",
            evidence=[Evidence(
                hypothesis="what the draft learned does not reach beyond its training prompts",
                prediction="on its training prompts it accepts what replay on the training states gives; on fresh ones less",
                measurement="greedy answers of the running server to prompts of both kinds, by its own counters",
                result=m.live.says, decides="train-budget if only the fresh prompts lose",
            )],
            fix=Fix(says="Train on more prompts, and on prompts such as are served; the server itself is sound."),
            recovery="needs-retraining",
            caveats=["fresh prompts of another domain than the training data's lose as well: that is data, not quantity"],
        )]

    def _everywhere(self, m: Measurements) -> list[Suspicion]:
        rung = m.rungs.get("trained")
        if rung is None or rung.nll is None or not m.unigram_nll or not rung.joint:
            return []
        ratio = rung.nll / m.unigram_nll
        # A draft that does well on any states it is given has learned; what it fails on is then wrong, not the draft.
        best = max(facts.joint[0] for facts in m.rungs.values() if facts.joint)
        other = m.embedding is not None and (m.embedding.own or 0) - (m.embedding.target or 0) > CLEARLY
        if ratio < LEARNED or best > POSITION_1 or other or m.turned is not None or spoilt(m):
            return []
        return [
            Suspicion(
                fault=self.id,
                side="train",
                where=[],
                says=f"the draft has learned little: on training states it accepts {rung.joint[0]:.0%} at the first "
                "position, and knows hardly more than how often each token occurs",
                strength="supported",
                evidence=[
                    Evidence(
                        hypothesis="the draft was trained too little",
                        prediction="a trained draft is far better than token frequencies on its own training states",
                        measurement="-log p of the token to match on training states, against -log p under the tokens' own "
                        "frequencies there",
                        result=f"{rung.nll:.2f} against {m.unigram_nll:.2f} ({ratio:.0%}); best first-position acceptance on any "
                        f"rung {best:.0%}",
                        decides="train-budget if the draft fails on its own training states as it does in service; a fault of "
                        "wiring if only the latter",
                        figures={"nll": rung.nll, "unigram_nll": m.unigram_nll, "best_position_1": best},
                    )
                ],
                fix=Fix(
                    says="Train on more of the target's own answers, or longer; watch held-out accept length. Do not look for a "
                    "serving fault."
                ),
                recovery="needs-retraining",
            )
        ]

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant != "few sequences":
            raise ValueError(f"train-budget has no variant {variant!r}")
        return replace(plant, training_sequences=6)
