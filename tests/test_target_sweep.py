"""The sweep of all boundaries against transformers, whatever the batching."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LAYERS, VOCAB, WIDTH, random_target

from draftscope.errors import DraftscopeError
from draftscope.target.model import Target
from draftscope.target.sweep import batches, sweep


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(random_target(3), tmp_path_factory.mktemp("none"))


def texts(lengths: list[int]) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(f"text {i}", torch.randint(3, VOCAB, (n,), generator=draw)) for i, n in enumerate(lengths)]


@torch.no_grad()
def test_every_boundary_of_every_sequence(target: Target) -> None:
    items = texts([9, 30, 1, 28, 0, 300, 31])
    seen: list[int] = []
    swept = list(sweep(target, iter(items), partial=True, on_tokens=seen.append))
    assert [s.name for s in swept] == [name for name, _ in items]
    assert sum(seen) == sum(len(ids) for _, ids in items)
    for s, (_, ids) in zip(swept, items, strict=True):
        assert s.partial is not None
        assert s.stream.shape == (LAYERS + 1, len(ids), WIDTH) and s.partial.shape == (LAYERS, len(ids), WIDTH)
        assert torch.equal(s.token_ids, ids)
        if not len(ids):
            continue
        states = target.model(ids[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(s.stream[:-1], torch.cat(states[:-1]), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(s.post, states[-1][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(target.parts.final_norm(s.stream[-1]), s.post)
        torch.testing.assert_close(s.branch(4), s.stream[4] - s.stream[3])
        for i, layer in enumerate(target.model.model.layers):
            mlp = layer.mlp(layer.post_attention_layernorm(s.partial[i]))
            torch.testing.assert_close(s.partial[i] + mlp, s.stream[i + 1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="branches run from 1 to 8"):
        swept[0].branch(0)


def test_one_forward_pass_per_batch_of_neighbours(target: Target) -> None:
    calls: list[tuple[int, ...]] = []
    handle = target.model.model.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    without = list(sweep(target, texts([64] * 64)))
    handle.remove()
    assert calls == [(32, 64), (32, 64)]
    assert without[0].partial is None


def test_sequences_do_not_keep_their_batch_alive(target: Target) -> None:
    first = next(sweep(target, texts([20, 20, 20]), partial=True))
    assert first.partial is not None
    for tensor in (first.stream, first.post, first.partial):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_foreign_token(target: Target) -> None:
    for bad in (VOCAB, -1):
        with pytest.raises(DraftscopeError, match=r"chat 7: token ids .*another model's tokenizer"):
            list(sweep(target, [("chat 7", torch.tensor([5, bad]))]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_batches_keep_order_and_bounds(lengths: list[int], budget: int) -> None:
    items = texts(lengths)
    made = list(batches(iter(items), budget))
    assert [name for batch in made for name, _ in batch] == [name for name, _ in items]
    sizes = [[len(ids) for _, ids in batch] for batch in made]
    for batch in sizes:
        padded = max(batch) * len(batch)
        assert len(batch) == 1 or (padded <= budget and padded - sum(batch) <= padded / 4)
    for before, after in pairwise(sizes):  # no batch ends without need
        joined = [*before, after[0]]
        padded = max(joined) * len(joined)
        assert padded > budget or 4 * (padded - sum(joined)) > padded
