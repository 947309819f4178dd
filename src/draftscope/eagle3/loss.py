"""Training-time test: every row drafts several steps at once, and each step is held against the target's own distribution.

At step k, row t holds the embedding of x_{t+1+k} (the true token), its feature at step 0 and its own output of step k-1 later,
position t+k, and is taught the target's distribution at index t+1+k, head(norm(last[t+1+k])), restricted to the draft
vocabulary and renormalised (SafeAILab/EAGLE `eagle/traineagle3/cnets.py`, vllm-project/speculators `models/eagle3/core.py`).
Shapes: B sequences, T tokens, S slots, Ht and H target and draft width, D draft vocabulary, K steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.eagle3.model import Draft, StepMask
from draftscope.eagle3.rowloss import head_loss
from draftscope.eagle3.settings import ROWS_EPS, Alignment, LossKind, Normaliser


@dataclass(slots=True)
class Batch:
    """Sequences padded on the right.

    Attributes:
        token_ids: [B, T] int64.
        features: [B, T, S, Ht], as the draft's `project` takes them.
        supervised: [K, B, T] bool, rows that are taught at each step.
        teacher: [M, D], the target's log-probabilities over the draft vocabulary at the indices needed.
        teacher_row: [B, T + 1] int64, row of `teacher` for each index, -1 where none is needed; T is the index past the end.
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
        total: sum over steps of decay^k times the step's loss.
        steps: each step's sum by its normaliser; nan where that is 0.
        rows: supervised rows of each step.
        correct: of these, rows whose argmax is the teacher's.
    """

    total: Tensor
    steps: list[float]
    rows: list[int]
    correct: list[int]


def normalisers(batch: Batch, normaliser: Normaliser) -> Tensor:
    """What each step's sum is to be divided by, [K] int64, without the small constant of `rows-eps`; adds up over batches."""
    if normaliser == "positions":
        return torch.full((len(batch.supervised),), batch.token_ids.numel(), device=batch.token_ids.device)
    return batch.supervised.flatten(1).sum(1)


def supervised_rows(answer: Tensor, steps: int, alignment: Alignment = "served", past_end: bool = False) -> Tensor:
    """Rows that each step may teach, [K, T] bool, from the answer mask [T]; the teacher's index t+1+k is within the sequence.

    `served`: the rows from which a server drafts that token: l_{t+1} to l_{t+2+k} are all 1. `same`: l_{t+k} at step k
    (SafeAILab/EAGLE, SpecForge, TorchSpec, AngelSlim). `next`: l_{t+1+k} (speculators, ModelOpt).

    Args:
        past_end: with `same`, also the row whose index is the one after the last.
    """
    length = len(answer)
    rows = torch.zeros(steps, length, dtype=torch.bool)
    served = _ahead(answer, 1)
    for k in range(steps):
        served = served & _ahead(answer, 2 + k)
        rows[k] = served if alignment == "served" else _ahead(answer, k if alignment == "same" else 1 + k)
        rows[k, max(length - 1 - k, 0) + past_end :] = False
    return rows


def _ahead(mask: Tensor, by: int) -> Tensor:
    shifted = torch.zeros_like(mask)
    if by < len(mask):
        shifted[: len(mask) - by] = mask[by:]
    return shifted


def ttt_outputs(draft: Draft, features: Tensor, token_ids: Tensor, rows: Tensor, steps: int, *, first_position: int = 0,
                window_moves: bool = True) -> Iterator[Tensor]:
    """The draft layer's outputs [B, R, H] before the final norm, one per step, at rows [B, R] int64.

    Step 0 runs on every row, since all of them are keys; later steps on the rows asked for. Tokens beyond the end count as 0.

    Args:
        first_position: rotary position of row 0; window_moves: see `StepMask`.
    """
    batch, length = token_ids.shape
    embeds = draft.embed(torch.nn.functional.pad(token_ids, (0, steps)))
    positions = (first_position + torch.arange(length, device=token_ids.device)).expand(batch, length)
    mask = StepMask.of(draft.config, moves=window_moves)
    # Under autocast the residual stream stays in the weights' own dtype.
    hidden = draft.project(features).to(embeds.dtype)
    output = _at(draft(hidden, embeds[:, 1 : length + 1], positions, mask), rows)
    yield output
    later = mask.on(rows)
    for k in range(1, steps):
        output = draft(draft.feedback(output), _at(embeds, rows + 1 + k), first_position + rows + k, later)
        yield output


def _at(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def ttt_loss(draft: Draft, batch: Batch, decay: float = 0.8, precision: torch.dtype = torch.float32, *,
             kind: LossKind = "soft-ce", normaliser: Normaliser = "rows", counts: Tensor | None = None,
             first_position: int = 0, window_moves: bool = True) -> Loss:
    """The loss of every step, weighted decay^k.

    Args:
        precision: of the matrix products' operands; weights, norms, softmax and sums stay as they are.
        counts: [K], what `normalisers` gives over all the batches of which this is a part; None = over this one.
    """
    low = precision != torch.float32
    divisors = (normalisers(batch, normaliser) if counts is None else counts).double()
    if normaliser == "rows-eps":
        divisors = divisors + ROWS_EPS
    rows, real = pack_rows(batch.supervised.any(0))
    steps = len(batch.supervised)
    result = Loss(torch.zeros((), dtype=draft.dtype, device=rows.device), [], [], [])
    with torch.autocast(batch.features.device.type, dtype=precision if low else None, enabled=low):
        outputs = ttt_outputs(draft, batch.features, batch.token_ids, rows, steps, first_position=first_position,
                              window_moves=window_moves)
        for k, (output, divisor) in enumerate(zip(outputs, divisors.tolist(), strict=True)):
            taught = batch.supervised[k].gather(1, rows) & real
            count = int(taught.sum())
            result.rows.append(count)
            if count == 0:
                result.steps.append(0.0 if divisor else float("nan"))
                result.correct.append(0)
                continue
            index = batch.teacher_row.gather(1, (rows + 1 + k).clamp(max=batch.token_ids.shape[1]))[taught]
            summed, correct = head_loss(kind, draft.head_input(output[taught]), draft.lm_head.weight, batch.teacher, index,
                                        precision if low else draft.dtype)
            result.total = result.total + decay**k * summed / divisor
            result.steps.append(float(summed.detach()) / divisor)
            result.correct.append(int(correct))
    return result


def pack_rows(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the true elements of each row of [B, T], as [B, R] int64 padded with 0, and which are real."""
    counts = wanted.sum(1)
    width = max(int(counts.max()), 1)
    order = wanted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    real = torch.arange(width, device=wanted.device) < counts[:, None]
    return order.masked_fill(~real, 0), real
