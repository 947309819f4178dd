"""Every boundary of the target over given tokens, sequence by sequence, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.target.model import Target

BATCH_BYTES = 256 * 2**20
"""States held at once, one sequence more than that where it alone is larger."""


@dataclass(slots=True)
class Swept:
    """The target's states over one sequence of T tokens, on the CPU, in the target's dtype.

    Attributes:
        token_ids: [T] int64.
        stream: [n+1, T, Ht], boundary b before any norm.
        post: [T, Ht], boundary n after the final norm.
        partial: [n, T, Ht] or None; `partial[i]` is boundary i+1 without layer i's MLP.
    """

    name: str
    token_ids: Tensor
    stream: Tensor
    post: Tensor
    partial: Tensor | None = None

    def branch(self, boundary: int) -> Tensor:
        """What layer `boundary` - 1 added: [T, Ht]."""
        if not 1 <= boundary < len(self.stream):
            raise ValueError(f"no branch at boundary {boundary}: branches run from 1 to {len(self.stream) - 1}")
        return self.stream[boundary] - self.stream[boundary - 1]


def sweep(
    target: Target, items: Iterable[tuple[str, Tensor]], *, partial: bool = False, on_tokens: Callable[[int], None] | None = None,
) -> Iterator[Swept]:
    """Run the target over named token sequences and yield all of its states, in the order given.

    Neighbours of like length share a forward pass; no more than a quarter of it is padding.

    Args:
        items: (name, token_ids [T] int64).
        partial: also the streams between attention and MLP, where the target has them.
        on_tokens: called with the number of tokens of each finished pass.

    Raises:
        DraftscopeError: a token id that the target does not have; names the sequence.
    """
    partial = partial and target.partials
    states = target.layers + 1 + (target.layers if partial else 0)
    per_token = states * target.width * target.parts.embedding.element_size()
    for batch in batches(items, max(128, min(2048, BATCH_BYTES // per_token))):
        for name, ids in batch:
            target.check_ids(name, ids)
        lengths = [len(ids) for _, ids in batch]
        if max(lengths) == 0:
            yield from (_nothing(target, name, ids, partial) for name, ids in batch)
            continue
        padded = torch.nn.utils.rnn.pad_sequence([ids for _, ids in batch], batch_first=True)
        indices = set(range(1, target.layers + 1))
        run = target.run(padded, {0} | indices, indices if partial else set())
        for row, (name, ids) in enumerate(batch):
            end = lengths[row]
            stream = torch.stack([run.streams[b][row, :end] for b in range(target.layers + 1)]).cpu()
            between = torch.stack([run.partials[b][row, :end] for b in sorted(indices)]).cpu() if partial else None
            yield Swept(name, ids, stream, run.post[row, :end].cpu().clone(), between)
        if on_tokens is not None:
            on_tokens(sum(lengths))


def batches(items: Iterable[tuple[str, Tensor]], tokens: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group neighbours so that a batch, padded, has at most `tokens` tokens and a quarter of padding; longer ones go alone."""
    batch: list[tuple[str, Tensor]] = []
    longest = total = 0
    for name, ids in items:
        grown = max(longest, len(ids))
        padded = grown * (len(batch) + 1)
        if batch and (padded > tokens or 4 * (padded - total - len(ids)) > padded):
            yield batch
            batch, longest, total, grown = [], 0, 0, len(ids)
        batch.append((name, ids))
        longest, total = grown, total + len(ids)
    if batch:
        yield batch


def _nothing(target: Target, name: str, ids: Tensor, partial: bool) -> Swept:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=target.dtype)

    return Swept(name, ids, empty(target.layers + 1, 0, target.width), empty(0, target.width),
                 empty(target.layers, 0, target.width) if partial else None)
