"""Sequences into a fingerprint: which rows are of which class, range of positions and group, and what is taken of them.

Every value goes into the core (`scan.core`); what needs whole rows (samples, cosines) is taken of a share of the ordinary rows.
Rows are added up by (entry, class, half, range, group) over many sequences, and handed to the fingerprint's cells and parts when
another group needs the memory, or at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from draftscope.scan import kernels
from draftscope.scan.accumulators import row_norms
from draftscope.scan.core import Core
from draftscope.scan.fingerprint import CLASSES, ORDINARY, Fingerprint, Part, RowClass, Statistics
from draftscope.scan.joint import Cosines, RowSample, cosines_of

SINK = 10.0  # times the sequence's median norm in the slot
POSITIONS = (1, 16, 64, 256, 1024, 4096)
"""Where the ranges of positions begin."""
MOST_GROUPS = 64
FULL = 64
"""Sequences whose every row may be taken whole."""
ALONE = 2**20
"""Bytes of a sequence below which threads cost more than they save."""
HELD = 192 * 2**20
"""Bytes of sums that are kept apart by group."""
OTHERS = "others"


def half_of(name: str) -> int:
    """Which half of the sequences a sequence belongs to, by its name alone."""
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=1).digest()[0] & 1


class Tally:
    """Adds sequences to a fingerprint, which holds them after `close`.

    Args:
        fingerprint: what they are added to.
        every: of how many ordinary rows one goes into what needs whole rows.
    """

    def __init__(self, fingerprint: Fingerprint, every: int = 1) -> None:
        self.fingerprint, self.every = fingerprint, every
        fingerprint.every = (every,) if not fingerprint.cells else tuple(sorted({*fingerprint.every, every}))
        self._held: dict[str, dict[tuple[int, RowClass, int, str], Core]] = {}  # by group, the one used last at the end
        self._groups = set(fingerprint.of_kind("group"))
        self._pool: ThreadPoolExecutor | None = None

    def add(self, name: str, states: Tensor, answer: Tensor | None, group: str = "") -> None:
        """The rows of one sequence, states [T, L, Ht] and answer [T]."""
        if group not in self._groups and len(self._groups) >= MOST_GROUPS:
            group = OTHERS
        cells = self._held[group] = self._held.pop(group, {})
        half, ranges = half_of(name), _ranges(len(states))
        entries = list(states.unbind(1))

        def measure(entry: int) -> tuple[Tensor, Tensor]:
            return _measure(cells, entry, half, entries[entry], answer, ranges)

        compiled = kernels.fits(entries[0])
        workers = min(len(entries), torch.get_num_threads()) if compiled and states.nbytes >= ALONE else 1
        with _threads_of_torch(1 if compiled else None):
            if workers > 1 and self._pool is None:
                self._pool = ThreadPoolExecutor(workers)
            measured = list(map(measure, range(len(entries))) if workers == 1 or self._pool is None else
                            self._pool.map(measure, range(len(entries))))
            usual, norms = (torch.stack(part) for part in zip(*measured, strict=True))
            self._whole_rows(usual & rich_rows(name, len(states), self.every), norms, states, ranges, group)
        if bool(usual.any()):
            self._groups.add(group)
        size = 32 * self.fingerprint.width
        while len(self._held) > 1 and size * sum(map(len, self._held.values())) > HELD:
            self._hand_over(next(iter(self._held)))

    def close(self) -> None:
        """Hand over what is held; more may be added afterwards."""
        for group in list(self._held):
            self._hand_over(group)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _whole_rows(self, taken: Tensor, norms: Tensor, states: Tensor, ranges: dict[str, slice], group: str) -> None:
        """Samples of the rows taken of each entry [L, T], by their norms [L, T], and cosines of rows that are taken of all."""
        taken = taken & norms.isfinite()
        for entry in range(len(taken)):
            sample = self.fingerprint.samples.setdefault(entry, RowSample())
            numbers = taken[entry].nonzero()[:, 0]
            if len(numbers):
                sample.update_finite(states[numbers, entry])
        numbers = (taken & (norms > 0)).all(0).nonzero()[:, 0]
        found = cosines_of(states[numbers])
        for at, span in ranges.items():
            piece = Cosines(len(taken))
            stop = len(states) if span.stop is None else span.stop
            piece.update_found(found[(numbers >= span.start) & (numbers < stop)])
            if piece.count:
                self.fingerprint.parts.setdefault(("position", at), Part()).cosines.merge(piece)
                self.fingerprint.parts.setdefault(("group", group), Part()).cosines.merge(piece)

    def _hand_over(self, group: str) -> None:
        made = self.fingerprint
        for (entry, row_class, half, at), core in sorted(self._held.pop(group).items(), key=lambda held: held[0]):
            found = core.statistics()
            made.cells.setdefault((entry, row_class, half), Statistics()).merge(found)
            if row_class in ORDINARY:
                for part in (("position", at), ("group", group)):
                    made.parts.setdefault(part, Part()).cells.setdefault((entry, row_class), Statistics()).merge(found)


def add_sequence(
    fingerprint: Fingerprint, name: str, states: Tensor, answer: Tensor | None, group: str = "", every: int = 1
) -> None:
    """One sequence alone into a fingerprint; see `Tally`."""
    tally = Tally(fingerprint, every)
    tally.add(name, states, answer, group)
    tally.close()


def _measure(
    cells: dict[tuple[int, RowClass, int, str], Core], entry: int, half: int, rows: Tensor, answer: Tensor | None,
    ranges: dict[str, slice],
) -> tuple[Tensor, Tensor]:
    """One entry's rows [T, H] into their cells; which are ordinary [T], and all norms [T]."""
    norms = row_norms(rows)
    by_class = dict(zip(CLASSES, _classes(norms, answer), strict=True))
    for row_class, chosen in by_class.items():
        numbers = chosen.nonzero()[:, 0]
        if len(numbers) == 0:
            continue
        for at, span in ranges.items() if row_class in ORDINARY else [("", slice(0, None))]:
            stop = len(rows) if span.stop is None else span.stop
            held = numbers[(numbers >= span.start) & (numbers < stop)]
            if len(held):
                cells.setdefault((entry, row_class, half, at), Core()).update(rows, held, norms)
    return by_class["answer"] | by_class["other"], norms


@contextmanager
def _threads_of_torch(number: int | None) -> Iterator[None]:
    """torch with so many threads: what is small is slower with several, the more so beside threads of ours."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rich_rows(name: str, count: int, every: int) -> Tensor:
    """Which rows of a sequence go into what needs whole rows, one of `every` by a hash of name and position: [T] bool."""
    if every == 1:
        return torch.ones(count, dtype=torch.bool)
    seed = np.frombuffer(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), np.uint64)
    with np.errstate(over="ignore"):  # products wrap around
        key = seed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of SplitMix64
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((key ^ (key >> np.uint64(31))) % np.uint64(every) == 0)


def share_of(sequences: int) -> int:
    """Of how many rows one goes into what needs whole rows: all of a small source, of others what 64 sequences have, or more."""
    return 1 if sequences < 2 * FULL else min(FULL, sequences // FULL)


def _ranges(rows: int) -> dict[str, slice]:
    """Ranges of positions by name, those that a sequence of so many rows reaches; the first row is in none."""
    ends = (*POSITIONS[1:], None)
    return {
        f"{start} to {end - 1}" if end else f"{start} on": slice(start, end)
        for start, end in zip(POSITIONS, ends, strict=True) if start < rows
    }


def classes_of(rows: Tensor, answer: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First token, sinks, answer rows, other rows of one sequence [T, H]: four [T] bool that exclude each other.

    Rows that are not finite are in the class that they would be in without their values.
    """
    return _classes(row_norms(rows), answer)


def _classes(norms: Tensor, answer: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    usable = norms[norms.isfinite() & (norms > 0)]
    bar = SINK * usable.median() if len(usable) else torch.tensor(torch.inf, dtype=torch.float64)
    first = torch.zeros(len(norms), dtype=torch.bool)
    first[:1] = True
    sink = (norms > bar) & norms.isfinite() & ~first
    rest = ~first & ~sink
    answered = torch.zeros_like(first) if answer is None else answer
    return first, sink, rest & answered, rest & ~answered
