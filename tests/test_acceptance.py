"""Acceptance figures against sums by hand, and intervals against a bootstrap written as a loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftscope.eagle3 import acceptance
from draftscope.eagle3.acceptance import Counts, Likelihood, length_difference, length_interval, nll_difference, summarise

K = 3
WHOLE = st.lists(st.lists(st.integers(0, K), max_size=8), min_size=1, max_size=12)
CENSORED = st.lists(st.tuples(st.integers(0, K), st.integers(0, K)).map(lambda x: (min(x), max(x))), min_size=1, max_size=30)


def counted(accepted: list[list[int]], prefix: str = "s") -> list[Counts]:
    return [Counts.of(f"{prefix}{i}", rows, [K] * len(rows), K) for i, rows in enumerate(accepted)]


@settings(deadline=None, max_examples=40)
@given(accepted=WHOLE)
def test_pooled_figures_equal_sums_by_hand(accepted: list[list[int]]) -> None:
    rung = summarise(counted(accepted), K, "walk")
    rows = [a for one in accepted for a in one]
    assert rung.rounds == len(rows)
    if not rows:
        assert rung.length is None and rung.joint == [0.0] * K and rung.conditional == [None] * K and rung.interval is None
        return
    assert rung.length == pytest.approx(sum(a + 1 for a in rows) / len(rows), abs=1e-12)
    assert rung.length == pytest.approx(1 + sum(rung.joint), abs=1e-12)
    assert rung.joint == pytest.approx([sum(a > k for a in rows) / len(rows) for k in range(K)], abs=1e-12)
    for k, share in enumerate(rung.conditional):
        reached = sum(a >= k for a in rows)
        assert share is None if not reached else share == pytest.approx(sum(a > k for a in rows) / reached)
    assert all(a >= b for a, b in zip(rung.joint, rung.joint[1:], strict=False))
    assert summarise(counted(accepted), K, "all").length is None


@settings(deadline=None, max_examples=40)
@given(rows=CENSORED)
def test_censored_rows_count_up_to_their_limit(rows: list[tuple[int, int]]) -> None:
    joint = summarise([Counts.of("s", [r[0] for r in rows], [r[1] for r in rows], K)], K, "all").joint
    product = 1.0
    for k in range(K):
        judged = [lead for lead, limit in rows if limit > k and lead >= k]
        product *= sum(lead > k for lead in judged) / len(judged) if judged else 0.0
        assert joint[k] == pytest.approx(product, abs=1e-12)


def test_the_interval_is_that_of_a_bootstrap_over_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    accepted = [rng.integers(0, K + 1, rng.integers(1, 20)).tolist() for _ in range(25)]
    low, high = length_interval(counted(accepted), K, seed=1)
    lengths = []
    for _ in range(4000):
        rows = [a for i in rng.integers(0, 25, 25) for a in accepted[i]]
        lengths.append(1 + np.mean(rows))
    expected = np.percentile(lengths, [2.5, 97.5])
    assert [low, high] == pytest.approx(expected, abs=0.02)
    assert length_interval(counted(accepted), K, seed=1) == (low, high) != length_interval(counted(accepted), K, seed=2)
    monkeypatch.setattr(acceptance, "DRAWS", 50)
    assert length_interval(counted(accepted), K, seed=1) != (low, high)


def test_below_eight_sequences_there_is_no_interval_and_empty_ones_are_none() -> None:
    seven = counted([[1, 2]] * 7 + [[]] * 5)
    assert length_interval(seven, K) is None and summarise(seven, K, "engine").length == 2.5
    assert length_interval(counted([[1, 2]] * 8), K) == (2.5, 2.5)
    assert length_difference(seven, seven, K).interval is None and length_difference([], seven, K).value is None


def test_pairing_cancels_what_sequences_have_in_common() -> None:
    rng = np.random.default_rng(3)
    hard = rng.random(40) < 0.5
    first = counted([[0] * 10 if h else [2] * 10 for h in hard])
    second = counted([[1] + [0] * 9 if h else [3] + [2] * 9 for h in hard])
    found = length_difference(first, second, K, seed=0)
    assert found.value == pytest.approx(0.1) and found.interval == pytest.approx((0.1, 0.1)) and found.sequences == 40
    wide = length_interval(first, K)
    assert wide[1] - wide[0] > 0.5
    shuffled = [Counts(f"other{c.name}", c.reached, c.passed, c.rounds) for c in second[:5]]
    partial = length_difference(first, [*shuffled, *second[5:]], K)
    assert partial.sequences == 35 and partial.unpaired == 10


def test_nll_is_pooled_over_rows_and_paired_over_sequences() -> None:
    def with_nll(values: list[tuple[float, int]]) -> list[Counts]:
        sums = [Likelihood(total, inside, inside, inside + 1) for total, inside in values]
        return [Counts.of(f"s{i}", [0], [K], K, one) for i, one in enumerate(sums)]

    first, second = with_nll([(6.0, 3), (1.0, 1)] * 4), with_nll([(3.0, 3), (0.5, 1)] * 4)
    rung = summarise(first, K, "walk")
    assert rung.nll == pytest.approx(28 / 16) and rung.coverage == pytest.approx(16 / 24) and rung.rows == 24
    found = nll_difference(first, second)
    assert found.value == pytest.approx(-14 / 16) and found.interval[0] < found.value < found.interval[1]
    assert nll_difference(first, with_nll([(0.0, 0)] * 8)).value is None
