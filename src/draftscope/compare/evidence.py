"""What is measured of each row while sequences go by, and kept of a bounded sample of rows.

Which rows are kept depends on the sequence's name and the row's number alone (the lowest hashes win), so neither order
nor batching matters, and two sources with the same names keep the same rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.compare.transforms import Sketch, decompose

LAGS = (0, -2, -1, 1, 2)
SINK = 10.0  # times the sequence's median norm
LAGGING = 0.1  # rows with a larger error under every place are tried with a lag: states of other tokens are further apart
FAILED = 0.2  # rows with a larger error under every place and lag are kept whole, for maps and look-ups
CURVE = 96  # rows tried with every lag whatever their error, for the lag curve
BLOCK = 256


class Sweep(Protocol):
    """Every place of the target over one sequence (`target.sweep.Swept`)."""

    name: str
    token_ids: Tensor
    stream: Tensor  # [n+1, T, Ht], boundary n before the final norm
    post: Tensor  # [T, Ht], after it
    partial: Tensor | None  # [n, T, Ht]; entry i is boundary i+1 without layer i's MLP


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that a slot may hold. `mlp` marks what layer index-1's MLP alone added, reported as the branch there."""

    place: Boundary
    mlp: bool = False

    def rows(self, swept: Sweep, index: Tensor) -> Tensor:
        """[len(index), Ht] float32: the target's states here."""
        b = self.place.index
        if self.place.norm == "post":
            return swept.post[index].float()
        here = swept.stream[b][index].float()
        if self.place.kind == "stream":
            return here
        if self.place.kind == "partial" or self.mlp:
            assert swept.partial is not None
            partial = swept.partial[b - 1][index].float()
            return here - partial if self.mlp else partial
        return here - swept.stream[b - 1][index].float()


def candidates_of(layers: int, partial: bool) -> list[Candidate]:
    """Streams 0..n first, then n after the norm, branches 1..n, and with partial sums those and the MLPs alone."""
    found = [Candidate(Boundary(b)) for b in range(layers + 1)]
    found.append(Candidate(Boundary(layers, "post")))
    found += [Candidate(Boundary(b, kind="branch")) for b in range(1, layers + 1)]
    if partial:
        found += [Candidate(Boundary(b, kind="partial")) for b in range(1, layers + 1)]
        found += [Candidate(Boundary(b, kind="branch"), mlp=True) for b in range(1, layers + 1)]
    return found


def row_keys(name: str, rows: int) -> Tensor:
    """[rows] int64 hashes that say which rows are kept when there are too many (splitmix64 over name and row)."""
    base = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        z = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return torch.from_numpy(((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64))


@dataclass
class Kept:
    """Columns of equal length, of which the `capacity` rows with the lowest keys are kept."""

    capacity: int
    blocks: list[dict[str, Tensor]] = field(default_factory=list)
    threshold: int = 2**63 - 1
    ordered: bool = False

    def wanted(self, keys: Tensor) -> Tensor:
        """Indices of rows that may still be kept, at most `capacity`, in order."""
        index = (keys < self.threshold).nonzero().squeeze(-1)
        if len(index) > self.capacity:
            index = index[keys[index].topk(self.capacity, largest=False).indices].sort().values
        return index

    def add(self, **columns: Tensor) -> None:
        if len(columns["key"]) == 0:
            return
        self.blocks.append(columns)
        self.ordered = False
        if sum(len(b["key"]) for b in self.blocks) > 2 * self.capacity:
            self._prune()

    def _prune(self) -> None:
        joined = {name: torch.cat([b[name] for b in self.blocks]) for name in self.blocks[0]}
        if len(joined["key"]) > self.capacity:
            keep = joined["key"].topk(self.capacity, largest=False).indices
            self.threshold = int(joined["key"][keep].max())
            joined = {name: column[keep] for name, column in joined.items()}
        self.blocks = [joined]

    def columns(self) -> dict[str, Tensor]:
        """All columns, sorted by sequence and row; empty when nothing was added."""
        if not self.blocks:
            return {}
        if not self.ordered:
            self._prune()
            order = (self.blocks[0]["sequence"] * 2**32 + self.blocks[0]["row"]).argsort()
            self.blocks, self.ordered = [{name: column[order] for name, column in self.blocks[0].items()}], True
        return self.blocks[0]


def measure(
    x: Tensor, swept: Sweep, rows: Tensor, candidates: list[Candidate], *, above: float = LAGGING
) -> tuple[Tensor, Tensor]:
    """Offset and rest (see `transforms.decompose`) of x [M, S, Ht], holding the states of `rows` [M], against every place.

    Args:
        above: rows are tried with a lag whose least error in any slot is larger; below zero: all.

    Returns:
        two float32 [M, S, C, len(LAGS)]; lags that were not needed or fall off the sequence are NaN.
    """
    shape = (*x.shape[:2], len(candidates), len(LAGS))
    offset, rest = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    length = swept.stream.shape[1]
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        for c, candidate in enumerate(candidates):
            offset[part, :, c, 0], rest[part, :, c, 0] = decompose(x[part], candidate.rows(swept, rows[part])[:, None])
    best = torch.hypot(offset[..., 0], rest[..., 0]).amin(2)
    lagging = (best > above).any(1)
    for d, lag in enumerate(LAGS):
        if lag == 0:
            continue
        target = rows + lag
        index = (lagging & (target >= 0) & (target < length)).nonzero().squeeze(-1)
        for start in range(0, len(index), BLOCK):
            some = index[start : start + BLOCK]
            for c, candidate in enumerate(candidates):
                offset[some, :, c, d], rest[some, :, c, d] = decompose(x[some], candidate.rows(swept, target[some])[:, None])
    return offset, rest


class Evidence:
    """Bounded evidence on what each slot holds, over any number of sequences.

    Attributes:
        rows: at most `capacity` sampled rows with `key, sequence, row, first, verify, sink [S], finite [S], zero [S],
            offset and rest [S, C, lags]`.
        whole: rows that no place and lag explains, with their vectors `x [S, Ht]` and the streams `r [n+1, Ht]`.
        curve: a few rows with the same columns but `zero`, under every lag.
        references: sketches of the target's streams and `post` over all rows, for finding rows that moved.
        seen: rows of each kind per slot, over everything, kept or not.
    """

    def __init__(self, capacity: int = 2048, *, whole_bytes: int = 2**27, reference_rows: int = 2**14) -> None:
        self.rows = Kept(capacity)
        self.curve = Kept(CURVE)
        self.references = Kept(reference_rows)
        self.whole = Kept(0)
        self._whole_bytes = whole_bytes
        self.candidates: list[Candidate] = []
        self.names: list[str] = []
        self.layers = 0
        self.sketch: Sketch | None = None
        self.seen: dict[str, Tensor] = {}

    def update(self, slots: Tensor, swept: Sweep, verify: Tensor | None = None) -> None:
        """Take in the slots [T, S, Ht] of a sequence, row t at token t of the sweep (which may be longer).

        `verify` [T] bool marks rows of verify steps, None = no row is one.
        """
        if slots.ndim != 3 or slots.shape[2] != swept.stream.shape[2]:
            raise ValueError(f"slots of shape {tuple(slots.shape)} do not fit states of width {swept.stream.shape[2]}")
        count, width = slots.shape[0], slots.shape[2]
        if count > swept.stream.shape[1]:
            raise ValueError(f"{count} rows of slots, but the target was swept over {swept.stream.shape[1]} tokens")
        if not self.candidates:
            self._begin(slots.shape[1], width, swept)
        if count == 0:
            return
        number = len(self.names)
        self.names.append(swept.name)
        x = slots.float()
        finite = x.isfinite().all(-1)
        x = torch.where(finite[..., None], x, 0.0)
        norms = x.norm(dim=-1)
        median = torch.where(finite, norms, torch.nan).nanmedian(0).values
        sink = (norms > SINK * median) & (median > 0)
        first = torch.zeros(count, dtype=torch.bool)
        first[0] = True
        self._count(first, sink, finite, norms == 0)
        keys = row_keys(swept.name, count)
        index = self.rows.wanted(keys)
        offset, rest = measure(x[index], swept, index, self.candidates)
        sequence = torch.full((len(index),), number)
        late = torch.zeros(count, dtype=torch.bool) if verify is None else verify
        self.rows.add(
            key=keys[index], sequence=sequence, row=index, first=first[index], verify=late[index], sink=sink[index],
            finite=finite[index], zero=(norms == 0)[index], offset=offset, rest=rest,
        )
        few = self.curve.wanted(keys)
        offset_few, rest_few = measure(x[few], swept, few, self.candidates, above=-1.0)
        self.curve.add(
            key=keys[few], sequence=torch.full((len(few),), number), row=few, first=first[few], verify=late[few],
            sink=sink[few], finite=finite[few], offset=offset_few, rest=rest_few,
        )
        error = torch.hypot(offset, rest).nan_to_num(torch.inf).flatten(2).amin(2)
        failed = (error > FAILED) & finite[index] & ~sink[index] & (norms > 0)[index] & ~first[index][:, None]
        self._keep_whole(x, swept, keys, index[failed.any(1)], failed[failed.any(1)], late, number)
        self._keep_references(swept, number)

    def _begin(self, slots: int, width: int, swept: Sweep) -> None:
        self.layers = swept.stream.shape[0] - 1
        self.candidates = candidates_of(self.layers, swept.partial is not None)
        self.sketch = Sketch(width)
        self.whole.capacity = max(8, min(4 * width, self._whole_bytes // (4 * width * (self.layers + 1 + slots))))
        self.seen = {name: torch.zeros(slots, dtype=torch.int64) for name in ("ordinary", "first", "sink", "nonfinite", "zero")}

    def _count(self, first: Tensor, sink: Tensor, finite: Tensor, zero: Tensor) -> None:
        leading = first[:, None] & finite
        for name, rows in (
            ("first", leading), ("sink", sink & finite & ~leading), ("nonfinite", ~finite), ("zero", zero & finite),
            ("ordinary", finite & ~leading & ~sink),
        ):
            self.seen[name] = self.seen[name] + rows.sum(0)

    def _keep_whole(
        self, x: Tensor, swept: Sweep, keys: Tensor, index: Tensor, failed: Tensor, verify: Tensor, number: int,
    ) -> None:
        chosen = self.whole.wanted(keys[index])
        index, failed = index[chosen], failed[chosen]
        self.whole.add(
            key=keys[index], sequence=torch.full((len(index),), number), row=index, failed=failed, x=x[index],
            verify=verify[index], r=swept.stream[:, index].float().transpose(0, 1),
        )

    def _keep_references(self, swept: Sweep, number: int) -> None:
        assert self.sketch is not None
        keys = row_keys(swept.name, swept.stream.shape[1])
        index = self.references.wanted(keys)
        units, norms = [], []
        for b in range(self.layers + 2):
            states = swept.post if b > self.layers else swept.stream[b]
            unit, norm = self.sketch(states[index])
            units.append(unit)
            norms.append(norm)
        self.references.add(
            key=keys[index], sequence=torch.full((len(index),), number), row=index,
            unit=torch.stack(units, 1), norm=torch.stack(norms, 1),
        )
