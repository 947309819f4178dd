"""Figures per row, and what depth is told from, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftscope.inspecting.depth import TokenTest, ordinal, rank_by_depth, same_token_pairs
from draftscope.inspecting.rows import row_figures, same_entries
from draftscope.inspecting.suspicions import layer_number

VALUES = st.sampled_from([0.0, 1.0, -2.5, 3.0, 300.0, 1e30, math.nan, math.inf, -math.inf])


@settings(max_examples=120, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_row_figures_are_those_of_float64(data: st.DataObject, rows: int, slots: int, width: int, dtype: torch.dtype) -> None:
    count = rows * slots * width
    states = torch.tensor(data.draw(st.lists(VALUES, min_size=count, max_size=count))).reshape(rows, slots, width).to(dtype)
    found = row_figures(states)
    plain = states.double().numpy()
    norms = np.sqrt((plain**2).sum(-1))
    bad = ~np.isfinite(plain).all(-1)
    np.testing.assert_array_equal(found.bad.numpy(), bad)
    np.testing.assert_array_equal(found.bad_values.numpy(), (~np.isfinite(plain)).sum((0, 2)))
    np.testing.assert_allclose(found.norms.numpy()[~bad], norms[~bad], rtol=1e-6)
    for s in range(slots):
        usable = [norms[t, s] if not bad[t, s] and norms[t, s] > 0 else None for t in range(rows)]
        later = sorted(n for n in (usable[1:] if rows > 1 else usable) if n is not None)
        median = later[(len(later) - 1) // 2] if later else math.nan
        for t in range(rows):
            norm = usable[t]
            sink = t > 0 and norm is not None and norm > 10 * median * (1 + 1e-6)
            near = norm is not None and abs(norm - 10 * median) <= 1e-5 * 10 * median
            assert near or bool(found.sinks[t, s]) == sink
            assert near or bool(found.ordinary[t, s]) == (t > 0 and norm is not None and not sink)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=25))
def test_pairs_are_neighbouring_occurrences_with_unlike_predecessors(ids: list[int]) -> None:
    expected = []
    for j, token in enumerate(ids):
        earlier = [i for i in range(j) if ids[i] == token]
        if earlier and ids[max(earlier[-1] - 1, 0)] != ids[j - 1]:
            expected.append((earlier[-1], j))
    assert sorted(map(tuple, same_token_pairs(torch.tensor(ids)).tolist())) == sorted(expected)


def test_the_embedding_is_told_from_a_state_with_a_little_context() -> None:
    """Also at the storage's precision: context of a few roundings is seen, roundings alone are not."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (200,), generator=draw)
    table = torch.randn(20, 64, generator=draw)
    context = torch.randn(200, 64, generator=draw)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        states = torch.stack([table[ids], table[ids] + 20 * eps * context, table[ids] + context, context], 1).to(dtype)
        test = TokenTest(4, dtype)
        test.update(ids, states, row_figures(states))
        assert [test.alone(s) for s in range(4)] == [True, False, False, False], dtype
        shares = [test.share(s) for s in range(4)]
        assert shares[0] == pytest.approx(1, abs=1e-3) and shares[2] == pytest.approx(0.5, abs=0.1)
        assert shares[3] == pytest.approx(0, abs=0.1)


def test_a_few_bad_rows_do_not_hide_an_embedding() -> None:
    ids = torch.arange(10).repeat(12)
    ids[1::7] = 3
    states = torch.randn(10, 1, 8)[ids].clone()
    states[5] = torch.nan
    states[17] = 0
    test = TokenTest(1, torch.float32)
    test.update(ids, states, row_figures(states))
    assert test.alone(0) is True


@settings(max_examples=60, deadline=None)
@given(st.permutations([1.0, 2.0, 3.0, 4.0, 5.0]))
def test_without_shares_depth_is_the_order_of_norms(norms: list[float]) -> None:
    ranks, agree = rank_by_depth(norms, [None] * 5)
    assert ranks == [int(n) for n in norms] and agree


def test_depth_where_norm_and_share_disagree_or_nothing_is_known() -> None:
    assert rank_by_depth([1.0, 40.0, 700.0, 50.0], [0.9, 0.6, 0.4, 0.3]) == ([1, 2, 4, 3], False)
    assert rank_by_depth([1.0, 2.0, 3.0], [0.9, 0.6, 0.4]) == ([1, 2, 3], True)
    assert rank_by_depth([None, 2.0, 1.0], [None, 0.5, 0.6]) == ([None, 2, 1], True)
    assert rank_by_depth([None, 2.0], [None, None]) == ([None, None], True)
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 22)] == ["1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "22nd"]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
       st.integers(0, 99))
def test_same_entries_are_equal_bytes_nan_included(slots: int, rows: int, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 2, (rows, slots, 2), generator=draw).float()
    states[0, :, 0] = torch.nan
    states = states.to(dtype)
    expected = [(i, j) for i in range(slots) for j in range(i + 1, slots)
                if states[:, i].float().nan_to_num(-9).equal(states[:, j].float().nan_to_num(-9))]
    assert same_entries(states, row_figures(states).norms) == expected


@pytest.mark.parametrize(("label", "number"), [
    ("embed", -1), ("embed_tokens", -1), ("layer 3", 3), ("layer id 30", 30), ("Layer_31", 31), ("model.layers.12", 12),
    ("59", 59), ("boundary 27", 27), ("last", 10**6), ("entry 2", None), ("low", None), ("", None),
])
def test_what_layer_a_label_names(label: str, number: int | None) -> None:
    assert layer_number(label) == number
