"""Replay by the serving drafter itself, round after round: for runtimes in which a round depends on those before it.

`drafting` runs all rows at once and knows a right runtime alone. Here recorded rows go through the drafter as they went through
the engine: the prompt, then from each start K tokens, then the accepted rows. Only rows that a round starts from have an
outcome. B sequences, N rounds, K drafted tokens, H draft width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftscope.eagle3.acceptance import Ints
from draftscope.eagle3.habits import Shared, new_drafter
from draftscope.eagle3.matching import Prepared
from draftscope.eagle3.model import Draft
from draftscope.eagle3.tree import TreeShape, longest


@dataclass(slots=True)
class Enacted:
    """The rounds of one sequence, in order.

    Attributes:
        rows: indices into the rows of its `Prepared`.
        tokens: per round [K] target ids; states: [K, H] that they came from; parents: of trees.
        lead, closed: as in `drafting.Drafted`; gap: per round [K].
    """

    rows: list[int] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    lead: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    gap: list[Tensor] = field(default_factory=list)


class Course:
    """Which rows of a sequence rounds start from: the recorded ones, or those that the draft's own tokens lead to.

    Args:
        walked: starts follow from what is accepted; else they are the recorded ones.
    """

    def __init__(self, one: Prepared, walked: bool) -> None:
        self.one, self.kind = one, 0 if walked else 1
        chosen = one.answers if walked else one.steps
        self._at = {int(one.rows[i]): int(i) for i in chosen.tolist() if int(one.rows[i]) < one.finite}
        if walked:
            mask = torch.zeros(0, dtype=torch.bool) if one.walked is None else one.walked
            begins = (mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])[: len(mask)]).nonzero().flatten() - 1
            self._begins = [t for t in begins.tolist() if t in self._at]
        else:
            self._begins = sorted(self._at)

    @property
    def first(self) -> int | None:
        return self._begins[0] if self._begins else None

    def index(self, row: int) -> int:
        return self._at[row]

    def after(self, row: int, accepted: int | None) -> int | None:
        """The next start; `accepted` None = it cannot be told."""
        if self.kind == 0 and accepted is not None and row + accepted + 1 in self._at:
            return row + accepted + 1
        return next((t for t in self._begins if t > row), None)


def enact(draft: Draft, k: int, shape: TreeShape | None, batch: Sequence[Prepared], courses: Sequence[Course],
          shared: Sequence[int], rounds: int | None = None, *, drawn: bool = False) -> list[Enacted]:
    """Run the draft along each sequence's course.

    Args:
        k: tokens of a chain; shape: of the trees drafted instead.
        shared: per sequence, rows of its prompt that an earlier one begins with.
        rounds: most of each sequence; None = all.
        drawn: the engine drew its drafts, so the recorded ones are drafted again (chains of recorded rounds only).
    """
    found = [Enacted() for _ in batch]
    live = [i for i, course in enumerate(courses) if course.first is not None]
    if not live:
        return found
    longest_text = max(one.sequence.rows for one in batch)
    room = k if shape is None else max(shape.drafted, shape.expanded)
    drafter = new_drafter(draft, k, len(batch), longest_text + room + 2, shape=shape)
    texts = [one.sequence.draft_inputs(one.sequence.rows) for one in batch]
    here = {i: courses[i].first or 0 for i in live}
    hidden, following, counts = _block(draft, batch, texts, [(i, 0, here[i] + 1) for i in live])
    drafter.begin(hidden, following, counts, torch.tensor(live), torch.tensor([shared[i] for i in live]))
    number = 0
    while live and (rounds is None or number < rounds):
        number += 1
        at = torch.tensor(live)
        given = torch.stack([_given(batch[i], courses[i].index(here[i]), k) for i in live]) if drawn else None
        proposal = drafter.propose(at, given=given)
        assert proposal.states is not None
        gaps = _gaps(draft, proposal.states) if shape is None else torch.full(proposal.tokens.shape, torch.nan)
        blocks, gaps_between = [], []
        for j, i in enumerate(live):
            course, one, row = courses[i], batch[i], here[i]
            index = course.index(row)
            wanted = one.to_match[course.kind, index]
            parents = None if proposal.tree is None else proposal.tree.parents[j]
            depths = None if proposal.tree is None else proposal.tree.depths[j]
            lead, closed = _lead(proposal.tokens[j], wanted, parents, depths)
            into = found[i]
            into.rows.append(index)
            into.tokens.append(proposal.tokens[j])
            into.states.append(proposal.states[j])
            into.lead.append(lead)
            into.closed.append(closed)
            into.gap.append(gaps[j, : len(wanted)])
            if parents is not None:
                into.parents.append(parents)
            known = closed or lead == len(wanted) or int(wanted[lead]) >= 0
            then = course.after(row, lead if known else None)
            if then is None:
                continue
            # A round's own rows are those that it accepted; what else lies before the next start came without a draft.
            own = min(then - row, len(wanted) + 1)
            blocks.append((i, row + 1, row + 1 + own))
            if row + 1 + own <= then:
                gaps_between.append((i, row + 1 + own, then + 1))
            here[i] = then
        live = [i for i, _, _ in blocks]
        for wanted_rows in (blocks, gaps_between):
            if wanted_rows:
                hidden, following, counts = _block(draft, batch, texts, wanted_rows)
                drafter.extend(hidden, following, counts, torch.tensor([i for i, _, _ in wanted_rows]))
    return found


def prefixes(sequences: Sequence[Prepared], shared: Shared) -> list[int]:
    """Of each sequence, the rows of its prompt that an earlier one begins with."""
    firsts = [Course(one, False).first or Course(one, True).first for one in sequences]
    return [0 if first is None else shared.rows(one.sequence.token_ids[: first + 1].tolist())
            for one, first in zip(sequences, firsts, strict=True)]


def _block(draft: Draft, batch: Sequence[Prepared], texts: Sequence[Tensor],
           spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [start, end) of some sequences, padded on the right: projected features [R, W, H], the tokens given, and counts."""
    hidden = [draft.project(batch[i].sequence.features[start:end]) for i, start, end in spans]
    given = [texts[i][start:end] for i, start, end in spans]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(hidden, batch_first=True), pad(given, batch_first=True), torch.tensor([len(h) for h in hidden])


def _given(one: Prepared, index: int, k: int) -> Tensor:
    """The ids [K] that were drafted in the round from a row."""
    steps = one.sequence.steps
    assert steps is not None and steps.drafted is not None
    drafted = steps.drafted[one.placed[one.steps == index][0]].clamp(min=0)[:k]
    return torch.nn.functional.pad(drafted, (0, k - len(drafted)))


def _gaps(draft: Draft, states: Tensor) -> Tensor:
    """Distance between the two best logits of each state, [R, K]."""
    logits = draft.logits(states)
    best = logits.topk(min(2, logits.shape[-1]), -1).values
    return best[..., 0] - best[..., -1]


def _lead(tokens: Tensor, wanted: Tensor, parents: Tensor | None, depths: Tensor | None) -> tuple[int, bool]:
    """Drafted tokens [K] that the text `wanted` [D] follows, and whether nothing was drafted beyond them."""
    if parents is None or depths is None:
        return int((tokens == wanted).cumprod(0).sum()), False
    equal = tokens.masked_fill(tokens < 0, -2) == wanted.gather(0, depths - 1)
    path, counts = longest(parents[None], equal[None], len(wanted))
    return int(counts[0]), not bool((parents == path[0, -1] - 1).any())


def leads(one: Prepared, enacted: Enacted, kind: int, k: int) -> tuple[Ints, Ints]:
    """Per round, tokens that match and positions that could be judged [N]."""
    if not enacted.rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    known = (one.to_match[kind, enacted.rows] >= 0).sum(-1).numpy()
    return np.array(enacted.lead), np.where(np.array(enacted.closed), k, known)
