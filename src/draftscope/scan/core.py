"""What is told of every value: counts, norms, moments by dimension and outlier channels, in one pass over chosen rows."""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.scan import kernels
from draftscope.scan.accumulators import BINS_PER_OCTAVE, LOWEST_OCTAVE, Norms, Outliers
from draftscope.scan.fingerprint import Statistics


class Core:
    """`Statistics` that grow by rows in place: compiled where the rows fit the kernels, else by the accumulators on tensors."""

    def __init__(self) -> None:
        self._settled = Statistics()
        self._norms = Norms()
        self._sums: kernels.Sums | None = None

    def update(self, rows: Tensor, chosen: Tensor, norms: Tensor) -> None:
        """Take in chosen rows.

        Args:
            rows: [N, H] of any float dtype.
            chosen: [M] int64, numbers of rows.
            norms: [N] float64, of all rows (`row_norms`).

        Raises:
            ValueError: rows of another width than before.
        """
        if not kernels.fits(rows):
            self._settled.update(rows[chosen])
            return
        held = norms[chosen]
        usable = held.isfinite()
        if not bool(usable.all()):
            self._settled.counts.update(rows[chosen[~usable]])
            chosen, held = chosen[usable], held[usable]
        if len(chosen) == 0:
            return
        width = rows.shape[1]
        if self._sums is not None and len(self._sums.largest) != width:
            raise ValueError(f"rows of width {len(self._sums.largest)} and {width} do not go together")
        zeros = kernels.into_histogram(held, self._norms.histogram, self._norms.moments, self._norms.extremes, LOWEST_OCTAVE,
                                       BINS_PER_OCTAVE)
        self._settled.counts.counts += torch.tensor([len(held), 0, 0, 0, zeros])
        if self._sums is None:
            self._sums = kernels.Sums(width)
        self._sums.add(rows, chosen, Outliers.bars(held, width))
        if self._sums.count >= kernels.Sums.MOST:
            self._settle()

    def statistics(self) -> Statistics:
        """All rows so far; shares nothing that a later update changes."""
        self._settle()
        total = Statistics()
        total.merge(self._settled)
        return total

    def _settle(self) -> None:
        if self._sums is None:
            return
        part = Statistics()
        part.norms = self._norms
        part.dimensions.count = part.outliers.count = self._sums.count
        part.dimensions.mean, part.dimensions.squares = self._sums.moments()
        part.outliers.largest = torch.from_numpy(self._sums.largest)
        part.outliers.exceeds = torch.from_numpy(self._sums.exceeds).long()
        self._settled.merge(part)
        self._norms, self._sums = Norms(), None
