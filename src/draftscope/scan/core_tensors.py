"""The engine that adds rows to the accumulators, on torch tensors of any dtype and device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import row_norms
from draftscope.scan.core import CELLS, EngineName, Store, cells_of
from draftscope.scan.statistics import Statistics
from draftscope.states.dtypes import NARROW, WIDE


def wide(rows: Tensor) -> Tensor:
    """Rows in a dtype that torch calculates with; the values are the same."""
    return rows.to(WIDE) if rows.dtype in NARROW else rows


class OnTensors:
    """By `Statistics.update`."""

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
    """An accumulator for each entry and cell."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.held: dict[tuple[int, int], Statistics] = {}

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
                self.held.setdefault((entry, cell), Statistics()).update(rows)

    def results(self) -> Iterator[tuple[int, int, Statistics]]:
        for (entry, cell), held in sorted(self.held.items()):
            yield entry, cell, held
