"""What a training log shows of learning: loss against knowing nothing, held-out figures, restarts; and what the budget allows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

import draftscope
from draftscope.diagnose.traininglog import Curve, Point
from draftscope.errors import DraftscopeError
from draftscope.faults.facts_data import BudgetFacts, CurveFacts, Restart

BUDGET = Path(draftscope.__file__).parent / "embedded" / "budget.json"
"""The measured curve, where the package has one."""
EDGE = 0.05
"""Share of the records that are a log's beginning, and its end."""
BEFORE, AFTER = 12, 4
"""Records looked at round a restart."""
JUMP, SPREADS, LASTING = 0.08, 4.0, 3.0
"""Rise of the loss from which a place without a word is a jump: relative, and in standard deviations of the records before, of
the first record and of the next few together."""


def curve_facts(curve: Curve, vocabulary: int | None) -> CurveFacts:
    """The figures of a log; `vocabulary` is the draft's, for the loss of one that knows nothing."""
    points = [point for point in curve.points if point.loss is not None]
    finite = [point for point in points if point.loss is not None and math.isfinite(point.loss)]
    taught = [point for point in finite if point.loss]
    facts = CurveFacts(curve.format, len(points), max((point.step for point in curve.points), default=0),
                       uniform=math.log(vocabulary) if vocabulary and vocabulary > 1 else None)
    facts.nonfinite = len(points) - len(finite)
    facts.zero = sum(point.loss == 0 for point in finite)
    # Every pass over the data shows the same tokens.
    passes = [point.tokens for point in points if point.epoch == points[0].epoch]
    if passes and all(tokens is not None for tokens in passes):
        facts.tokens = sum(tokens or 0 for tokens in passes)
    if taught:
        edge = max(1, round(EDGE * len(taught)))
        losses = [point.loss or 0.0 for point in taught]
        facts.first_loss, facts.last_loss = mean_of(losses[:edge]), mean_of(losses[-edge:])
        facts.lowest_loss = min(mean_of(losses[i : i + edge]) for i in range(0, len(losses), edge))
    positions = [point.position_loss for point in points if point.position_loss]
    if positions:
        facts.position_loss = mean_of(positions[-max(1, round(EDGE * len(positions))) :])
    accuracies = [point.accuracy[0] for point in curve.points if 0 in point.accuracy]
    if accuracies:
        facts.accuracy = mean_of(accuracies[-max(1, round(EDGE * len(accuracies))) :])
    for what, better in (("length", True), ("accuracy", True), ("loss", False)):
        held = [(point.step, point.held[what]) for point in curve.points if math.isfinite(point.held.get(what, math.nan))]
        if held:
            facts.held, facts.held_what, facts.held_better = held, what, better
            break
    facts.restarts = _restarts(finite)
    return facts


def mean_of(values: Sequence[float]) -> float:
    """The mean; infinite where the sum is."""
    return sum(values) / len(values)


def _restarts(points: Sequence[Point]) -> list[Restart]:
    """Where the log says so, where steps begin again, and where the loss jumps."""
    found: list[Restart] = []
    last = -BEFORE
    for i in range(4, len(points)):
        back = points[i].step <= points[i - 1].step
        here = points[i].step
        before = [p for p in points[max(0, i - BEFORE) : i] if p.step < here] if back else list(points[max(0, i - BEFORE) : i])
        after = points[i : i + AFTER]
        if len(before) < 4 or len(after) < 2:
            continue
        losses = [p.loss or 0.0 for p in before]
        mean = mean_of(losses)
        spread = math.hypot(*(loss - mean for loss in losses)) / math.sqrt(len(losses))
        jump = mean_of([p.loss or 0.0 for p in after])
        told = points[i].resumed or ("steps begin again" if back else "")
        if told and len(points) > i + AFTER:  # a first loss of single steps comes before anything was changed
            jump = max(jump, mean_of([p.loss or 0.0 for p in points[i + 1 : i + 1 + AFTER]]))
        sudden = (points[i].loss or 0.0) > mean + max(SPREADS * spread, JUMP * mean) and jump > mean + max(
            LASTING * spread, JUMP * mean)
        if (told or sudden) and i - last >= AFTER:
            found.append(Restart(here, mean, jump, spread, before[-1].rate, points[i].rate, told))
            last = i
    return found


@dataclass(frozen=True, slots=True)
class _At:
    length: float
    low: float
    high: float


class Reached(BaseModel):
    """One point of a budget curve: accept length of a draft trained on so many answer tokens, and its 95 % interval."""

    answer_tokens: int = Field(gt=0)
    length: float = Field(ge=1)
    interval: tuple[float, float] | None = None

    def at(self) -> _At:
        low, high = self.interval or (self.length, self.length)
        return _At(self.length, low, high)


class Budget(BaseModel):
    """`embedded/budget.json`: what drafts of one kind reach by the answer tokens that they were trained on."""

    schema_: str = Field("draftscope.budget/1", alias="schema")
    target: str
    about: str = ""
    k: int = Field(gt=0)
    points: list[Reached] = Field(min_length=2)


def read_budget(path: Path = BUDGET) -> Budget | None:
    """The measured curve, points by tokens; None where there is none.

    Raises:
        DraftscopeError: the file is there and is none.
    """
    try:
        budget = Budget.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise DraftscopeError(f"is no budget curve ({str(error).splitlines()[0]})", where=str(path)) from None
    budget.points.sort(key=lambda point: point.answer_tokens)
    return budget


def budget_facts(budget: Budget, tokens: int, own: float) -> BudgetFacts:
    """Accept length `own` after training on `tokens` answer tokens, beside what the curve says of as many and of four times."""
    now, more = _at(budget, tokens), _at(budget, 4 * tokens)
    return BudgetFacts(tokens, (now.length, now.low, now.high), (more.length, more.low, more.high),
                       max(point.length for point in budget.points), budget.target, own)


def _at(budget: Budget, tokens: int) -> _At:
    """Between two points, in the logarithm of the tokens; beyond the ends their own figures."""
    points = budget.points
    if tokens <= points[0].answer_tokens:
        return points[0].at()
    for a, b in pairwise(points):
        if tokens <= b.answer_tokens:
            share = (math.log(tokens) - math.log(a.answer_tokens)) / (math.log(b.answer_tokens) - math.log(a.answer_tokens))

            def between(x: float, y: float, share: float = share) -> float:
                return x + share * (y - x)

            below, above = a.at(), b.at()
            return _At(between(below.length, above.length), between(below.low, above.low), between(below.high, above.high))
    return points[-1].at()
