"""Acceptance on held-out sequences while training, from one batched pass with the true tokens.

Up to the first miss a draft's own tokens are the true ones, so the pass gives each row the tokens that a server would accept
from it. K drafted tokens, A_t accepted ones of row t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.eagle3.batches import batch_order
from draftscope.eagle3.collate import Collate
from draftscope.eagle3.corpus import Corpus
from draftscope.eagle3.examples import Example
from draftscope.eagle3.loss import pack_rows, supervised_rows, ttt_outputs
from draftscope.eagle3.matching import OWN_SHARE
from draftscope.eagle3.model import Draft
from draftscope.eagle3.parallel import ALONE, Ranks
from draftscope.eagle3.replay import walk


@dataclass(slots=True)
class HeldOut:
    """Acceptance on held-out sequences whose text is the target's own.

    Attributes:
        rows: answer rows whose text is the target's own choice throughout the window.
        joint: unconditional acceptance of each position over them; length = 1 + its sum.
        rounds: verify steps of walks over whole answers, from each answer's first token on, as a server would take them.
        walk: tokens of a verify step over these, the bonus token included; None where no sequence is the target's own text
            (nine tenths of its answer tokens the target's first choice).
    """

    k: int
    rows: int
    joint: list[float]
    length: float
    rounds: int = 0
    walk: float | None = None

    @property
    def figure(self) -> float:
        """What one run is compared with another by: the walk's length where there is one."""
        return self.length if self.walk is None else self.walk


@torch.no_grad()
def evaluate(draft: Draft, corpus: Corpus, collate: Collate, k: int, batch_tokens: int = 4096, ranks: Ranks = ALONE) -> HeldOut:
    """Acceptance over windows of k; tokens outside the draft vocabulary count as rejected. Processes share the batches."""
    # hits of each position, rows, accepted tokens and rounds of the walks
    sums = torch.zeros(k + 3, dtype=torch.float64)
    for number, chosen in enumerate(batch_order(corpus.lengths, batch_tokens, 0, 0)):
        if number % ranks.world == ranks.rank:
            sums += _batch(draft, corpus.load(chosen), collate, k)
    *hits, rows, accepted, rounds = ranks.sum(sums).tolist()
    joint = [hit / max(rows, 1) for hit in hits]
    return HeldOut(k, int(rows), joint, 1 + sum(joint), int(rounds), 1 + accepted / rounds if rounds else None)


def _batch(draft: Draft, examples: list[Example], collate: Collate, k: int) -> Tensor:
    batch = collate.finish(collate.pack(examples))
    length = batch.token_ids.shape[1]
    windows = torch.zeros(len(examples), length, dtype=torch.bool)
    walked = torch.zeros_like(windows)
    # What position j of row t should say: the target's choice, or on its own text the text.
    best, text = (torch.full((len(examples), length + k + 1), -1, dtype=torch.int64) for _ in range(2))
    for b, example in enumerate(examples):
        own = len(example)
        best[b, :own], text[b, : own - 1] = example.best, example.token_ids[1:]
        rows = supervised_rows(example.answer, k)[k - 1]
        windows[b, :own] = rows & _followed(example, k)
        if own_text(example):
            walked[b, :own] = rows
    sums = torch.zeros(k + 3, dtype=torch.float64)
    if not bool((windows | walked).any()):
        return sums
    rows, real = pack_rows(windows | walked)
    as_chosen, as_written = windows.gather(1, rows) & real, walked.gather(1, rows) & real
    sums[k] = as_chosen.sum()
    accepted = torch.zeros_like(rows)
    outputs = ttt_outputs(draft, batch.features, batch.token_ids, rows.to(batch.token_ids.device), k)
    for j, output in enumerate(outputs):
        alive = (as_chosen | as_written).nonzero(as_tuple=True)
        if not len(alive[0]):
            break
        said = draft.target_ids[draft.logits(output[tuple(i.to(output.device) for i in alive)]).argmax(-1)].cpu()
        as_chosen[alive] &= said == best.gather(1, rows + 1 + j)[alive]
        as_written[alive] &= said == text.gather(1, rows + 1 + j)[alive]
        sums[j] = as_chosen.sum()
        accepted += as_written
    places = walked.gather(1, rows) & real
    for b, example in enumerate(examples):
        leads = accepted[b, places[b]].numpy()
        taken = leads[walk(example.answer, rows[b, places[b]].numpy(), leads)]
        sums[k + 1] += int(taken.sum())
        sums[k + 2] += len(taken)
    return sums


def own_text(example: Example) -> bool:
    """Whether nine tenths of the answer tokens are the target's first choice."""
    judged = example.answer[1:] & (example.best[:-1] >= 0)
    return bool(judged.any()) and float((example.best[:-1] == example.token_ids[1:])[judged].float().mean()) >= OWN_SHARE


def _followed(example: Example, k: int) -> Tensor:
    """[T] whether the text is the target's own choice throughout the window that row t drafts, but for the last token."""
    own = len(example)
    rows = torch.ones(own, dtype=torch.bool)
    for j in range(k - 1):
        followed = torch.zeros(own, dtype=torch.bool)
        followed[: max(own - 2 - j, 0)] = example.token_ids[2 + j :] == example.best[1 + j : own - 1]
        rows &= followed
    return rows
