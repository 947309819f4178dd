"""What whole rows of an entry show: how values are distributed, principal components, projections, likeness of neighbours.

The accumulators keep the contract of `scan.accumulators`. All are sums, so that merging is exact but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import Moments, State, finite_rows

DIRECTIONS = 32
"""Columns of the sketch."""
SLICES = 16
"""Of them, those along which rows are projected."""
COMPONENTS = 16
BITS = 12
"""Of a float32 that tell a bin: sign, exponent, and three bits of the mantissa, so eight bins an octave."""
BINS = 2**BITS


def bins_of(values: Tensor) -> Tensor:
    """The bin of each value, by its first bits as float32: 0 .. `BINS` - 1; those of negative values come last."""
    # Beyond what float32 holds counts as its largest.
    held = values.to(torch.float32).clamp(torch.finfo(torch.float32).min, torch.finfo(torch.float32).max) + 0.0
    return (held.view(torch.int32) >> (32 - BITS)) & (BINS - 1)


def edges() -> Tensor:
    """[BINS] float32: in each bin the value that is closest to zero."""
    return (torch.arange(BINS, dtype=torch.int64) << (32 - BITS)).to(torch.int32).view(torch.float32)


class ValueHistogram:
    """Every value of the rows, by sign and size: [BINS] int64."""

    def __init__(self) -> None:
        self.histogram = torch.zeros(BINS, dtype=torch.int64)

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows)]
        self.histogram += torch.bincount(bins_of(rows.flatten()), minlength=BINS)

    def merge(self, other: ValueHistogram) -> None:
        self.histogram = self.histogram + other.histogram

    def state(self) -> State:
        return {"histogram": self.histogram}

    @classmethod
    def from_state(cls, state: State) -> ValueHistogram:
        made = cls()
        made.histogram = state["histogram"].clone()
        return made

    def result(self) -> ValuesResult:
        total = int(self.histogram.sum())
        if total == 0:
            return ValuesResult(0, None, None, None)
        # Ordered from the most negative to the largest.
        order = torch.cat([torch.arange(BINS - 1, BINS // 2 - 1, -1), torch.arange(BINS // 2)])
        below = self.histogram[order].cumsum(0)
        at = [float(edges()[order[int((below > min(int(q * total), total - 1)).nonzero()[0])]]) for q in (0.001, 0.5, 0.999)]
        return ValuesResult(total, *at)


@dataclass
class ValuesResult:
    """Values in all, and quantiles of them: the edge of their bin that is closest to zero, within an eighth of the value."""

    count: int
    low: float | None
    median: float | None
    high: float | None


@lru_cache(maxsize=8)
def omega_of(width: int) -> Tensor:
    """[width, DIRECTIONS] float64, standard normal, the same everywhere: SplitMix64 of the place, then Box and Muller."""
    with np.errstate(over="ignore"):
        key = np.arange(1, 2 * width * DIRECTIONS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    uniform = ((key ^ (key >> np.uint64(31))) >> np.uint64(11)).astype(np.float64).reshape(2, width, DIRECTIONS) * 2.0**-53
    return torch.from_numpy(np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * np.pi * uniform[1]))


@dataclass
class ComponentsResult:
    """Principal components; None with fewer than two rows.

    Attributes:
        count: rows.
        total: variance over all dimensions.
        shares: the largest components' shares of it, falling, at most `COMPONENTS`.
    """

    count: int
    total: float | None
    shares: Tensor | None


class Sketch:
    """The covariance C of rows through Y = C Omega, with Omega [H, k] standard normal, k = `DIRECTIONS`.

    Rows count from their mean. Y is a sum over rows, so that sketches add up. Components come from the Nystrom approximation
    Y (Omega' Y)^-1 Y' (Tropp, Yurtsever, Udell and Cevher, Fixed-rank approximation of a positive-semidefinite matrix from
    streaming data, NIPS 2017, algorithm 3). Their theorem 4.1: cut to rank r < k - 1 its expected error in the nuclear norm is
    at most 1 + r / (k - r - 1) times that of the best approximation of that rank: with k = 32, 1.19 times at r = 5 and 2.07
    times at r = 16.
    """

    def __init__(self, width: int = 0) -> None:
        self.count = 0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.total = torch.zeros((), dtype=torch.float64)  # sum of squared distances from the mean
        self.products = torch.zeros(width, DIRECTIONS, dtype=torch.float64)  # sum of y (y' Omega), y from the mean

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows)].double()
        if len(rows):
            self.update_exact(rows)

    def update_exact(self, rows: Tensor) -> Tensor:
        """The same from finite rows [N, H] float64, one or more; their projections [N, k], which `Slices` takes."""
        part = Sketch()
        part.count, part.mean = len(rows), rows.mean(0)
        off, omega = rows - part.mean, omega_of(rows.shape[1]).to(rows.device)
        projected = off @ omega
        part.total, part.products = off.square().sum(), off.T @ projected
        self.merge(part)
        return projected + part.mean @ omega

    def merge(self, other: Sketch) -> None:
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.total, self.products = (other.count, other.mean.clone(), other.total.clone(),
                                                                other.products.clone())
            return
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"rows of width {len(self.mean)} and {len(other.mean)} do not go together")
        count, delta = self.count + other.count, other.mean - self.mean
        weight = self.count * other.count / count
        self.total = self.total + other.total + delta.square().sum() * weight
        self.products = (self.products + other.products).addr_(delta, delta @ omega_of(len(delta)), alpha=weight)
        self.mean = torch.add(self.mean, delta, alpha=other.count / count)
        self.count = count

    def state(self) -> State:
        return {"count": torch.tensor(self.count), "mean": self.mean, "total": self.total, "products": self.products}

    @classmethod
    def from_state(cls, state: State) -> Sketch:
        made = cls()
        made.count = int(state["count"])
        made.mean, made.total, made.products = (state[name].clone() for name in ("mean", "total", "products"))
        return made

    def result(self) -> ComponentsResult:
        if self.count < 2:
            return ComponentsResult(self.count, None, None)
        return ComponentsResult(self.count, *self.components()[:2])

    def components(self) -> tuple[float, Tensor, Tensor]:
        """Variance over all dimensions, the largest components' shares of it, their directions [H, components], orthonormal."""
        keep = min(COMPONENTS, len(self.mean))
        if self.total == 0:
            return 0.0, torch.zeros(keep, dtype=torch.float64), torch.eye(len(self.mean), keep, dtype=torch.float64)
        omega, products = omega_of(len(self.mean)), self.products / self.total  # scaled, so that huge values stay finite
        shift = torch.finfo(torch.float64).eps * products.norm() * len(self.mean) ** 0.5
        held, directions = _nystrom(products, omega, shift)
        return float(self.total) / self.count, held[:keep].clamp(0, 1), directions[:, :keep]


def _nystrom(products: Tensor, omega: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, falling, and vectors of the approximation; the shift keeps the inner matrix positive."""
    basis, upper = torch.linalg.qr(omega)  # the same column space; of no more columns than there are dimensions
    moved = products @ torch.linalg.pinv(upper) + shift * basis
    inner = basis.T @ moved
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    left, sizes, _ = torch.linalg.svd(moved @ (vectors / values.clamp_min(shift).sqrt()), full_matrices=False)
    return (sizes.square() - shift).clamp_min(0), left


class Slices:
    """Rows projected onto `SLICES` fixed random directions: mean, variance and histogram [SLICES, BINS] of each projection."""

    def __init__(self) -> None:
        self.moments = Moments(SLICES)
        self.histogram = torch.zeros(SLICES, BINS, dtype=torch.int64)

    def update(self, rows: Tensor) -> None:
        rows = rows[finite_rows(rows)].double()
        if len(rows) == 0:
            return
        self.update_projected(rows @ omega_of(rows.shape[1])[:, :SLICES].to(rows.device))

    def update_projected(self, projected: Tensor) -> None:
        """The same from projections [N, SLICES or more] float64 of finite rows, where they are known."""
        projected = projected[:, :SLICES]
        self.moments.update_found(projected)
        bins = bins_of(projected).long() + BINS * torch.arange(SLICES)
        self.histogram += torch.bincount(bins.flatten(), minlength=SLICES * BINS).view(SLICES, BINS)

    def merge(self, other: Slices) -> None:
        self.moments.merge(other.moments)
        self.histogram = self.histogram + other.histogram

    def state(self) -> State:
        return {**self.moments.state(), "histogram": self.histogram}

    @classmethod
    def from_state(cls, state: State) -> Slices:
        made = cls()
        made.moments, made.histogram = Moments.from_state(state), state["histogram"].clone()
        return made

    def result(self) -> SlicesResult:
        if self.moments.count == 0:
            return SlicesResult(0, None, None)
        return SlicesResult(self.moments.count, self.moments.mean.clone(), self.moments.squares / self.moments.count)


@dataclass
class SlicesResult:
    """Mean and (population) variance along each direction [SLICES]; None without rows."""

    count: int
    mean: Tensor | None
    variance: Tensor | None


@dataclass
class NeighboursResult:
    """Mean and (population) standard deviation of the cosine between a row and the one before it; None without rows."""

    count: int
    mean: float | None
    std: float | None


class Neighbours(Moments):
    """Cosine between rows and those before them, pairs [N, 2, H]; pairs with NaN, infinity or a zero row are left out."""

    def __init__(self) -> None:
        super().__init__()

    def update(self, pairs: Tensor) -> None:
        self.update_beside(pairs[:, 0].double(), pairs[:, 1])

    def update_beside(self, rows: Tensor, before: Tensor) -> None:
        """The same from rows [N, H] float64 and those before them [N, H], of any dtype that torch calculates with."""
        held = before.double()
        size = torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(held, dim=1)
        found = torch.linalg.vecdot(rows, held) / size
        self.update_found(found[found.isfinite() & (size > 0)])

    def result(self) -> NeighboursResult:
        if self.count == 0:
            return NeighboursResult(0, None, None)
        return NeighboursResult(self.count, float(self.mean), float((self.squares / self.count).sqrt()))
