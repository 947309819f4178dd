"""What a replay found: rows, steps and texts of each sequence, and the read-outs and the gate over all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from draftscope.eagle3.acceptance import Counts, Difference, Ints, Likelihood, length_difference, nll_difference, summarise
from draftscope.eagle3.generated import NEAR_TIE
from draftscope.errors import UsageError
from draftscope.findings import Readout, Rung

Written = Literal["own", "other", "recorded", "unknown"]
Side = Literal["pre", "post"]

GATE_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Outcome:
    """Replayed rows of one sequence.

    Attributes:
        rows: [R] int64, t.
        lead: [R], tokens that match before the first that does not.
        limit: [R], positions that could be judged, 0..K.
    """

    rows: Ints
    lead: Ints
    limit: Ints
    k: int

    @property
    def accepted(self) -> Ints:
        """A_t [R], -1 where it cannot be told."""
        return np.where((self.lead < self.limit) | (self.limit == self.k), self.lead, -1)

    def take(self, chosen: Ints) -> Outcome:
        return Outcome(self.rows[chosen], self.lead[chosen], self.limit[chosen], self.k)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Recorded verify steps of one sequence, replayed from their own starts against the served text.

    Attributes:
        outcome: one row per step.
        recorded: [N] int64, accepted counts as the engine counted them.
        gap: [N, K], distance between the draft's two highest logits; of trees the least margin by which a node was taken.
        unplaced: steps of the request that have no start among the rows.
    """

    outcome: Outcome
    recorded: Ints
    gap: npt.NDArray[np.float64]
    unplaced: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """One sequence after replay.

    Attributes:
        written: `own` (the target's greedy text), `other` (argmax rules apply), `recorded` (the served text, taken as it
            stands because nothing was there to test it with), or `unknown` (nothing says where answers begin; argmax rules).
        share: share of the checked answer tokens that equal the target's argmax; None = not tested.
        checked: how many tokens that share rests on.
        last_norm: whether the last state was found before or after the final norm; None = not tested.
        answer: all answer rows; without a loss mask, all rows.
        walk: the answer rows that a server would have drafted from; None on text that the target did not write.
        steps: the recorded verify steps, or None.
        nonfinite: answer rows that see a NaN or Inf; they accept nothing and have no likelihood.
        unlike: there are recorded steps, but of chains or trees of another shape than was replayed.
    """

    name: str
    written: Written
    share: float | None
    checked: int
    last_norm: Side | None
    answer: Outcome
    walk: Outcome | None
    steps: StepOutcome | None
    likelihood: Likelihood
    nonfinite: int = 0
    unlike: bool = False


@dataclass(frozen=True, slots=True)
class NearTie:
    """A step whose replay differs from the count only where the draft's two best logits are closer than 1e-4.

    Of a tree the gap is the least distance in log-probability at which a node was taken or left.
    """

    name: str
    row: int
    position: int
    gap: float


@dataclass(frozen=True, slots=True)
class Gate:
    """Does replay reproduce the engine's own counts at the engine's own starts?

    Attributes:
        share: of the compared steps, those in which A_t equals the recorded count.
        steps: steps compared.
        near_ties: differing steps that rounding explains; they count as differing.
        left_out: steps that need a token beyond the last known one, or whose start is not among the rows.
    """

    share: float
    steps: int
    near_ties: tuple[NearTie, ...]
    left_out: int

    @property
    def passed(self) -> bool:
        return self.share >= GATE_SHARE


@dataclass(slots=True)
class Replay:
    """What `replay` returns: one entry per sequence, and figures pooled over them."""

    k: int
    sequences: list[Replayed] = field(default_factory=list)

    @property
    def readout(self) -> Readout:
        """The read-out with which this replay is best compared: walk, else engine, else all."""
        if any(s.walk is not None and len(s.walk.rows) for s in self.sequences):
            return "walk"
        return "engine" if any(s.steps is not None for s in self.sequences) else "all"

    def counts(self, readout: Readout | None = None) -> list[Counts]:
        """Per sequence, in order; sequences without the read-out contribute nothing."""
        chosen = readout or self.readout
        found = []
        for one in self.sequences:
            outcome = _outcome(one, chosen)
            if outcome is not None:
                found.append(Counts.of(one.name, outcome.lead, outcome.limit, self.k, one.likelihood))
        return found

    def rung(self, readout: Readout | None = None, held_out: bool | None = None, seed: int = 0) -> Rung:
        """Pooled acceptance; see `acceptance.summarise` for what is None when."""
        chosen = readout or self.readout
        return summarise(self.counts(chosen), self.k, chosen, held_out=held_out, seed=seed)

    def measured(self) -> Rung | None:
        """The engine's own counts on the steps that the read-out `engine` has; None without recorded steps."""
        counts = []
        for one in self.sequences:
            if one.steps is not None:
                known = one.steps.outcome.accepted >= 0
                recorded = np.minimum(one.steps.recorded[known], self.k)
                counts.append(Counts.of(one.name, recorded, np.full(len(recorded), self.k), self.k))
        return summarise(counts, self.k, "engine") if counts else None

    def gate(self) -> Gate | None:
        """None without recorded steps, or where none of them can be told."""
        compared = agreed = left_out = 0
        ties = []
        seen = False
        for one in self.sequences:
            if one.steps is None:
                continue
            seen = True
            accepted = one.steps.outcome.accepted
            recorded = np.minimum(one.steps.recorded, self.k)
            known = accepted >= 0
            compared += int(known.sum())
            left_out += int((~known).sum()) + one.steps.unplaced
            agreed += int((accepted == recorded)[known].sum())
            for i in np.flatnonzero(known & (accepted != recorded)):
                position = int(min(accepted[i], recorded[i]))
                gap = float(one.steps.gap[i, position])
                if gap < NEAR_TIE:
                    ties.append(NearTie(one.name, int(one.steps.outcome.rows[i]), position, gap))
        return Gate(agreed / compared, compared, tuple(ties), left_out) if seen and compared else None

    def only(self, names: Collection[str]) -> Replay:
        """The same replay over some of its sequences."""
        chosen = set(names)
        return Replay(self.k, [s for s in self.sequences if s.name in chosen])

    def text(self) -> dict[str, float | int | None]:
        """Sequences by who wrote them, and the pooled share of answer tokens that equal the target's argmax."""
        checked = sum(s.checked for s in self.sequences)
        equal = sum((s.share or 0.0) * s.checked for s in self.sequences)
        return {
            "own": sum(s.written == "own" for s in self.sequences),
            "other": sum(s.written == "other" for s in self.sequences),
            "recorded": sum(s.written == "recorded" for s in self.sequences),
            "unknown": sum(s.written == "unknown" for s in self.sequences),
            "share": equal / checked if checked else None,
            "post_norm": sum(s.last_norm == "post" for s in self.sequences),
            "pre_norm": sum(s.last_norm == "pre" for s in self.sequences),
        }


def _outcome(one: Replayed, readout: Readout) -> Outcome | None:
    if readout == "all":
        return one.answer
    if readout == "walk":
        return one.walk
    if one.steps is None:
        return None
    return one.steps.outcome.take(np.flatnonzero(one.steps.outcome.accepted >= 0))


def compare(first: Replay, second: Replay, readout: Readout | None = None, *, seed: int = 0) -> tuple[Difference, Difference]:
    """Second minus first, paired by sequence: of 1 + sum of joint in one read-out, and of nll."""
    if first.k != second.k:
        raise UsageError(f"replays of different K cannot be compared: {first.k} and {second.k}")
    chosen = readout or first.readout
    left, right = first.counts(chosen), second.counts(chosen)
    lengths = length_difference(left, right, first.k, seed=seed)
    return lengths, nll_difference(first.counts("all"), second.counts("all"), seed=seed)
