"""Sequences into a fingerprint: which rows are of which class, range of positions and group, and what is taken of them.

Every value goes into the core (`scan.core`); what needs whole rows (`scan.rich`) is taken of a share of the ordinary rows.
Sequences are taken up in batches, so that small ones keep all threads busy; whatever the number of threads, each sum is taken in
the order of the sequences by one thread. Rows are added up by (entry, class, half, range, group) over many sequences, and handed
to the fingerprint's cells and parts when another group needs the memory, or at the end.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.accumulators import row_norms
from draftscope.scan.core import CELLS, RANGES, SINK, Engine, Store, cells_of, class_of, engine_of, name_of
from draftscope.scan.fingerprint import ORDINARY, Fingerprint, Part
from draftscope.scan.rich import Rich
from draftscope.scan.statistics import RowClass, Statistics, merge_into
from draftscope.states.mapped import release

__all__ = ["SINK", "Tally", "add_sequence", "classes_of", "half_of"]

MOST_GROUPS = 64
ALONE = 2**20
"""Bytes of a batch below which threads cost more than they save."""
BATCH = 32 * 2**20
"""Bytes of sequences that are taken up together."""
BLOCK = 128 * 2**20
"""Bytes of a sequence that are mapped at once."""
HELD = 192 * 2**20
"""Bytes of sums that are kept apart by group."""
OTHERS = "others"


def half_of(name: str) -> int:
    """Which half of the sequences a sequence belongs to, by its name alone; folders in it do not count."""
    return hashlib.blake2b(name.rpartition("/")[2].encode("utf-8", "surrogateescape"), digest_size=1).digest()[0] & 1


@dataclass(slots=True)
class _Item:
    """A sequence in hand: norms [L, T] float64 and cells [L, T] are found in the first pass."""

    name: str
    states: Tensor
    answer: np.ndarray | None
    token_ids: Tensor | None
    group: str
    half: int
    engine: Engine
    view: Any
    norms: np.ndarray
    cells: np.ndarray

    def blocks(self) -> list[tuple[int, int]]:
        """First row and end of what is mapped at once."""
        count = len(self.states)
        step = max(1, BLOCK * count // max(self.states.nbytes, 1))
        return [(start, min(start + step, count)) for start in range(0, count, step)]


class Tally:
    """Adds sequences to a fingerprint, which holds them after `close`.

    Args:
        fingerprint: what they are added to.
        every: of how many ordinary rows one goes into what needs whole rows.
        engine: what passes over rows; states that it cannot take go to torch.
        pool: threads that work; None = as many as torch takes, made where they are of use.
        threads: how many they are.
    """

    def __init__(self, fingerprint: Fingerprint, every: int = 1, engine: Engine | None = None, pool: Executor | None = None,
                 threads: int | None = None) -> None:
        self.fingerprint = fingerprint
        fingerprint.every = (every,) if not fingerprint.cells else tuple(sorted({*fingerprint.every, every}))
        self.engine = engine or engine_of()
        self.used: set[str] = set()
        self.groups = set(fingerprint.of_kind("group"))
        self._rich = Rich(fingerprint, every)
        self._held: dict[str, dict[tuple[str, int], Store]] = {}  # by group, the one used last at the end
        self._pending: list[_Item] = []
        self._waiting = 0
        self._threads = threads or torch.get_num_threads()
        self._pool, self._own = pool, pool is None

    def add(self, name: str, states: Tensor, answer: Tensor | None, group: str = "", token_ids: Tensor | None = None) -> None:
        """The rows of one sequence: states [T, L, Ht], answer [T] bool, token_ids [T]."""
        if group not in self.groups and len(self.groups) >= MOST_GROUPS:
            group = OTHERS
        engine = self.engine if self.engine.fits(states) else engine_of("torch")
        self.used.add(engine.name)
        self.groups.add(group)
        shape = (states.shape[1], len(states))
        self._pending.append(_Item(
            name, states, None if answer is None else answer.cpu().numpy().astype(bool), token_ids, group, half_of(name), engine,
            engine.view(states), np.empty(shape), np.empty(shape, np.int8),
        ))
        self._waiting += states.nbytes
        if self._waiting >= BATCH:
            self._take_up()

    def close(self) -> None:
        """Hand over what is held; more may be added afterwards."""
        self._take_up()
        for group in list(self._held):
            self._hand_over(group)
        with quiet(self.engine):
            self._rich.flush()
        if self._pool is not None and self._own:
            self._pool.shutdown()
            self._pool = None

    def _map(self, work: Callable[[Any], Any], over: Iterable[Any]) -> list[Any]:
        if self._threads == 1 or self._waiting < ALONE or not self.engine.compiled:
            return [work(one) for one in over]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads)
        return list(self._pool.map(work, over))

    def _take_up(self) -> None:
        """Both passes over what is pending."""
        batch, self._pending = self._pending, []
        if not batch:
            return
        entries, width = batch[0].states.shape[1:]
        for item in batch:
            self._held[item.group] = self._held.pop(item.group, {})
            self._store(item)
        columns = _columns(width, self._threads // entries if self.engine.compiled else 1)
        with quiet(self.engine):
            if len(columns) == 1 and all(len(item.blocks()) == 1 for item in batch):
                self._map(partial(self._entry, batch), range(entries))
            else:
                for item in batch:
                    self._in_parts(item, columns)
            for item in batch:
                self._rich.take(item.name, item.states, item.norms, item.cells >= 2, item.group, item.answer, item.token_ids)
                self.fingerprint.between.add_sequence(item.norms, item.cells)
        self._waiting = 0
        while len(self._held) > 1 and sum(store.touched for held in self._held.values() for store in held.values()) > HELD:
            self._hand_over(next(iter(self._held)))

    def _entry(self, items: list[_Item], entry: int) -> None:
        """Both passes over an entry of the items, one item after the other: what the first has read the second finds in cache."""
        for item in items:
            _measure(item, 0, len(item.states), entry)
            self._add(item, self._begin(item, 0, None, entry), entry, 0, item.states.shape[2])

    def _in_parts(self, item: _Item, columns: list[tuple[int, int]]) -> None:
        """Both passes over an item too large to be mapped at once, or with more threads than entries."""
        entries = range(item.states.shape[1])
        blocks = item.blocks()
        for start, stop in blocks:
            self._map(partial(_measure, item, start, stop), entries)
            if len(blocks) > 1:
                release(item.states[start:stop], whole=item.states)
        for start, stop in blocks:
            plans = self._map(partial(self._begin, item, start, stop), entries)
            self._map(lambda task: self._add(item, *task),
                      [(plans[entry], entry, low, high) for entry in entries for low, high in columns])
            if len(blocks) > 1:
                release(item.states[start:stop], whole=item.states)

    def _begin(self, item: _Item, start: int, stop: int | None, entry: int) -> Any:
        return self._store(item).begin(item.view, entry, item.norms[entry, start:stop], item.cells[entry, start:stop], start)

    def _add(self, item: _Item, plan: Any, entry: int, low: int, high: int) -> None:
        self._store(item).add(item.view, entry, plan, low, high)

    def _store(self, item: _Item) -> Store:
        held = self._held.setdefault(item.group, {})
        key = (item.engine.name, item.half)
        if key not in held:
            held[key] = item.engine.store(item.states.shape[1], item.states.shape[2])
        return held[key]

    def _hand_over(self, group: str) -> None:
        made = self.fingerprint
        for (_, half), store in sorted(self._held.pop(group).items()):
            whole: dict[tuple[int, RowClass], Statistics] = {}  # over ranges of positions
            for entry, cell, found in store.results():
                row_class, at = class_of(cell)
                if row_class in ORDINARY:
                    merge_into(made.parts.setdefault(("position", name_of(at)), Part()).cells, (entry, row_class), found)
                merge_into(whole, (entry, row_class), found)
            for (entry, row_class), found in whole.items():
                merge_into(made.cells, (entry, row_class, half), found)
                if row_class in ORDINARY:
                    merge_into(made.parts.setdefault(("group", group), Part()).cells, (entry, row_class), found)


@contextmanager
def quiet(engine: Engine) -> Iterator[None]:
    """torch with one thread beside compiled passes: what is small is slower with several, and those that wait spin.

    Threads that are started meanwhile have one, too.
    """
    before = torch.get_num_threads()
    if not engine.compiled or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(item: _Item, start: int, stop: int, entry: int) -> None:
    """The first pass over rows of an entry; their cells once all norms are there."""
    item.norms[entry, start:stop] = item.engine.norms(item.view, entry, start, stop)
    if stop == len(item.states):
        item.cells[entry] = item.engine.cells(item.norms[entry], item.answer)


def _columns(width: int, parts: int) -> list[tuple[int, int]]:
    """Channels in so many parts, none of fewer than 512, each beginning at a multiple of 64."""
    parts = max(1, min(parts, width // 512))
    edges = [width * part // parts // 64 * 64 for part in range(parts)] + [width]
    return list(itertools.pairwise(edges))


def add_sequence(
    fingerprint: Fingerprint, name: str, states: Tensor, answer: Tensor | None, group: str = "", every: int = 1
) -> None:
    """One sequence alone into a fingerprint; see `Tally`."""
    tally = Tally(fingerprint, every)
    tally.add(name, states, answer, group)
    tally.close()


def classes_of(rows: Tensor, answer: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First token, sinks, answer rows, other rows of one sequence [T, H]: four [T] bool that exclude each other.

    Rows that are not finite are in the class that they would be in without their values.
    """
    cells = torch.from_numpy(cells_of(row_norms(rows).numpy(), None if answer is None else answer.numpy().astype(bool)))
    assert CELLS == 2 + 2 * RANGES
    return cells == 0, cells == 1, (cells >= 2) & (cells < 2 + RANGES), cells >= 2 + RANGES
