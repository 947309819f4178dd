"""The engine's recorded rounds held against the same rounds run offline under a reading: counts, drafted ids, draft states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftscope.eagle3.enacting import Course, Enacted, enact, leads, prefixes
from draftscope.eagle3.habits import Shared
from draftscope.eagle3.matching import Matcher, Prepared
from draftscope.eagle3.model import Draft
from draftscope.eagle3.stages import relative_error
from draftscope.eagle3.tree import TreeShape
from draftscope.faults.facts_runtime import Likeness
from draftscope.faults.measurements import SAME
from draftscope.states.types import Steps
from draftscope.target.parts import TargetParts

DEPARTS = 0.1
"""Relative error of a state beyond what rounding makes, bfloat16 included."""
BATCH = 16
"""Sequences run at once."""


@dataclass(slots=True)
class Round:
    """One round: its number, the rows seen by its first draft, accepted count as recorded and as found (-1 = not told), ids equal
    [up to K], errors of the states compared."""

    number: int
    context: int
    recorded: int
    found: int
    ids: list[bool] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    @property
    def alike(self) -> bool:
        """By the best evidence there is."""
        if self.errors:
            return all(e < SAME for e in self.errors) and all(self.ids)
        return all(self.ids) if self.ids else self.found in (-1, self.recorded)


class Recorded:
    """Sequences with their recorded rounds, prepared once for any number of readings.

    Args:
        draft: of any reading; only widths and vocabulary count.
        drawn: drafts were drawn: the recorded ones are run again, and only states compared.
    """

    def __init__(self, draft: Draft, sequences: Sequence[object], parts: TargetParts | None, k: int,
                 shape: TreeShape | None, *, drawn: bool = False) -> None:
        self.k, self.shape, self.drawn = k, shape, drawn
        matcher = Matcher(draft, parts, k, "auto")
        found = [matcher.prepare(s) for s in sequences]  # type: ignore[arg-type]
        self.sequences = [one for one in found if len(one.steps) and one.sequence.steps is not None
                          and (one.sequence.steps.parents is None) == (shape is None)]

    def rounds(self, draft: Draft, chosen: Sequence[int] | None = None, most: int | None = None) -> dict[int, list[Round]]:
        """The rounds of the chosen sequences (all if None), the first `most` of each, run under a draft's reading."""
        numbers = range(len(self.sequences)) if chosen is None else chosen
        if not self.sequences:
            return {}
        missing = prefixes(self.sequences, Shared(draft.runtime.prefix))
        found: dict[int, list[Round]] = {}
        by_length = sorted(numbers, key=lambda i: self.sequences[i].sequence.rows)
        with torch.no_grad():
            for start in range(0, len(by_length), BATCH):
                batch = by_length[start : start + BATCH]
                ones = [self.sequences[i] for i in batch]
                runs = enact(draft, self.k, self.shape, ones, [Course(one, False) for one in ones],
                             [missing[i] for i in batch], most, drawn=self.drawn)
                for i, one, run in zip(batch, ones, runs, strict=True):
                    found[i] = _rounds(one, run, self.k)
                    if self.drawn:
                        for one_round in found[i]:
                            one_round.ids, one_round.found = [], -1
        return found


def _rounds(one: Prepared, run: Enacted, k: int) -> list[Round]:
    steps = one.sequence.steps
    assert steps is not None
    lead, limit = leads(one, run, 1, k)
    place = {int(row): int(n) for row, n in zip(one.steps, one.placed, strict=True)}
    rounds = []
    for number, row in enumerate(run.rows):
        n = place[row]
        depth = k if steps.drafted is None or steps.parents is not None else min(int((steps.drafted[n] >= 0).sum()), k)
        told = lead[number] < limit[number] or limit[number] >= depth
        found = min(int(lead[number]), depth) if told else -1
        one_round = Round(number, int(one.sequence.positions[steps.start[n]]) + 1, min(int(steps.accepted[n]), k), found)
        if steps.parents is not None:
            _tree(one_round, run, number, steps, n)
        else:
            if steps.drafted is not None:
                one_round.ids = _equal(run.tokens[number], steps.drafted[n])
            if steps.states is not None:
                one_round.errors = _errors(run.states[number], steps, n, one_round.ids)
        rounds.append(one_round)
    return rounds


def _equal(own: Tensor, recorded: Tensor) -> list[bool]:
    """Whether drafted ids are the recorded ones, up to the first that is not."""
    found = []
    for a, b in zip(own.tolist(), recorded.tolist(), strict=False):
        if b < 0:
            break
        found.append(a == b)
        if a != b:
            break
    return found


def _errors(own: Tensor, steps: Steps, n: int, equal: list[bool]) -> list[float]:
    """Errors of the states whose tokens before are the engine's."""
    assert steps.states is not None
    comparable = max(1, len(equal)) if steps.drafted is not None else 1
    width = min(comparable, len(own), steps.states.shape[1])
    errors = relative_error(own[:width], steps.states[n, :width].to(own.dtype))
    return [float(e) for e in errors]


def _tree(into: Round, run: Enacted, number: int, steps: Steps, n: int) -> None:
    """A whole tree is the recorded one or not; its states are compared level by level, of another tree only the root's."""
    tokens, parents, states = run.tokens[number], run.parents[number], run.states[number]
    width = len(tokens)
    if steps.drafted is None or steps.parents is None:
        return
    drafted, above = steps.drafted[n], steps.parents[n]
    width = min(width, len(drafted))
    there = tokens[:width] >= 0
    same = torch.equal(tokens[:width], drafted[:width]) and torch.equal(parents[:width][there], above[:width][there])
    into.ids = [bool(same)]
    if steps.states is None:
        return
    errors = relative_error(states[:width], steps.states[n, :width].to(states.dtype))
    depths = torch.zeros(width + 1, dtype=torch.int64)
    for column in range(width):
        depths[column + 1] = depths[int(parents[column]) + 1] + 1
    levels = range(1, int(depths[1:][there].max()) + 1) if same else range(1, 2)
    into.errors = [float(errors[there & (depths[1:] == level)].median()) for level in levels]


def likeness(rounds: dict[int, list[Round]], k: int) -> Likeness:
    """Pooled over rounds."""
    every = [one for several in rounds.values() for one in several]
    told = [one for one in every if one.found >= 0]
    ids = [equal for one in every for equal in one.ids]
    by_position = [np.array([one.errors[j] for one in every if len(one.errors) > j]) for j in range(k)]
    errors = np.concatenate(by_position) if by_position else np.zeros(0)
    finite = [e[np.isfinite(e)] for e in by_position]
    return Likeness(
        rounds=len(every),
        counts=sum(one.found == one.recorded for one in told) / len(told) if told else None,
        ids=sum(ids) / len(ids) if ids else None,
        states=float((errors < SAME).mean()) if len(errors) else None,
        errors=tuple(float(np.median(e)) if len(e) else float("nan") for e in finite) if len(errors) else (),
        off=tuple(float((e >= SAME).mean()) if len(e) else float("nan") for e in by_position) if len(errors) else (),
        departs=float((~(errors <= DEPARTS)).mean()) if len(errors) else None,
    )
