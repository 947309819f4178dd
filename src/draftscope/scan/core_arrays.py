"""The engine on numpy arrays alone, in the plainest way: where nothing else works, and what the others are held against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, Outliers
from draftscope.scan.core import CELLS, EngineName, Store, cells_of
from draftscope.scan.statistics import Statistics

Plan = tuple[int, np.ndarray, np.ndarray]


def decoded(rows: Tensor) -> np.ndarray:
    """Values of rows as float64, from their bytes."""
    rows = rows.detach().cpu()
    if rows.dtype == torch.bfloat16:
        stored = rows.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        with np.errstate(invalid="ignore"):  # NaN of the signalling kind
            return (stored << 16).view(np.float32).astype(np.float64)
    if rows.dtype.itemsize == 1:
        table = torch.arange(256, dtype=torch.uint8).view(rows.dtype).double().numpy()
        return table[rows.contiguous().view(torch.uint8).numpy()]
    return rows.numpy().astype(np.float64)


class OnArrays:
    """By whole-array arithmetic in float64."""

    name: EngineName = "numpy"
    compiled = False

    def fits(self, states: Tensor) -> bool:
        return True

    def view(self, states: Tensor) -> Tensor:
        return states

    def norms(self, view: Tensor, entry: int, start: int, stop: int) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.sqrt(np.square(decoded(view[start:stop, entry])).sum(1))

    def cells(self, norms: np.ndarray, answer: np.ndarray | None) -> np.ndarray:
        return cells_of(norms, answer)

    def store(self, entries: int, width: int) -> Store:
        return Held(width)


class Held:
    """Statistics for each entry and cell, made of a sequence's rows at once."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.held: dict[tuple[int, int], Statistics] = {}

    @property
    def touched(self) -> int:
        return len(self.held) * 32 * self.width

    def begin(self, view: Tensor, entry: int, norms: np.ndarray, cells: np.ndarray, start: int) -> Plan:
        return start, norms, cells

    def add(self, view: Tensor, entry: int, plan: Plan, low: int, high: int) -> None:
        start, norms, cells = plan
        for cell in range(CELLS):
            numbers = np.flatnonzero(cells == cell)
            if len(numbers):
                rows = decoded(view[torch.from_numpy(numbers + start), entry])
                self.held.setdefault((entry, cell), Statistics()).merge(statistics_of(rows, norms[numbers]))

    def results(self) -> Iterator[tuple[int, int, Statistics]]:
        for (entry, cell), held in sorted(self.held.items()):
            yield entry, cell, held


def statistics_of(rows: np.ndarray, norms: np.ndarray) -> Statistics:
    """Of rows [N, H] float64 with norms [N]."""
    made = Statistics()
    finite = np.isfinite(norms)
    spoilt, rows, norms = rows[~finite], rows[finite], norms[finite]
    made.counts.counts = torch.tensor([len(finite), len(spoilt), int(np.isnan(spoilt).sum()), int(np.isinf(spoilt).sum()),
                                       int((norms == 0).sum())])
    if len(rows) == 0:
        return made
    held = norms[norms > 0]
    logs = np.log(held)
    bins = np.clip(np.floor((np.log2(held) - LOWEST_OCTAVE) * BINS_PER_OCTAVE), 0, BINS - 1).astype(np.int64)
    zeros = np.zeros(len(norms) - len(held), np.int64)
    made.norms.histogram = torch.from_numpy(np.bincount(np.append(bins, zeros), minlength=BINS))
    mean = logs.mean() if len(logs) else 0.0
    squares = np.square(logs - mean).sum()
    made.norms.moments = torch.tensor([len(norms), norms.sum(), len(logs), mean, squares], dtype=torch.float64)
    made.norms.extremes = torch.tensor([norms.min(), norms.max()], dtype=torch.float64)
    made.dimensions.count = made.outliers.count = len(rows)
    made.dimensions.mean = torch.from_numpy(rows.mean(0))
    made.dimensions.squares = torch.from_numpy(np.square(rows - rows.mean(0)).sum(0))
    size = np.abs(rows)
    made.outliers.largest = torch.from_numpy(size.max(0).astype(np.float32))
    made.outliers.exceeds = torch.from_numpy((size > (Outliers.FACTOR * norms / rows.shape[1] ** 0.5)[:, None]).sum(0))
    return made
