"""From matches per row to acceptance: pooled figures, intervals over sequences, paired differences.

K is the number of drafted tokens per step, N the number of sequences, B the number of bootstrap draws. A row that drafts
from token t has a *lead*, how many of its tokens match before the first that does not, and a *limit*, how many of its
positions could be judged at all (a position cannot where the token to match is unknown, or where the recorded states no
longer follow the tokens to match). Rows with lead == limit < K are censored: they count up to their limit and not beyond.
joint[k] is the product of the conditional acceptances over uncensored rows (Kaplan and Meier's estimator), which without
censoring is the plain share of rows with A > k; accept length = 1 + sum of joint, which then is sum(A + 1) / rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draftscope.findings import Readout, Rung

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

DRAWS = 2000
_DRAWN = 1 << 22
FEWEST = 8
"""Fewest sequences for which an interval is given."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Sums of -log p of the token to match at the first position, over answer rows inside the draft vocabulary.

    Attributes:
        total: sum of -log p.
        inside: rows whose token is in the draft vocabulary and whose -log p is finite.
        covered: rows whose token is in the draft vocabulary.
        rows: all answer rows with a known token to match.
    """

    total: float = 0.0
    inside: int = 0
    covered: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What one sequence contributes to a read-out.

    Attributes:
        name: the sequence.
        reached: [K], rows of which position k was judged and all before it matched.
        passed: [K], those of them that match at position k too.
        rounds: rows in the read-out.
        likelihood: over the sequence's answer rows, whatever the read-out.
    """

    name: str
    reached: Ints
    passed: Ints
    rounds: int
    likelihood: Likelihood = field(default_factory=Likelihood)

    @classmethod
    def of(cls, name: str, lead: npt.ArrayLike, limit: npt.ArrayLike, k: int, likelihood: Likelihood | None = None) -> Counts:
        """Count rows; `lead` and `limit` [R] are 0..K with lead <= limit."""
        lead, limit = np.asarray(lead, dtype=np.int64), np.asarray(limit, dtype=np.int64)
        position = np.arange(k)
        judged = limit[:, None] > position
        reached = (judged & (lead[:, None] >= position)).sum(0, dtype=np.int64)
        passed = (judged & (lead[:, None] > position)).sum(0, dtype=np.int64)
        return cls(name, reached, passed, len(lead), likelihood or Likelihood())


@dataclass(frozen=True, slots=True)
class Difference:
    """Second minus first, paired by sequence. `interval` is None below 8 sequences; `value` where a side has no data."""

    value: float | None
    interval: tuple[float, float] | None
    sequences: int
    unpaired: int = 0


def conditional(reached: Ints | Floats, passed: Ints | Floats) -> Floats:
    """Acceptance at each position given that all before it were accepted, [..., K]; NaN where no row got there."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(passed, dtype=np.float64) / np.asarray(reached, dtype=np.float64)


def joint(reached: Ints | Floats, passed: Ints | Floats) -> Floats:
    """Unconditional acceptance [..., K]: the running product of the conditionals, 0 from where no row got there."""
    return np.asarray(np.cumprod(np.nan_to_num(conditional(reached, passed), nan=0.0), axis=-1), dtype=np.float64)


def accept_length(reached: Ints | Floats, passed: Ints | Floats) -> Floats:
    """1 + sum of joint, [...]; NaN where there is no row at all."""
    length = 1.0 + joint(reached, passed).sum(-1)
    return np.where(np.asarray(reached)[..., 0] > 0, length, np.nan)


def summarise(
    counts: Sequence[Counts], k: int, readout: Readout, *, held_out: bool | None = None, seed: int = 0,
) -> Rung:
    """Pool sequences into one rung.

    `length` is None for the read-out `all`, whose rows overlap, and where there are no rounds. `nll`, `coverage` and `rows`
    are of the answer rows in every read-out.
    """
    reached, passed = _stack(counts, k)
    total_reached, total_passed = reached.sum(0), passed.sum(0)
    given = conditional(total_reached, total_passed)
    likelihood = [c.likelihood for c in counts]
    inside, rows = sum(x.inside for x in likelihood), sum(x.rows for x in likelihood)
    rounds = sum(c.rounds for c in counts)
    called = readout != "all" and rounds > 0
    return Rung(
        k=k,
        length=float(accept_length(total_reached, total_passed)) if called else None,
        interval=length_interval(counts, k, seed=seed) if called else None,
        joint=[float(x) for x in joint(total_reached, total_passed)],
        conditional=[None if np.isnan(x) else float(x) for x in given],
        nll=sum(x.total for x in likelihood) / inside if inside else None,
        coverage=sum(x.covered for x in likelihood) / rows if rows else None,
        rounds=rounds, rows=rows, readout=readout, held_out=held_out,
    )


def length_interval(counts: Sequence[Counts], k: int, *, seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of 1 + sum of joint: percentiles of a bootstrap over sequences; None below 8 of them."""
    counts = [c for c in counts if c.rounds]
    if len(counts) < FEWEST:
        return None
    drawn = _resample(np.concatenate(_stack(counts, k), axis=1), seed)
    return _percentiles(accept_length(drawn[:, :k], drawn[:, k:]))


def length_difference(first: Sequence[Counts], second: Sequence[Counts], k: int, *, seed: int = 0) -> Difference:
    """Difference of two lengths over the sequences that both have, each draw taking the same sequences on both sides."""
    pairs, unpaired = _pair(first, second, lambda c: c.rounds > 0)
    if not pairs:
        return Difference(None, None, 0, unpaired)
    sums = np.concatenate([part for i in (0, 1) for part in _stack([pair[i] for pair in pairs], k)], axis=1)

    def gained(found: Floats) -> Floats:
        before, after = (accept_length(half[..., :k], half[..., k:]) for half in (found[..., : 2 * k], found[..., 2 * k :]))
        return after - before

    interval = _percentiles(gained(_resample(sums, seed))) if len(pairs) >= FEWEST else None
    return Difference(float(gained(sums.sum(0).astype(np.float64))), interval, len(pairs), unpaired)


def nll_difference(first: Sequence[Counts], second: Sequence[Counts], *, seed: int = 0) -> Difference:
    """Difference of two mean -log p over the sequences that both have."""
    pairs, unpaired = _pair(first, second, lambda c: c.likelihood.inside > 0)
    if not pairs:
        return Difference(None, None, 0, unpaired)
    sums = np.array([[x for c in pair for x in (c.likelihood.total, c.likelihood.inside)] for pair in pairs], dtype=np.float64)

    def gained(found: Floats) -> Floats:
        return np.asarray(found[..., 2] / found[..., 3] - found[..., 0] / found[..., 1])

    interval = _percentiles(gained(_resample(sums, seed))) if len(pairs) >= FEWEST else None
    return Difference(float(gained(sums.sum(0))), interval, len(pairs), unpaired)


def _stack(counts: Sequence[Counts], k: int) -> tuple[Ints, Ints]:
    empty = np.zeros((0, k), dtype=np.int64)
    if not counts:
        return empty, empty
    return np.stack([c.reached for c in counts]), np.stack([c.passed for c in counts])


def _resample(sums: Ints | Floats, seed: int) -> Floats:
    """Column sums [DRAWS, M] over N sequences drawn with replacement from `sums` [N, M]."""
    n = len(sums)
    values = np.asarray(sums, dtype=np.float64)
    random = np.random.default_rng(seed)
    found = np.empty((DRAWS, values.shape[1]))
    block = max(1, _DRAWN // n)
    for start in range(0, DRAWS, block):
        rows = min(block, DRAWS - start)
        drawn = random.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        found[start : start + rows] = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n) @ values
    return found


def _percentiles(values: Floats) -> tuple[float, float]:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def _pair(
    first: Iterable[Counts], second: Iterable[Counts], usable: Callable[[Counts], bool],
) -> tuple[list[tuple[Counts, Counts]], int]:
    left = {c.name: c for c in first if usable(c)}
    right = {c.name: c for c in second if usable(c)}
    both = [name for name in left if name in right]
    return [(left[name], right[name]) for name in both], len(left) + len(right) - 2 * len(both)
