"""The draft over a batch of sequences at once, only on rows that still count, and what its tokens come to.

B sequences of up to T feature rows, N rows replayed among them, K steps, H draft width, D draft vocabulary. A row goes on to
the next step only while all its tokens so far match, since nothing beyond the first miss counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.eagle3.matching import Prepared
from draftscope.eagle3.model import Draft, StepMask
from draftscope.eagle3.tree import TreeShape

_SCORES = 1 << 24
_LOGITS = 1 << 24


@dataclass(slots=True)
class Drafted:
    """What the rows of one sequence came to, in the order of its rows.

    Attributes:
        lead: [2, R] int64, tokens that match before the first that does not: as answer row, and as step start.
        gap: [R, K], distance between the two highest logits at step starts; NaN where not looked at.
        score: [R], log-probability of the first token to match at answer rows; NaN outside the draft vocabulary.
        closed: [2, R] bool, nothing was drafted beyond the tokens that match, so the next token need not be known.
    """

    lead: Tensor
    gap: Tensor
    score: Tensor
    closed: Tensor


class Drafter:
    """Runs a draft K steps from many rows. `shape`: of the trees that it drafts, None = chains."""

    shape: TreeShape | None = None

    def __init__(self, draft: Draft, k: int) -> None:
        self.draft, self.k = draft, k
        vocab, targets = draft.config.vocab_size, draft.target_ids
        inside = (targets >= 0) & (targets < vocab)
        # A map that sends two draft ids to one target id is broken; the higher draft id then stands for it.
        self.inverse = torch.full((vocab,), -1, dtype=torch.int64)
        self.inverse[targets[inside]] = torch.arange(len(targets))[inside]

    def covers(self, token_ids: Tensor) -> Tensor:
        """Which target ids are in the draft vocabulary; -1 is not."""
        return (token_ids >= 0) & (self.inverse[token_ids.clamp(min=0)] >= 0)

    def run(self, batch: list[Prepared]) -> list[Drafted]:
        """Draft from the rows of a batch. Rows that see a NaN or Inf are left at lead 0."""
        run = self.start(batch)
        if run.span:
            run.steps()
        sizes = [len(one.rows) for one in batch]
        return [Drafted(*parts) for parts in zip(
            run.lead.split(sizes, 1), run.gap.split(sizes), run.score.split(sizes), run.closed.split(sizes, 1), strict=True,
        )]

    def start(self, batch: list[Prepared]) -> Run:
        return Run(self, batch)


class Run:
    """One batch: its rows one after another [N], and the matrix [B, R] of those that go on, -1 padded.

    `wide`: how many tokens a row drafts at once.
    """

    wide = 1

    def __init__(self, drafter: Drafter, batch: list[Prepared]) -> None:
        self.drafter, self.draft, self.batch = drafter, drafter.draft, batch
        self.k = drafter.k
        self.rows = torch.cat([one.rows for one in batch])
        self.match = torch.cat([one.to_match for one in batch], 1)
        finite = torch.cat([one.rows < one.finite for one in batch])
        self.active = finite & (self.match[..., 0] >= 0).any(0)
        self.is_step = torch.zeros(len(self.rows), dtype=torch.bool)
        first = 0
        places = []
        for one in batch:
            self.is_step[first + one.steps] = True
            places.append(first + self.active[first : first + len(one.rows)].nonzero().squeeze(-1))
            first += len(one.rows)
        self.lead = torch.zeros(2, len(self.rows), dtype=torch.int64)
        self.closed = torch.zeros(2, len(self.rows), dtype=torch.bool)
        dtype = self.draft.dtype
        self.gap = torch.full((len(self.rows), self.k), torch.nan, dtype=dtype)
        self.score = torch.full((len(self.rows),), torch.nan, dtype=dtype)
        self.places = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
        self.span = int(self.rows[self.active].max()) + 1 if bool(self.active.any()) else 0

    def steps(self) -> None:
        config = self.draft.config
        shape = (len(self.batch), self.span, config.slots, config.target_hidden_size)
        features = torch.zeros(shape, dtype=self.draft.dtype)
        self.tokens = torch.zeros(len(self.batch), self.span + self.k, dtype=torch.int64)
        self.positions = torch.zeros(len(self.batch), self.span, dtype=torch.int64)
        given = torch.zeros(len(self.batch), self.span, dtype=torch.int64)
        for i, one in enumerate(self.batch):
            length = min(self.span, one.finite)
            features[i, :length] = one.sequence.features[:length].to(features.dtype)
            text = one.sequence.token_ids[: self.span + self.k]
            self.tokens[i, : len(text)] = text
            self.positions[i, :length] = one.sequence.positions[:length]
            inputs = one.sequence.draft_inputs(self.span)
            given[i, : len(inputs)] = inputs
        mask = StepMask.of(config)
        first = self.draft(self.draft.project(features), self.draft.embed(given), self.positions, mask)
        del features
        piece = max(1, _SCORES // (len(self.batch) * config.num_attention_heads * self.span * self.wide))
        for places in self.places.split(piece, 1):
            self.piece(first, mask, places)

    def piece(self, first: Tensor, mask: StepMask, places: Tensor) -> None:
        """Draft from the rows at `places` [B, R]: `first` [B, T, H] is the draft's output over the true features."""
        rows = self.rows[places.clamp(min=0)].masked_fill(places < 0, 0)
        hidden = first.gather(1, rows[..., None].expand(-1, -1, first.shape[-1]))
        later = mask.on(rows)
        for step in range(self.k):
            held = places >= 0
            self._read(hidden[held], places[held], step)
            going = held & self._goes_on(step)[places.clamp(min=0)]
            if step + 1 == self.k or not bool(going.any()):
                return
            chosen = (~going).sort(dim=1, stable=True).indices[:, : int(going.sum(1).max())]
            places = places.masked_fill(~going, -1).gather(1, chosen)
            rows = rows.gather(1, chosen)
            later.narrow(chosen)
            hidden = hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[-1]))
            embeds = self.draft.embed(self.tokens.gather(1, rows + 2 + step))
            hidden = self.draft(self.draft.feedback(hidden), embeds, self.positions.gather(1, rows) + step + 1, later)

    def _goes_on(self, step: int) -> Tensor:
        """Rows [N] whose tokens all match so far, and whose next one can be judged."""
        if step + 1 == self.k:
            return torch.zeros_like(self.active)
        return ((self.lead == step + 1) & (self.match[..., step + 1] >= 0)).any(0)

    def _read(self, hidden: Tensor, places: Tensor, step: int) -> None:
        """Take in one step's outputs [n, H] of the rows at `places` [n]."""
        size = max(1, _LOGITS // self.draft.config.draft_vocab_size)
        for states, at in zip(hidden.split(size), places.split(size), strict=True):
            logits = self.draft.logits(states)
            hit = self.draft.target_ids[logits.argmax(-1)] == self.match[:, at, step]
            self.lead[:, at] += hit & (self.lead[:, at] == step)
            starts = self.is_step[at]
            if bool(starts.any()):
                best = logits[starts].topk(min(2, logits.shape[-1]), -1).values
                self.gap[at[starts], step] = best[:, 0] - best[:, -1]
            if not step:
                self.score[at] = self.likelihood(logits, self.match[0, at, 0])

    def likelihood(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Log-probability [n] of target ids `wanted` [n]; NaN outside the draft vocabulary."""
        column = torch.where(wanted >= 0, self.drafter.inverse[wanted.clamp(min=0)], -1)
        score = logits.gather(1, column.clamp(min=0)[:, None]).squeeze(1) - logits.logsumexp(-1)
        return score.masked_fill(column < 0, torch.nan)
