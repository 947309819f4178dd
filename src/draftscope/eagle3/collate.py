"""Examples to a batch: padded on the right, with what each row is taught.

Packing needs no model and runs ahead of the training, in storage dtypes; finishing computes the teacher, where the draft is.
B sequences, T tokens, S slots, Ht target width, D draft vocabulary, K steps, M taught indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from draftscope.eagle3.examples import Example
from draftscope.eagle3.loss import Batch, supervised_rows
from draftscope.eagle3.settings import Settings
from draftscope.target.parts import TargetParts


@dataclass(slots=True)
class Packed:
    """Padded sequences, on the CPU.

    Attributes:
        token_ids: [B, T] int64; lengths: [B] int64.
        features: [B, T, S, Ht] in the dtype stored.
        supervised: [K, B, T] bool; teacher_row: [B, T + 1] int64 (see `Batch`).
        last: [M, Ht] last states in the dtype stored; normed: [M] bool, they are after the final norm.
        uniform: [M] bool, the teacher is the uniform distribution.
        answers: answer tokens.
    """

    token_ids: Tensor
    lengths: Tensor
    features: Tensor
    supervised: Tensor
    teacher_row: Tensor
    last: Tensor
    normed: Tensor
    uniform: Tensor
    names: tuple[str, ...]
    answers: int


@dataclass(slots=True)
class Collate:
    """Examples to a `Batch`.

    Attributes:
        parts: the target's, with the head's rows of the draft vocabulary only, where the draft is.
        draft_ids: [V] int64, draft id of each target id, -1 outside the draft vocabulary.
        column_scale: [S, Ht] by which features are divided, None = 1.
    """

    parts: TargetParts
    draft_ids: Tensor
    settings: Settings
    column_scale: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, parts: TargetParts, target_ids: Tensor, settings: Settings, column_scale: Tensor | None = None,
           device: torch.device | str = "cpu") -> Collate:
        """From the whole target and the draft vocabulary's target ids [D]."""
        draft_ids = torch.full((parts.vocab,), -1, dtype=torch.int64)
        draft_ids[target_ids.cpu()] = torch.arange(len(target_ids))
        head = parts.head[target_ids.to(parts.head.device)].float()
        ends = replace(parts, head=head.to(device), norm_weight=parts.norm_weight.to(device))
        return cls(ends, draft_ids, settings, None if column_scale is None else column_scale.to(device), torch.device(device))

    def __call__(self, examples: Sequence[Example], dtype: torch.dtype = torch.float32) -> Batch:
        """A whole batch at once."""
        return self.finish(self.pack(examples), dtype)

    def pack(self, examples: Sequence[Example], length: int | None = None) -> Packed:
        """Padded to `length`, or to the longest."""
        settings, steps = self.settings, self.settings.ttt_steps
        count, length = len(examples), length or max(len(e) for e in examples)
        entries, width = examples[0].states.shape[1:]
        dtype = reduce(torch.promote_types, (e.states.dtype for e in examples))
        token_ids = torch.zeros(count, length, dtype=torch.int64)
        features = torch.zeros(count, length, entries - 1, width, dtype=dtype)
        supervised = torch.zeros(steps, count, length, dtype=torch.bool)
        teacher_row = torch.full((count, length + 1), -1, dtype=torch.int64)
        lasts, normed, uniform = list[Tensor](), list[Tensor](), list[Tensor]()
        filled = 0
        for b, example in enumerate(examples):
            own = len(example)
            token_ids[b, :own] = example.token_ids
            features[b, :own] = example.states[:, :-1].to(dtype)
            rows = supervised_rows(example.answer, steps, settings.alignment, settings.past_end)
            inside = self._inside(example)
            needed = torch.zeros(own + 1, dtype=torch.bool)
            for k in range(min(steps, own)):
                taught = rows[k].clone()
                taught[: own - k] &= inside[1 + k :]
                taught[own - k :] = False
                supervised[k, b, :own] = taught
                needed[1 + k :] |= taught[: own - k]
            index = needed.nonzero().squeeze(-1)
            teacher_row[b, index] = torch.arange(filled, filled + len(index))
            filled += len(index)
            lasts.append(example.states[index.clamp(max=own - 1), -1].to(dtype))
            normed.append(torch.full((len(index),), example.normed))
            uniform.append(index == own)
        return Packed(token_ids, torch.tensor([len(e) for e in examples]), features, supervised, teacher_row, torch.cat(lasts),
                      torch.cat(normed), torch.cat(uniform), tuple(e.name for e in examples),
                      sum(int(e.answer.sum()) for e in examples))

    def finish(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Batch:
        """The batch on the draft's device, features divided, with the teacher's log-probabilities at every index taught."""
        device = self.device
        features = packed.features.to(device, non_blocking=True).to(dtype)
        if self.column_scale is not None:
            features = features / self.column_scale.to(dtype)
        last, normed = packed.last.to(device).float(), packed.normed.to(device)
        logits = self.parts.logits(torch.where(normed[:, None], last, self.parts.final_norm(last)))
        logits = logits.masked_fill(packed.uniform.to(device)[:, None], 0.0)
        return Batch(packed.token_ids.to(device), features, packed.supervised.to(device), logits.log_softmax(-1).to(dtype),
                     packed.teacher_row.to(device), packed.names)

    def _inside(self, example: Example) -> Tensor:
        """Whether the teacher at each index [T + 1] may teach: its first choice is a token that the draft can say."""
        inside = torch.ones(len(example) + 1, dtype=torch.bool)
        if self.settings.outside == "masked":
            inside[:-1] = (example.best >= 0) & (self.draft_ids[example.best.clamp(min=0)] >= 0)
            inside[-1] = bool(self.draft_ids[0] >= 0)  # the first of equal logits
        return inside
