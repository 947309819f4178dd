"""Packed weights: the same target, faster; and left as it was where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import LAYERS, random_draft, save_target

from draftscope.boundaries import Boundary
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import divergence
from draftscope.target.model import load_target
from draftscope.target.packed import PackedLinear, pack
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
