"""Trees drafted from many rows of recorded sequences at once, and how far the tokens to match lie in each.

A chain needs the draft only along the text. Whether a node of the text is among those verified depends on all the others, so
here every expanded node is run, except from rows whose first token is not even a candidate. B sequences, P rows of each,
N = B x P trees, E nodes expanded on a level, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.eagle3.drafting import Drafter, Run
from draftscope.eagle3.matching import Prepared
from draftscope.eagle3.model import Draft, StepMask
from draftscope.eagle3.tree import Growth, TreeShape, longest
from draftscope.errors import UsageError

_LOGITS = 1 << 24


class TreeDrafter(Drafter):
    """Drafts trees of one shape; K is their depth.

    Raises:
        UsageError: more siblings than the draft has tokens.
    """

    def __init__(self, draft: Draft, shape: TreeShape) -> None:
        super().__init__(draft, shape.steps)
        self.shape: TreeShape = shape
        if shape.topk > draft.config.draft_vocab_size:
            raise UsageError(f"topk {shape.topk} with a draft vocabulary of {draft.config.draft_vocab_size} tokens")

    def start(self, batch: list[Prepared]) -> Run:
        return _TreeRun(self, batch)


class _TreeRun(Run):
    """`gap` holds, for all positions of a row, the least distance in log-probability at which its tree took or left a node."""

    def __init__(self, drafter: TreeDrafter, batch: list[Prepared]) -> None:
        super().__init__(drafter, batch)
        self.shape, self.wide = drafter.shape, drafter.shape.topk

    def piece(self, first: Tensor, mask: StepMask, places: Tensor) -> None:
        topk = self.shape.topk
        rows = self.rows[places.clamp(min=0)].masked_fill(places < 0, 0)
        hidden = first.gather(1, rows[..., None].expand(-1, -1, first.shape[-1]))
        held = places >= 0
        hopeful = held.clone()
        hopeful[held] = self._hopeful(hidden[held], places[held])
        if not bool(hopeful.any()):
            return
        chosen = (~hopeful).sort(dim=1, stable=True).indices[:, : int(hopeful.sum(1).max())]
        places = places.masked_fill(~hopeful, -1).gather(1, chosen)
        rows, held = rows.gather(1, chosen), places >= 0
        hidden = hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[-1]))[:, :, None]
        growth = Growth(self.shape)
        b, p = rows.shape
        spread = rows[..., None].expand(-1, -1, topk).flatten(1)
        later = mask.on(spread)
        for level in range(self.shape.steps):
            tokens, above = growth.level(*self._children(growth, hidden.flatten(0, 1)))
            if level + 1 == self.shape.steps:
                break
            above = above.unflatten(0, (b, p))
            if level:
                later.narrow((torch.arange(p)[:, None] * topk + above).flatten(1))
            fed = self.draft.feedback(hidden.take_along_dim(above[..., None], 2)).flatten(1, 2)
            embeds = self.draft.embed(self.draft.target_ids[tokens]).unflatten(0, (b, p)).flatten(1, 2)
            output = self.draft(fed, embeds, self.positions.gather(1, spread) + level + 1, later)
            hidden = output.unflatten(1, (p, topk))
        self._follow(growth, places.flatten()[held.flatten()], held.flatten())

    def _hopeful(self, states: Tensor, at: Tensor) -> Tensor:
        """Rows [n] at `at` with outputs [n, H] one of whose first tokens to match is a candidate: the others accept nothing,
        whatever the rest of their tree. Of recorded steps the margins are wanted, too."""
        found = []
        size = max(1, _LOGITS // self.draft.config.draft_vocab_size)
        for piece, rows in zip(states.split(size), at.split(size), strict=True):
            logits = self.draft.logits(piece)
            self.score[rows] = self.likelihood(logits, self.match[0, rows, 0])
            candidates = self.draft.target_ids[logits.topk(self.shape.topk, -1).indices]
            found.append((candidates[:, None] == self.match[:, rows, 0].T[..., None]).any(-1).any(-1) | self.is_step[rows])
        return torch.cat(found)

    def _children(self, growth: Growth, states: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [N, E, H] to the log-probabilities and draft ids [N, E, topk] of the best tokens after each."""
        n, e, _ = states.shape
        flat, topk = states.flatten(0, 1), self.shape.topk
        values, tokens = [], []
        for piece in flat.split(max(1, _LOGITS // self.draft.config.draft_vocab_size)):
            logits = self.draft.logits(piece)
            scores = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            best = scores.topk(min(topk + 1, scores.shape[-1]), -1)
            values.append(best.values)
            tokens.append(best.indices[:, :topk])
        found = torch.cat(values).unflatten(0, (n, e))
        if found.shape[-1] > topk:
            growth.note((found[..., topk - 1] - found[..., topk]).amin(-1))
        return found[..., :topk], torch.cat(tokens).unflatten(0, (n, e))

    def _follow(self, growth: Growth, at: Tensor, held: Tensor) -> None:
        """How far the tokens to match of the rows at `at` [n] go in their trees, `held` [N] of all."""
        tree = growth.tree()
        tokens, parents, depths = (x[held] for x in (tree.tokens, tree.parents, tree.depths))
        targets = self.draft.target_ids[tokens.clamp(min=0)].masked_fill(tokens < 0, -2)
        for kind in range(2):
            wanted = self.match[kind, at].gather(1, depths - 1)
            path, counts = longest(parents, targets == wanted, self.shape.steps)
            self.lead[kind, at] = counts
            self.closed[kind, at] = ~(parents == path[:, -1:] - 1).any(-1)
        self.gap[at] = growth.margin[held, None].to(self.gap.dtype)
