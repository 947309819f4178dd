"""Training-time test: every row drafts several steps at once, and each step is held against the target's own distribution.

At step k, row t holds the embedding of x_{t+1+k} (the true token), its feature at step 0 and its own output of step k-1 later,
position t+k, and is taught the target's distribution at index t+1+k, head(norm(last[t+1+k])), restricted to the draft
vocabulary and renormalised (SafeAILab/EAGLE `eagle/traineagle3/cnets.py`, vllm-project/speculators `models/eagle3/core.py`).
Shapes: B sequences, T tokens, S slots, Ht and H target and draft width, D draft vocabulary, K steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draftscope.eagle3.model import Draft, StepMask

Alignment = Literal["served", "same", "next"]

_CHUNK = 256


@dataclass(slots=True)
class Batch:
    """Sequences padded on the right.

    Attributes:
        token_ids: [B, T] int64.
        features: [B, T, S, Ht], as the draft's `project` takes them.
        supervised: [K, B, T] bool, rows that are taught at each step.
        teacher: [M, D], the target's probabilities over the draft vocabulary at the indices needed.
        teacher_row: [B, T] int64, row of `teacher` for each index, -1 where none is needed.
        names: for messages.
    """

    token_ids: Tensor
    features: Tensor
    supervised: Tensor
    teacher: Tensor
    teacher_row: Tensor
    names: tuple[str, ...]


@dataclass(slots=True)
class Loss:
    """The loss to descend, and what it is made of.

    Attributes:
        total: sum over steps of decay^k times the step's mean.
        steps: mean cross-entropy of each step; nan where no row is supervised.
        rows: supervised rows of each step.
        correct: of these, rows whose argmax is the teacher's.
    """

    total: Tensor
    steps: list[float]
    rows: list[int]
    correct: list[int]


def supervised_rows(answer: Tensor, steps: int, alignment: Alignment = "served") -> Tensor:
    """Rows that each step may teach, [K, T] bool, from the answer mask [T]; the teacher's index t+1+k is within the sequence.

    `served`: the rows from which a server drafts that token: l_{t+1} to l_{t+2+k} are all 1. `same`: l_{t+k} at step k
    (SafeAILab/EAGLE, SpecForge, TorchSpec, AngelSlim). `next`: l_{t+1+k} (speculators, ModelOpt).
    """
    length = len(answer)
    rows = torch.zeros(steps, length, dtype=torch.bool)
    served = _ahead(answer, 1)
    for k in range(steps):
        served = served & _ahead(answer, 2 + k)
        rows[k] = served if alignment == "served" else _ahead(answer, k if alignment == "same" else 1 + k)
        rows[k, max(length - 1 - k, 0) :] = False
    return rows


def _ahead(mask: Tensor, by: int) -> Tensor:
    shifted = torch.zeros_like(mask)
    if by < len(mask):
        shifted[: len(mask) - by] = mask[by:]
    return shifted


def ttt_outputs(draft: Draft, features: Tensor, token_ids: Tensor, rows: Tensor, steps: int) -> Iterator[Tensor]:
    """The draft layer's outputs [B, R, H] before the final norm, one per step, at rows [B, R] int64.

    Step 0 runs on every row, since all of them are keys; later steps on the rows asked for. Tokens beyond the end count as 0.
    """
    batch, length = token_ids.shape
    embeds = draft.embed(torch.nn.functional.pad(token_ids, (0, steps)))
    positions = torch.arange(length, device=token_ids.device).expand(batch, length)
    mask = StepMask.of(draft.config)
    # Under autocast the residual stream stays in the weights' own dtype.
    hidden = draft.project(features).to(embeds.dtype)
    output = _at(draft(hidden, embeds[:, 1 : length + 1], positions, mask), rows)
    yield output
    later = mask.on(rows)
    for k in range(1, steps):
        output = draft(draft.feedback(output), _at(embeds, rows + 1 + k), rows + k, later)
        yield output


def _at(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def ttt_loss(draft: Draft, batch: Batch, decay: float = 0.8, precision: torch.dtype = torch.float32) -> Loss:
    """Soft cross-entropy of every step, each the mean over its supervised rows, weighted decay^k.

    Args:
        precision: of the matrix products' operands; weights, norms, softmax and sums stay as they are.
    """
    low = precision != torch.float32
    with torch.autocast(batch.features.device.type, dtype=precision if low else None, enabled=low):
        return _ttt_loss(draft, batch, decay, precision if low else draft.dtype)


def _ttt_loss(draft: Draft, batch: Batch, decay: float, precision: torch.dtype) -> Loss:
    rows, real = pack_rows(batch.supervised.any(0))
    total = torch.zeros((), dtype=draft.dtype)
    result = Loss(total, [], [], [])
    steps = len(batch.supervised)
    for k, output in enumerate(ttt_outputs(draft, batch.features, batch.token_ids, rows, steps)):
        taught = batch.supervised[k].gather(1, rows) & real
        count = int(taught.sum())
        if count == 0:
            result.steps.append(float("nan"))
            result.rows.append(0)
            result.correct.append(0)
            continue
        index = batch.teacher_row.gather(1, (rows + 1 + k).clamp(max=batch.token_ids.shape[1] - 1))[taught]
        normed = draft.head_input(output[taught])
        summed, correct = _SoftCrossEntropy.apply(normed, draft.lm_head.weight, batch.teacher, index, precision)
        result.total = result.total + decay**k * summed / count
        result.steps.append(float(summed.detach()) / count)
        result.rows.append(count)
        result.correct.append(int(correct))
    return result


def pack_rows(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the true elements of each row of [B, T], as [B, R] int64 padded with 0, and which are real."""
    counts = wanted.sum(1)
    width = max(int(counts.max()), 1)
    order = wanted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    real = torch.arange(width) < counts[:, None]
    return order.masked_fill(~real, 0), real


class _SoftCrossEntropy(torch.autograd.Function):
    """Head and soft cross-entropy in one, in chunks of rows: logits over the vocabulary are never kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, teacher: Tensor, index: Tensor,
                precision: torch.dtype) -> tuple[Tensor, Tensor]:
        grad_states = torch.empty_like(states)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        total, correct = states.new_zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        narrow_states, narrow_head = states.to(precision), head.to(precision)
        for start in range(0, len(states), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits, wanted = (narrow_states[part] @ narrow_head.T).to(states.dtype), teacher[index[part]]
            correct += (logits.argmax(-1) == wanted.argmax(-1)).sum()
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += normaliser.sum(dtype=torch.float64) - torch.linalg.vecdot(wanted, logits).sum(dtype=torch.float64)
            grad = logits.sub_(normaliser).exp_().sub_(wanted).to(precision)
            grad_states[part] = grad @ narrow_head
            if grad_head is not None:
                grad_head += grad.T @ narrow_states[part]
        ctx.save_for_backward(grad_states, grad_head)
        ctx.mark_non_differentiable(correct)
        return total.to(states.dtype), correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_states, grad_head = ctx.saved_tensors
        return grads[0] * grad_states, None if grad_head is None else grads[0] * grad_head, None, None, None
