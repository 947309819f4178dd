"""What is told of every value, and by what: counts, norms, moments by dimension and outlier channels.

The rows of a sequence fall into *cells* by class and range of positions. An *engine* finds the rows' norms and cells in a first
pass and adds the rows to the sums of their cells, a *store*, in a second. There are three engines with one contract
(`tests/test_scan_engines.py`): `numba` (compiled, on the bytes as they lie in the file), `torch`, and `numpy`. All sum in
float64, in different orders, so that their figures agree to 1e-9 relative. A deviation is taken from a pivot (the mean of a few
of the rows), so that a channel that is large and hardly varies keeps its variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from draftscope.errors import UsageError
from draftscope.scan.statistics import CLASSES, RowClass, Statistics

SINK = 10.0  # times the sequence's median norm in the slot
POSITIONS = (1, 16, 64, 256, 1024, 4096)
"""Where the ranges of positions begin."""
RANGES = len(POSITIONS)
CELLS = 2 + 2 * RANGES
"""First token, sinks, then answer rows by range, then other rows by range."""
PIVOT = 16
"""Rows whose mean is a pivot."""
EngineName = Literal["numba", "torch", "numpy"]


def class_of(cell: int) -> tuple[RowClass, int]:
    """Class and range of positions of a cell; the range of the first token and of sinks is -1."""
    if cell < 2:
        return CLASSES[cell], -1
    return ("answer" if cell < 2 + RANGES else "other"), (cell - 2) % RANGES


def name_of(number: int) -> str:
    """A range of positions in words."""
    return f"{POSITIONS[number]} to {POSITIONS[number + 1] - 1}" if number + 1 < RANGES else f"{POSITIONS[number]} on"


def cells_of(norms: np.ndarray, answer: np.ndarray | None) -> np.ndarray:
    """The cell of each row of a sequence, [T] int8, by norms [T] float64 and answer rows [T] bool.

    Rows that are not finite are where they would be without their values.
    """
    usable = np.sort(norms[np.isfinite(norms) & (norms > 0)])
    bar = SINK * usable[(len(usable) - 1) // 2] if len(usable) else np.inf
    at = np.searchsorted(np.array(POSITIONS), np.arange(len(norms)), side="right") - 1
    cells = np.where(answer if answer is not None else np.zeros(len(norms), bool), 2 + at, 2 + RANGES + at)
    cells[np.isfinite(norms) & (norms > bar)] = 1
    cells[:1] = 0
    return cells.astype(np.int8)


class Store(Protocol):
    """Sums of rows by entry and cell."""

    @property
    def touched(self) -> int:
        """Bytes of the cells in use."""

    def begin(self, view: Any, entry: int, norms: np.ndarray, cells: np.ndarray, start: int) -> Any:
        """Take in the counts and norms of the rows `start` on, one each in `norms` and `cells`; a plan for `add`."""

    def add(self, view: Any, entry: int, plan: Any, low: int, high: int) -> None:
        """Take in channels low .. high - 1 of the same rows."""

    def results(self) -> Iterator[tuple[int, int, Statistics]]:
        """Entry, cell, statistics; of those with rows. The store is of no use afterwards."""


class Engine(Protocol):
    """What passes over rows."""

    name: EngineName
    compiled: bool

    def fits(self, states: Tensor) -> bool:
        """Whether states [T, L, H] can be passed over."""

    def view(self, states: Tensor) -> Any:
        """States in whatever form the passes take."""

    def norms(self, view: Any, entry: int, start: int, stop: int) -> np.ndarray:
        """L2 norms of rows start .. stop - 1 of an entry, float64."""

    def cells(self, norms: np.ndarray, answer: np.ndarray | None) -> np.ndarray:
        """As `cells_of`."""

    def store(self, entries: int, width: int) -> Store:
        """Sums over no rows."""


def _numba() -> Engine:
    from draftscope.scan.core_compiled import Compiled

    return Compiled()


def _torch() -> Engine:
    from draftscope.scan.core_tensors import OnTensors

    return OnTensors()


def _numpy() -> Engine:
    from draftscope.scan.core_arrays import OnArrays

    return OnArrays()


ENGINES: dict[EngineName, Callable[[], Engine]] = {"numba": _numba, "torch": _torch, "numpy": _numpy}
"""The fastest first."""


@cache
def _works(name: EngineName) -> bool:
    """Whether an engine is there and gives a small sum right."""
    rows = torch.tensor([[[0.0, 1.0]], [[3.0, 4.0]], [[5.0, 12.0]]]).bfloat16()
    try:
        engine = ENGINES[name]()
        view, store = engine.view(rows), engine.store(1, 2)
        norms = engine.norms(view, 0, 0, 3)
        store.add(view, 0, store.begin(view, 0, norms, engine.cells(norms, np.array([False, True, True])), 0), 0, 2)
        held = {cell: statistics for _, cell, statistics in store.results()}
        return norms.tolist() == [1, 5, 13] and held[2].dimensions.mean.tolist() == [4, 8]
    except Exception:  # whatever a library that does not fit this machine may raise
        return False


def engine_of(name: str | None = None) -> Engine:
    """The engine of a name, else the fastest that works here.

    Raises:
        UsageError: no such engine, or it does not work here.
    """
    if name is None:
        return next(ENGINES[each]() for each in ENGINES if _works(each))
    if name not in ENGINES:
        raise UsageError(f"no engine `{name}`", remedy=f"Known: {', '.join(ENGINES)}")
    if not _works(name):
        remedy = "pip install 'draftscope[fast]'" if name == "numba" else ""
        raise UsageError(f"the engine {name} does not work here", remedy=remedy)
    return ENGINES[name]()
