"""Pairs by token prefix, and what the target's parts say of first and last states, against transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VOCAB, random_target, save_target
from torch import Tensor
from transformers import LlamaForCausalLM

from draftscope.compare.pairing import embedding_check, last_state_check, match_entries, pair
from draftscope.states.types import Sequence
from draftscope.target.parts import TargetParts, read_parts


def sequence(name: str, ids: list[int], rows: int | None = None, *, slots: int = 3, start: int = 0, seed: int = 0) -> Sequence:
    """States that depend on the token prefix alone, as a target's do."""
    rows = len(ids) if rows is None else rows
    states = []
    for t in range(rows):
        g = torch.Generator().manual_seed((hash((seed, *ids[: t + 1]))) % 2**31)
        states.append(torch.randn(slots + 1, 16, generator=g))
    made = torch.stack(states) if states else torch.zeros(0, slots + 1, 16)
    return Sequence(
        name=name, token_ids=torch.tensor(ids), features=made[:, :-1], last=made[:, -1], answer=None,
        positions=torch.arange(start, start + rows),
    )


def test_pairs_and_reasons() -> None:
    train = [sequence("t0", [1, 2, 3, 4, 5, 6]), sequence("t1", [1, 2, 9, 9], rows=3), sequence("t2", [7, 7])]
    serve = [
        sequence("s0", [1, 2, 3, 4, 8, 8]),  # four rows like t0
        sequence("s1", [1, 2, 9, 9, 9]),  # two seen before, one with t1, one beyond its rows, one of other text
        sequence("s2", [5, 5]),
        sequence("s3", [1, 2, 3], start=4),
        sequence("s4", [1, 2, 3]),
    ]
    found = pair(train, serve)
    assert [(p.train.name, p.serve.name, p.start, p.stop) for p in found.pairs] == [("t0", "s0", 0, 4), ("t1", "s1", 2, 3)]
    assert found.counts == {
        "paired": 5, "same prefix paired before": 5, "training rows end here": 1, "text differs from here on": 3,
        "no training sequence begins so": 2, "does not begin at position 0": 3,
    }
    assert found.served == sum(found.counts.values()) == 19
    assert found.trained == 11


def test_nothing_to_pair() -> None:
    assert pair([], []).counts == {"paired": 0}
    alone = pair([], [sequence("s", [1, 2])])
    assert alone.counts == {"paired": 0, "no training sequence begins so": 2}
    assert match_entries(alone) == []


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=5), st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=5)
)
def test_paired_rows_are_those_of_common_prefixes(train: list[list[int]], serve: list[list[int]]) -> None:
    def prefixes(lists: list[list[int]]) -> set[tuple[int, ...]]:
        return {tuple(ids[:t]) for ids in lists for t in range(1, len(ids) + 1)}

    found = pair([sequence(f"t{i}", x) for i, x in enumerate(train)], [sequence(f"s{i}", x) for i, x in enumerate(serve)])
    rows = [tuple(p.serve.token_ids[: t + 1].tolist()) for p in found.pairs for t in range(p.start, p.stop)]
    assert len(rows) == len(set(rows))
    assert set(rows) == prefixes(train) & prefixes(serve)
    assert found.paired == len(rows)
    assert sum(found.counts.values()) == found.served
    for p in found.pairs:
        assert torch.equal(p.train.features[p.start : p.stop], p.serve.features[p.start : p.stop])


def test_entries_are_matched_without_a_target() -> None:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(50, (30,), generator=g).tolist() for _ in range(4)]
    train = [sequence(f"t{i}", x) for i, x in enumerate(ids)]
    serve = [sequence(f"s{i}", x) for i, x in enumerate(ids)]
    for s in serve:
        states = torch.cat([s.features, s.last[:, None]], 1)  # type: ignore[index]
        s.features = torch.stack([2 * states[:, 1], states[:, 3], states[:, 0].roll(-1, 0)], 1).bfloat16()
        s.features[5, 1] = float("nan")
    low, mid, high = match_entries(pair(train, serve))
    assert [(m.entry, m.lag) for m in (low, mid, high)] == [(1, 0), (3, 0), (0, 1)]
    assert (mid.scale, high.scale) == (None, None)
    assert low.scale == pytest.approx(2, rel=1e-2)
    assert mid.rows == 4 * 28  # neither the first rows nor the four spoilt ones
    assert all(m.margin is not None and m.margin > 0.9 for m in (low, mid, high))
    assert all(m.error is not None and m.error < 5e-3 for m in (low, mid, high))


def test_a_factor_does_not_lead_to_a_larger_entry() -> None:
    """Eight times a small entry is nearer in size to a large one; with its own factor it is its own entry."""
    ids = list(range(20))
    train, serve = sequence("t", ids), sequence("s", ids)
    sizes = torch.tensor([1.0, 2.0, 4.0])[:, None]
    train.features, train.last = train.features * sizes, train.last * 40  # type: ignore[operator]
    serve.features = train.features * torch.tensor([8.0, 1.0, 1.0])[:, None]
    found = match_entries(pair([train], [serve]))
    assert [(m.entry, m.scale) for m in found] == [(0, pytest.approx(8)), (1, None), (2, None)]
    assert all(m.error is not None and m.error < 1e-5 for m in found)


def test_an_unknown_slot_matches_no_entry() -> None:
    train, serve = [sequence("t", [1, 2, 3, 4, 5])], [sequence("s", [1, 2, 3, 4, 5], seed=1)]
    assert [m.entry for m in match_entries(pair(train, serve))] == [None, None, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def parts(folder: Path) -> TargetParts:
    return read_parts(folder)


@cache
def target() -> LlamaForCausalLM:
    return random_target(seed=3)


def run(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boundary 0, boundary n before and after the final norm, of the target in `folder`."""
    model = target()
    pre: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: pre.append(args[0]))
    with torch.no_grad():
        out = model.model(ids[None], output_hidden_states=True)
    handle.remove()
    return out.hidden_states[0][0], pre[0][0], out.last_hidden_state[0]


def greedy(prompt: list[int], length: int) -> Tensor:
    model = target()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0]


@pytest.fixture(scope="module")
def text() -> Tensor:
    return greedy([1, 17, 40], 40)


def test_embedding(parts: TargetParts, text: Tensor) -> None:
    zero, last, _ = run(text)
    found = embedding_check([(zero.bfloat16(), text), (zero, text)], parts)
    assert found.is_embedding
    assert (found.share, found.rows) == (1.0, 2 * len(text))
    assert found.factor == pytest.approx(1, abs=1e-3)
    scaled = embedding_check([(8 * zero, text)], parts)
    assert scaled.is_embedding
    assert scaled.factor == pytest.approx(8, rel=1e-5)
    other = embedding_check([(last, text)], parts)
    assert not other.is_embedding
    assert other.share < 0.1
    assert not embedding_check([(zero.roll(1, 0), text)], parts).is_embedding
    broken = zero.clone()
    broken[: len(text) // 2] = float("nan")
    assert embedding_check([(broken, text)], parts).rows == len(text) - len(text) // 2
    assert embedding_check([], parts).factor is None


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_last_state_of_own_text(parts: TargetParts, text: Tensor, norm: str) -> None:
    _, pre, post = run(text)
    answer = torch.arange(len(text)) >= 3
    found = last_state_check([({"pre": pre, "post": post}[norm].bfloat16(), text, answer)], parts)
    assert found.norm == norm
    assert found.agreement is not None
    assert found.agreement > 0.9
    assert found.agreement == getattr(found, norm)
    assert found.consistent is True
    assert found.offset == 0
    assert found.rows == 40
    with torch.no_grad():
        logits = target()(text[None]).logits[0].double().log_softmax(-1)
    expected = -logits[2:-1].gather(1, text[3:, None]).mean()
    assert found.nll == pytest.approx(float(expected), rel=0.05)


def test_last_state_of_another_boundary_or_row(parts: TargetParts) -> None:
    ids = [greedy([1, i, 2 * i], 20) for i in range(5, 15)]
    zero, moved, foreign = [], [], []
    for x in ids:
        first, pre, _ = run(x)
        zero.append((first, x, None))
        moved.append((pre.roll(1, 0), x, None))  # row t holds the state of token t-1
        foreign.append((pre, torch.randint(VOCAB, x.shape, generator=torch.Generator().manual_seed(0)), None))
    found = last_state_check(moved, parts)
    assert found.norm == "pre"
    assert found.offset == -1
    assert found.consistent is not True
    assert last_state_check(zero, parts).consistent is not True
    assert last_state_check(foreign, parts).consistent is False
    assert last_state_check([], parts).norm is None
    few = last_state_check(moved, parts, rows=50)
    assert few.rows == 50
