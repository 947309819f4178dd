"""One capture against itself: contradictions that need no second one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from draftscope.compare.runs import Recorded, Run, relative, repeated, shared_tokens, tolerance_of
from draftscope.states.types import Trace

LEAST_SHARED = 4
"""Tokens from which two requests begin alike: texts recorded from somewhere in their middle, unsaid, share fewer by chance."""
LAGS = 2
"""Rows left out at the end of what is shared: shifted, they hold states of tokens that are not."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Rows of one slot that unlike tokens share, bit for bit.

    Attributes:
        zeros, verify: of these rows, those of zeros, and those of verify steps.
        example: the last of them, in words.
    """

    slot: int
    rows: int
    zeros: int
    verify: int
    example: str


@dataclass(frozen=True, slots=True)
class Within:
    """A capture against itself.

    Attributes:
        repeats: by slot.
        prefixes: rows of two requests with the same tokens from position 0 on, compared, and those that differ.
        chained: rows whose `verified_ids` could be held against the next accepted token, and those that differ.
        gaps: requests whose accepted rows leave a position out; late: requests whose first row is not at position 0, with the
            rows that are missing.
    """

    repeats: tuple[Repeat, ...]
    prefix_rows: int
    prefix_differ: int
    prefix_example: str
    chained: int
    broken: int
    broken_example: str
    gaps: tuple[str, ...]
    late: int
    late_rows: int


def within(traces: Sequence[Trace], items: Sequence[Recorded]) -> Within:
    """Look for contradictions inside one capture; `items` are its `recorded` rows."""
    rows, differ, example = 0, 0, ""
    for run in _same_prefixes(items):
        error = relative(run.b.slots[: run.rows].float(), run.a.slots[: run.rows].float())
        bad = (~(error <= tolerance_of(run.a.slots.dtype))).any(1)
        rows, differ = rows + run.rows, differ + int(bad.sum())
        if bool(bad.any()) and not example:
            example = f"{run.b.name}, row {int(bad.nonzero()[0])} against {run.a.name}"
    chained, broken, broken_example, gaps = 0, 0, "", []
    for trace in traces:
        kept = trace.accepted.nonzero().squeeze(-1)
        if trace.positions is not None and bool((trace.positions[kept].diff() != 1).any()):
            gaps.append(trace.name)
        if trace.verified_ids is None:
            continue
        said, following = trace.verified_ids[kept][:-1], trace.token_ids[kept][1:]
        known = said >= 0
        wrong = known & (said != following)
        chained, broken = chained + int(known.sum()), broken + int(wrong.sum())
        if bool(wrong.any()) and not broken_example:
            broken_example = f"{trace.name}, row {int(kept[int(wrong.nonzero()[0])])}"
    late = [item.start for item in items if item.start > 0]
    return Within(
        repeats=tuple(_repeats(items)), prefix_rows=rows, prefix_differ=differ, prefix_example=example, chained=chained,
        broken=broken, broken_example=broken_example, gaps=tuple(gaps), late=len(late), late_rows=sum(late),
    )


def _repeats(items: Sequence[Recorded]) -> Iterator[Repeat]:
    """Slots in which unlike tokens share a vector; what is not finite is another matter."""
    by_name = {item.name: item for item in items}
    for slot in range(items[0].slots.shape[1] if items else 0):
        places = [(by_name[name], row) for shared in repeated(items, slot).values() if not _neighbours(shared)
                  for name, row in shared if bool(by_name[name].slots[row, slot].isfinite().all())]
        if places:
            zeros = sum(not bool(item.slots[row, slot].any()) for item, row in places)
            verify = sum(bool(item.verify[row]) for item, row in places)
            yield Repeat(slot, len(places), zeros, verify, f"{places[-1][0].name}, row {places[-1][1]}")


def _neighbours(shared: Sequence[tuple[str, int]]) -> bool:
    """Whether a vector stands in two rows next to each other alone: at the edge of a block that was shifted it does."""
    return len(shared) == 2 and shared[0][0] == shared[1][0] and abs(shared[0][1] - shared[1][1]) <= LAGS


def _same_prefixes(items: Sequence[Recorded]) -> Iterator[Run]:
    """Requests that begin alike, each with its neighbour in the order of their tokens."""
    ordered = sorted((item for item in items if item.start == 0), key=lambda item: item.token_ids.tolist())
    for one, other in pairwise(ordered):
        shared = shared_tokens(one.token_ids.tolist(), other.token_ids.tolist())
        if shared >= LEAST_SHARED and one.slots.shape[1:] == other.slots.shape[1:]:
            yield Run(one, other, 0, 0, shared - LAGS)
