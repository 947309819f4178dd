"""The draft as it serves: a cache over accepted rows, extended with true features, and chains drafted from its end.

Shapes: R rows of the batch, W tokens of a pass, K drafted tokens, H draft width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.model import Draft
from draftscope.target.cache import RaggedCache


class DraftCache(RaggedCache):
    """The serving draft's attention: keys of accepted rows, and of the chain being drafted until it is thrown away."""

    def __init__(self, config: DraftConfig, rows: int, capacity: int) -> None:
        super().__init__(config.layers, rows, capacity)
        self._windows = [config.window(layer) for layer in range(config.layers)]
        self._masks: dict[int | None, Tensor] = {}

    def begin(self, width: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        positions, mask = super().begin(width, rows)
        near = torch.arange(mask.shape[-1]) - positions[:, None, :, None]
        self._masks = {window: mask if window is None else mask & (near > -window) for window in set(self._windows)}
        return positions, mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        keys, values = self.update(k, v, layer)
        mask = self._masks[self._windows[layer]].to(q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class Drafter:
    """The draft side of the loop: its cache, and its output at each row's last accepted state.

    `at` [R] names the rows of the batch that a call is about; None = all of them.
    """

    def __init__(self, draft: Draft, k: int, rows: int, capacity: int, feedback: Literal["pre", "post"] | None) -> None:
        self.draft, self.k = draft, k
        self.cache = DraftCache(draft.config, rows, capacity)
        feeds: dict[str | None, Callable[[Tensor], Tensor]] = {"pre": lambda state: state, "post": draft.norm}
        self._feed = feeds.get(feedback, draft.feedback)
        self._output = draft.norm.weight.new_zeros(rows, draft.config.hidden_size)

    def extend(self, hidden: Tensor, following: Tensor, counts: Tensor, at: Tensor | None) -> None:
        """Run over accepted rows: projected true features [R, W, H], the token after each row [R, W], how many count [R]."""
        positions, _ = self.cache.begin(hidden.shape[1], at)
        outputs = self.draft(hidden, self.draft.embed(following.to(hidden.device)), positions.to(hidden.device), self.cache)
        self.cache.commit(counts, at)
        self._output[slice(None) if at is None else at] = outputs[torch.arange(len(counts)), counts - 1]

    def propose(self, at: Tensor | None) -> tuple[Tensor, Tensor]:
        """A chain of drafted target ids [R, K], and the outputs [R, K, H] that they were read from."""
        state = self._output if at is None else self._output[at]
        states, drafted = [state], [self._pick(state)]
        for _ in range(self.k - 1):
            positions, _ = self.cache.begin(1, at)
            fed, embeds = self._feed(state)[:, None], self.draft.embed(drafted[-1])[:, None]
            state = self.draft(fed, embeds, positions.to(state.device), self.cache)[:, 0]
            self.cache.commit(1, at)
            states.append(state)
            drafted.append(self._pick(state))
        self.cache.commit(1 - self.k, at)
        return torch.stack(drafted, 1).cpu(), torch.stack(states, 1)

    def _pick(self, output: Tensor) -> Tensor:
        return self.draft.target_ids[self.draft.logits(output).argmax(-1)]
