"""Draft trees as EAGLE-2 and EAGLE-3 grow them: their shape, their growth level by level, who sees whom, which path matches.

Of each level the `topk` nodes with the best cumulative draft probability are expanded into their `topk` best tokens; of all
candidates the best are verified (Li et al. 2024, "EAGLE-2", sections 4.1 and 4.2; SafeAILab/EAGLE `cnets.py`
`topK_genrate`; SGLang `eagle_utils.py` and `spec_utils.py`, `select_top_k_tokens` and `organize_draft_results`). A node is
never better than its parent, and among equals the one that came first wins, so whoever is kept has its parent kept.

Shapes: N trees, E nodes expanded on a level, C candidates, K drafted nodes, W = K + 1 nodes with the root. Columns count
drafted nodes from 0, parents before children; -1 is the root. Nodes count from 0, the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import UsageError

MOST = 1024
"""Beyond it nothing that a file claims of a tree is taken for a shape."""
DEEPEST = 16
"""Drafted tokens of one step that a replay takes; what a capture claims beyond is no chain of an EAGLE-3 draft."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How far a tree grows.

    Attributes:
        topk: tokens tried after a node, and nodes expanded per level (SGLang `speculative_eagle_topk`, EAGLE `top_k`).
        steps: levels below the root (SGLang `speculative_num_steps`; EAGLE's `depth` is one less).
        nodes: tokens that the target reads in a verify step, the root included, which is the token that it chose last
            (SGLang `speculative_num_draft_tokens`, EAGLE `total_token`).

    Raises:
        UsageError: nothing to draft, or more nodes than such a tree has.
    """

    topk: int
    steps: int
    nodes: int

    def __post_init__(self) -> None:
        if min(self.topk, self.steps, self.nodes - 1) < 1:
            raise UsageError(f"a tree with topk {self.topk}, {self.steps} steps and {self.nodes} nodes drafts nothing",
                             remedy="topk and steps are at least 1, nodes at least 2: the root is one of them")
        if self.drafted > self.candidates:
            raise UsageError(
                f"a tree with topk {self.topk} and {self.steps} steps has {self.candidates + 1} nodes at most, not {self.nodes}",
                remedy=f"nodes count the root and topk + (steps - 1) x topk^2 candidates: ask for {self.candidates + 1} or fewer",
            )

    @property
    def drafted(self) -> int:
        """K, the nodes without the root."""
        return self.nodes - 1

    @property
    def candidates(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def expanded(self) -> int:
        """Nodes whose children are looked at, the root included."""
        return 1 + (self.steps - 1) * self.topk

    def __str__(self) -> str:
        return f"topk {self.topk}, {self.steps} steps, {self.nodes} nodes"


@dataclass(frozen=True, slots=True)
class Tree:
    """N trees of K drafted nodes.

    Attributes:
        tokens: [N, K] int64, what filled the node when it grew; -1 where a tree has fewer nodes, at the end.
        parents: [N, K] int64, column of the parent, -1 under the root.
        depths: [N, K] int64, 1 directly under the root.
        sources: [N, K] int64, which expanded node it is a child of, in the order of expansion (0 = the root).
        expansions: [N, K] int64, which expanded node it is itself, -1 = none.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    sources: Tensor
    expansions: Tensor

    def seen(self) -> Tensor:
        """[N, W, W] bool: node i looks at node j, which is itself or an ancestor."""
        n, k = self.parents.shape
        up = torch.cat([torch.zeros(n, 1, dtype=torch.int64), self.parents + 1], 1)
        seen = torch.eye(k + 1, dtype=torch.bool).repeat(n, 1, 1)
        for _ in range(int(self.depths.max()) if k else 0):
            seen = seen | seen.take_along_dim(up[..., None], 1)
        return seen


@dataclass(slots=True)
class Growth:
    """N trees while they grow. `margin` [N]: the least distance in log-probability at which a node was taken or left."""

    shape: TreeShape
    margin: Tensor = field(default_factory=lambda: torch.empty(0))
    _scores: list[Tensor] = field(default_factory=list)
    _tokens: list[Tensor] = field(default_factory=list)
    _parents: list[Tensor] = field(default_factory=list)
    _sources: list[Tensor] = field(default_factory=list)
    _chosen: list[Tensor] = field(default_factory=list)  # per level, candidates that were expanded

    def level(self, scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the children of the nodes last expanded (first of the root, E = 1), and expand the best of them.

        Args:
            scores: [N, E, topk] log-probability of each child given its parent; -inf = no such child.
            tokens: [N, E, topk] int64.

        Returns:
            tokens [N, topk] of the nodes to expand next, and which of the E nodes [N, topk] each is a child of.
        """
        n, expanded, topk = scores.shape
        first = self._chosen[-1] if self._chosen else torch.full((n, 1), -1)
        if self._scores:
            known = torch.cat(self._scores, 1)
            scores = scores + known.gather(1, first)[..., None]
        flat = scores.flatten(1)
        begun = sum(s.shape[1] for s in self._scores)
        order = flat.sort(dim=1, descending=True, stable=True)
        best = order.indices[:, : self.shape.topk]
        self._mark(order.values, self.shape.topk)
        numbers = torch.arange(expanded) + (0 if not self._chosen else 1 + (len(self._chosen) - 1) * self.shape.topk)
        self._scores.append(flat)
        self._tokens.append(tokens.flatten(1))
        self._parents.append(first.repeat_interleave(topk, 1))
        self._sources.append(numbers.repeat_interleave(topk).expand(n, -1))
        self._chosen.append(best + begun)
        return self._tokens[-1].gather(1, best), best // topk

    def tree(self) -> Tree:
        """The best of all candidates, in the order in which they came."""
        scores = torch.cat(self._scores, 1)
        n, count = scores.shape
        order = scores.sort(dim=1, descending=True, stable=True)
        self._mark(order.values, self.shape.drafted)
        picked = order.indices[:, : self.shape.drafted]
        lacking = torch.isneginf(scores.gather(1, picked))
        picked = (picked + count * lacking).sort(1).values
        lacking, picked = picked >= count, picked % count
        columns = torch.full((n, count), -1).scatter(1, picked, torch.arange(picked.shape[1]).expand(n, -1))
        expansions = torch.full((n, count), -1)
        for level, chosen in enumerate(self._chosen[:-1]):
            numbers = torch.arange(chosen.shape[1]) + 1 + level * self.shape.topk
            expansions.scatter_(1, chosen, numbers.expand(n, -1))
        depths = torch.cat([torch.full((s.shape[1],), i + 1) for i, s in enumerate(self._scores)])
        above = torch.cat(self._parents, 1).gather(1, picked)
        parents = torch.where(above < 0, -1, columns.gather(1, above.clamp(min=0)))
        return Tree(
            tokens=torch.cat(self._tokens, 1).gather(1, picked).masked_fill(lacking, -1),
            parents=parents.masked_fill(lacking, -1), depths=depths[picked].masked_fill(lacking, 1),
            sources=torch.cat(self._sources, 1).gather(1, picked),
            expansions=expansions.gather(1, picked).masked_fill(lacking, -1),
        )

    def note(self, gap: Tensor) -> None:
        """Remember how close [N] the last one taken was to the first one left."""
        gap = gap.nan_to_num(nan=torch.inf)
        self.margin = torch.minimum(self.margin, gap) if len(self.margin) else gap

    def _mark(self, ordered: Tensor, taken: int) -> None:
        if ordered.shape[1] > taken:
            self.note(ordered[:, taken - 1] - ordered[:, taken])
        elif not len(self.margin):
            self.note(ordered.new_full((len(ordered),), torch.inf))


def longest(parents: Tensor, hit: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The longest path whose every node is a hit; of several the first.

    Args:
        parents: [N, K] columns; hit: [N, K] bool, the node's token is the one wanted after its parent.

    Returns:
        path [N, steps + 1] nodes from the root on, its last one repeated; how many drafted ones it has, [N] int64.
    """
    n, k = parents.shape
    up = torch.cat([torch.zeros(n, 1, dtype=torch.int64), parents + 1], 1)
    alive = torch.cat([torch.ones(n, 1, dtype=torch.bool), hit], 1)
    depths = torch.zeros(n, k + 1, dtype=torch.int64)
    for _ in range(steps):
        alive = alive & alive.gather(1, up)
        depths = torch.cat([depths[:, :1], depths.gather(1, up)[:, 1:] + 1], 1)
    counts, best = depths.masked_fill(~alive, -1).max(1)
    path = best[:, None].repeat(1, steps + 1)
    for depth in range(steps - 1, -1, -1):
        below = path[:, depth + 1]
        path[:, depth] = torch.where(depth < counts, up.gather(1, below[:, None])[:, 0], below)
    return path, counts


def claimed(meta: Mapping[str, Any]) -> TreeShape | None:
    """The tree that a capture says its engine drafted, None for chains and where it does not say enough."""
    switches, k = meta.get("switches"), meta.get("num_spec_tokens")
    said = {**(switches if isinstance(switches, dict) else {}), **meta}
    if isinstance(k, int):
        said.setdefault("num_draft_tokens", k + 1)
    depth = said.get("num_steps", said.get("num_steps_in_effect", said.get("speculative_num_steps")))
    found = [said.get("topk", said.get("speculative_eagle_topk")), depth, said.get("num_draft_tokens")]
    topk, steps, nodes = (n if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= MOST else 0 for n in found)
    if topk < 2:
        return None
    try:
        return TreeShape(topk, steps, nodes)
    except UsageError:
        return None


def claimed_depth(meta: Mapping[str, Any]) -> int | None:
    """Tokens that a step can accept as a capture says: the depth of its trees, else its chains' length; None = no claim, or
    one that could not be."""
    tree, told = claimed(meta), meta.get("num_spec_tokens")
    if tree is not None:
        return tree.steps
    return told if type(told) is int and 0 < told <= DEEPEST else None
