"""Packed weights: the same target, faster; and left as it was where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import LAYERS, random_draft, save_target

from draftscope.boundaries import Boundary
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import divergence
from draftscope.faults.writing import disturbed
from draftscope.target.model import Target, load_target
from draftscope.target.packed import PackedLinear, pack
from draftscope.target.quantised import quantised
from draftscope.target.wiring import Wiring

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
TAPS = (Boundary(2), Boundary(5, kind="partial"), Boundary(LAYERS, "post"))


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (5, 3), (2, 40)])
def test_a_packed_target_computes_the_same(tmp_path: Path, shape: tuple[int, int]) -> None:
    folder = save_target(tmp_path, 3)
    target, packed = load_target(folder), load_target(folder)
    assert pack(packed)
    ids = torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(0))
    expected, found = target.forward(ids, TAPS), packed.forward(ids, TAPS)
    for name in ("taps", "last", "post"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.logits(found.post), target.logits(expected.post), rtol=1e-4, atol=1e-4)
    assert not any(type(m) is torch.nn.Linear for m in packed.model.get_decoder().modules())


def test_weights_and_bias_are_taken_over() -> None:
    linear = torch.nn.Linear(7, 5).double()
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    packed = PackedLinear(linear.weight.float(), linear.bias.float())
    torch.testing.assert_close(packed(x.float()).double(), x @ linear.weight.T + linear.bias, rtol=1e-5, atol=1e-5)


def test_texts_are_those_of_the_unpacked_target(tmp_path: Path) -> None:
    folder = save_target(tmp_path, 3, vocab=6, tied=False)
    target, packed = load_target(folder), load_target(folder)
    draft = random_draft(5, vocab=6)
    assert pack(packed, draft)
    assert pack(packed, draft)  # once more does no harm
    assert not any(type(m) is torch.nn.Linear for m in draft.modules())
    prompts, wiring = [[1, 2, 3], [5], [0, 4, 4, 1, 2]], Wiring.of((2, 4, 5))
    plain = generate(target, None, prompts, wiring=wiring, max_new=24)
    found = generate(packed, draft, prompts, wiring=wiring, max_new=24, rows=2)
    for prompt, one, other in zip(prompts, plain, found, strict=True):
        parted = divergence(target, prompt, one.token_ids, other.token_ids)
        assert parted is None or parted.near_tie
    unpacked = generate(target, random_draft(5, vocab=6), prompts, wiring=wiring, max_new=24, rows=2)
    assert [g.drafted_ids for g in found] == [g.drafted_ids for g in unpacked]


def test_a_packed_layer_gives_its_weights_back() -> None:
    linear = torch.nn.Linear(7, 5)
    plain = PackedLinear(linear.weight, linear.bias).plain()
    assert torch.equal(plain.weight, linear.weight) and plain.bias is not None and torch.equal(plain.bias, linear.bias)
    assert PackedLinear(linear.weight).plain().bias is None


@pytest.mark.parametrize("change", [lambda target: quantised(target, "int4"), lambda target: disturbed(target, 0.3)],
                         ids=["rounded", "another model's"])
def test_weights_change_in_a_packed_target_as_in_a_plain_one(tmp_path: Path, change: Callable[[Target], Target]) -> None:
    folder = save_target(tmp_path, 3)
    target, packed = load_target(folder), load_target(folder)
    assert pack(packed)
    ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    before, expected, found = (one.forward(ids, TAPS).taps for one in (target, change(target), change(packed)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float((expected - before).norm() / before.norm()) > 1e-3
    torch.testing.assert_close(packed.forward(ids, TAPS).taps, before, rtol=1e-4, atol=1e-4)


def test_what_ranks_give_to_an_mlp_is_the_same_of_a_packed_target(tmp_path: Path) -> None:
    """And what a layer gives out with all other columns of its last projection at zero."""
    folder = save_target(tmp_path, 3)
    target, packed = load_target(folder), load_target(folder)
    assert pack(packed)
    ids = torch.arange(8)[None]
    layer, partial = target.model.get_decoder().layers[2], target.forward(ids, [Boundary(3, kind="partial")]).taps[..., 0, :]
    found, again = target.shares(3, partial, 2), packed.shares(3, partial, 2)
    assert found is not None and again is not None
    torch.testing.assert_close(again, found, rtol=1e-4, atol=1e-4)
    down = layer.mlp.down_proj.weight.data
    kept = down.clone()
    for rank, share in enumerate(found.unbind(-2)):
        down.zero_()
        half = slice(rank * (down.shape[1] // 2), (rank + 1) * (down.shape[1] // 2))
        down[:, half] = kept[:, half]
        with torch.no_grad():
            expected = layer.mlp(layer.post_attention_layernorm(partial))
        torch.testing.assert_close(share, expected, rtol=1e-4, atol=1e-5)
    down.copy_(kept)
    assert target.adds_shares(2) and packed.adds_shares(8) and not target.adds_shares(7)
    first = target.forward(ids, [Boundary(3, kind="partial", ranks=2)]).taps[..., 0, :]
    torch.testing.assert_close(first, partial + found[..., 0, :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("why", ["dtype", "operator missing", "operator wrong"])
def test_where_it_cannot_be_the_target_stays_as_it_was(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(save_target(tmp_path, 3), torch.float64 if why == "dtype" else torch.float32)

    def absent(*_: object) -> None:
        raise RuntimeError("no such operator")

    if why == "operator missing":
        monkeypatch.setattr(PackedLinear, "forward", absent)
    elif why == "operator wrong":
        monkeypatch.setattr(PackedLinear, "forward", lambda self, x: torch.zeros(*x.shape[:-1], self.out_features))
    before = list(target.model.modules())
    assert not pack(target)
    assert list(target.model.modules()) == before
    assert target.head is None
