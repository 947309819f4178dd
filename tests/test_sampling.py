"""Speculative sampling: every outcome of the rules enumerated with its exact probability, and samples of the whole loop."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support import random_draft, save_target
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftscope.eagle3.drafter import Drafter
from draftscope.eagle3.generate import generate
from draftscope.eagle3.sampling import Draws, Sampling
from draftscope.eagle3.tree import Growth, TreeShape
from draftscope.eagle3.verifying import Proposal, verify_sampled
from draftscope.errors import DraftscopeError, UsageError
from draftscope.target.model import Target, load_target
from draftscope.target.wiring import Wiring

WIRING = Wiring.of((1, 2, 3))


class Scripted(Draws):
    """Takes the branches that it is told, then the first of each; remembers the chance of all that, and the other branches."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.taken, self.chance, self.others = script, [], 1.0, []

    def _branch(self, chances: list[float]) -> int:
        open_ = [i for i, chance in enumerate(chances) if chance > 0]
        number = len(self.taken)
        if number < len(self.script):
            branch = self.script[number]
        else:
            branch = open_[0]
            self.others += [(*self.taken, other) for other in open_[1:]]
        self.taken.append(branch)
        self.chance *= chances[branch]
        return branch

    def flip(self, chance: float) -> bool:
        return self._branch([1 - chance, chance]) == 1

    def choose(self, weights: Tensor) -> int:
        return self._branch((weights / weights.sum()).tolist())

    def order(self, weights: Tensor, count: int) -> Tensor:
        left, found = weights.clone(), []
        for _ in range(min(count, int((weights > 0).sum()))):
            found.append(self.choose(left))
            left[found[-1]] = 0
        return torch.tensor(found + [i for i in range(len(weights)) if i not in found][: count - len(found)])


def enumerate_all(run: Callable[[Draws], Hashable]) -> tuple[dict[Any, float], int]:
    """The exact probability of every outcome of a program that draws."""
    found: dict[Any, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    count = 0
    while scripts:
        draws = Scripted(scripts.pop())
        found[run(draws)] += draws.chance
        scripts += draws.others
        count += 1
        assert count < 30_000
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found, count


class Tables:
    """Random logits after every path of tokens."""

    def __init__(self, seed: int, vocab: int, spread: float = 1.5) -> None:
        self.seed, self.vocab, self.spread, self.known = seed, vocab, spread, {}

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.known:
            draw = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
            self.known[path] = self.spread * torch.randn(self.vocab, dtype=torch.float64, generator=draw)
        return self.known[path]


@dataclass
class Pair:
    """A target and a draft by tables, and one real verify step between them."""

    target: Tables
    draft: Tables
    ids: Tensor
    sampling: Sampling
    shape: TreeShape
    biased: bool = False

    def propose(self, draws: Draws) -> tuple[Proposal, list[tuple[int, ...]]]:
        drafter = object.__new__(Drafter)
        drafter.sampling = self.sampling if self.sampling.draft == "probabilistic" else None
        growth, paths, logits = Growth(self.shape), [()], []
        for _ in range(self.shape.steps):
            logits.append(torch.stack([self.draft(path) for path in paths])[None])
            scores, tokens = drafter._children(logits[-1], self.shape.topk, [draws])
            if self.biased:  # what must not be done: the shape by what was drawn
                scores = self.sampling.distribution(logits[-1]).gather(2, tokens).log()
            best, above = growth.level(scores, tokens)
            paths = [(*paths[up], int(self.ids[token])) for up, token in zip(above[0].tolist(), best[0].tolist(), strict=True)]
        tree = growth.tree()
        targets = self.ids[tree.tokens.clamp(min=0)].masked_fill(tree.tokens < 0, -1)
        drawn = torch.cat(logits, 1) if drafter.sampling is not None else None
        walked: list[tuple[int, ...]] = [()]
        for token, parent in zip(targets[0].tolist(), tree.parents[0].tolist(), strict=True):
            walked.append((*walked[parent + 1], token))
        return Proposal(targets, None, tree, drawn), walked

    def step(self, draws: Draws) -> tuple[int, ...]:
        proposal, nodes = self.propose(draws)
        logits = torch.stack([self.target(path) for path in nodes])[None]
        verdict = verify_sampled(proposal, logits, self.shape.steps, self.sampling, [draws], self.ids)
        count = int(verdict.accepted[0])
        assert verdict.path is not None
        text = tuple(verdict.along(verdict.chosen)[0, : count + 1].tolist())
        assert nodes[int(verdict.path[0, count])] == text[:-1]
        assert sorted(set(verdict.path[0].tolist())) == verdict.path[0, : count + 1].tolist()
        return text

    def exact(self, text: tuple[int, ...]) -> float:
        return math.prod(float(self.sampling.distribution(self.target(text[:i]))[token]) for i, token in enumerate(text))

    def largest_error(self) -> tuple[float, int]:
        """Largest difference in probability of a text of steps + 1 tokens, what a step leaves open being drawn plainly."""
        length = self.shape.steps + 1
        found, count = enumerate_all(self.step)
        errors = []
        for text in itertools.product(range(self.target.vocab), repeat=length):
            whole = self.exact(text)
            got = sum(chance * (whole / self.exact(part) if whole else 0.0) for part, chance in found.items()
                      if text[: len(part)] == part)
            errors.append(abs(got - whole))
        return max(errors), count


def pair(shape: tuple[int, int, int], sampling: Sampling, *, vocab: int = 3, draft_vocab: int | None = None, seed: int = 0,
         **extra: bool) -> Pair:
    ids = torch.arange(vocab) if draft_vocab is None else torch.tensor(sorted(range(vocab))[vocab - draft_vocab :])
    return Pair(Tables(seed, vocab), Tables(seed + 100, len(ids)), ids, sampling, TreeShape(*shape), **extra)


SETTINGS = [
    {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.7, "top_p": 0.8}, {"temperature": 0.9, "top_k": 2},
    {"temperature": 1.3, "top_k": 2, "top_p": 0.7},
]


DRAWN = [((1, 1, 2), 5, None), ((1, 2, 3), 4, None), ((1, 3, 4), 3, None), ((1, 2, 3), 5, 3), ((3, 1, 4), 4, None),
         ((2, 1, 3), 6, 4)]
PRUNED = [((2, 2, 3), 3, None), ((2, 2, 4), 3, None), ((2, 2, 5), 3, 2), ((2, 2, 7), 3, None)]


@pytest.mark.parametrize(("case", "settings"), [
    *itertools.product(DRAWN, SETTINGS), *itertools.product(PRUNED, SETTINGS[::2]),
], ids=str)
def test_drawn_tokens_leave_the_target_its_distribution(
    case: tuple[tuple[int, int, int], int, int | None], settings: dict[str, Any],
) -> None:
    shape, vocab, draft_vocab = case
    made = pair(shape, Sampling(draft="probabilistic", **settings), vocab=vocab, draft_vocab=draft_vocab, seed=len(str(settings)))
    error, outcomes = made.largest_error()
    assert error < 1e-12
    assert outcomes > 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 2, 5), (3, 2, 8), (2, 3, 6)], ids=str)
def test_fixed_tokens_leave_it_too(settings: dict[str, Any], shape: tuple[int, int, int]) -> None:
    error, _ = pair(shape, Sampling(**settings), vocab=5, seed=3).largest_error()
    assert error < 1e-12


def test_a_tree_shaped_by_what_was_drawn_would_not() -> None:
    """The control: the enumeration sees the bias of pruning by a sibling's own probability."""
    sampling = Sampling(draft="probabilistic")
    assert pair((2, 2, 4), sampling, seed=1, biased=True).largest_error()[0] > 1e-3
    assert pair((2, 2, 4), sampling, seed=1).largest_error()[0] < 1e-12


def test_acceptance_of_one_token_is_what_the_distributions_share() -> None:
    """1 - the distance in variation for a drawn token, p(x) for the draft's best one."""
    for draft in ("probabilistic", "greedy"):
        made = pair((1, 1, 2), Sampling(0.8, draft=draft), vocab=5, seed=7)
        p, q = (made.sampling.distribution(tables(())) for tables in (made.target, made.draft))
        found, _ = enumerate_all(lambda draws, made=made: len(made.step(draws)) - 1)
        wanted = torch.minimum(p, q).sum() if draft == "probabilistic" else p[made.draft(()).argmax()]
        assert found[1] == pytest.approx(float(wanted), abs=1e-12)


def test_what_temperature_top_k_and_top_p_leave_is_what_transformers_leaves() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 40, dtype=torch.float64, generator=draw)
    for temperature, top_k, top_p in itertools.product((0.3, 1.0, 2.0), (0, 1, 7, 40, 99), (1.0, 0.95, 0.5, 0.01)):
        scores = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        found = Sampling(temperature, top_p, top_k).distribution(logits)
        assert torch.allclose(found, scores.softmax(-1), atol=1e-12)
        assert torch.allclose(found.sum(-1), torch.ones(50, dtype=torch.float64))


def test_draws_have_the_chances_that_they_say() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    draws = Draws(0)
    chosen = np.bincount([draws.choose(weights) for _ in range(6000)], minlength=6)
    assert chosen[[0, 2, 5]].sum() == 0
    assert stats.chisquare(chosen[[1, 3, 4]], np.array([3, 1, 2]) * 1000).pvalue > 1e-3
    assert abs(sum(draws.flip(0.3) for _ in range(5000)) - 1500) < 4 * math.sqrt(5000 * 0.21)
    exact, _ = enumerate_all(lambda d: tuple(d.order(weights, 2).tolist()))
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    for _ in range(6000):
        seen[tuple(draws.order(weights, 2).tolist())] += 1
    assert set(seen) == set(exact)
    assert stats.chisquare([seen[k] for k in exact], [6000 * exact[k] for k in exact]).pvalue > 1e-3
    assert set(draws.order(weights, 5)[:3].tolist()) == {1, 3, 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("target"), 3, layers=4, width=16, vocab=6, tied=False), torch.float64)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("few"), 5, layers=4, width=16, vocab=3, tied=False), torch.float64)


def texts(
    target: Target, prompt: list[int], sampling: Sampling, length: int, stop: int | None = None,
) -> dict[tuple[int, ...], float]:
    """Every text of the target with its probability."""
    found: dict[tuple[int, ...], float] = {}
    going = {(): 1.0}
    with torch.inference_mode():
        for _ in range(length):
            after: dict[tuple[int, ...], float] = {}
            for text, chance in going.items():
                logits = target.model(torch.tensor([[*prompt, *text]])).logits[0, -1].float()
                for token, p in enumerate(sampling.distribution(logits).tolist()):
                    if p > 0:
                        (found if token == stop else after)[(*text, token)] = chance * p
            going = after
    return found | going


class Given(Sampling):
    """Sampling with one source of chance for all requests."""

    __slots__ = ("source",)

    def draws(self, request: int) -> Draws:
        return self.source


def given(draws: Draws, **settings: Any) -> Given:
    made = Given(**settings)
    object.__setattr__(made, "source", draws)
    return made


@pytest.mark.parametrize(("shape", "k", "settings"), [
    (None, 2, {"temperature": 1.0, "top_k": 2, "draft": "probabilistic"}),
    (None, 2, {"temperature": 1.5}),
    (None, 1, {"temperature": 0.7, "top_p": 0.9, "draft": "probabilistic"}),
    ((2, 2, 4), 0, {"temperature": 1.2, "top_k": 2, "draft": "probabilistic"}),
    ((2, 2, 5), 0, {"temperature": 1.0, "top_p": 0.95}),
], ids=str)
def test_the_whole_loop_by_enumeration(
    few: Target, shape: tuple[int, int, int] | None, k: int, settings: dict[str, Any],
) -> None:
    """Every text that `generate` itself can end in, over all of its draws, with the stop token at work."""
    draft = random_draft(5, width=16, vocab=3, boundaries=(1, 2, 3)).double()
    prompt = [1, 0, 2, 2]

    def run(draws: Draws) -> tuple[int, ...]:
        found = generate(few, draft, [prompt], wiring=WIRING, k=k or 3, tree=None if shape is None else TreeShape(*shape),
                         sampling=given(draws, **settings), max_new=3, stop_ids=frozenset({0}))
        return tuple(found[0].token_ids)

    found, _ = enumerate_all(run)
    wanted = texts(few, prompt, Sampling(**settings), 3, stop=0)
    assert set(found) == set(wanted)
    assert max(abs(found[text] - wanted[text]) for text in wanted) < 1e-6  # logits are float32


def chi_square(samples: list[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """p-value; texts of fewer than five expected ones are taken together."""
    n = len(samples)
    common = [text for text, p in wanted.items() if p * n >= 5]
    counts = [sum(s == text for s in samples) for text in common]
    expected = [n * wanted[text] for text in common]
    rest = n - sum(expected)
    if rest >= 5:
        counts, expected = [*counts, n - sum(counts)], [*expected, rest]
    else:
        assert n - sum(counts) < 25
        expected = [e * sum(counts) / sum(expected) for e in expected]
    assert len(counts) > 5
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize(("shape", "settings"), [
    (None, {"temperature": 1.0}),
    (None, {"temperature": 1.4, "top_p": 0.9, "draft": "probabilistic", "seed": 1}),
    ((3, 3, 8), {"temperature": 0.8, "top_k": 4, "seed": 2}),
    ((3, 2, 7), {"temperature": 1.0, "draft": "probabilistic", "seed": 3}),
    ("plain", {"temperature": 1.0, "seed": 4}),
], ids=str)
def test_samples_of_generate_are_the_target_s(target: Target, shape: Any, settings: dict[str, Any]) -> None:
    draft = None if shape == "plain" else random_draft(5, width=16, vocab=6, draft_vocab=5, boundaries=(1, 2, 3)).double()
    if draft is not None:
        draft.target_ids = torch.tensor([0, 1, 3, 4, 5])
    prompt, n = [1, 4, 2], 1200
    tree = TreeShape(*shape) if isinstance(shape, tuple) else None
    found = generate(target, draft, [prompt] * n, wiring=WIRING, k=3, tree=tree, sampling=Sampling(**settings), max_new=3,
                     stop_ids=frozenset({2}), rows=200)
    samples = [tuple(g.token_ids) for g in found]
    assert chi_square(samples, texts(target, prompt, Sampling(**settings), 3, stop=2)) > 1e-3
    other = Sampling(**settings | {"temperature": settings["temperature"] * 1.4})
    if "top_p" not in settings:
        assert chi_square(samples, texts(target, prompt, other, 3, stop=2)) < 1e-6  # what the test would see
    assert draft is None or sum(sum(g.accepted_counts) for g in found) > n / 10


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("shape", [None, TreeShape(2, 3, 6)], ids=str)
def test_a_text_does_not_depend_on_its_company(target: Target, shape: TreeShape | None, draft_sampling: Any) -> None:
    draft = random_draft(5, width=16, vocab=6, boundaries=(1, 2, 3)).double()
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 6, (n,), generator=draw).tolist() for n in (3, 9, 1, 5, 2)]
    sampling = Sampling(1.2, draft=draft_sampling, seed=9)

    def run(some: list[int], rows: int, seed: int = 9) -> list[list[int]]:
        one = Sampling(1.2, draft=draft_sampling, seed=seed)
        return [g.token_ids for g in generate(target, draft, [prompts[i] for i in some], wiring=WIRING, tree=shape, sampling=one,
                                              max_new=20, rows=rows, seeds=[one.seed_of(i) for i in some])]

    alone = run([0, 1, 2, 3, 4], 1)
    assert run([0, 1, 2, 3, 4], 3) == alone
    assert run([3, 1], 2) == [alone[3], alone[1]]
    plain_seeds = generate(target, draft, prompts, wiring=WIRING, tree=shape, sampling=sampling, max_new=20, rows=5)
    assert [g.token_ids for g in plain_seeds] == alone
    assert run([0, 1, 2, 3, 4], 1, seed=10) != alone
    assert len({tuple(text) for text in run([0], 1) + generate_twice(target, draft, prompts[0], sampling)}) > 1


def generate_twice(target: Target, draft: Any, prompt: list[int], sampling: Sampling) -> list[list[int]]:
    return [g.token_ids for g in generate(target, draft, [prompt, prompt], wiring=WIRING, sampling=sampling, max_new=20)]


def test_a_low_temperature_is_greedy(target: Target) -> None:
    draft = random_draft(5, width=16, vocab=6, boundaries=(1, 2, 3)).double()
    prompts = [[1, 2, 3], [4]]
    for shape, kind in itertools.product((None, TreeShape(3, 2, 6)), ("greedy", "probabilistic")):
        cold = generate(target, draft, prompts, wiring=WIRING, tree=shape, sampling=Sampling(1e-6, draft=kind), max_new=16)
        greedy = generate(target, draft, prompts, wiring=WIRING, tree=shape, max_new=16)
        assert [g.token_ids for g in cold] == [g.token_ids for g in greedy]
        if kind == "greedy":
            assert [g.accepted_counts for g in cold] == [g.accepted_counts for g in greedy]
            assert [g.drafted_ids for g in cold] == [g.drafted_ids for g in greedy]
        elif shape is not None:
            assert all(step.count(-1) == shape.drafted - 2 for g in cold for step in g.drafted_ids)  # one token has all of q


def test_what_cannot_be_sampled_is_refused(target: Target) -> None:
    for wrong in ({"temperature": 0.0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1},
                  {"temperature": float("nan")}, {"temperature": float("inf")}):
        with pytest.raises(UsageError, match="cannot sample"):
            Sampling(**wrong)
    draft = random_draft(5, width=16, vocab=6, boundaries=(1, 2, 3)).double()
    draft.target_ids = torch.tensor([0, 1, 2, 3, 4, 4])
    with pytest.raises(DraftscopeError, match="several draft ids to one token"):
        generate(target, draft, [[1]], wiring=WIRING, sampling=Sampling(draft="probabilistic"))
