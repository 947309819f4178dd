"""Mergeable statistics of the rows of one slot.

Every accumulator keeps one contract, tested once for all of them: `update(rows)`, `merge(other)`, `state()` and
`from_state(...)`, `result()`; how rows are split and in which order parts are merged changes nothing beyond rounding of
float64; merging is associative; the result equals a float64 reference; it is defined on no rows at all. Where a statistic has
no value (no rows), the result says None.

Rows are [N, H] of any float dtype. Rows with NaN or infinity are left out of everything but `Counts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftscope.scan import kernels

State = dict[str, Tensor]


def finite_rows(rows: Tensor) -> Tensor:
    """[N] bool."""
    return rows.isfinite().all(-1)


@dataclass
class CountsResult:
    """Rows in all, rows with NaN or infinity, values of each, rows that are zero."""

    rows: int
    nonfinite_rows: int
    nan: int
    infinite: int
    zero_rows: int


class Counts:
    """How many rows, and how many of them are unusable."""

    def __init__(self) -> None:
        self.counts = torch.zeros(5, dtype=torch.int64)

    def update(self, rows: Tensor) -> None:
        finite = finite_rows(rows)
        spoilt = rows[~finite]
        self.counts += torch.tensor([
            len(rows), len(spoilt), int(spoilt.isnan().sum()), int(spoilt.isinf().sum()),
            int((rows[finite] == 0).all(-1).sum()) if rows.shape[-1] else 0,
        ])

    def merge(self, other: Counts) -> None:
        self.counts = self.counts + other.counts

    def state(self) -> State:
        return {"counts": self.counts}

    @classmethod
    def from_state(cls, state: State) -> Counts:
        made = cls()
        made.counts = state["counts"].clone()
        return made

    def result(self) -> CountsResult:
        return CountsResult(*self.counts.tolist())


BINS_PER_OCTAVE = 32
LOWEST_OCTAVE, HIGHEST_OCTAVE = -40, 88  # norms from 1e-12 to 3e26; outside goes to the outermost bins
BINS = BINS_PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)


@dataclass
class NormsResult:
    """L2 norms of rows; None without rows.

    Attributes:
        mean, minimum, maximum: exact.
        median, p01, p99: from the histogram, within 1.1 % of the exact value (half a bin of 1/32 octave).
        log_mean, log_std: of the natural logarithm, rows of norm zero left out.
    """

    count: int
    mean: float | None
    log_mean: float | None
    log_std: float | None
    minimum: float | None
    p01: float | None
    median: float | None
    p99: float | None
    maximum: float | None


class Norms:
    """L2 norms: mean, extremes, quantiles, and the histogram of their logarithm."""

    def __init__(self) -> None:
        self.histogram = torch.zeros(BINS, dtype=torch.int64)
        # count, sum of norms, count, mean and sum of squared deviations of log norms
        self.moments = torch.zeros(5, dtype=torch.float64)
        self.extremes = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows)]
        if len(rows) == 0:
            return
        self.update_norms(row_norms(rows))

    def update_norms(self, norms: Tensor) -> None:
        """The same from norms [N] float64, where they are known."""
        if len(norms) == 0:
            return
        logs = norms[norms > 0].log2()
        bins = ((logs - LOWEST_OCTAVE) * BINS_PER_OCTAVE).floor().clamp(0, BINS - 1).long()
        zeros = torch.zeros(len(norms) - len(logs), dtype=torch.int64)
        self.histogram += torch.bincount(torch.cat([bins, zeros]), minlength=BINS)
        logs = norms[norms > 0].log()
        mean = logs.mean() if len(logs) else torch.zeros((), dtype=torch.float64)
        part = Norms()
        part.moments = torch.stack([
            torch.tensor(float(len(norms))).double(), norms.sum(), torch.tensor(float(len(logs))).double(), mean,
            (logs - mean).square().sum(),
        ])
        part.extremes = torch.stack([norms.min(), norms.max()])
        self.merge(part)

    def merge(self, other: Norms) -> None:
        self.histogram += other.histogram
        a, b = self.moments.tolist(), other.moments.tolist()
        count, delta = a[2] + b[2], b[3] - a[3]
        share = b[2] / max(count, 1)
        self.moments = torch.tensor([
            a[0] + b[0], a[1] + b[1], count, a[3] + delta * share, a[4] + b[4] + delta * delta * a[2] * share,
        ], dtype=torch.float64)
        (low, high), (other_low, other_high) = self.extremes.tolist(), other.extremes.tolist()
        self.extremes = torch.tensor([min(low, other_low), max(high, other_high)], dtype=torch.float64)

    def state(self) -> State:
        return {"histogram": self.histogram, "moments": self.moments, "extremes": self.extremes}

    @classmethod
    def from_state(cls, state: State) -> Norms:
        made = cls()
        made.histogram, made.moments, made.extremes = (state[k].clone() for k in ("histogram", "moments", "extremes"))
        return made

    def quantile(self, q: float) -> float | None:
        """The norm below which a share q of the rows lies: the middle of the bin, in logarithms, kept within the extremes."""
        total = int(self.histogram.sum())
        if total == 0:
            return None
        rank = min(int(q * (total - 1)), total - 1)
        chosen = int((self.histogram.cumsum(0) > rank).nonzero()[0])
        value = 2.0 ** (LOWEST_OCTAVE + (chosen + 0.5) / BINS_PER_OCTAVE)
        return min(max(value, float(self.extremes[0])), float(self.extremes[1]))

    def result(self) -> NormsResult:
        count, total, logged, log_mean, squares = self.moments.tolist()
        if count == 0:
            return NormsResult(0, *[None] * 8)
        return NormsResult(
            int(count), total / count, log_mean if logged else None, (squares / logged) ** 0.5 if logged else None,
            float(self.extremes[0]), self.quantile(0.01), self.quantile(0.5), self.quantile(0.99), float(self.extremes[1]),
        )


def row_norms(rows: Tensor) -> Tensor:
    """[..., H] to [...] float64. float32 suffices for the squares of narrow types, whose sums are then taken in float64."""
    if kernels.fits(rows):
        return kernels.squares(rows).sqrt()
    if rows.dtype in (torch.bfloat16, torch.float64):
        rows = rows.double()  # squares of bfloat16 can exceed float32
    return torch.linalg.vector_norm(rows.float() if rows.dtype == torch.float16 else rows, dim=-1, dtype=torch.float64)


class Moments:
    """Mean and sum of squared deviations from it of values [N, ...] (Chan's merge of Welford's moments, in float64)."""

    MISFIT = "values of shape {} and {} do not go together"

    def __init__(self, *shape: int) -> None:
        self.count = 0
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros(shape, dtype=torch.float64)

    def update_found(self, found: Tensor) -> None:
        """Take in values [N, ...] float64, all finite."""
        if len(found) == 0:
            return
        part = type(self)(*found.shape[1:])
        part.count, part.mean = len(found), found.mean(0)
        part.squares = (found - part.mean).square().sum(0)
        self.merge(part)

    def merge(self, other: Self) -> None:
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.squares = other.count, other.mean.clone(), other.squares.clone()
            return
        if self.mean.shape != other.mean.shape:
            raise ValueError(self.MISFIT.format(len(self.mean), len(other.mean)))
        count = self.count + other.count
        delta = other.mean - self.mean
        share = other.count / count
        self.mean.add_(delta, alpha=share)
        self.squares.add_(other.squares).addcmul_(delta, delta, value=self.count * share)
        self.count = count

    def state(self) -> State:
        return {"count": torch.tensor(self.count), "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: State) -> Self:
        made = cls()
        made.count, made.mean, made.squares = int(state["count"]), state["mean"].clone(), state["squares"].clone()
        return made


@dataclass
class DimensionsResult:
    """Per dimension: [H] float64 mean and (population) variance; None without rows."""

    count: int
    mean: Tensor | None
    variance: Tensor | None


class Dimensions(Moments):
    """Mean and variance of every dimension."""

    MISFIT = "rows of width {} and {} do not go together"

    def __init__(self, width: int = 0) -> None:
        super().__init__(width)

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows)]
        if len(rows) == 0:
            return
        part = Dimensions(rows.shape[1])
        part.count = len(rows)
        part.mean = rows.mean(0, dtype=torch.float64)
        # The deviation is taken in float64: a dimension may be large and hardly vary.
        part.squares = torch.zeros_like(part.mean)
        for block in rows.split(1024):
            part.squares += (block.double() - part.mean).square().sum(0)
        self.merge(part)

    def result(self) -> DimensionsResult:
        if self.count == 0:
            return DimensionsResult(0, None, None)
        return DimensionsResult(self.count, self.mean.clone(), self.squares / self.count)


@dataclass
class OutliersResult:
    """Channels that stand out.

    Attributes:
        largest: [H] float32, largest absolute value of each channel; None without rows.
        share: [H] float64, share of rows in which the channel exceeds six times the row's root mean square.
        channels: those that do so in one row of twenty or more, most frequent first.
    """

    count: int
    largest: Tensor | None
    share: Tensor | None
    channels: list[int]


class Outliers:
    """Channels far larger than the rest of their row (massive activations)."""

    FACTOR = 6.0

    def __init__(self, width: int = 0) -> None:
        self.count = 0
        self.largest = torch.zeros(width)
        self.exceeds = torch.zeros(width, dtype=torch.int64)

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows)]
        if len(rows) == 0:
            return
        size = rows.float().abs()
        bar = self.bars(row_norms(rows), rows.shape[1])
        part = Outliers(rows.shape[1])
        part.count, part.largest = len(rows), size.amax(0)
        part.exceeds = (size.double() > bar[:, None]).sum(0)
        self.merge(part)

    @classmethod
    def bars(cls, norms: Tensor, width: int) -> Tensor:
        """What a value exceeds to stand out of its row, by the rows' norms."""
        return cls.FACTOR * norms / width**0.5

    def merge(self, other: Outliers) -> None:
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.largest, self.exceeds = other.count, other.largest.clone(), other.exceeds.clone()
            return
        if self.largest.shape != other.largest.shape:
            raise ValueError(f"rows of width {len(self.largest)} and {len(other.largest)} do not go together")
        self.count += other.count
        torch.maximum(self.largest, other.largest, out=self.largest)
        self.exceeds.add_(other.exceeds)

    def state(self) -> State:
        return {"count": torch.tensor(self.count), "largest": self.largest, "exceeds": self.exceeds}

    @classmethod
    def from_state(cls, state: State) -> Outliers:
        made = cls()
        made.count, made.largest, made.exceeds = int(state["count"]), state["largest"].clone(), state["exceeds"].clone()
        return made

    def result(self) -> OutliersResult:
        if self.count == 0:
            return OutliersResult(0, None, None, [])
        share = self.exceeds.double() / self.count
        order = share.argsort(descending=True, stable=True)
        return OutliersResult(self.count, self.largest.clone(), share, order[share[order] >= 0.05].tolist())


ACCUMULATORS: dict[str, type[Counts] | type[Norms] | type[Dimensions] | type[Outliers]] = {
    "counts": Counts, "norms": Norms, "dimensions": Dimensions, "outliers": Outliers,
}
