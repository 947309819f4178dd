"""Replay: the draft run offline over recorded states, to see which of its tokens would have been accepted.

Row t has the feature of token t and the embedding of token t+1; its drafts 1..K are compared with tokens t+2..t+1+K. A_t is
how many match before the first that does not, the draft being fed the true features up to t and then its own states and its
own tokens. One batched pass under the training-time-test mask gives the same A_t, since up to A_t the draft's own tokens are
the text's. A row is an *answer row* when tokens t+1..t+1+K all belong to an answer. Shapes: T feature rows, R replayed rows.

The token to match is the recorded text where the target wrote it. Elsewhere it is the argmax of the target's head over the
last state at t+1 (which predicts t+2), and positions after the first where that differs from the text are not judged, since
the recorded states follow the text; `acceptance` says how such rows count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftscope.eagle3.acceptance import Ints, Likelihood
from draftscope.eagle3.matching import Matcher, Prepared, Text, answer_rows
from draftscope.eagle3.model import Draft, StepMask
from draftscope.eagle3.replayed import Gate, NearTie, Outcome, Replay, Replayed, StepOutcome, compare
from draftscope.errors import UsageError
from draftscope.states.types import Sequence, Steps

if TYPE_CHECKING:
    from draftscope.target.parts import TargetParts

__all__ = ["Gate", "NearTie", "Outcome", "Replay", "Replayed", "StepOutcome", "answer_rows", "compare", "replay", "walk"]

_BUFFERED_BYTES = 256 << 20
_BATCH_TOKENS = 4096
_SCORES = 1 << 24
_LOGITS = 1 << 24


def replay(
    draft: Draft, sequences: Iterable[Sequence], *, parts: TargetParts | None = None, k: int = 3, text: Text = "auto",
    on_tokens: Callable[[int], None] | None = None,
) -> Replay:
    """Run the draft over recorded states.

    Args:
        draft: with its embedding; computes in its own dtype.
        sequences: read lazily, a few at a time.
        parts: final norm and head of the target, to tell who wrote the text and, where it was not the target, what the
            target would have written.
        k: drafted tokens per step.
        text: `own` or `other` overrides that decision for all sequences.
        on_tokens: told how many feature rows were just replayed.

    Raises:
        DraftscopeError: states, tokens or target of another width or vocabulary than the draft's, naming both.
        UsageError: nothing says what the tokens are to be matched with.
    """
    if k < 1:
        raise UsageError(f"k is {k}; a step drafts at least one token")
    matcher, drafter = Matcher(draft, parts, k, text), _Drafter(draft, k)
    result = Replay(k)
    names: dict[str, int] = {}
    with torch.no_grad():
        for group in _buffered(sequences):
            prepared = [matcher.prepare(_named(sequence, names)) for sequence in group]
            done: dict[int, Replayed] = {}
            for batch in _batches(prepared):
                for i, replayed in zip(batch, drafter.run([prepared[i] for i in batch]), strict=True):
                    done[i] = replayed
                if on_tokens is not None:
                    on_tokens(sum(prepared[i].sequence.rows for i in batch))
            result.sequences += [done[i] for i in range(len(group))]
    return result


def walk(answer: Tensor, rows: Ints, accepted: Ints) -> Ints:
    """Indices into `rows` that a server drafts from: from each answer's s - 1 on, t to t + A_t + 1, whole windows only.

    Args:
        answer: [T] bool.
        rows: [R], the answer rows, ascending; `accepted`: [R], A_t there.
    """
    at = {int(t): i for i, t in enumerate(rows)}
    mask = answer.numpy().astype(bool)
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    chosen = []
    for start in starts:
        t = int(start) - 1
        while t in at:
            i = at[t]
            chosen.append(i)
            t += int(accepted[i]) + 1
    return np.array(chosen, dtype=np.int64)


def _named(sequence: Sequence, names: dict[str, int]) -> Sequence:
    """Pairing goes by name, so a name that comes again gets a number."""
    names[sequence.name] = names.get(sequence.name, 0) + 1
    if names[sequence.name] > 1:
        return replace(sequence, name=f"{sequence.name} ({names[sequence.name]})")
    return sequence


def _buffered(sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
    group: list[Sequence] = []
    held = 0
    for sequence in sequences:
        group.append(sequence)
        held += sequence.features.numel() * 4
        if held >= _BUFFERED_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _batches(prepared: list[Prepared]) -> Iterator[list[int]]:
    """Indices of sequences of similar length, at most `_BATCH_TOKENS` padded tokens together."""
    batch: list[int] = []
    for i in sorted(range(len(prepared)), key=lambda i: -_span(prepared[i])):
        if batch and (len(batch) + 1) * _span(prepared[batch[0]]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _span(one: Prepared) -> int:
    """Feature rows that the replayed rows can see."""
    return int(one.rows.max()) + 1 if len(one.rows) else 0


class _Drafter:
    """Runs the draft over batches of prepared sequences and judges its tokens."""

    def __init__(self, draft: Draft, k: int) -> None:
        self.draft, self.k = draft, k
        vocab, targets = draft.config.vocab_size, draft.target_ids
        inside = (targets >= 0) & (targets < vocab)
        # A map that sends two draft ids to one target id is broken; the higher draft id then stands for it.
        self.inverse = torch.full((vocab,), -1, dtype=torch.int64)
        self.inverse[targets[inside]] = torch.arange(len(targets))[inside]

    def run(self, batch: list[Prepared]) -> list[Replayed]:
        return [self._judge(one, *found) for one, found in zip(batch, self._draft(batch), strict=True)]

    def _draft(self, batch: list[Prepared]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """K steps on the rows of a batch.

        Returns:
            per sequence: drafted target ids [R, K]; the gap between the two highest logits [N, K] at the step starts; the
            log-probability [A] of the first token to match at the answer rows, NaN outside the draft vocabulary.
        """
        draft, k = self.draft, self.k
        span, width = max(_span(one) for one in batch), max(len(one.rows) for one in batch)
        if not width:
            nothing = torch.zeros(0, k)
            return [(nothing.long(), nothing, nothing[:, 0]) for _ in batch]
        config = draft.config
        shape = (len(batch), span, config.slots, config.target_hidden_size)
        features = torch.zeros(shape, dtype=draft.fc.weight.dtype)
        tokens = torch.zeros(len(batch), span + k, dtype=torch.int64)
        positions = torch.zeros(len(batch), span, dtype=torch.int64)
        rows = torch.zeros(len(batch), width, dtype=torch.int64)
        for i, one in enumerate(batch):
            length = _span(one)
            finite = min(length, one.finite)
            features[i, :finite] = one.sequence.features[:finite].to(features.dtype)
            text = one.sequence.token_ids[: span + k]
            tokens[i, : len(text)] = text
            positions[i, :length] = one.sequence.positions[:length]
            rows[i, : len(one.rows)] = one.rows
        mask = StepMask(config.sliding_window)
        first = draft(draft.project(features), draft.embed(tokens[:, 1 : span + 1]), positions, mask)
        del features
        pieces = [
            self._steps(batch, first, tokens, positions, mask, chosen, begin)
            for begin, chosen in _pieces(rows, max(1, _SCORES // (len(batch) * config.num_attention_heads * span)))
        ]
        return [
            (torch.cat([p[i][0] for p in pieces]), torch.cat([p[i][1] for p in pieces]), torch.cat([p[i][2] for p in pieces]))
            for i in range(len(batch))
        ]

    def _steps(
        self, batch: list[Prepared], first: Tensor, tokens: Tensor, positions: Tensor, mask: StepMask, rows: Tensor, begin: int,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        draft = self.draft
        hidden = first.gather(1, rows[..., None].expand(-1, -1, first.shape[-1]))
        base = positions.gather(1, rows)
        later = mask.on(rows)
        read = [[self._read(hidden[i], one, begin, 0) for i, one in enumerate(batch)]]
        for step in range(1, self.k):
            embeds = draft.embed(tokens.gather(1, (rows + 1 + step).clamp(max=tokens.shape[1] - 1)))
            hidden = draft(draft.feedback(hidden), embeds, base + step, later)
            read.append([self._read(hidden[i], one, begin, step) for i, one in enumerate(batch)])
        return [
            (torch.stack([r[i][0] for r in read], -1), torch.stack([r[i][1] for r in read], -1), read[0][i][2])
            for i in range(len(batch))
        ]

    def _read(self, hidden: Tensor, one: Prepared, begin: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """One sequence's rows from `begin` on: drafted ids [r], gaps of the step starts, scores of the answer rows."""
        rows = max(0, min(len(one.rows) - begin, len(hidden)))
        answers = max(0, min(one.answers - begin, rows))
        drafted, gaps, scores = [], [hidden.new_zeros(0)], [hidden.new_zeros(0)]
        size = max(1, _LOGITS // self.draft.config.draft_vocab_size)
        for at in range(0, rows, size):
            logits = self.draft.logits(hidden[at : min(at + size, rows)])
            drafted.append(self.draft.target_ids[logits.argmax(-1)])
            split = max(0, min(answers - at, len(logits)))
            if split < len(logits):
                best = logits[split:].topk(min(2, logits.shape[-1]), -1).values
                gaps.append(best[:, 0] - best[:, -1])
            if split and not step:
                scores.append(self._score(logits[:split], one.to_match[begin + at : begin + at + split, 0]))
        return torch.cat(drafted) if drafted else one.rows[:0], torch.cat(gaps), torch.cat(scores)

    def _score(self, logits: Tensor, wanted: Tensor) -> Tensor:
        column = torch.where(wanted >= 0, self.inverse[wanted.clamp(min=0)], -1)
        score = logits.gather(1, column.clamp(min=0)[:, None]).squeeze(1) - logits.logsumexp(-1)
        return score.masked_fill(column < 0, torch.nan)

    def _judge(self, one: Prepared, drafted: Tensor, gaps: Tensor, scores: Tensor) -> Replayed:
        known = one.to_match >= 0
        lead = ((drafted == one.to_match) & known).cumprod(-1).sum(-1)
        lead = lead.masked_fill(one.rows >= one.finite, 0)
        rows, found = one.rows.numpy(), Outcome(one.rows.numpy(), lead.numpy(), known.sum(-1).numpy(), self.k)
        answer = found.take(np.arange(one.answers))
        walked = None
        if one.walked is not None:
            walked = answer.take(walk(one.walked, answer.rows, answer.accepted))
        steps = None
        if one.sequence.steps is not None:
            steps = self._judge_steps(one.sequence.steps, one, found.take(np.arange(one.answers, len(rows))), gaps)
        usable = (one.to_match[: one.answers, 0] >= 0) & (one.rows[: one.answers] < one.finite)
        inside = usable & torch.isfinite(scores)
        likelihood = Likelihood(
            total=-float(scores[inside].sum(dtype=torch.float64)), inside=int(inside.sum()),
            covered=int((self.inverse[one.to_match[: one.answers, 0].clamp(min=0)] >= 0)[usable].sum()), rows=int(usable.sum()),
        )
        return Replayed(
            name=one.sequence.name, written=one.written, share=one.share, checked=one.checked, last_norm=one.last_norm,
            answer=answer, walk=walked, steps=steps, likelihood=likelihood,
            nonfinite=int((one.rows[: one.answers] >= one.finite).sum()),
        )

    def _judge_steps(self, steps: Steps, one: Prepared, found: Outcome, gaps: Tensor) -> StepOutcome:
        """Tokens that the engine did not draft in a step count as not accepted, as its own counters have it."""
        chosen = one.placed.numpy()
        depth = np.full(len(chosen), self.k)
        if steps.drafted is not None:
            depth = np.minimum((steps.drafted[one.placed] >= 0).sum(-1).numpy(), self.k)
        told = (found.lead < found.limit) | (found.limit >= depth)
        outcome = Outcome(found.rows, np.minimum(found.lead, depth), np.where(told, self.k, found.limit), self.k)
        recorded = np.minimum(steps.accepted[one.placed].numpy(), self.k)
        return StepOutcome(outcome, recorded, gaps.double().numpy(), steps.left_out + len(steps.start) - len(chosen))


def _pieces(rows: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, rows.shape[1], size):
        yield begin, rows[:, begin : begin + size]
