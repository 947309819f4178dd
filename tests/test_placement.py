"""Placement on synthetic sweeps whose neighbouring boundaries resemble each other, and on a random Llama's real states."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LAYERS, VOCAB, random_target
from torch import Tensor

from draftscope import findings
from draftscope.boundaries import Boundary
from draftscope.compare.evidence import candidates_of, measure, row_keys
from draftscope.compare.placed import as_finding
from draftscope.compare.placement import Placed, Placer, place
from draftscope.compare.transforms import Sketch, decompose, fit_rotation, gram_error, sketched_errors


@dataclass
class Walk:
    """A sweep: every layer adds two random steps (attention, MLP) that leave a cosine of 0.97 to the boundary before."""

    name: str
    token_ids: Tensor
    stream: Tensor
    post: Tensor
    partial: Tensor | None

    def at(self, place: Boundary) -> Tensor:
        if place.norm == "post":
            return self.post
        if place.kind == "branch":
            return self.stream[place.index] - self.stream[place.index - 1]
        if place.kind == "partial":
            assert self.partial is not None
            return self.partial[place.index - 1]
        return self.stream[place.index]


def walk(
    name: str, tokens: int, *, layers: int = 10, width: int = 64, seed: int = 0, sinks: int = 0, partial: bool = True
) -> Walk:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(500, (tokens,), generator=g)
    table = torch.randn(500, width, generator=torch.Generator().manual_seed(99))
    stream, parts = [table[ids]], []
    for _ in range(layers):
        here = stream[-1]
        size = here.norm(dim=-1, keepdim=True) / width**0.5
        parts.append(here + 0.2 * size * torch.randn(tokens, width, generator=g))
        stream.append(1.1 * (parts[-1] + 0.15 * size * torch.randn(tokens, width, generator=g)))
    for row in [0, *range(3, 3 + sinks)][: sinks + 1 if sinks else 0]:
        for b in range(3, layers + 1):
            stream[b][row, 7] += 400 * stream[b][row].norm()
    last = stream[-1]
    weight = torch.rand(width, generator=torch.Generator().manual_seed(98)) + 0.5
    post = last / last.square().mean(-1, keepdim=True).sqrt() * weight
    return Walk(name, ids, torch.stack(stream), post, torch.stack(parts) if partial else None)


def slots_at(swept: Walk, *places: Boundary) -> Tensor:
    return torch.stack([swept.at(p) for p in places], 1)


STREAMS = (Boundary(2), Boundary(5), Boundary(7))


def walks(count: int = 3, tokens: int = 80, **kw: int) -> list[Walk]:
    return [walk(f"s{i}", tokens, seed=i, **kw) for i in range(count)]


def brute_force(pairs: list[tuple[Tensor, Walk]], slot: int) -> list[float]:
    """Median relative errors by stream boundary, in float64, row by row, without the first tokens and sinks."""
    by_boundary = []
    for b in range(pairs[0][1].stream.shape[0]):
        errors = []
        for slots, swept in pairs:
            norms = sorted(float(row.double().norm()) for row in slots[:, slot])
            median = norms[(len(norms) - 1) // 2]
            for t in range(1, len(slots)):
                x, r = slots[t, slot].double(), swept.stream[b, t].double()
                if float(x.norm()) <= 10 * median:
                    errors.append(float((x - r).norm() / r.norm()))
        errors.sort()
        by_boundary.append(errors[(len(errors) - 1) // 2])
    return by_boundary


EVERY = [c.place for c in candidates_of(10, True) if not c.mlp]


@pytest.mark.parametrize("expected", EVERY, ids=str)
@pytest.mark.parametrize("spoil", ["exact", "bfloat16", "noisy"])
def test_every_place_is_found(expected: Boundary, spoil: str) -> None:
    pairs = []
    for i, swept in enumerate(walks(2, 60)):
        slots = slots_at(swept, expected)
        if spoil == "bfloat16":
            slots = slots.bfloat16()
        elif spoil == "noisy":
            torch.manual_seed(i)
            slots = slots + 0.05 * slots.norm(dim=-1, keepdim=True) / 8 * torch.randn_like(slots)
        pairs.append((slots, swept))
    (found,) = place(pairs)
    assert found.place == expected
    assert found.candidates == (expected,)
    assert found.certain
    assert found.transform == "none"
    assert found.lag == 0
    assert found.scale is None
    assert found.share == 1.0
    assert found.error is not None
    assert found.margin is not None
    assert found.error < {"exact": 1e-6, "bfloat16": 3e-3, "noisy": 0.06}[spoil]
    assert found.margin > 0.5


def test_errors_equal_brute_force() -> None:
    pairs = [(slots_at(s, *STREAMS).bfloat16(), s) for s in walks(3, 50, sinks=2)]
    for found in place(pairs):
        expected = brute_force(pairs, found.slot)
        assert found.plain_errors == pytest.approx(expected, rel=1e-4)
        assert found.errors == pytest.approx(expected, rel=1e-4)
        best, second = sorted(expected)[:2]
        assert found.margin is not None
        assert found.margin <= 1 - best / second + 1e-4


def test_mlp_alone_is_a_branch() -> None:
    swept = walk("a", 60)
    assert swept.partial is not None
    (found,) = place([((swept.stream[4] - swept.partial[3])[:, None], swept)])
    assert found.place == Boundary(4, kind="branch")
    assert found.mlp
    (found,) = place([(slots_at(swept, Boundary(4, kind="branch")), swept)])
    assert not found.mlp


def test_without_partial_sums() -> None:
    swept = walk("a", 60, partial=False)
    assert [p.place for p in place([(slots_at(swept, *STREAMS), swept)])] == list(STREAMS)


def test_sinks_and_first_tokens_stand_apart() -> None:
    swept = walks(2, 60, sinks=4)
    pairs = []
    for s in swept:
        slots = slots_at(s, *STREAMS)
        slots[3:7] *= 2  # the sinks alone are wrong
        slots[0] *= 3
        pairs.append((slots, s))
    low, mid, high = place(pairs)
    assert [p.place for p in (low, mid, high)] == list(STREAMS)
    assert mid.seen == {"first": 2, "sink": 8, "ordinary": 110, "zero": 0, "nonfinite": 0}
    assert low.seen["sink"] == 0  # no sinks below boundary 3
    assert mid.error == 0
    assert mid.sink_error == pytest.approx(1, abs=1e-4)
    assert mid.first_error == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_lag(lag: int) -> None:
    pairs = []
    for s in walks(3, 40):
        slots = slots_at(s, *STREAMS)
        slots[:, 1] = slots[:, 1].roll(-lag, 0)  # row t holds t + lag
        pairs.append((slots.bfloat16(), s))
    low, mid, high = place(pairs)
    assert (low.lag, mid.lag, high.lag) == (0, lag, 0)
    assert mid.place == STREAMS[1]
    assert mid.transform == "lag"
    assert mid.share > 0.9
    assert min(mid.plain_errors) > 0.5
    assert mid.margin is not None
    assert mid.margin > 0.9


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.06, 8.0, -1.0])
def test_scale(factor: float) -> None:
    pairs = [(slots_at(s, *STREAMS) * torch.tensor([1.0, factor, 1.0])[:, None], s) for s in walks(3, 40)]
    low, mid, high = place(pairs)
    assert low.scale is high.scale is None
    assert mid.place == STREAMS[1]
    assert mid.transform == "scale"
    assert mid.scale == pytest.approx(factor, rel=1e-4)
    assert mid.error is not None
    assert mid.error < 1e-5


def test_scale_and_lag_together() -> None:
    pairs = [(2 * slots_at(s, STREAMS[1]).roll(1, 0), s) for s in walks(3, 40)]
    (found,) = place(pairs)
    assert (found.place, found.lag, found.transform) == (STREAMS[1], -1, "lag and scale")
    assert found.scale == pytest.approx(2, rel=1e-4)


def test_a_factor_within_the_noise_is_not_reported() -> None:
    torch.manual_seed(0)
    pairs = [(1.03 * slots_at(s, STREAMS[1]) + 0.1 * torch.randn(40, 1, 64), s) for s in walks(3, 40)]
    (found,) = place(pairs)
    assert (found.place, found.transform, found.scale) == (STREAMS[1], "none", None)


def test_direction_only() -> None:
    pairs = []
    for s in walks(2, 60):
        x = slots_at(s, STREAMS[1])
        pairs.append((x / x.square().mean(-1, keepdim=True).sqrt() * torch.linspace(0.5, 2, 60)[:, None, None], s))
    (found,) = place(pairs)
    assert (found.place, found.transform) == (STREAMS[1], "direction")


def rotation(width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)))[0]


def test_rotated_slot() -> None:
    turn = rotation(64)
    pairs = []
    for s in walks(4, 80):
        slots = slots_at(s, *STREAMS)
        slots[:, 2] = slots[:, 2] @ turn
        pairs.append((slots.bfloat16(), s))
    low, mid, high = place(pairs)
    assert [p.place for p in (low, mid, high)] == list(STREAMS)
    assert [p.transform for p in (low, mid, high)] == ["none", "none", "rotation"]
    assert high.rotation is not None
    assert high.rotation.determined
    assert not high.rotation.permutation
    assert high.error is not None
    assert high.error < 0.01
    assert min(high.plain_errors) > 1


def test_reordered_channels() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    (found,) = place([(slots_at(s, STREAMS[1])[..., order], s) for s in walks(4, 80)])
    assert (found.place, found.transform) == (STREAMS[1], "permutation")


def test_half_of_the_channels() -> None:
    pairs = []
    for s in walks(4, 80):
        x = slots_at(s, STREAMS[1]).clone()
        x[..., 32:] = 0
        pairs.append((x, s))
    (found,) = place(pairs)
    assert found.place is None
    assert found.channels == pytest.approx(0.5)


def test_unrelated_states_stay_unplaced() -> None:
    torch.manual_seed(1)
    pairs = [(s.stream[5].norm(dim=-1).mean() / 8 * torch.randn(80, 1, 64), s) for s in walks(3)]
    (found,) = place(pairs)
    assert found.place is None
    assert found.boundary is found.norm is found.kind is found.margin is found.lag is None
    assert found.error is not None
    assert found.error > 0.5
    assert found.shares == {"matched": 0.0, "unmatched": 1.0}


def test_permuted_rows() -> None:
    pairs = []
    for i, s in enumerate(walks(3)):
        order = torch.randperm(80, generator=torch.Generator().manual_seed(i))
        pairs.append((slots_at(s, STREAMS[1])[order].bfloat16(), s))
    (found,) = place(pairs)
    assert (found.place, found.transform, found.lag) == (STREAMS[1], "rows", None)
    assert found.moved is not None
    assert found.moved.same > 0.8
    assert found.moved.other == 0


def test_rows_displaced_by_a_cached_prefix() -> None:
    (found,) = place([(slots_at(s, STREAMS[1])[16:], s) for s in walks(3)])
    assert (found.place, found.transform) == (STREAMS[1], "rows")
    assert found.moved is not None
    assert found.moved.offset == 16
    assert found.moved.offset_share == 1


def test_rows_of_another_request() -> None:
    swept = walks(3)
    pairs = [(slots_at(swept[(i + 1) % 3], *STREAMS), s) for i, s in enumerate(swept)]
    for found, expected in zip(place(pairs), STREAMS, strict=True):
        assert (found.place, found.transform) == (expected, "rows")
        assert found.moved is not None
        assert found.moved.other > 0.9
        assert {(a, c) for a, _, c, _ in found.moved.examples} <= {("s0", "s1"), ("s1", "s2"), ("s2", "s0")}


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_some_rows_of_another_request(share: float) -> None:
    swept = walks(4)
    g = torch.Generator().manual_seed(0)
    pairs, spoilt = [], 0
    for i, s in enumerate(swept):
        slots = slots_at(s, *STREAMS)
        rows = torch.rand(80, generator=g) < share
        rows[0] = False
        spoilt += int(rows.sum())
        slots[rows, 1] = slots_at(swept[i - 1], *STREAMS)[rows, 1]
        pairs.append((slots, s))
    low, mid, high = place(pairs)
    assert low.share == high.share == 1
    assert mid.place == STREAMS[1]
    assert mid.share == pytest.approx(1 - spoilt / mid.rows)
    assert mid.shares["other sequence"] == pytest.approx(spoilt / mid.rows)
    assert sum(mid.shares.values()) == pytest.approx(1)


def test_some_rows_by_kind() -> None:
    """Each fault takes its own tenth of the rows."""
    pairs = []
    for s in walks(2, 200):
        x = slots_at(s, STREAMS[1])[:, 0].clone()
        clean = x.clone()
        x[20:40] = clean[21:41]
        x[40:60] = s.stream[6, 40:60]
        x[60:80] = 0
        x[80:100] *= 1.5
        x[100:120] = clean[150:170]
        x[120:140] = float("nan")
        pairs.append((x[:, None], s))
    (found,) = place(pairs)
    assert found.place == STREAMS[1]
    assert found.lag == 0
    assert found.seen["nonfinite"] == 40
    assert found.seen["zero"] == 40
    assert found.rows == 2 * (199 - 20)
    tenth = 40 / found.rows
    expected = {"lag +1": tenth, "boundary 6": tenth, "zero": tenth, "rescaled": tenth, "same sequence": tenth}
    assert found.shares == pytest.approx(expected | {"matched": 1 - 5 * tenth})


def test_a_noisy_target_is_not_taken_apart() -> None:
    """Errors around 0.12 on all rows: a few are below 0.1, and are not made into a minority that matches."""
    torch.manual_seed(0)
    pairs = []
    for s in walks(3):
        slots = slots_at(s, STREAMS[1])
        noise = (0.12 + 0.03 * torch.randn(80, 1, 1)) * slots.norm(dim=-1, keepdim=True) / 8
        pairs.append((slots + noise * torch.randn_like(slots), s))
    (found,) = place(pairs)
    assert found.place == STREAMS[1]
    assert found.error == pytest.approx(0.12, abs=0.01)
    assert found.share == 1.0
    assert found.certain


def test_few_tokens() -> None:
    (low, mid, high) = place([(slots_at(walk("a", 20), *STREAMS).bfloat16(), walk("a", 20))])
    assert [p.place for p in (low, mid, high)] == list(STREAMS)
    assert all(p.certain for p in (low, mid, high))


def test_too_noisy_to_tell_neighbours_apart() -> None:
    """The noise is four times the distance of two boundaries that are nearly one."""
    swept = walk("a", 80)
    swept.stream[6] = swept.stream[5] * (1 + 0.01 * torch.randn(80, 64, generator=torch.Generator().manual_seed(3)))
    noise = 0.04 * swept.stream[5].norm(dim=-1, keepdim=True) / 8
    noise = noise * torch.randn(80, 64, generator=torch.Generator().manual_seed(4))
    (found,) = place([((swept.stream[5] + noise)[:, None], swept)])
    assert {c.index for c in found.candidates} == {5, 6}
    assert not found.certain
    assert found.margin is not None
    assert found.margin < 0.1


def test_bounded_sample_does_not_depend_on_order() -> None:
    swept = walks(6, 60)

    def run(order: list[int]) -> list[Placed]:
        placer = Placer(rows=50)
        for i in order:
            placer.update(slots_at(swept[i], *STREAMS).bfloat16(), swept[i])
        assert len(placer.evidence.rows.columns()["key"]) == 50
        return placer.result()

    assert run([0, 1, 2, 3, 4, 5]) == run([5, 3, 1, 0, 2, 4])


def test_empty_input() -> None:
    assert Placer().result() == []
    placer = Placer()
    placer.update(torch.zeros(0, 2, 64), walk("a", 10))
    assert [(p.place, p.rows) for p in placer.result()] == [(None, 0), (None, 0)]
    placer = Placer()
    placer.update(torch.full((10, 1, 64), float("nan")), walk("a", 10))
    (found,) = placer.result()
    assert (found.place, found.seen["nonfinite"]) == (None, 10)
    with pytest.raises(ValueError, match="width"):
        placer.update(torch.zeros(3, 1, 32), walk("a", 10))
    with pytest.raises(ValueError, match="swept over 10"):
        placer.update(torch.zeros(11, 1, 64), walk("a", 10))


def llama_walk(seed: int = 0, tokens: int = 60) -> Walk:
    """A random Llama's states as transformers gives them, the sums between attention and MLP by hooks."""
    model = random_target(seed=7)
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))
    partial: list[Tensor] = []
    stream: list[Tensor] = []
    handles = [
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: partial.append(args[0][0]))
        for layer in model.model.layers
    ]
    handles += [layer.register_forward_pre_hook(lambda _, args: stream.append(args[0][0])) for layer in model.model.layers]
    handles.append(model.model.norm.register_forward_pre_hook(lambda _, args: stream.append(args[0][0])))
    with torch.no_grad():
        post = model.model(ids[None]).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    return Walk(f"llama{seed}", ids, torch.stack(stream), post, torch.stack(partial))


@pytest.mark.parametrize("expected", [c.place for c in candidates_of(LAYERS, True) if not c.mlp], ids=str)
def test_every_place_of_a_llama(expected: Boundary) -> None:
    (found,) = place([(slots_at(s, expected).bfloat16(), s) for s in (llama_walk(0), llama_walk(1))])
    assert found.place == expected
    assert found.certain


def test_bfloat16_arithmetic_of_a_llama() -> None:
    model = random_target(seed=7).bfloat16()
    reference = llama_walk(0)
    with torch.no_grad():
        states = model(reference.token_ids[None], output_hidden_states=True).hidden_states
    slots = torch.stack([states[b][0] for b in (2, 4, 5)], 1)
    found = place([(slots, reference)])
    assert [p.boundary for p in found] == [2, 4, 5]
    assert all(p.error is not None and 1e-3 < p.error < 0.1 for p in found)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.floats(-3, 3), st.floats(-6, 0))
def test_decompose_is_exact(seed: int, factor: float, power: float) -> None:
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(5, 16, generator=g)
    x = factor * r + 10**power * torch.randn(5, 16, generator=g)
    offset, rest = decompose(x, r)
    x64, r64 = x.double(), r.double()
    alpha = (x64 * r64).sum(-1) / r64.square().sum(-1)
    assert torch.allclose(1 + offset.double(), alpha, atol=1e-5)
    assert torch.allclose(rest.double(), (x64 - alpha[:, None] * r64).norm(dim=-1) / r64.norm(dim=-1), rtol=1e-3, atol=1e-6)
    assert torch.allclose(torch.hypot(offset, rest).double(), (x64 - r64).norm(dim=-1) / r64.norm(dim=-1), rtol=1e-4, atol=1e-7)


def test_decompose_of_zero_rows() -> None:
    offset, rest = decompose(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.zeros(2, 2))
    assert offset.tolist() == [0, 0]
    assert rest.tolist() == [0, float("inf")]


def test_measure_computes_lags_where_needed_only() -> None:
    swept = walk("a", 30)
    x = slots_at(swept, STREAMS[1]).clone()
    x[10] = x[20]
    offset, rest = measure(x, swept, torch.arange(30), candidates_of(10, True))
    assert rest[10, 0, 5, 1:].isfinite().all()
    assert rest[11, 0, 5, 1:].isnan().all()
    assert offset.shape == (30, 1, 11 + 1 + 30, 5)


def test_gram_and_rotation_with_few_rows() -> None:
    g = torch.Generator().manual_seed(0)
    r = torch.randn(20, 64, generator=g)
    x = r @ rotation(64)
    assert gram_error(x, r) < 1e-5
    assert gram_error(torch.randn(20, 64, generator=g), r) > 1
    assert not fit_rotation(x, r).determined
    assert fit_rotation(x, r).error > 0.3  # an upper bound: the map is known on the span of ten rows


def test_sketch_keeps_distances() -> None:
    g = torch.Generator().manual_seed(0)
    r = torch.randn(200, 64, generator=g) * torch.logspace(-3, 4, 200)[:, None]
    x = r[:50] + 0.05 * r[:50].norm(dim=-1, keepdim=True) / 8 * torch.randn(50, 64, generator=g)
    sketch = Sketch(64)
    found = sketched_errors(*sketch(x), *sketch(r))
    exact = torch.cdist(x.double(), r.double()) / r.double().norm(dim=-1)
    assert (found.diagonal() / exact.diagonal()).sub(1).abs().max() < 0.5
    assert found.argmin(1)[20:].tolist() == list(range(20, 50))


def test_keys_are_stable() -> None:
    """Kept rows may be compared between runs and machines: the hash is part of the contract."""
    assert row_keys("a", 2).tolist() == row_keys("a", 5)[:2].tolist()
    assert row_keys("a", 1000).unique().numel() == 1000
    assert row_keys("a", 1).item() != row_keys("b", 1).item()


def lag_curve(pairs: list[tuple[Tensor, Walk]], slot: int, place: Boundary, scale: float = 1.0) -> list[float]:
    """Median relative errors at lags -2..2, in float64, row by row, without first tokens."""
    by_lag = []
    for lag in range(-2, 3):
        errors = []
        for slots, swept in pairs:
            held = swept.at(place).double()
            for t in range(1, len(slots)):
                if 0 <= t + lag < len(held):
                    errors.append(float((slots[t, slot].double() / scale - held[t + lag]).norm() / held[t + lag].norm()))
        errors.sort()
        by_lag.append(errors[(len(errors) - 1) // 2])
    return by_lag


@pytest.mark.parametrize("spoil", ["healthy", "shifted", "scaled"])
@pytest.mark.parametrize("where", [Boundary(5), Boundary(10, "post"), Boundary(4, kind="branch")], ids=str)
def test_the_lag_curve_is_that_of_the_place_found(where: Boundary, spoil: str) -> None:
    pairs = []
    for swept in walks(2, 24):  # no more rows than the curve is taken from
        slots = slots_at(swept, where)
        if spoil == "shifted":
            slots = torch.cat([slots[1:], torch.zeros_like(slots[:1])])
        pairs.append((4 * slots if spoil == "scaled" else slots, swept))
    (found,) = place(pairs)
    assert found.place == where
    expected = lag_curve(pairs, 0, where, 4.0 if spoil == "scaled" else 1.0)
    assert found.lag_errors == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert found.lag_errors.index(min(found.lag_errors)) == (3 if spoil == "shifted" else 2)


def test_the_lag_curve_of_a_minority_is_over_its_rows() -> None:
    pairs = []
    for swept in walks(2, 60):
        slots = slots_at(swept, Boundary(5))
        slots[15:] = torch.randn(len(slots) - 15, 1, 64, generator=torch.Generator().manual_seed(7))
        pairs.append((slots, swept))
    (found,) = place(pairs)
    assert found.place == Boundary(5)
    assert found.share < 0.5
    assert found.lag_errors[2] is not None
    assert found.lag_errors[2] < 1e-5
    assert all(e is not None and e > 0.5 for i, e in enumerate(found.lag_errors) if i != 2)


def test_an_unplaced_slot_has_no_lag_curve() -> None:
    (found,) = place([(torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(3)), walk("s", 50))])
    assert found.place is None
    assert found.lag_errors == ()


def test_the_lag_curve_does_not_depend_on_how_rows_arrive() -> None:
    parts = [(slots_at(s, *STREAMS), s) for s in walks(4, 70)]
    forward, backward = place(parts), place(reversed(parts))
    assert [p.lag_errors for p in forward] == [p.lag_errors for p in backward]


def test_a_slot_without_a_finite_row_can_be_written_and_read_again() -> None:
    swept = walk("s", 30)
    (found,) = place([(torch.full((30, 1, 64), torch.nan), swept)])
    written = as_finding(found, "")
    assert findings.Placed.model_validate_json(written.model_dump_json()) == written
    assert written.errors == [None] * 11
