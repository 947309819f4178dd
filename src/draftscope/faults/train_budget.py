"""train-budget: the draft has learned too little; training and serving agree with each other, so there is nothing to repair."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.checking import spoilt
from draftscope.faults.facts_data import CurveFacts
from draftscope.faults.measurements import CLEARLY, LEARNED, Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Strength

# A draft that knows little more than how often each token occurs.
POSITION_1 = 0.35
NOTHING = 0.85
"""Loss over that of a draft that knows nothing, from which nothing was learned."""
UNMOVED = 0.95
FALLEN = 0.03
"""Relative fall of a held-out figure from its best to the end, from which training went on for too long."""
BY_HEART = 0.2
"""Acceptance at the first position by which training states may lie above held-out ones."""
EVALUATIONS = 4
SHORT = 0.9
"""Of the longest accept length of the curve, below which more data would help."""


class TrainBudget(Fault):
    """Too few tokens or steps, too many over little data, or nothing learned."""

    id = "train-budget"
    title = "too little training"
    verdict = "training"
    variants = ("few sequences",)
    page = Page(
        symptom="the draft is as poor on its own training states as in service, or well there and poor on everything else",
        traces={
            "few sequences": Trace("the draft saw a handful of samples", "--train, --draft, --target",
                                   "-log p on training states is near that of the tokens' own frequencies", "trained"),
        },
        lookalikes={
            "lossmask-empty": "a loss of exactly 0, not a high one",
            "config-flag": "a checkpoint read otherwise than it was trained is poor on its training states too; a switch turned "
                           "mends it there",
            "leak": "training accuracy that replay on single samples does not reach; over-training is good there and poor on "
                    "held-out samples",
            "vocab-map": "the log is good and the checkpoint poor",
        },
        unseen={
            "nothing learned": "told by a log (--log) whose loss stays near ln of the draft vocabulary; the checkpoint alone "
                               "looks "
                               "like one exported before its first step (weight-missing)",
            "training past the best checkpoint": "told by the held-out figures of a log (--log), which fall from their best "
                                                 "while the loss goes on falling; not made here: the small pair does not "
                                                 "over-train in minutes",
            "too few parameters": "a wider draft would have to be trained: nothing in one draft's files says what it could do",
        },
        reports=("SpecForge issue #128", "1bit-MONSTER issue #1509", "DeepSpec issue #84"))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._on_fresh_prompts(m) + self._everywhere(m) + self._by_heart(m) + self._by_log(m) + self._by_tokens(m)

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
        seen = [] if m.in_sample is None else [m.in_sample]
        best = max(facts.joint[0] for facts in (*m.rungs.values(), *seen) if facts.joint)
        other = m.embedding is not None and (m.embedding.own or 0) - (m.embedding.target or 0) > CLEARLY
        logged = None if m.data.curve is None else m.data.curve.accuracy
        # A log that says otherwise speaks of a leak, or of another checkpoint.
        if logged is not None and logged > 2 * POSITION_1:
            return []
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

    def _by_heart(self, m: Measurements) -> list[Suspicion]:
        """A draft that does well on the samples that it learned from, and not on others of their kind."""
        seen, unseen = m.in_sample, m.rungs.get("trained")
        if seen is None or unseen is None or not seen.joint or not unseen.joint or spoilt(m):
            return []
        if seen.joint[0] - unseen.joint[0] < BY_HEART:
            return []
        return [Suspicion(
            fault=self.id, side="train", where=[],
            says=f"the draft knows its training texts by heart: it accepts {seen.joint[0]:.0%} at the first position on states "
                 f"that it learned from, and {unseen.joint[0]:.0%} on held-out ones",
            strength="supported",
            evidence=[Evidence(
                hypothesis="too little data, too often", prediction="on held-out samples a draft is nearly as good as on its own",
                measurement="acceptance at the first position on training states and on held-out ones, by replay",
                result=f"{seen.joint[0]:.0%} over {seen.rows} rows, {unseen.joint[0]:.0%} over {unseen.rows}",
                decides="train-budget if the two are far apart",
                figures={"in_sample": seen.joint[0], "held_out": unseen.joint[0]},
            )],
            fix=Fix(says="Train on more of the target's own answers rather than longer, and keep the checkpoint that is best on "
                         "held-out samples."),
            recovery="needs-retraining",
            caveats=["held-out samples of another kind than the training's look the same: take both from one source"],
        )]

    def _by_log(self, m: Measurements) -> list[Suspicion]:
        curve = m.data.curve
        if curve is None or curve.last_loss is None:
            return []
        if curve.uniform is not None and _still(curve) and (curve.accuracy or 0) < POSITION_1:
            accuracy = "" if curve.accuracy is None else f", accuracy at the first position {curve.accuracy:.0%}"
            return [_logged(
                curve, f"the {curve.format} log ends where it began: nothing was learned", "supported",
                prediction=f"the loss falls well below {curve.uniform:.2f}, which is ln of the draft vocabulary",
                result=f"{curve.first_loss:.2f} at first and {curve.last_loss:.2f} after {curve.steps} steps{accuracy}",
                decides="train-budget where the loss stays near that of a draft that knows nothing; lossmask-empty where it is 0",
                fix="Look at the learning rate, at frozen weights and at the share of supervised tokens; do not look for a "
                    "serving "
                    "fault before the loss falls.", figures={"uniform": curve.uniform})]
        if curve.nonfinite:
            return [_logged(
                curve, f"{curve.nonfinite} of {curve.points} logged losses are NaN or Inf", "supported",
                prediction="every loss is a number", result=f"{curve.nonfinite} of {curve.points} are none",
                decides="train-budget where training broke down; nonfinite where the states hold NaN",
                fix="Look for NaN in the states (`draftscope inspect`), lower the learning rate, and go back to a checkpoint "
                    "from "
                    "before.", figures={"nonfinite": curve.nonfinite})]
        return self._too_long(curve)

    def _too_long(self, curve: CurveFacts) -> list[Suspicion]:
        if len(curve.held) < EVALUATIONS:
            return []
        sign = 1 if curve.held_better else -1
        at, best = max(curve.held, key=lambda held: sign * held[1])
        last = curve.held[-1][1]
        after = [figure for step, figure in curve.held if step > at]
        fall = sign * (best - last) / max(abs(best), 1e-9)
        # Evaluations scatter: every later one is worse, and the last by more than neighbours differ.
        scatter = _scatter([figure for _, figure in curve.held])
        if len(after) < 2 or fall < FALLEN or sign * (best - last) < 2 * scatter:
            return []
        if curve.first_loss is None or curve.last_loss is None or curve.last_loss > curve.first_loss:
            return []
        what = {"length": "accept length", "accuracy": "accuracy", "loss": "loss"}[curve.held_what]
        return [_logged(
            curve, f"training went on past its best: held-out {what} was {best:.2f} at step {at} and is {last:.2f} at the end",
            "supported", prediction="the held-out figure goes on with the training loss, or stays",
            result=f"held-out {what} {curve.held[0][1]:.2f} at first, {best:.2f} at step {at}, {last:.2f} at step "
            f"{curve.held[-1][0]}; training loss {curve.first_loss:.2f} to {curve.last_loss:.2f}",
            decides="train-budget where training and held-out figures part; a fault of wiring shows on both",
            fix=f"Take the checkpoint of step {at} (ours keeps it in best/; SpecForge and speculators keep what save_best or the "
                "interval left), and train on more data rather than longer.",
            figures={"best": best, "best_step": at, "last": last, "what": curve.held_what})]

    def _by_tokens(self, m: Measurements) -> list[Suspicion]:
        budget = m.data.budget
        if budget is None:
            return []
        reached, low, high = budget.reached
        more, more_low, _ = budget.more
        if budget.own > high or budget.own < 0.8 * low or more_low <= high or budget.own > SHORT * budget.best:
            return []
        return [Suspicion(
            fault=self.id, side="train", where=[], strength="supported",
            says=f"with {budget.tokens:,} answer tokens drafts of this kind reach about {reached:.2f} ({low:.2f} to {high:.2f}); "
            f"yours has {budget.own:.2f}",
            evidence=[Evidence(
                hypothesis="the draft does what so little training gives",
                prediction="beyond the budget's figure if something else were better, clearly below it if something were wrong",
                measurement=f"accept length against answer tokens of training, measured on {budget.pair}",
                result=f"{budget.own:.2f} here; {reached:.2f} at as many tokens, {more:.2f} at four times as many, at best "
                f"{budget.best:.2f}",
                decides="train-budget where the draft is where its tokens put it and more would carry it further",
                figures={"tokens": budget.tokens, "reached": budget.reached, "more": budget.more, "own": budget.own})],
            fix=Fix(says=f"Train on more of the target's own answers: four times as many gave {more:.2f} there."),
            recovery="needs-retraining",
            caveats=[f"measured on {budget.pair}: another target reaches other lengths; the shape is what carries over"])]

    def why_not(self, m: Measurements) -> str:
        told = []
        rung, curve, budget = m.rungs.get("trained"), m.data.curve, m.data.budget
        if rung is not None and rung.nll is not None and m.unigram_nll:
            told.append(f"on training states -log p is {rung.nll:.2f}, by frequencies alone it would be {m.unigram_nll:.2f}")
        if curve is not None and curve.last_loss is not None:
            told.append(f"the log's loss goes from {curve.first_loss:.2f} to {curve.last_loss:.2f}")
        if budget is not None:
            told.append(f"with {budget.tokens:,} answer tokens drafts of this kind reach about {budget.reached[0]:.2f} "
                        f"({budget.reached[1]:.2f} to {budget.reached[2]:.2f}); yours has {budget.own:.2f}")
        return "; ".join(told) or "takes training states and the draft (--train, --draft), or the training's log (--log)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "few sequences":
            return replace(plant, training_sequences=6)
        raise ValueError(f"train-budget has no variant {variant!r}")


def _still(curve: CurveFacts) -> bool:
    """Whether the loss of the first position is that of a draft that knows nothing; of a total alone, whether it has not "
    "moved."""
    if curve.uniform is None or curve.first_loss is None or curve.last_loss is None:
        return False
    if curve.position_loss is not None:
        return curve.position_loss >= NOTHING * curve.uniform
    return curve.last_loss >= max(NOTHING * curve.uniform, UNMOVED * curve.first_loss)


def _scatter(figures: list[float]) -> float:
    """How much neighbouring evaluations differ beyond their trend: the median of second differences."""
    second = sorted(abs(a - 2 * b + c) for a, b, c in zip(figures, figures[1:], figures[2:], strict=False))
    return second[len(second) // 2] / 2 if second else 0.0


def _logged(curve: CurveFacts, says: str, strength: Strength, *, prediction: str, result: str, decides: str, fix: str,
            figures: dict[str, object]) -> Suspicion:
    return Suspicion(
        fault=TrainBudget.id, side="train", where=[], says=says, strength=strength,
        evidence=[Evidence(
            hypothesis="the training itself is why the draft is poor", prediction=prediction,
            measurement=f"the {curve.format} training log, {curve.points} records over {curve.steps} steps", result=result,
            decides=decides,
            figures={"first_loss": curve.first_loss, "last_loss": curve.last_loss, "steps": curve.steps, **figures})],
        fix=Fix(says=fix), recovery="needs-retraining")
