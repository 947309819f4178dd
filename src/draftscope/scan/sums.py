"""Sums of rows on torch tensors of any device: what `accumulators.Statistics` tells of every value, without waiting for a device.

This file needs torch and the standard library, Python 3.10 or newer: a copy of it runs inside serving engines, in the copy of
`engines/inside.py`. Everything is summed in float64 where the rows are; batches are merged by Chan's formulas. Nothing here
reads a value back, so that on an accelerator a call only queues work.

Shapes: N rows, S slots that are summed beside each other, H channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_OCTAVE, LOWEST, HIGHEST = 32, -40, 88
BINS = PER_OCTAVE * (HIGHEST - LOWEST)
"""Of the histogram of norms: 1/32 octave each, from 2^-40 to 2^88; what lies outside goes to the outermost."""
OUTSTANDING = 6.0
"""Times a row's root mean square from which a value stands out of it."""
AT_ONCE, ALONE = 2**23, 2**15 - 1
"""Values widened together: on an accelerator; and where no other thread is to be woken, which torch does for more."""
SINK = 10.0
"""Times the median norm of a sequence's rows in a slot from which a row is a sink."""
POSITIONS = (1, 16, 64, 256, 1024, 4096)
"""Where the ranges of positions begin."""


def norms_of(rows: Tensor) -> Tensor:
    """L2 norms of rows [N, S, H]: [N, S] float64."""
    step = max(1, AT_ONCE // max(1, rows.shape[1] * rows.shape[2]))
    return torch.cat([torch.linalg.vector_norm(block.double(), dim=-1) for block in rows.split(step)])


class Sums:
    """Counts, norms, moments and outlier channels of rows, by slot.

    Attributes:
        counts: [S, 5] int64: rows, rows with NaN or infinity, NaN values, infinite values, rows of zeros.
        histogram: [S, BINS] int64 of norms.
        norms: [S, 5] float64: count, sum; of the logarithms of those above zero count, mean, sum of squared deviations.
        extremes: [S, 2] float64: least and largest norm.
        mean, squares: [S, H] float64: mean, sum of squared deviations from it.
        largest: [S, H] float32: largest absolute value; exceeds: [S, H] int64: rows in which a channel stands out.
    """

    NAMES = ("counts", "histogram", "norms", "extremes", "mean", "squares", "largest", "exceeds")

    def __init__(self, slots: int, width: int, device: torch.device | str = "cpu") -> None:
        whole = {"dtype": torch.int64, "device": device}
        exact = {"dtype": torch.float64, "device": device}
        self.counts = torch.zeros(slots, 5, **whole)  # type: ignore[call-overload]
        self.histogram = torch.zeros(slots, BINS, **whole)  # type: ignore[call-overload]
        self.norms = torch.zeros(slots, 5, **exact)  # type: ignore[call-overload]
        self.extremes = torch.tensor([torch.inf, -torch.inf], **exact).repeat(slots, 1)  # type: ignore[arg-type]
        self.mean = torch.zeros(slots, width, **exact)  # type: ignore[call-overload]
        self.squares = torch.zeros(slots, width, **exact)  # type: ignore[call-overload]
        self.largest = torch.zeros(slots, width, dtype=torch.float32, device=device)
        self.exceeds = torch.zeros(slots, width, **whole)  # type: ignore[call-overload]

    def add(self, rows: Tensor, taken: Tensor | None = None, *, together: int | None = None) -> None:
        """Take in rows.

        Args:
            rows: [N, S, H] of a dtype that torch calculates with, on this device.
            taken: [N, S] bool, which of them; None = all.
            together: values that are widened at once.
        """
        together = together or (ALONE if rows.device.type == "cpu" else AT_ONCE)
        step = max(1, together // max(1, rows.shape[1] * rows.shape[2]))
        if len(rows):
            blocks = rows.split(step)
            for block, chosen in zip(blocks, [None] * len(blocks) if taken is None else taken.split(step), strict=True):
                self._add(block, chosen)

    def _add(self, rows: Tensor, taken: Tensor | None) -> None:
        slots, width = self.mean.shape
        usable = rows.isfinite()
        kept = usable.all(-1)
        asked = torch.ones_like(kept) if taken is None else taken
        spoilt = asked.logical_and(kept.logical_not())
        kept = asked & kept
        values = torch.where(kept.unsqueeze(-1), rows, torch.zeros_like(rows)).double()
        norms = torch.linalg.vector_norm(values, dim=-1)  # [N, S]; of rows left out zero
        nan = ((rows != rows) & asked.unsqueeze(-1)).sum((0, 2))
        unusable = (usable.logical_not() & asked.unsqueeze(-1)).sum((0, 2))
        self.counts += torch.stack([asked.sum(0), spoilt.sum(0), nan, unusable - nan, (kept & (norms == 0)).sum(0)], 1)
        bins = ((norms.log2() - LOWEST) * PER_OCTAVE).floor().clamp(0, BINS - 1).long()
        bins += BINS * torch.arange(slots, device=rows.device)
        self.histogram.view(-1).index_add_(0, bins.flatten(), kept.long().flatten())
        above = kept & (norms > 0)
        logs = torch.where(above, norms, torch.ones_like(norms)).log()
        logged = above.sum(0).double()
        log_mean = logs.sum(0) / logged.clamp_min(1)
        log_squares = torch.where(above, logs - log_mean, torch.zeros_like(logs)).square().sum(0)
        count = kept.sum(0).double()
        mean = values.sum(0) / count.clamp_min(1).unsqueeze(1)
        squares = torch.where(kept.unsqueeze(-1), values - mean, torch.zeros_like(values)).square_().sum(0)
        size = values.abs_()
        largest, exceeds = size.amax(0).float(), (size > (OUTSTANDING / width**0.5 * norms).unsqueeze(-1)).sum(0)
        none = torch.full_like(norms, torch.inf)
        extremes = torch.stack([torch.where(kept, norms, none).amin(0), torch.where(kept, norms, -none).amax(0)], 1)
        found = torch.stack([count, norms.sum(0), logged, log_mean, log_squares], 1)
        self._merge(found, extremes, mean, squares, largest, exceeds)

    def merge(self, other: Sums) -> None:
        """Take in all rows of the other, of the same slots and width, on this device."""
        self.counts += other.counts
        self.histogram += other.histogram
        self._merge(other.norms, other.extremes, other.mean, other.squares, other.largest, other.exceeds)

    def _merge(self, norms: Tensor, extremes: Tensor, mean: Tensor, squares: Tensor, largest: Tensor, exceeds: Tensor) -> None:
        before, total, logged, log_mean, log_squares = self.norms.unbind(1)
        more, added, logs_more, mean_more, squares_more = norms.unbind(1)
        share = more / (before + more).clamp_min(1)
        off = mean - self.mean
        self.mean += off * share.unsqueeze(1)
        self.squares += squares + off.square() * (before * share).unsqueeze(1)
        log_share = logs_more / (logged + logs_more).clamp_min(1)
        log_off = mean_more - log_mean
        self.norms = torch.stack([before + more, total + added, logged + logs_more, log_mean + log_off * log_share,
                                  log_squares + squares_more + log_off.square() * logged * log_share], 1)
        (least, most), (less, longer) = self.extremes.unbind(1), extremes.unbind(1)
        self.extremes = torch.stack([torch.minimum(least, less), torch.maximum(most, longer)], 1)
        self.largest = torch.maximum(self.largest, largest)
        self.exceeds += exceeds

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, on the host: here a device is waited for."""
        return {name: getattr(self, name).cpu().contiguous() for name in self.NAMES}
