"""The engine on torch tensors of any dtype and device: the sums that also run inside serving engines (`scan.sums`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import row_norms
from draftscope.scan.core import CELLS, EngineName, Store, cells_of
from draftscope.scan.statistics import Statistics
from draftscope.scan.sums import Sums
from draftscope.states.dtypes import NARROW, WIDE

TOGETHER = 2**20
"""Values that are widened at once."""


def wide(rows: Tensor) -> Tensor:
    """Rows in a dtype that torch calculates with; the values are the same."""
    return rows.to(WIDE) if rows.dtype in NARROW else rows


class OnTensors:
    """By `Sums.add`."""

    name: EngineName = "torch"
    compiled = False

    def fits(self, states: Tensor) -> bool:
        return True

    def view(self, states: Tensor) -> Tensor:
        return states

    def norms(self, view: Tensor, entry: int, start: int, stop: int) -> np.ndarray:
        return row_norms(wide(view[start:stop, entry])).cpu().numpy()

    def cells(self, norms: np.ndarray, answer: np.ndarray | None) -> np.ndarray:
        return cells_of(norms, answer)

    def store(self, entries: int, width: int) -> Store:
        return Held(width)


class Held:
    """Sums for each entry and cell, where the rows are."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.held: dict[tuple[int, int], Sums] = {}

    @property
    def touched(self) -> int:
        return len(self.held) * 32 * self.width

    def begin(self, view: Tensor, entry: int, norms: np.ndarray, cells: np.ndarray, start: int) -> tuple[int, np.ndarray]:
        return start, cells

    def add(self, view: Tensor, entry: int, plan: tuple[int, np.ndarray], low: int, high: int) -> None:
        start, cells = plan
        for cell in range(CELLS):
            numbers = np.flatnonzero(cells == cell)
            if len(numbers):
                rows = wide(view[torch.from_numpy(numbers + start).to(view.device), entry])
                if (entry, cell) not in self.held:
                    self.held[entry, cell] = Sums(1, self.width, rows.device)
                self.held[entry, cell].add(rows[:, None], together=TOGETHER)

    def results(self) -> Iterator[tuple[int, int, Statistics]]:
        for (entry, cell), held in sorted(self.held.items()):
            yield entry, cell, statistics_of(held.state(), 0)


def statistics_of(state: Mapping[str, Tensor], slot: int) -> Statistics:
    """One slot of the state of `Sums`, as the accumulators hold it."""
    held = {name: tensor[slot].clone() for name, tensor in state.items()}
    made, rows = Statistics(), int(held["norms"][0])
    made.counts.counts = held["counts"]
    made.norms.histogram, made.norms.moments, made.norms.extremes = held["histogram"], held["norms"], held["extremes"]
    if rows:
        made.dimensions.count = made.outliers.count = rows
        made.dimensions.mean, made.dimensions.squares = held["mean"], held["squares"]
        made.outliers.largest, made.outliers.exceeds = held["largest"], held["exceeds"]
    return made
