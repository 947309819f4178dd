"""What is taken of whole rows: of a share of the ordinary rows, chosen by a hash of the sequence's name and the position.

The rows are gathered over many sequences and taken up together; which ones come together follows from the data alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftscope.scan.core import POSITIONS, name_of
from draftscope.scan.core_tensors import wide
from draftscope.scan.fingerprint import Fingerprint
from draftscope.scan.joint import Cosines, RowSample, cosines_of
from draftscope.scan.statistics import Part, Shape

TOGETHER = 256
"""Rows that are taken up together."""
BYTES = 48 * 2**20
"""Or so many bytes of them, whichever is less."""
FULL = 64
"""Sequences whose every row may be taken whole."""
LEAST = 1024
"""A share is never smaller than one row in so many."""


@dataclass(slots=True)
class _Gathered:
    """Rows [n, L, H] of a sequence and those before them, of which entries they are ordinary rows [L, n], where they stood."""

    rows: Tensor
    before: Tensor
    usual: Tensor
    numbers: np.ndarray
    group: str


class Rich:
    """Adds rows to a fingerprint's samples, shapes and cosines, which holds them after `flush`."""

    def __init__(self, fingerprint: Fingerprint, every: int) -> None:
        self.fingerprint, self.every = fingerprint, every
        self._gathered: list[_Gathered] = []
        self._waiting = 0

    def take(self, name: str, states: Tensor, norms: np.ndarray, usual: np.ndarray, group: str, answer: np.ndarray | None,
             token_ids: Tensor | None) -> None:
        """The chosen rows of a sequence: states [T, L, H], norms [L, T], which rows are ordinary [L, T], answer and ids [T]."""
        self.fingerprint.kept.offer(name, token_ids, answer, norms)
        held = usual & np.isfinite(norms) & rich_rows(name, len(states), self.every)
        numbers = np.flatnonzero(held.any(0))
        if len(numbers) == 0:
            return
        for part in np.array_split(numbers, -(-len(numbers) // TOGETHER)):
            index = torch.from_numpy(part)
            self._gathered.append(_Gathered(states[index], states[index - 1], torch.from_numpy(held[:, part]), part, group))
            self._waiting += len(part)
            if self._waiting >= TOGETHER or self._waiting * states[:1].nbytes >= BYTES:
                self.flush()

    def flush(self) -> None:
        """Take up what was gathered."""
        gathered, self._gathered, self._waiting = self._gathered, [], 0
        if not gathered:
            return
        made = self.fingerprint
        rows = torch.cat([one.rows for one in gathered])
        before = torch.cat([one.before for one in gathered])
        usual = torch.cat([one.usual for one in gathered], 1)
        for entry in range(rows.shape[1]):
            chosen = usual[entry]
            if not bool(chosen.any()):
                continue
            own = wide(rows[chosen, entry])
            made.samples.setdefault(entry, RowSample()).update_finite(own)
            exact = own.double()
            shape = made.shapes.setdefault(entry, Shape())
            shape.values.update(own)
            shape.slices.update_projected(shape.sketch.update_exact(exact))
            shape.neighbours.update_beside(exact, wide(before[chosen, entry]))
        self._cosines(gathered, wide(rows), usual)

    def _cosines(self, gathered: list[_Gathered], rows: Tensor, usual: Tensor) -> None:
        """Of rows that are ordinary in every entry and nowhere zero, by range of positions and by group."""
        full = usual.all(0) & (rows != 0).any(-1).all(1)
        found = cosines_of(rows[full])
        numbers = np.concatenate([one.numbers for one in gathered])[full.numpy()]
        ranges = np.searchsorted(np.array(POSITIONS), numbers, side="right") - 1
        groups = np.repeat([one.group for one in gathered], [len(one.numbers) for one in gathered])[full.numpy()]
        for kind, names, own in (("position", [name_of(at) for at in range(len(POSITIONS))], ranges), ("group", groups, groups)):
            for value in dict.fromkeys(own.tolist()):
                piece = Cosines(rows.shape[1])
                piece.update_found(found[torch.from_numpy(own == value)])
                name = names[value] if kind == "position" else value
                self.fingerprint.parts.setdefault((kind, str(name)), Part()).cosines.merge(piece)  # type: ignore[arg-type]


def rich_rows(name: str, count: int, every: int) -> np.ndarray:
    """Which rows of a sequence are taken whole, one of `every` by a hash of name and position: [T] bool."""
    if every == 1:
        return np.ones(count, bool)
    seed = np.frombuffer(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), np.uint64)
    with np.errstate(over="ignore"):  # products wrap around
        key = seed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of SplitMix64
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return (key ^ (key >> np.uint64(31))) % np.uint64(every) == 0


def share_of(sequences: int) -> int:
    """Of how many rows one is taken whole: all of a small source, of others what 64 sequences have, or more."""
    return 1 if sequences < 2 * FULL else min(LEAST, sequences // FULL)
