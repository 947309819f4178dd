"""What befalls states on their way, against independent restatements; and every change of a repair undoes what it is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.compare.maps import partial_factor, turn_of
from draftscope.diagnose.changing import Map, changed, shifted
from draftscope.faults.changes import Change, Own, Scale, Shift, TurnBack
from draftscope.states.types import Sequence
from draftscope.target.quantised import PRECISIONS, Precision, rounded
from draftscope.target.spoiling import Normed, Phase, Poisoned, Scaled, Shifted, Spoiler, Turned, turn
from draftscope.target.wiring import Wiring

WIDTH = 16
PLACES = (Boundary(1), Boundary(2), Boundary(3))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * torch.linspace(0.5, 2, WIDTH)


def wired(spoiler: Spoiler, states: Tensor, counts: list[int], phase: Phase = "prefill", start: int = 0) -> Tensor:
    return Wiring(PLACES, spoilers=(spoiler,)).apply(states, torch.tensor(counts), start, phase=phase, norm=norm)


def test_a_factor_reaches_its_slots_and_channels_alone() -> None:
    states = random(2, 5, 3, WIDTH)
    found = wired(Scaled(3.0, (1,), (0.5, 1.0)), states, [5, 5])
    assert torch.equal(found[:, :, [0, 2]], states[:, :, [0, 2]])
    assert torch.equal(found[:, :, 1, :8], states[:, :, 1, :8])
    assert torch.equal(found[:, :, 1, 8:], 3 * states[:, :, 1, 8:])


@pytest.mark.parametrize("spoiler", [Scaled(3.0, phase="verify"), Shifted(1, phase="verify"), Turned(phase="verify"),
                                     Normed(phase="verify")])
def test_a_phase_spares_the_other(spoiler: Spoiler) -> None:
    states = random(1, 5, 3, WIDTH)
    assert wired(spoiler, states, [5]) is states
    assert not torch.equal(wired(spoiler, states, [5], "verify"), states)


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_rows_shift_inside_their_block(by: int) -> None:
    """Row by row: the state of row t + by where that is a row of the block, else its own; padding takes no part."""
    states = random(2, 6, 3, WIDTH)
    found = wired(Shifted(by, (0,)), states, [6, 4])
    assert torch.equal(found[:, :, 1:], states[:, :, 1:])
    for block, count in enumerate((6, 4)):
        for row in range(count):
            source = row + by if 0 <= row + by < count else row
            assert torch.equal(found[block, row, 0], states[block, source, 0])


@pytest.mark.parametrize("basis", ["orthogonal", "hadamard", "reversed"])
def test_a_turn_keeps_lengths_and_angles(basis: str) -> None:
    states = random(1, 7, 3, WIDTH)
    found = wired(Turned(basis), states, [7])[0].flatten(0, 1)  # type: ignore[arg-type]
    flat = states[0].flatten(0, 1)
    assert torch.allclose(found @ found.T, flat @ flat.T, atol=1e-4)
    assert (found - flat).norm() > 0.5 * flat.norm()
    if basis == "hadamard":
        matrix = turn(torch.eye(WIDTH), "hadamard")
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, WIDTH**-0.5))


def test_a_norm_twice_is_the_norm_of_the_norm() -> None:
    states = random(1, 4, 3, WIDTH)
    found = wired(Normed((2,), 2), states, [4])
    assert torch.equal(found[:, :, 2], norm(norm(states[:, :, 2])))
    with pytest.raises(ValueError, match="final norm"):
        Wiring(PLACES, spoilers=(Normed(),)).apply(states, torch.tensor([4]))


def test_poison_counts_rows_of_the_request() -> None:
    found = wired(Poisoned(3), random(1, 4, 3, WIDTH), [4], start=2)
    assert found.isnan().all(-1).all(-1)[0].tolist() == [True, True, False, False]


def test_half_of_a_fused_pair() -> None:
    """The stream less the stream before the MLP is what the MLP gave out."""
    wiring = Wiring(PLACES, verify=(Boundary(4), *PLACES[1:]), less=((1, Boundary(2, kind="partial")),))
    assert wiring.taps() == (*PLACES, Boundary(2, kind="partial"))
    assert wiring.taps("verify")[0] == Boundary(4)
    states = random(1, 5, 4, WIDTH)
    found = wiring.apply(states, torch.tensor([5]))
    assert torch.equal(found[:, :, 1], states[:, :, 1] - states[:, :, 3])
    assert torch.equal(found[:, :, [0, 2]], states[:, :, [0, 2]])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounded_weights_lie_on_few_levels(precision: Precision) -> None:
    weight = random(4, 64)
    found = rounded(weight, precision)
    levels = {"int8": 255, "fp8": 255, "int4": 2 * 15}[precision]
    assert all(len(row.unique()) <= levels for row in found)
    error = float((found - weight).norm() / weight.norm())
    assert 0 < error < {"int8": 0.02, "fp8": 0.06, "int4": 0.2}[precision]
    assert torch.equal(rounded(found, precision), found) or torch.allclose(rounded(found, precision), found, rtol=1e-5)


def sequence(features: Tensor) -> Sequence:
    rows = len(features)
    answer = torch.arange(rows) >= rows // 2
    return Sequence("s", torch.arange(rows), features, None, answer, torch.arange(rows))


def no_turn(_: TurnBack) -> Map | None:
    return None


@pytest.mark.parametrize("phase", [None, "prefill", "verify"])
@pytest.mark.parametrize(("spoiler", "undo"), [
    (lambda phase: Scaled(4.0, (1,), (0.0, 0.5), phase), lambda phase: Scale(1, 0.25, (0, WIDTH // 2), phase)),
    (lambda phase: Normed((1,), phase=phase), lambda phase: Own(1, phase=phase)),
    (lambda phase: Turned(slots=(1,), phase=phase), lambda phase: TurnBack(1, phase)),
])
def test_a_change_undoes_its_fault_in_its_rows(spoiler: object, undo: object, phase: Phase | None) -> None:
    """Prompt and verify rows go through the wiring as the engine sends them; the change gives the states back."""
    states = random(12, 3, WIDTH)
    fault: Spoiler = spoiler(phase)  # type: ignore[operator]
    halves = [wired(fault, states[None, :6], [6]), wired(fault, states[None, 6:], [6], "verify", 6)]
    spoilt = torch.cat(halves, 1)[0]
    assert not torch.equal(spoilt, states)
    matrix = turn(torch.eye(WIDTH), "orthogonal").double()
    change: Change = undo(phase)  # type: ignore[operator]
    found = changed(sequence(spoilt), [change], lambda: states, lambda _: (matrix, 1.0))
    assert torch.allclose(found, states, atol=1e-4)


def test_faults_of_one_slot_come_undone_one_by_one() -> None:
    """Another layer's state, scaled and shifted: own states take over the factor and the lag, and these are undone by name."""
    right, wrong = random(9, 3, WIDTH), random(9, 3, WIDTH, seed=1)
    served = shifted(wrong * 3.0, 1)
    own = Own(1, scale=3.0, lag=1)
    layer = changed(sequence(served), [own], lambda: right, no_turn)
    assert torch.allclose(layer[:, 1], shifted(right[:, 1] * 3.0, 1))
    assert torch.equal(layer[:, [0, 2]], served[:, [0, 2]])
    for more in (Own(1, lag=1), Own(1, scale=3.0)):
        # Of two that replace the same rows only what both leave in stays, in whichever order they come.
        pairs = [changed(sequence(served), order, lambda: right, no_turn) for order in ([own, more], [more, own])]
        assert torch.equal(*pairs)
        assert torch.allclose(pairs[0][:, 1], shifted(right[:, 1] * more.scale, more.lag))
    whole = changed(sequence(served), [Shift(1, -1), Scale(1, 1 / 3), own], lambda: right, no_turn)
    assert torch.allclose(whole[1:-1, 1], right[1:-1, 1])


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_factor_on_some_channels_is_measured(noise: float) -> None:
    r = random(200, WIDTH) + 2
    x = r.clone()
    x[:, 4:9] *= 1.2
    found = partial_factor(x + noise * random(200, WIDTH, seed=3), r)
    assert found is not None
    assert (found.first, found.last, found.channels, found.whole_run) == (4, 8, 5, True)
    assert found.factor == pytest.approx(1.2, abs=0.01)


@pytest.mark.parametrize("other", ["nothing", "a whole factor", "noise", "a turn", "other rows"])
def test_no_factor_is_found_where_none_is(other: str) -> None:
    r = random(200, WIDTH)
    x = {"nothing": r, "a whole factor": 3 * r, "noise": r + 0.1 * random(200, WIDTH, seed=3), "a turn": turn(r, "orthogonal"),
         "other rows": random(200, WIDTH, seed=4)}[other]
    assert partial_factor(x, r) is None


@pytest.mark.parametrize("basis", ["orthogonal", "hadamard", "reversed"])
def test_a_turn_is_measured(basis: str) -> None:
    r = random(200, WIDTH)
    found = turn_of(2 * turn(r, basis), r)  # type: ignore[arg-type]
    assert found is not None
    assert found.error < 1e-4
    assert found.basis == {"reversed": "permutation"}.get(basis, basis)


def test_no_turn_is_found_between_unrelated_rows_or_from_too_few() -> None:
    assert turn_of(random(200, WIDTH), random(200, WIDTH, seed=1)) is None
    few = random(WIDTH, WIDTH)
    assert turn_of(turn(few, "orthogonal"), few) is None
