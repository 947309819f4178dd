"""Losses of a row: the draft's logits held against the target's distribution over the draft vocabulary.

With p the target's and q the draft's distribution, alpha = sum min(p, q) the chance that a token drawn from q is accepted:
`soft-ce` -sum p log q (SafeAILab/EAGLE, SpecForge), `kl` KL(p|q) (speculators; the same gradient), `reverse-kl`, `jsd`, `ce`
-log q of p's first choice, `tv` 1 - alpha, `nla` -log alpha, `lk-hybrid` w KL + (1 - w) TV with w = exp(-3 alpha) (speculators
0.9.0 `losses/eager.py`; Samarin et al., arXiv 2602.23881). Head and loss are one function, taken in chunks of rows: logits
over the vocabulary are never kept for the backward pass. N rows, M teachers, H draft width, D draft vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from draftscope.eagle3.settings import LossKind

_CHUNK = 256
_LEAST_ALPHA = 1e-5
_ETA = 3.0


def row_losses(kind: LossKind, logits: Tensor, teacher: Tensor) -> Tensor:
    """Loss of each row [N] from the draft's logits [N, D] and the teacher's log-probabilities [N, D]."""
    log_q, p = logits.log_softmax(-1), teacher.exp()
    if kind == "soft-ce":
        return -(p * log_q).sum(-1)
    if kind == "ce":
        return -log_q.gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1)
    if kind == "reverse-kl":
        return (log_q.exp() * (log_q - teacher)).sum(-1)
    if kind == "jsd":
        mixed = torch.logaddexp(log_q, teacher) - math.log(2.0)
        return 0.5 * ((p * (teacher - mixed)).sum(-1) + (log_q.exp() * (log_q - mixed)).sum(-1))
    kl = (p * (teacher - log_q)).sum(-1)
    if kind == "kl":
        return kl
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - alpha
    if kind == "nla":
        return -alpha.clamp_min(_LEAST_ALPHA).log()
    weight = torch.exp(-_ETA * alpha.detach())
    return weight * kl + (1 - weight) * (1 - alpha)


def head_loss(kind: LossKind, states: Tensor, head: Tensor, teacher: Tensor, index: Tensor,
              precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum over rows, and how many have the teacher's first choice first.

    Args:
        states: [N, H] as the head takes them; head: [D, H].
        teacher: [M, D] log-probabilities; index: [N] int64, the row of it that teaches each.
        precision: of the matrix products' operands.
    """
    return _HeadLoss.apply(states, head, teacher, index, precision, kind)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, teacher: Tensor, index: Tensor, precision: torch.dtype,
                kind: LossKind) -> tuple[Tensor, Tensor]:
        grad_states = torch.empty_like(states)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        total = states.new_zeros((), dtype=torch.float64)
        correct = torch.zeros((), dtype=torch.int64, device=states.device)
        narrow_states, narrow_head = states.to(precision), head.to(precision)
        for start in range(0, len(states), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits, wanted = (narrow_states[part] @ narrow_head.T).to(states.dtype), teacher[index[part]]
            correct += (logits.argmax(-1) == wanted.argmax(-1)).sum()
            loss, grad = _descended(kind, logits, wanted)
            total += loss
            grad = grad.to(precision)
            grad_states[part] = grad @ narrow_head
            if grad_head is not None:
                grad_head += grad.T @ narrow_states[part]
        ctx.save_for_backward(grad_states, grad_head)
        ctx.mark_non_differentiable(correct)
        return total.to(states.dtype), correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_head = ctx.saved_tensors
        return grads[0] * grad_states, None if grad_head is None else grads[0] * grad_head, None, None, None, None


def _descended(kind: LossKind, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss in float64, and its gradient by the logits [N, D] (which are overwritten)."""
    if kind not in ("soft-ce", "kl"):
        with torch.enable_grad():
            free = logits.detach().requires_grad_()
            summed = row_losses(kind, free, teacher).sum(dtype=torch.float64)
            (grad,) = torch.autograd.grad(summed, free)
        return summed.detach(), grad
    wanted = teacher.exp()
    normaliser = logits.logsumexp(-1, keepdim=True)
    total = normaliser.sum(dtype=torch.float64) - torch.linalg.vecdot(wanted, logits).sum(dtype=torch.float64)
    if kind == "kl":
        total = total + torch.linalg.vecdot(wanted, teacher).sum(dtype=torch.float64)
    return total, logits.sub_(normaliser).exp_().sub_(wanted)
