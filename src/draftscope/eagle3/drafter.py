"""The draft as it serves: a cache over accepted rows, extended with true features, and chains or trees drafted from its end.

Shapes: R rows of the batch, W tokens of a pass, K drafted tokens, E expanded nodes of a level, H draft width, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.model import Draft
from draftscope.eagle3.sampling import Draws, Sampling
from draftscope.eagle3.tree import Growth, TreeShape
from draftscope.eagle3.verifying import Proposal
from draftscope.target.cache import Branches, RaggedCache


class DraftCache(RaggedCache):
    """The serving draft's attention: keys of accepted rows, and of what is being drafted until it is thrown away."""

    def __init__(self, config: DraftConfig, rows: int, capacity: int) -> None:
        super().__init__(config.layers, rows, capacity)
        self._windows = [config.window(layer) for layer in range(config.layers)]
        self._masks: dict[int | None, Tensor] = {}

    def begin(self, width: int, rows: Tensor | None = None, branches: Branches | None = None) -> tuple[Tensor, Tensor]:
        positions, mask = super().begin(width, rows, branches)
        self._masks = {
            window: mask if window is None else mask & (self.distances(positions) < window) for window in set(self._windows)
        }
        return positions, mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        keys, values = self.update(k, v, layer)
        mask = self._masks[self._windows[layer]].to(q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class Drafter:
    """The draft side of the loop: its cache, and its output at each row's last accepted state.

    `at` [R] names the rows of the batch that a call is about; None = all of them.

    Args:
        k: length of the chains that it drafts.
        shape: of the trees that it drafts instead; None = chains.
        sampling: draws the tokens of its trees, if that is how it says to draft; None = the draft's best.
    """

    def __init__(self, draft: Draft, k: int, rows: int, capacity: int, feedback: Literal["pre", "post"] | None,
                 shape: TreeShape | None = None, sampling: Sampling | None = None) -> None:
        self.draft, self.k, self.shape = draft, k, shape
        self.sampling = sampling if sampling is not None and sampling.draft == "probabilistic" else None
        self.cache = self._new_cache(rows, capacity)
        feeds: dict[str | None, Callable[[Tensor], Tensor]] = {"pre": lambda state: state, "post": draft.norm}
        self._feed = feeds.get(feedback, draft.feedback)
        self._output = draft.norm.weight.new_zeros(rows, draft.config.hidden_size)

    def _new_cache(self, rows: int, capacity: int) -> DraftCache:
        return DraftCache(self.draft.config, rows, capacity)

    def begin(self, hidden: Tensor, following: Tensor, counts: Tensor, at: Tensor, shared: Tensor) -> None:
        """Start requests: `extend` over whole prompts; `shared` [R], rows of each that an earlier prompt begins with, too."""
        self.cache.clear(at)
        self.extend(hidden, following, counts, at)

    def extend(self, hidden: Tensor, following: Tensor, counts: Tensor, at: Tensor | None) -> None:
        """Run over accepted rows: projected true features [R, W, H], the token after each row [R, W], how many count [R]."""
        positions, _ = self.cache.begin(hidden.shape[1], at)
        outputs = self.draft(hidden, self.draft.embed(following.to(hidden.device)), positions.to(hidden.device), self.cache)
        self.cache.commit(counts, at)
        self._output[slice(None) if at is None else at] = outputs[torch.arange(len(counts)), counts - 1]

    def propose(self, at: Tensor | None, draws: Sequence[Draws] = (), given: Tensor | None = None) -> Proposal:
        """A chain of K drafted tokens per row, or a tree; `draws` [R] where tokens are drawn.

        Args:
            given: [R, K] target ids that a chain drafts in place of its own.
        """
        if self.shape is not None:
            return self._tree(self.shape, at, draws)
        state = self._output if at is None else self._output[at]
        states, drafted = [state], [self._pick(state, given, 0)]
        for step in range(1, self.k):
            positions, _ = self.cache.begin(1, at)
            fed, embeds = self._feed(state)[:, None], self.draft.embed(drafted[-1])[:, None]
            state = self.draft(fed, embeds, positions.to(state.device), self.cache)[:, 0]
            self.cache.commit(1, at)
            states.append(state)
            drafted.append(self._pick(state, given, step))
        self.cache.commit(1 - self.k, at)
        return Proposal(torch.stack(drafted, 1).cpu(), torch.stack(states, 1))

    def _pick(self, output: Tensor, given: Tensor | None, step: int) -> Tensor:
        if given is not None:
            return given[:, step].to(output.device)
        return self.draft.target_ids[self.draft.logits(output).argmax(-1)]

    def _tree(self, shape: TreeShape, at: Tensor | None, draws: Sequence[Draws]) -> Proposal:
        """A tree per row. What its nodes leave in the cache is never kept, so the next pass overwrites it."""
        states = (self._output if at is None else self._output[at])[:, None]
        r, topk, device = len(states), shape.topk, states.device
        growth, outputs, logits = Growth(shape), [states], []
        seen = torch.zeros(r, topk, 0, dtype=torch.bool)
        for level in range(shape.steps):
            found = self.draft.logits(states)
            if self.sampling is not None:
                logits.append(found.cpu())
            tokens, above = growth.level(*self._children(found, topk, draws))
            if level + 1 == shape.steps:
                break
            # The nodes of a level see their ancestors, each of them its own row of the level before, and themselves.
            if level:
                seen = seen.take_along_dim(above[..., None], 1)
            seen = torch.cat([seen, torch.eye(topk, dtype=torch.bool).expand(r, -1, -1)], 2)
            positions, _ = self.cache.begin(topk, at, Branches(torch.full((r, topk), level), seen))
            fed = self._feed(states.take_along_dim(above[..., None].to(device), 1))
            embeds = self.draft.embed(self.draft.target_ids[tokens.to(device)])
            states = self.draft(fed, embeds, positions.to(device), self.cache)
            outputs.append(states)
        tree = growth.tree()
        targets = self.draft.target_ids.cpu()[tree.tokens.clamp(min=0)].masked_fill(tree.tokens < 0, -1)
        behind = torch.cat(outputs, 1).take_along_dim(tree.sources[..., None].to(device), 1)
        return Proposal(targets, behind, tree, torch.cat(logits, 1) if logits else None)

    def _children(self, logits: Tensor, topk: int, draws: Sequence[Draws]) -> tuple[Tensor, Tensor]:
        """Logits [R, E, D] to the log-probabilities of the `topk` best [R, E, topk], and the draft ids that are tried.

        Where tokens are drawn the scores stay those of the best: a shape must not depend on what was drawn.
        """
        if self.sampling is None:
            best = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).topk(topk, -1)
            return best.values.cpu(), best.indices.cpu()
        q = self.sampling.drafts(logits.cpu())
        tokens = torch.stack([torch.stack([draws[row].order(node, topk) for node in rows]) for row, rows in enumerate(q)])
        return q.topk(topk, -1).values.log(), tokens
