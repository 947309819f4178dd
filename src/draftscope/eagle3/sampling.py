"""Speculative sampling: what is accepted of drafted tokens so that the text is distributed as the target's own.

Three ways to propose, each with its rule:

- One token drawn from the draft's distribution q: kept with probability min(1, p(x)/q(x)), else a token from the residual
  norm(max(p - q, 0)) takes its place (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
  appendix A.1; Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", theorem 1).
- Several siblings drawn from q without replacement: tried in the order of their drawing; after each rejection p becomes the
  residual, and q loses the token and is renormalised (Jeon et al. 2024, "Recursive Speculative Decoding", theorem 3.1;
  Yang et al. 2024, "Multi-Candidate Speculative Decoding", section 3.2). With one sibling it is the rule above.
- Tokens that are no draw, the draft's best: a token is drawn from p, and if it is among them its node is taken (the rule
  above with all of q on one token, for one sibling after another; SGLang's `tree_speculative_sampling_target_only`).

Siblings stay draws from q only if nothing decides by their own value whether they are tried. A tree is therefore shaped by
what q is, not by what was drawn: the i-th sibling counts for as much as the i-th largest probability.

p and q are what temperature, top-k and top-p leave, in that order (as transformers, vLLM and SGLang have it). V target
vocabulary, D draft vocabulary, W nodes of a pass. All arithmetic on probabilities is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftscope.errors import UsageError

DraftSampling = Literal["greedy", "probabilistic"]


class Draws:
    """A request's own source of chance, so that its text does not depend on what is answered beside it."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self._generator)

    def flip(self, chance: float) -> bool:
        """True with this probability."""
        return float(self._uniform(1)) < chance

    def choose(self, weights: Tensor) -> int:
        """An index of [n] float64, in proportion to the weights; never one of weight 0."""
        sums = weights.cumsum(0)
        index = int(torch.searchsorted(sums, self._uniform(1) * sums[-1], right=True))
        return index if index < len(sums) else int(weights.nonzero()[-1])

    def order(self, weights: Tensor, count: int) -> Tensor:
        """`count` different indices, each drawn in proportion to the weights of those left over; those of weight 0 come last.

        The largest of log-weights with Gumbel noise, in order, are such draws (Kool et al. 2019, "Stochastic Beams and Where
        to Find Them", section 2.3).
        """
        noise = -(-self._uniform(len(weights)).clamp(min=torch.finfo(torch.float64).tiny).log()).log()
        return (weights.log() + noise).topk(count).indices


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: above 0; without sampling (greedy) there is no such object.
        top_p: 1 = all; else the fewest tokens whose probabilities reach it.
        top_k: 0 = all.
        draft: `greedy` proposes the draft's best tokens, `probabilistic` draws them under the same settings.
        seed: with a request's number it seeds that request's draws.
        equality: a drawn draft stands only where a token drawn from the target's distribution equals it: the text is right, less
            is accepted than could be.
        draft_temperature: at which drafts are drawn; None = at the same.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    draft: DraftSampling = "greedy"
    seed: int = 0
    equality: bool = False
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        warm = (self.temperature, self.temperature if self.draft_temperature is None else self.draft_temperature)
        if not all(0 < t < float("inf") for t in warm) or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UsageError(
                f"cannot sample with temperature {self.temperature}, top-p {self.top_p}, top-k {self.top_k}",
                remedy="The temperature is above 0, top-p above 0 and at most 1, top-k 0 (all) or more",
            )

    def seed_of(self, request: int) -> int:
        """The seed of a request's draws."""
        return int(np.random.SeedSequence([self.seed, request]).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def draws(self, request: int) -> Draws:
        return Draws(self.seed_of(request))

    def drafts(self, logits: Tensor) -> Tensor:
        """`distribution` of the draft's logits."""
        return self.distribution(logits, self.draft_temperature)

    def distribution(self, logits: Tensor, temperature: float | None = None) -> Tensor:
        """Logits [..., n] to probabilities [..., n] float64."""
        scaled = logits.double() / (temperature or self.temperature)
        if 0 < self.top_k < scaled.shape[-1]:
            best = scaled.topk(self.top_k, -1)
            scaled = torch.full_like(scaled, -torch.inf).scatter(-1, best.indices, best.values)
        found = scaled.softmax(-1)
        if self.top_p < 1:
            order = found.sort(dim=-1, descending=True, stable=True)
            beyond = order.values.cumsum(-1) - order.values >= self.top_p
            found = found.masked_fill(beyond.scatter(-1, order.indices, beyond), 0)
            found = found / found.sum(-1, keepdim=True)
        return found


def verify_fixed(p: Tensor, tried: Sequence[int], draws: Draws) -> tuple[int, int | None]:
    """A token drawn from p [V], and which of the tokens tried it is, None if none."""
    token = draws.choose(p)
    return token, next((i for i, other in enumerate(tried) if other == token), None)


def verify_drawn(p: Tensor, q: Tensor, tried: Sequence[int], ids: Tensor, draws: Draws) -> tuple[int, int | None]:
    """One token distributed as p, given tokens drawn from q without replacement.

    Args:
        p: [V], sums to 1.
        q: [D] as the draft drew from it, sums to 1; ids: [D] its tokens as target ids, each once.
        tried: draft ids, in the order in which they were drawn, each of positive q.

    Returns:
        The target id, and which of the tokens tried it is, None if none.
    """
    p, q = p.clone(), q.clone()
    for i, x in enumerate(tried):
        token = int(ids[x])
        if draws.flip(min(1.0, float(p[token] / q[x]))):
            return token, i
        left = p.index_add(0, ids, -q).clamp(min=0)
        total = left.sum()
        if not total > 0:  # p = q but for rounding: then the token would have been kept
            return token, i
        p = left / total
        q[x] = 0
        q = q / q.sum()
    return draws.choose(p), None
