"""The engine whose passes numba compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftscope.scan import kernels
from draftscope.scan.accumulators import BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, Outliers
from draftscope.scan.core import CELLS, PIVOT, POSITIONS, SINK, EngineName, Store
from draftscope.scan.statistics import Statistics

_BEGINS = np.array(POSITIONS)
_NOTHING = np.zeros(0, bool)


@dataclass(slots=True)
class View:
    """States as one flat array: row t of entry e begins at t * step + e * between."""

    flat: np.ndarray
    step: int
    between: int
    width: int


@dataclass(slots=True)
class Plan:
    """Numbers of rows by cell, their bars, and where the first of them lies."""

    order: np.ndarray
    bounds: np.ndarray
    bars: np.ndarray
    start: int


class Compiled:
    """On the bytes as they lie."""

    name: EngineName = "numba"
    compiled = True

    def __init__(self) -> None:
        held = kernels.compiled()
        if held is None:
            raise ImportError("numba")
        self.held = held

    def fits(self, states: Tensor) -> bool:
        return kernels.fits(states)

    def view(self, states: Tensor) -> View:
        return View(kernels.flat(states), states.stride(0), states.stride(1), states.shape[2])

    def norms(self, view: View, entry: int, start: int, stop: int) -> np.ndarray:
        found = np.empty(stop - start)
        self.held.squares(view.flat, entry * view.between + start * view.step, view.step, view.width, found)
        return np.sqrt(found, out=found)

    def cells(self, norms: np.ndarray, answer: np.ndarray | None) -> np.ndarray:
        found = np.empty(len(norms), np.int8)
        self.held.classify(norms, _NOTHING if answer is None else answer, answer is not None, _BEGINS, SINK, found)
        return found

    def store(self, entries: int, width: int) -> Store:
        return Sums(self, entries, width)


class Sums:
    """Sums of deviations from a pivot that a cell's first rows set. Memory is taken up by the cells that are used."""

    def __init__(self, engine: Compiled, entries: int, width: int) -> None:
        self.held = engine.held
        self.width = width
        self.rows = np.zeros((entries, CELLS), np.int64)
        self.sums = np.zeros((entries, CELLS, 3, width))  # pivot, deviations, their squares
        self.largest = np.zeros((entries, CELLS, width), np.float32)
        self.exceeds = np.zeros((entries, CELLS, width), np.int32)
        self.histogram = np.zeros((entries, CELLS, BINS), np.int64)
        self.counts = np.zeros((entries, CELLS, 5), np.int64)
        self.small = np.zeros((entries, CELLS, 7))
        self.small[:, :, 5], self.small[:, :, 6] = np.inf, -np.inf

    @property
    def touched(self) -> int:
        """Bytes of the cells in use."""
        return int((self.counts[:, :, 0] > 0).sum()) * (32 * self.width + 8 * BINS)

    def begin(self, view: View, entry: int, norms: np.ndarray, cells: np.ndarray, start: int) -> Plan:
        at = entry * view.between + start * view.step
        plan = Plan(np.empty(len(norms), np.int64), np.empty(CELLS + 1, np.int64), np.empty(len(norms), np.float32), at)
        self.held.planned(norms, cells, Outliers.FACTOR, view.width**0.5, plan.order, plan.bounds, plan.bars)
        self.held.pivots(view.flat, at, view.step, plan.order, plan.bounds, self.rows[entry], PIVOT, self.sums[entry])
        self.held.told(view.flat, at, view.step, view.width, norms, cells, self.histogram[entry], self.small[entry],
                       self.counts[entry], LOWEST_OCTAVE, BINS_PER_OCTAVE)
        self.rows[entry] += np.diff(plan.bounds)
        return plan

    def add(self, view: View, entry: int, plan: Plan, low: int, high: int) -> None:
        self.held.moments(view.flat, plan.start, view.step, low, high, plan.order, plan.bounds, plan.bars, self.sums[entry],
                          self.largest[entry], self.exceeds[entry])

    def results(self) -> Iterator[tuple[int, int, Statistics]]:
        for entry, cell in np.argwhere(self.counts[:, :, 0] > 0).tolist():
            made = Statistics()
            made.counts.counts = torch.from_numpy(self.counts[entry, cell])
            count = int(self.rows[entry, cell])
            if count:
                small = torch.from_numpy(self.small[entry, cell])
                made.norms.histogram = torch.from_numpy(self.histogram[entry, cell])
                made.norms.moments, made.norms.extremes = small[:5], small[5:]
                pivot, sums, squares = self.sums[entry, cell]
                shift = sums / count
                made.dimensions.count = made.outliers.count = count
                made.dimensions.mean = torch.from_numpy(pivot + shift)
                made.dimensions.squares = torch.from_numpy(np.maximum(squares - sums * shift, 0))
                made.outliers.largest = torch.from_numpy(self.largest[entry, cell])
                made.outliers.exceeds = torch.from_numpy(self.exceeds[entry, cell]).long()
            yield entry, cell, made
