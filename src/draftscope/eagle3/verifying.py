"""One verify step: which drafted tokens stand, and which token follows them.

R rows of the batch, K drafted tokens, W = K + 1 nodes (the root first), D the longest possible path with its root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.eagle3.sampling import Draws, Sampling, verify_drawn, verify_fixed
from draftscope.eagle3.tree import Tree, longest


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the draft proposes.

    Attributes:
        tokens: [R, K] target ids; -1 where a tree has fewer nodes.
        states: [R, K, H], the draft's output that each was read from.
        tree: None = a chain. Its `tokens` are draft ids.
        logits: [R, E, D] of the nodes that were expanded, where the tokens were drawn from them; None = the draft's best.
    """

    tokens: Tensor
    states: Tensor | None
    tree: Tree | None = None
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stands of it.

    Attributes:
        accepted: [R] int64, drafted tokens that stand.
        chosen: [R, W] int64, what the target chose after each node; -1 where it was not asked.
        path: [R, D] int64 nodes from the root on, the last that stands repeated; None = the first ones, of a chain.
    """

    accepted: Tensor
    chosen: Tensor
    path: Tensor | None = None

    def along(self, values: Tensor) -> Tensor:
        """[R, W, ...] to [R, D, ...]: the rows of the path."""
        if self.path is None:
            return values
        return values[torch.arange(len(self.path))[:, None], self.path]


def verify_greedy(proposal: Proposal, chosen: Tensor, steps: int) -> Verdict:
    """The longest path whose tokens are the target's choice `chosen` [R, W] after the node before."""
    if proposal.tree is None:
        return Verdict((chosen[:, :-1] == proposal.tokens).cumprod(-1).sum(-1), chosen)
    parents = proposal.tree.parents
    path, accepted = longest(parents, proposal.tokens == chosen.gather(1, parents + 1), steps)
    return Verdict(accepted, chosen, path)


def verify_sampled(
    proposal: Proposal, logits: Tensor, steps: int, sampling: Sampling, draws: Sequence[Draws], ids: Tensor | None,
) -> Verdict:
    """A path drawn so that the text is distributed as the target's: logits [R, W, V], the draft's map `ids` [D]."""
    r, w = logits.shape[:2]
    chosen = torch.full((r, w), -1)
    accepted = torch.zeros(r, dtype=torch.int64)
    paths = torch.zeros(r, steps + 1, dtype=torch.int64)
    for row in range(r):
        tokens = proposal.tokens[row].tolist()
        parents = list(range(-1, w - 2)) if proposal.tree is None else proposal.tree.parents[row].tolist()
        node, path = 0, [0]
        while True:
            children = [column for column, parent in enumerate(parents) if parent == node - 1 and tokens[column] >= 0]
            p = sampling.distribution(logits[row, node])
            if proposal.tree is not None and proposal.logits is not None and children and not sampling.equality:
                assert ids is not None
                q = sampling.drafts(proposal.logits[row, int(proposal.tree.sources[row, children[0]])])
                drawn = proposal.tree.tokens[row, children].tolist()
                token, taken = verify_drawn(p, q, drawn, ids, draws[row])
            else:
                token, taken = verify_fixed(p, [tokens[column] for column in children], draws[row])
            chosen[row, node] = token
            if taken is None:
                break
            node = children[taken] + 1
            path.append(node)
        accepted[row] = len(path) - 1
        paths[row] = torch.tensor(path + path[-1:] * (steps + 1 - len(path)))
    return Verdict(accepted, chosen, None if proposal.tree is None else paths)
