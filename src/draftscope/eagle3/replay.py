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
from draftscope.eagle3.drafting import Drafted, Drafter
from draftscope.eagle3.enacting import Course, Enacted, enact, leads, prefixes
from draftscope.eagle3.habits import Shared
from draftscope.eagle3.matching import Matcher, Prepared, Text, answer_rows
from draftscope.eagle3.model import Draft
from draftscope.eagle3.replayed import Gate, NearTie, Outcome, Replay, Replayed, StepOutcome, compare
from draftscope.eagle3.tree import TreeShape
from draftscope.eagle3.treedrafting import TreeDrafter
from draftscope.errors import UsageError
from draftscope.states.types import Sequence, Steps

if TYPE_CHECKING:
    from draftscope.target.parts import TargetParts

__all__ = ["Gate", "NearTie", "Outcome", "Replay", "Replayed", "StepOutcome", "answer_rows", "compare", "replay", "walk"]

_BUFFERED_BYTES = 256 << 20
_BATCH_TOKENS = 4096


def replay(
    draft: Draft, sequences: Iterable[Sequence], *, parts: TargetParts | None = None, k: int = 3, tree: TreeShape | None = None,
    text: Text = "auto", on_tokens: Callable[[int], None] | None = None,
) -> Replay:
    """Run the draft over recorded states.

    A draft whose `runtime` is not right is run round after round, as an engine does: then only rows that rounds start from have
    an outcome, so that the read-out `all` is the walk's, and there is no -log p.

    Args:
        draft: with its embedding; computes in its own dtype.
        sequences: read lazily, a few at a time.
        parts: final norm and head of the target, to tell who wrote the text and, where it was not the target, what the
            target would have written.
        k: drafted tokens per step.
        tree: drafts trees of this shape instead; K is then their depth, and A_t the longest path that the text follows.
        text: `own` or `other` overrides that decision for all sequences.
        on_tokens: told how many feature rows were just replayed.

    Raises:
        DraftscopeError: states, tokens or target of another width or vocabulary than the draft's, naming both.
        UsageError: nothing says what the tokens are to be matched with.
    """
    if k < 1:
        raise UsageError(f"k is {k}; a step drafts at least one token")
    drafter = Drafter(draft, k) if tree is None else TreeDrafter(draft, tree)
    k = drafter.k
    matcher = Matcher(draft, parts, k, text)
    result = Replay(k)
    names: dict[str, int] = {}
    shared = Shared(draft.runtime.prefix)
    with torch.no_grad():
        for group in _buffered(sequences):
            prepared = [matcher.prepare(_named(sequence, names)) for sequence in group]
            done: dict[int, Replayed] = {}
            missing = [0] * len(prepared) if draft.runtime.right else prefixes(prepared, shared)
            for batch in _batches(prepared):
                chosen = [prepared[i] for i in batch]
                if draft.runtime.right:
                    found = [_judge(one, drafted, drafter) for one, drafted in zip(chosen, drafter.run(chosen), strict=True)]
                else:
                    found = _enact(drafter, chosen, [missing[i] for i in batch])
                done |= dict(zip(batch, found, strict=True))
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


def _enact(drafter: Drafter, batch: list[Prepared], missing: list[int]) -> list[Replayed]:
    """Round after round, once along the recorded starts and once along its own."""
    runs = []
    for walked in (False, True):
        courses = [Course(one, walked) for one in batch]
        runs.append(enact(drafter.draft, drafter.k, drafter.shape, batch, courses, missing))
    return [_told(one, drafter, *both) for one, *both in zip(batch, *runs, strict=True)]


def _told(one: Prepared, drafter: Drafter, stepped: Enacted, walked: Enacted) -> Replayed:
    k, recorded = drafter.k, one.sequence.steps
    unlike = recorded is not None and not _alike(recorded, drafter.shape)
    steps = None
    if recorded is not None and not unlike:
        gaps = torch.zeros(len(one.rows), k, dtype=torch.float64)
        lead, limit = np.zeros(len(one.rows), dtype=np.int64), np.full(len(one.rows), k)
        lead[stepped.rows], limit[stepped.rows] = leads(one, stepped, 1, k)
        if stepped.rows:
            gaps[stepped.rows] = torch.stack(stepped.gap).double()
        at = one.steps.numpy()
        steps = _judge_steps(recorded, one.placed, Outcome(one.rows.numpy()[at], lead[at], limit[at], k), gaps[one.steps])
    answer = Outcome(one.rows.numpy()[walked.rows], *leads(one, walked, 0, k), k)
    seeing = int((one.rows[one.answers] >= one.finite).sum())
    return Replayed(name=one.sequence.name, written=one.written, share=one.share, checked=one.checked, last_norm=one.last_norm,
                    answer=answer, walk=None if one.walked is None else answer, steps=steps, likelihood=Likelihood(),
                    nonfinite=seeing, unlike=unlike)


def _judge(one: Prepared, drafted: Drafted, drafter: Drafter) -> Replayed:
    k = drafter.k
    limit = (one.to_match >= 0).sum(-1).masked_fill(drafted.closed, k)
    answer = _outcome(one.rows, drafted.lead[0], limit[0], one.answers, k)
    steps, recorded = None, one.sequence.steps
    unlike = recorded is not None and not _alike(recorded, drafter.shape)
    if recorded is not None and not unlike:
        starts = _outcome(one.rows, drafted.lead[1], limit[1], one.steps, k)
        steps = _judge_steps(recorded, one.placed, starts, drafted.gap[one.steps])
    wanted, score = one.to_match[0, one.answers, 0], drafted.score[one.answers]
    seeing = one.rows[one.answers] >= one.finite
    usable = (wanted >= 0) & ~seeing
    inside = usable & torch.isfinite(score)
    return Replayed(
        name=one.sequence.name, written=one.written, share=one.share, checked=one.checked, last_norm=one.last_norm,
        answer=answer, steps=steps, nonfinite=int(seeing.sum()), unlike=unlike,
        walk=None if one.walked is None else answer.take(walk(one.walked, answer.rows, answer.accepted)),
        likelihood=Likelihood(
            total=-float(score[inside].sum(dtype=torch.float64)), inside=int(inside.sum()),
            covered=int(drafter.covers(wanted)[usable].sum()), rows=int(usable.sum()),
        ),
    )


def _outcome(rows: Tensor, lead: Tensor, limit: Tensor, chosen: Tensor, k: int) -> Outcome:
    return Outcome(rows[chosen].numpy(), lead[chosen].numpy(), limit[chosen].numpy(), k)


def _alike(steps: Steps, shape: TreeShape | None) -> bool:
    """Whether the engine drafted what is replayed: chains, or trees that such a shape can give."""
    if steps.parents is None or shape is None:
        return steps.parents is None and shape is None
    if steps.drafted is None or not len(steps.drafted):
        return True
    there = steps.drafted >= 0
    up = torch.cat([torch.zeros(len(there), 1, dtype=torch.int64), steps.parents + 1], 1)
    depths = torch.zeros_like(up)
    for _ in range(shape.steps + 1):
        depths = torch.cat([depths[:, :1], depths.gather(1, up)[:, 1:] + 1], 1)
    siblings = torch.zeros_like(up).scatter_add(1, up[:, 1:], there.long())
    return int(there.sum(1).max()) == shape.drafted and int(depths[:, 1:][there].max()) <= shape.steps and int(
        siblings.max()) <= shape.topk


def _judge_steps(steps: Steps, placed: Tensor, found: Outcome, gaps: Tensor) -> StepOutcome:
    """Tokens that the engine did not draft in a step count as not accepted, as its own counters have it."""
    depth = np.full(len(placed), found.k)
    if steps.drafted is not None and steps.parents is None:
        depth = np.minimum((steps.drafted[placed] >= 0).sum(-1).numpy(), found.k)
    told = (found.lead < found.limit) | (found.limit >= depth)
    outcome = Outcome(found.rows, np.minimum(found.lead, depth), np.where(told, found.k, found.limit), found.k)
    recorded = np.minimum(steps.accepted[placed].numpy(), found.k)
    return StepOutcome(outcome, recorded, gaps.double().numpy(), steps.left_out + len(steps.start) - len(placed))
