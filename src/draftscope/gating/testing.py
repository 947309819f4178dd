"""Did acceptance fall? One-sided tests by position and of the accept length, over sequences, at one level together.

A position's acceptance is passed / reached, pooled; the accept length is 1 plus the running products of those. Rows of one
sequence are not independent of each other, so the error is that of the sequences' own contributions (the delta method, with
Student's t over sequences), of their differences where both builds answered the same ones. Holm's procedure keeps the chance
that any test fails without a fall at the level, whatever the tests' dependence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from draftscope.gating.report import Counted, How, Tested

Floats = npt.NDArray[np.float64]

FEWEST = 8
"""Sequences from which their spread is estimated."""
SCARCE = 15
"""Rows passed, or rows stopped, of either build, below which a position's spread is not trusted alone."""
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Side:
    """A build on one rung: its figures [K+1], the accept length last, and each sequence's pull on them [N, K+1]."""

    names: list[str]
    values: Floats
    pulls: Floats
    reached: Floats
    passed: Floats


def side(sequences: Sequence[Counted], k: int) -> Side:
    """The figures of a rung. A position that no row reached has the value 0 and no pull."""
    used = [s for s in sequences if s.rounds]
    reached = np.array([s.reached[:k] for s in used], dtype=np.float64).reshape(len(used), k)
    passed = np.array([s.passed[:k] for s in used], dtype=np.float64).reshape(len(used), k)
    total = reached.sum(0)
    share = np.divide(passed.sum(0), total, out=np.zeros(k), where=total > 0)
    pulls = np.divide(passed - share * reached, total, out=np.zeros_like(passed), where=total > 0)
    joint = np.cumprod(share)
    # The length's slope in one position's share: the products behind it, without that share itself.
    slope = np.array([
        sum(float(np.prod(np.delete(share[: m + 1], i))) for m in range(i, k)) for i in range(k)
    ])
    values = np.append(share, 1 + joint.sum())
    return Side([s.name for s in used], values, np.column_stack([pulls, pulls @ slope]), total, passed.sum(0))


def rung_tests(
    rung: str, baseline: Sequence[Counted], current: Sequence[Counted], k: int, margin: float = 0.0
) -> list[Tested]:
    """The tests of one rung, not adjusted yet.

    Args:
        margin: a fall of the accept length that is allowed; of a position, this divided by K.
    """
    before, after = side(baseline, k), side(current, k)
    shared = set(before.names) & set(after.names)
    how: How
    if len(shared) >= FEWEST and len(shared) >= 0.9 * max(len(before.names), len(after.names)):
        before, after, how = side(_only(baseline, shared), k), side(_only(current, shared), k), "paired"
    elif min(len(before.names), len(after.names)) >= FEWEST:
        how = "two samples"
    else:
        how = "pooled"
    names = [*(f"position {i + 1}" for i in range(k)), "accept length"]
    found = []
    for i, name in enumerate(names):
        if i < k and min(before.reached[i], after.reached[i]) == 0:
            continue
        allowed = margin if i == k else margin / k
        if how == "pooled":
            if i == k:
                continue
            p, least = _pooled(before, after, i, allowed)
        else:
            p, least = _spread(before, after, i, allowed, how)
            if i < k and _few(before, after, i):
                # Too little for a spread to be told from: the counts themselves have to show it too.
                p = max(p, _pooled(before, after, i, allowed)[0])
        found.append(Tested(
            rung=rung, of=name, how=how, baseline=float(before.values[i]), current=float(after.values[i]),
            sequences=None if how == "pooled" else min(len(before.names), len(after.names)), p=p, adjusted=p, least=least,
            fell=False,
        ))
    return found


def adjust(found: Sequence[Tested], level: float) -> list[Tested]:
    """Holm's step-down over all tests: those whose adjusted p is at most the level fell."""
    ordered = sorted(range(len(found)), key=lambda i: found[i].p)
    adjusted, highest = [0.0] * len(found), 0.0
    for rank, i in enumerate(ordered):
        highest = max(highest, min(1.0, (len(found) - rank) * found[i].p))
        adjusted[i] = highest
    return [t.model_copy(update={"adjusted": a, "fell": a <= level}) for t, a in zip(found, adjusted, strict=True)]


def _only(sequences: Sequence[Counted], names: set[str]) -> list[Counted]:
    return sorted((s for s in sequences if s.name in names and s.rounds), key=lambda s: s.name)


def _spread(before: Side, after: Side, i: int, allowed: float, how: How) -> tuple[float, float | None]:
    """p and the least fall, from the spread of the sequences' pulls."""
    fall = float(before.values[i] - after.values[i]) - allowed
    if how == "paired":
        count = len(before.names)
        variance, freedom = _variance(after.pulls[:, i] - before.pulls[:, i]), count - 1.0
    else:
        one, other = _variance(before.pulls[:, i]), _variance(after.pulls[:, i])
        variance = one + other
        parts = one**2 / (len(before.names) - 1) + other**2 / (len(after.names) - 1)
        freedom = variance**2 / parts if parts > 0 else 1.0
    error = math.sqrt(variance)
    if error == 0:
        return (0.0 if fall > 0 else 1.0), None
    least = float((stats.t.ppf(0.95, freedom) + stats.t.ppf(POWER, freedom)) * error) + allowed
    return float(stats.t.sf(fall / error, freedom)), least


def _few(before: Side, after: Side, i: int) -> bool:
    return any(min(one.passed[i], one.reached[i] - one.passed[i]) < SCARCE for one in (before, after))


def _variance(pulls: Floats) -> float:
    count = len(pulls)
    return float((pulls**2).sum() * count / (count - 1))


def _pooled(before: Side, after: Side, i: int, allowed: float) -> tuple[float, float | None]:
    """Counts alone: the exact test of two shares where no fall is allowed, else the normal one."""
    n, m = float(before.reached[i]), float(after.reached[i])
    hits, others = float(before.passed[i]), float(after.passed[i])
    p, q = hits / n, others / m
    error = math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
    least = (1.645 + 0.842) * error + allowed if error else None
    if allowed == 0:
        table = [[others, m - others], [hits, n - hits]]
        return float(stats.fisher_exact(table, alternative="less").pvalue), least
    return (float(stats.norm.sf((p - q - allowed) / error)) if error else float(p - q <= allowed)), least
