"""What an entry is, told without the target: does it depend on the token alone, and how deep is it.

An embedding gives the same token the same vector wherever it stands; every deeper state has seen what came before. Depth
goes by the median norm (the residual stream grows) and by how much of a row its token still explains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.inspecting.rows import RowFigures
from draftscope.states.mapped import release

PAIRS_PER_SEQUENCE = 256
PAIRS = 4096
TOGETHER = 32
SHARE_PAIRS = 16
"""Fewer pairs than this say nothing about depth."""


def same_token_pairs(token_ids: Tensor) -> Tensor:
    """[N, 2] rows of the same token that have unlike predecessors, in order of position.

    A constant run of one token looks the same at every depth (attention over equal values), hence the predecessors; row 0
    counts as its own.
    """
    order = torch.argsort(token_ids, stable=True)
    same = (token_ids[order][1:] == token_ids[order][:-1]).nonzero().squeeze(-1)
    pairs = torch.stack([order[same], order[same + 1]], 1)
    before = torch.cat([token_ids[:1], token_ids[:-1]])
    return pairs[before[pairs[:, 0]] != before[pairs[:, 1]]]


class TokenTest:
    """Same token, same vector? Gathered over sequences, for each slot.

    Attributes:
        pairs: pairs looked at, by slot.
    """

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.pairs = torch.zeros(slots, dtype=torch.int64)
        self._equal = torch.zeros(slots, dtype=torch.int64)
        self._others = torch.zeros(slots, dtype=torch.int64)
        self._others_equal = torch.zeros(slots, dtype=torch.int64)
        self._same = torch.zeros(slots, dtype=torch.float64)
        self._unlike = torch.zeros(slots, dtype=torch.float64)
        self._compared = torch.zeros(slots, dtype=torch.int64)

    def update(self, token_ids: Tensor, states: Tensor, figures: RowFigures) -> None:
        """Take in states [T, S, Ht] of one sequence."""
        pairs = same_token_pairs(token_ids)
        if len(pairs) > PAIRS_PER_SEQUENCE:
            pairs = pairs[torch.linspace(0, len(pairs) - 1, PAIRS_PER_SEQUENCE).long()]
        rolled = pairs[:, 1].roll(1)
        others = torch.stack([pairs[:, 0], rolled], 1)[token_ids[pairs[:, 0]] != token_ids[rolled]] if len(pairs) else pairs
        if len(others) == 0 and len(token_ids) > 1:
            neighbours = torch.stack([torch.arange(len(token_ids) - 1), torch.arange(1, len(token_ids))], 1)
            others = neighbours[token_ids[:-1] != token_ids[1:]][:PAIRS_PER_SEQUENCE]
        eps = torch.finfo(self.dtype).eps
        for slot in range(states.shape[1]):
            if self.pairs[slot] >= PAIRS:
                continue
            usable = ~figures.bad[:, slot] & (figures.norms[:, slot] > 0)
            kept = pairs[usable[pairs].all(1)]
            errors, _ = distances(states[:, slot], kept)
            self.pairs[slot] += len(kept)
            self._equal[slot] += int((errors <= eps).sum())
            unlike = others[usable[others].all(1)]
            errors, _ = distances(states[:, slot], unlike)
            self._others[slot] += len(unlike)
            self._others_equal[slot] += int((errors <= eps).sum())
            ordinary = figures.ordinary[:, slot]
            kept, unlike = kept[ordinary[kept].all(1)], unlike[ordinary[unlike].all(1)]
            if len(kept) and len(unlike):
                self._compared[slot] += len(kept)
                self._same[slot] += float(distances(states[:, slot], kept)[1].mean()) * len(kept)
                self._unlike[slot] += float(distances(states[:, slot], unlike)[1].mean()) * len(kept)

    def constant(self, slot: int) -> bool:
        """Unlike tokens have the same vector: the entry depends on nothing."""
        return bool(self._others[slot] >= 2) and bool(self._others_equal[slot] == self._others[slot])

    def alone(self, slot: int) -> bool | None:
        """Whether the slot depends on the token alone; None without a repeated token."""
        if self.pairs[slot] == 0 or self.constant(slot):
            return None
        return bool(self._equal[slot] >= 0.99 * self.pairs[slot])

    def share(self, slot: int) -> float | None:
        """How much of a row its token explains, 0 to 1; None where too few rows tell."""
        if self._compared[slot] < SHARE_PAIRS or self._unlike[slot] <= 0:
            return None
        return float(1 - self._same[slot] / self._unlike[slot])


def distances(states: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows [N, 2] of states [T, Ht]: |a - b| / max(|a|, |b|), and the squared distance of the unit vectors; float64."""
    errors, units = [], []
    for some in pairs.split(TOGETHER):
        a, b = states[some[:, 0]].double(), states[some[:, 1]].double()
        release(states)  # rows here and there bring far more than themselves into memory
        norm_a, norm_b = a.norm(dim=-1), b.norm(dim=-1)
        errors.append((a - b).norm(dim=-1) / torch.maximum(norm_a, norm_b))
        units.append((a / norm_a[:, None] - b / norm_b[:, None]).square().sum(-1))
    return torch.cat(errors), torch.cat(units)


def rank_by_depth(norms: list[float | None], shares: list[float | None]) -> tuple[list[int | None], bool]:
    """1 = shallowest, and whether norm and token share agree.

    The mean of the two orders decides, the norm where they tie; without shares the norm alone. Entries without a norm have
    no rank, and one entry alone has none.
    """
    known = [i for i, norm in enumerate(norms) if norm is not None]
    ranks: list[int | None] = [None] * len(norms)
    if len(known) < 2:
        return ranks, True
    by_norm = _order([float(norms[i] or 0.0) for i in known])
    agree, score = True, [float(r) for r in by_norm]
    if all(shares[i] is not None for i in known):
        by_share = _order([-float(shares[i] or 0.0) for i in known])
        agree = by_norm == by_share
        score = [n + s + 1e-3 * n for n, s in zip(by_norm, by_share, strict=True)]
    for position, place in enumerate(_order(score)):
        ranks[known[position]] = place + 1
    return ranks, agree


def _order(values: list[float]) -> list[int]:
    ordered = sorted(range(len(values)), key=lambda i: values[i])
    return [ordered.index(i) for i in range(len(values))]


def ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
