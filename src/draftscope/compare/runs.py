"""Rows of two recordings that hold the same tokens at the same positions, from a request's first recorded row on."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from draftscope.states.types import Trace

LEAST_RUN = 4
"""Tokens that rows without their beginning (a cached prefix) must share before they are taken for the same request's."""
TOLERANCE = {torch.float64: 1e-3, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative error of a row that rounding explains, by dtype; float32 allows for TF32, whose mantissa has 10 bits."""
COARSEST = 0.2
"""Of dtypes with fewer bits."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Accepted rows of one request: token_ids [T], positions [T], slots [T, S, Ht], verify [T] bool (rows of verify steps)."""

    name: str
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    verify: Tensor

    @property
    def start(self) -> int:
        return int(self.positions[0])


def recorded(trace: Trace, slots: int) -> Recorded | None:
    """The accepted rows of a trace up to the first gap in their positions; None without rows."""
    kept = trace.accepted.nonzero().squeeze(-1)
    if not len(kept):
        return None
    positions = torch.arange(len(kept)) if trace.positions is None else trace.positions[kept]
    gaps = (positions.diff() != 1).nonzero().squeeze(-1)
    end = int(gaps[0]) + 1 if len(gaps) else len(kept)
    kept = kept[:end]
    whole = bool((kept.diff() == 1).all())
    features = trace.fc_input[int(kept[0]) : int(kept[-1]) + 1] if whole else trace.fc_input[kept]
    verify = torch.zeros(end, dtype=torch.bool) if trace.phase is None else trace.phase[kept] == 1
    return Recorded(trace.name, trace.token_ids[kept], positions[:end], features.unflatten(1, (slots, -1)), verify)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `a_start`.. of one and `b_start`.. of the other, `rows` of them, hold the same tokens at the same positions."""

    a: Recorded
    b: Recorded
    a_start: int
    b_start: int
    rows: int


def match(a: Sequence[Recorded], b: Sequence[Recorded]) -> tuple[list[Run], list[Recorded]]:
    """The run of each request of B in the request of A that shares most of its tokens, and those of B that have none.

    Either may lack its beginning. Of several that share as many, the one of the same name is taken. Where tokens are sorted,
    the longest shared prefix is a neighbour's, so nothing is compared with everything.
    """
    runs: list[Run] = []
    lost: list[Recorded] = []
    tables: dict[tuple[int, int], tuple[list[list[int]], list[Recorded]]] = {}
    starts = sorted({held.start for held in a})
    for item in b:
        best: Run | None = None
        for start in starts:
            at = max(start, item.start)
            if (start, at) not in tables:
                tables[start, at] = _table([held for held in a if held.start == start], at - start)
            run = _longest(item, at, *tables[start, at])
            if run is not None and (best is None or run.rows > best.rows):
                best = run
        if best is None:
            lost.append(item)
        else:
            runs.append(best)
    return runs, lost


def _table(held: list[Recorded], first: int) -> tuple[list[list[int]], list[Recorded]]:
    """Tokens from row `first` on, sorted, and whose they are."""
    rows = sorted(((one.token_ids[first:].tolist(), number) for number, one in enumerate(held) if first < len(one.token_ids)))
    return [tokens for tokens, _ in rows], [held[number] for _, number in rows]


def _longest(item: Recorded, at: int, keys: list[list[int]], owners: list[Recorded]) -> Run | None:
    """The longest run of an item from position `at` on."""
    tokens = item.token_ids[at - item.start :].tolist()
    if not tokens or not keys:
        return None
    place = bisect_left(keys, tokens)
    named = [index for index, owner in enumerate(owners) if owner.name == item.name]
    near = [index for index in (*named, place - 1, place) if 0 <= index < len(keys)]
    shared = {index: shared_tokens(tokens, keys[index]) for index in near}
    best = max(near, key=lambda index: shared[index])
    owner = owners[best]
    whole = owner.start == item.start == 0
    if shared[best] < (1 if whole else min(LEAST_RUN, len(tokens), len(keys[best]))):
        return None
    return Run(owner, item, at - owner.start, at - item.start, shared[best])


def shared_tokens(one: list[int], other: list[int]) -> int:
    for count, (x, y) in enumerate(zip(one, other, strict=False)):
        if x != y:
            return count
    return min(len(one), len(other))


def tolerance_of(*dtypes: torch.dtype) -> float:
    return max(TOLERANCE.get(dtype, COARSEST) for dtype in dtypes)


def relative(x: Tensor, r: Tensor) -> Tensor:
    """|x - r| / |r| over the last axis; 0 where both are zero, inf where only r is, NaN where a value is not finite."""
    difference, size = (x - r).norm(dim=-1), r.norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / size)


def digest(row: Tensor) -> bytes:
    """A digest: rows themselves would not fit the memory."""
    return blake2b(row.contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()


def repeated(items: Iterable[Recorded], slot: int) -> dict[bytes, list[tuple[str, int]]]:
    """States of a slot that stand bit for bit in rows of unlike tokens: by their digest, request and row of each."""
    seen: dict[bytes, list[tuple[str, int, int]]] = defaultdict(list)
    for item in items:
        if slot < item.slots.shape[1]:
            for row, (state, token) in enumerate(zip(item.slots[:, slot], item.token_ids.tolist(), strict=True)):
                seen[digest(state)].append((item.name, row, token))
    return {bits: [(name, row) for name, row, _ in places] for bits, places in seen.items()
            if len({token for _, _, token in places}) > 1}
