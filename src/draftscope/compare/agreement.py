"""Two recordings of the same tokens: rows that should hold the same states and do not, and what they hold instead.

A state depends on the tokens up to its own and on nothing else: not on what else was in the batch, on a cache, on graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftscope.compare.runs import Recorded, Run, digest, match, relative, repeated, tolerance_of
from draftscope.compare.transforms import decompose

EXAMINED = 128
"""Rows of a comparison whose content is looked for."""
POOL = 8192
"""Rows among which it is looked for."""
SAME_BITS_MANY = 4
"""Unlike prefixes with the very same row from which it is padding rather than another's row."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """Rows of B that are not what A holds for the same tokens, by what they are.

    Attributes:
        kind: `not finite`, `zeros`, `padding`, `stale`, `another request`, `another slot`, `shifted`, `scaled`, `unknown`.
        slot: of B; `of`: what it holds instead, in words.
        rows: how many; `verify`: how many of them in verify steps.
        example: request and row number of B.
        error: median relative error against A.
    """

    kind: str
    slot: int
    of: str
    rows: int
    verify: int
    example: str
    error: float


@dataclass(slots=True)
class Agreement:
    """What a comparison of A with B found.

    Attributes:
        requests: of B; `matched` found in A; rows compared; `differing_text`: requests whose texts part before both end.
        missing: rows of A's matched requests before B's first recorded one; `missing_in_a`: the reverse.
        tolerance: relative error taken for rounding.
        median, largest: [S] relative errors.
        beyond: [S] rows beyond the tolerance; the first EXAMINED of them are told apart in `unlike`.
    """

    requests: int = 0
    matched: int = 0
    rows: int = 0
    differing_text: int = 0
    missing: int = 0
    missing_in_a: int = 0
    tolerance: float = 0.0
    median: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    unlike: list[Unlike] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return self.rows > 0 and not any(self.beyond)


def agreement(a: Sequence[Recorded], b: Sequence[Recorded]) -> Agreement:
    """Hold every row of B against A's row of the same tokens.

    Requests of another width or number of slots than A's first are not compared.
    """
    shape = a[0].slots.shape[1:]
    a, fitting = ([item for item in items if item.slots.shape[1:] == shape] for items in (a, b))
    runs, lost = match(a, fitting)
    result = Agreement(requests=len(b), matched=len(runs), unmatched=[item.name for item in lost])
    if not runs:
        return result
    result.tolerance = tolerance_of(*{item.slots.dtype for run in runs for item in (run.a, run.b)})
    errors: list[Tensor] = []
    bad: list[tuple[Run, int, int, float]] = []
    for run in runs:
        ours, theirs = _rows(run.a, run.a_start, run.rows), _rows(run.b, run.b_start, run.rows)
        error = relative(theirs, ours)
        errors.append(error)
        result.rows += run.rows
        result.missing += run.a_start
        result.missing_in_a += run.b_start
        ends = min(len(run.a.token_ids) - run.a_start, len(run.b.token_ids) - run.b_start)
        result.differing_text += run.rows < ends
        beyond = (error > result.tolerance) | ~error.isfinite()
        bad += [(run, int(r), int(s), float(error[r, s])) for r, s in beyond.nonzero()]
    joined = torch.cat(errors)
    result.median = joined.nan_to_num(torch.inf).median(0).values.tolist()
    result.largest = joined.nan_to_num(torch.inf).max(0).values.tolist()
    result.beyond = [sum(slot == s for _, _, slot, _ in bad) for s in range(joined.shape[1])]
    result.unlike = _tell_apart(_sampled(bad), a, b, result.tolerance)
    return result


def _rows(item: Recorded, start: int, count: int) -> Tensor:
    return item.slots[start : start + count].float()


def _sampled(bad: list[tuple[Run, int, int, float]]) -> list[tuple[Run, int, int, float]]:
    """At most EXAMINED of each slot, evenly spread."""
    by_slot: dict[int, list[tuple[Run, int, int, float]]] = defaultdict(list)
    for item in bad:
        by_slot[item[2]].append(item)
    return [items[i * len(items) // min(len(items), EXAMINED)] for items in by_slot.values()
            for i in range(min(len(items), EXAMINED))]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Rows of A among which the content of a bad row is looked for: unit vectors [N, Ht], norms [N], and where they are from."""

    unit: Tensor
    norms: Tensor
    origin: list[tuple[Recorded, int, int]]


def _pool(items: Sequence[Recorded], near: Iterable[Run]) -> _Pool:
    """Rows of the requests in question first, then of the others, as far as the budget goes."""
    chosen: dict[int, Recorded] = {id(run.a): run.a for run in near}
    chosen |= {id(item): item for item in items if id(item) not in chosen}
    rows: list[Tensor] = []
    origin: list[tuple[Recorded, int, int]] = []
    for item in chosen.values():
        count, slots = item.slots.shape[:2]
        take = min(count, max(0, POOL - len(origin)) // slots)
        if take == 0:
            break
        rows.append(item.slots[:take].float().flatten(0, 1))
        origin += [(item, r, s) for r in range(take) for s in range(slots)]
    states = torch.cat(rows)
    norms = states.norm(dim=-1)
    return _Pool(states / norms.clamp_min(1e-30)[:, None], norms, origin)


def _tell_apart(bad: list[tuple[Run, int, int, float]], a: Sequence[Recorded], b: Sequence[Recorded],
                tolerance: float) -> list[Unlike]:
    if not bad:
        return []
    same = {slot: repeated(b, slot) for slot in {slot for _, _, slot, _ in bad}}
    pool = _pool(a, (run for run, _, _, _ in bad))
    found: dict[tuple[str, int, str], list[tuple[Run, int, float]]] = defaultdict(list)
    for run, row, slot, error in bad:
        kind, of = _what(run, row, slot, same[slot], pool, tolerance)
        found[kind, slot, of].append((run, row, error))
    told = []
    for (kind, slot, of), rows in found.items():
        run, row, _ = rows[0]
        errors = torch.tensor([error for _, _, error in rows])
        told.append(Unlike(
            kind, slot, of, len(rows), sum(bool(r.b.verify[r.b_start + at]) for r, at, _ in rows),
            f"{run.b.name}, row {run.b_start + row}", float(errors.nan_to_num(torch.inf).median()),
        ))
    return sorted(told, key=lambda one: (-one.rows, one.slot))


def _what(run: Run, row: int, slot: int, shared: dict[bytes, list[tuple[str, int]]], pool: _Pool,
          tolerance: float) -> tuple[str, str]:
    """What row and slot of B hold: kind, and of what."""
    stored = run.b.slots[run.b_start + row, slot]
    x, r = stored.float(), run.a.slots[run.a_start + row, slot].float()
    if not bool(x.isfinite().all()):
        return "not finite", "NaN or Inf"
    if not bool(x.any()):
        return "zeros", "nothing but zeros"
    if not bool(r.isfinite().all()):
        return "not finite", "NaN or Inf on the other side"
    if not bool(r.any()):
        return "zeros", "a state where the other side has nothing but zeros"
    elsewhere = _elsewhere(run, row, slot, x, pool, tolerance)
    if elsewhere is not None:
        return elsewhere
    same = [place for place in shared.get(digest(stored), []) if place != (run.b.name, run.b_start + row)]
    if len(same) >= SAME_BITS_MANY:
        return "padding", "one vector that many rows of unlike tokens hold"
    if same:
        return "stale", "what another row of the same capture holds, bit for bit"
    offset, rest = decompose(x, r)
    if float(rest / (1 + offset).abs().clamp_min(1e-12)) <= tolerance:
        return "scaled", f"{float(1 + offset):.3g} times the state"
    return "unknown", "no state of the other capture"


def _elsewhere(run: Run, row: int, slot: int, x: Tensor, pool: _Pool, tolerance: float) -> tuple[str, str] | None:
    """The row of A that x equals within the tolerance, if there is one and it is another."""
    size = x.norm()
    cosine = pool.unit @ (x / size)
    squared = (size / pool.norms).square() + 1 - 2 * cosine * (size / pool.norms)
    best = int(squared.argmin())
    item, at, other = pool.origin[best]
    if float(relative(x, item.slots[at, other].float())) > tolerance:
        return None
    lag = at - (run.a_start + row)
    if item is not run.a:
        return "another request", f"the state of {f'slot {other} of ' if other != slot else ''}another request's row"
    if other != slot and lag == 0:
        return "another slot", f"what slot {other} should hold"
    if abs(lag) <= 2:
        of = f" of slot {other}" if other != slot else ""
        return "shifted", f"the row {abs(lag)} {'later' if lag > 0 else 'earlier'}{of}"
    return "stale", f"{'an earlier' if lag < 0 else 'a later'} row of the same request"
