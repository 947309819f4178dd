"""How far two entries are from each other by their statistics alone.

*Distance*, over ordinary rows (no first tokens, no sinks), is the root of the sum of three squares:

- norms: the 1-Wasserstein distance of the distributions of log norms, in nats (0.1 is a difference of about 10 %);
- means: |difference of the means over dimensions| / root mean square size of a row;
- spread: the median over dimensions of |log ratio of the standard deviations|.

`shape` is the same without scale: both profiles divided by the size of their rows, norms left out.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftscope.scan.accumulators import BINS_PER_OCTAVE, Norms
from draftscope.scan.fingerprint import Statistics

Component = Literal["total", "norms", "means", "spread", "shape"]
COMPONENTS: tuple[Component, ...] = ("total", "norms", "means", "spread", "shape")


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Distance(Model):
    """Two entries against each other; None where a side has too few rows."""

    total: float | None = None
    norms: float | None = None
    means: float | None = None
    spread: float | None = None
    shape: float | None = None


def distance(a: Statistics, b: Statistics) -> Distance:
    """Distance of two entries; all None where either has fewer than two rows."""
    first, second = a.dimensions.result(), b.dimensions.result()
    if first.mean is None or second.mean is None or min(first.count, second.count) < 2:
        return Distance()
    assert first.variance is not None and second.variance is not None
    sizes = [(m.square() + v).sum().sqrt() for m, v in ((first.mean, first.variance), (second.mean, second.variance))]
    size = torch.stack(sizes).square().mean().sqrt()
    if size == 0:
        return Distance(total=0.0, norms=0.0, means=0.0, spread=0.0, shape=0.0)
    norms = wasserstein(a.norms, b.norms)
    means = float((first.mean - second.mean).norm() / size)
    spread = _spread(first.variance, second.variance)
    shape = math.inf
    if min(float(s) for s in sizes) > 0:
        scaled = [r / s for r, s in zip((first.mean, second.mean), sizes, strict=True)]
        shape = math.hypot(
            float((scaled[0] - scaled[1]).norm()),
            _spread(first.variance / sizes[0].square(), second.variance / sizes[1].square()),
        )
    return Distance(total=math.hypot(norms, means, spread), norms=norms, means=means, spread=spread, shape=shape)


def _spread(a: Tensor, b: Tensor) -> float:
    """Median over dimensions of |log ratio of the standard deviations|; a dimension that never varies counts as 1e-6 of all."""
    floor_a, floor_b = (1e-12 * v.mean().clamp_min(1e-300) for v in (a, b))
    floor = torch.maximum(floor_a, floor_b)
    return float((0.5 * (a.clamp_min(floor).log() - b.clamp_min(floor).log())).abs().median())


def wasserstein(a: Norms, b: Norms) -> float:
    """1-Wasserstein distance of two distributions of log norms, in nats, from their histograms."""
    shares = [n.histogram.double() / n.histogram.sum().clamp_min(1) for n in (a, b)]
    return float((shares[0] - shares[1]).cumsum(0).abs().sum()) * math.log(2) / BINS_PER_OCTAVE
