"""Acceptance on held-out sequences while training: a quick figure from one batched pass, not the replay's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftscope.eagle3.examples import Collate, Example, batch_order
from draftscope.eagle3.loss import pack_rows, supervised_rows, ttt_outputs
from draftscope.eagle3.model import Draft


@dataclass(slots=True)
class HeldOut:
    """Acceptance over answer rows of held-out sequences, as one batched pass simulates it.

    Attributes:
        joint: unconditional acceptance of each position; length = 1 + its sum.
        rows: answer rows whose text is the target's own choice throughout the window.
    """

    k: int
    rows: int
    joint: list[float]
    length: float


@torch.no_grad()
def evaluate(draft: Draft, examples: Sequence[Example], collate: Collate, k: int, batch_tokens: int = 4096) -> HeldOut:
    """Acceptance on sequences, in windows of k whose text is the target's own choice; tokens outside the draft vocabulary count
    as rejected."""
    hits = torch.zeros(k, dtype=torch.float64)
    seen = 0
    for chosen in batch_order([len(e) for e in examples], batch_tokens, 0, 0):
        part = [examples[i] for i in chosen]
        batch = collate(part)
        length = batch.token_ids.shape[1]
        wanted = torch.zeros(len(part), length, dtype=torch.bool)
        best = torch.full((len(part), length + k), -1, dtype=torch.int64)
        for b, example in enumerate(part):
            own = len(example)
            best[b, :own] = example.best
            rows = supervised_rows(example.answer, k)[k - 1]
            for j in range(k - 1):
                followed = torch.zeros(own, dtype=torch.bool)
                followed[: max(own - 2 - j, 0)] = example.token_ids[2 + j :] == example.best[1 + j : own - 1]
                rows &= followed
            wanted[b, :own] = rows
        if not bool(wanted.any()):
            continue
        rows, real = pack_rows(wanted)
        good = real.clone()
        for j, output in enumerate(ttt_outputs(draft, batch.features, batch.token_ids, rows, k)):
            alive = good.nonzero(as_tuple=True)
            if not len(alive[0]):
                break
            said = draft.target_ids[draft.logits(output[alive]).argmax(-1)]
            good[alive] = said == best.gather(1, rows + 1 + j)[alive]
            hits[j] += int(good.sum())
        seen += int(real.sum())
    joint = (hits / max(seen, 1)).tolist()
    return HeldOut(k, seen, joint, 1 + sum(joint))
