"""Forward passes of a server put together into requests.

A dump holds one batch a pass: rows of several requests behind each other, positions, and how long each request is. A row
belongs to the request whose next position it is. Under speculation a pass verifies drafted tokens, and the position at which
the request goes on says how many of them were accepted; of the last pass that is not known, so only its first row is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from draftscope.errors import UsageError
from draftscope.states.dtypes import common
from draftscope.states.errors import StatesError
from draftscope.states.types import Trace

BUDGET = 2**30
"""Bytes of states taken from one dump; a choice of boundaries makes them go further."""


@dataclass(slots=True)
class Forward:
    """One pass.

    Attributes:
        token_ids, positions: [R] int64.
        states: [R, S, Ht], the boundaries taken as slots; last: [R, Ht] or None.
        lengths: [B] int64, one a request; None = not recorded.
        requests: B ids, where they are recorded.
    """

    token_ids: Tensor
    positions: Tensor
    states: Tensor
    last: Tensor | None = None
    lengths: Tensor | None = None
    requests: Sequence[str] | None = None
    name: str = ""


@dataclass(slots=True)
class _Run:
    start: int
    rows: slice
    source: Forward
    verify: bool


@dataclass(slots=True, eq=False)
class _Request:
    name: str
    runs: list[_Run] = field(default_factory=list)
    closed: bool = False

    @property
    def start(self) -> int:
        return self.runs[-1].start

    @property
    def end(self) -> int:
        """The position after the last row, accepted or not."""
        run = self.runs[-1]
        return run.start + run.rows.stop - run.rows.start


def chosen_boundaries(choice: str, name: str) -> tuple[int, ...]:
    """The numbers of `NAME@2,15,27`; () = all.

    Raises:
        UsageError: something else than numbers.
    """
    if not choice:
        return ()
    parts = choice.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"no reading `{name}@{choice}`", remedy=f"Name boundaries, as in {name}@2,15,27")
    return tuple(int(part) for part in parts)


def forward_of(ids: Tensor, positions: Tensor, streams: Mapping[int, Tensor], wanted: Sequence[int], where: str, *,
               last: Tensor | None = None, lengths: Tensor | None = None, requests: Sequence[str] | None = None) -> Forward:
    """A pass from what was recorded of it; rows behind the last token are padding.

    Raises:
        StatesError: a boundary that was asked for is not there, or tensors that do not fit each other.
    """
    rows = len(ids)
    numbers = list(wanted) or sorted(streams)
    lacking = [number for number in numbers if number not in streams]
    if lacking:
        raise StatesError(f"holds no boundary {lacking[0]} (it holds {', '.join(map(str, sorted(streams)[:40]))})", where=where)
    if not numbers:
        raise StatesError("holds no residual stream: no input_layernorm gave one beside its output", where=where,
                          remedy="Dump all layers of the target, without CUDA graphs")
    held = [streams[number] for number in numbers]
    for number, stream in zip([*numbers, -1], [*held, *([] if last is None else [last])], strict=False):
        if stream.dim() != 2 or len(stream) < rows or stream.shape[1] != held[0].shape[1]:
            which = "the last state" if number < 0 else f"boundary {number}"
            raise StatesError(f"{which} has shape {list(stream.shape)} for {rows} tokens of width {held[0].shape[-1]}",
                              cause="rows", where=where)
    if positions.dim() != 1 or len(positions) < rows or rows == 0:
        raise StatesError(f"has positions {list(positions.shape)} for {rows} tokens", cause="rows", where=where)
    dtype = common([stream.dtype for stream in held])
    states = torch.stack([stream[:rows].to(dtype) for stream in held], 1)
    return Forward(ids.to(torch.int64), positions[:rows].to(torch.int64), states,
                   None if last is None else last[:rows], lengths, requests, where)


def stitch(passes: Iterable[Forward], notes: list[str]) -> list[Trace]:
    """Requests in the order in which they began; what could not be told apart is left out, and noted."""
    requests: list[_Request] = []
    lost = trees = 0
    first: Forward | None = None
    for one in passes:
        first = first or one
        if one.states.shape[1:] != first.states.shape[1:]:
            notes.append(f"passes with other layers or widths than the first are left out, {one.name} first")
            continue
        runs, bad = _runs(one)
        trees += bad
        live = [request for request in requests if not request.closed]
        used: set[int] = set()
        new: list[_Request] = []
        for b, run in enumerate(runs):
            own = None if one.requests is None else str(one.requests[b])
            found, ambiguous = _owner(run, live, used, own, len(runs))
            if ambiguous:
                lost += 1
                for request in live:
                    request.closed = request.closed or request.start < run.start <= request.end
                continue
            if found is None:
                found = _Request(own or f"request-{len(requests) + len(new)}")
                new.append(found)
            used.add(id(found))
            found.runs.append(run)
        requests += new
    if lost:
        notes.append(f"{lost} runs of rows fit several requests of one length: these requests end there")
    if trees:
        notes.append(f"{trees} passes verify trees, or rows that do not follow each other: left out")
    return [_trace(request) for request in requests]


def _owner(run: _Run, live: list[_Request], used: set[int], own: str | None, count: int) -> tuple[_Request | None, bool]:
    """Whose rows these are (None = a new request's), and whether that cannot be told."""
    free = [request for request in live if id(request) not in used and not request.closed]
    if own is not None:
        return next((request for request in free if request.name == own), None), False
    if run.start == 0:
        return None, False
    fitting = [request for request in free if request.start < run.start <= request.end]
    if len(fitting) <= 1:
        return (fitting[0] if fitting else None), False
    return (free[0], False) if len(live) == count and free[0] in fitting else (None, True)


def _runs(one: Forward) -> tuple[list[_Run], int]:
    """Rows of each request of a pass, and 1 where they cannot be divided."""
    rows = len(one.positions)
    breaks = (one.positions[1:] != one.positions[:-1] + 1).nonzero().squeeze(-1) + 1
    bounds = [0, *breaks.tolist(), rows]
    count = None if one.lengths is None else len(one.lengths)
    if count and len(bounds) - 1 != count:
        if rows % count:
            return [], 1
        bounds = list(range(0, rows + 1, rows // count))
    runs = []
    for b, (start, stop) in enumerate(pairwise(bounds)):
        positions = one.positions[start:stop]
        if not torch.equal(positions, torch.arange(stop - start) + positions[0]):
            return [], 1
        first = int(positions[0])
        # In a prefill or plain decoding step the length counts these rows, in a verify step it does not.
        verify = first > 0 and (stop - start == 1 or (count is not None and int(one.lengths[b]) <= first))  # type: ignore[index]
        runs.append(_Run(first, slice(start, stop), one, verify))
    return runs, 0


def _trace(request: _Request) -> Trace:
    runs = request.runs
    ids, states, lasts, positions, accepted, phases, steps = [], [], [], [], [], [], []
    drafted: list[Tensor] = []
    counts: list[int] = []
    for number, run in enumerate(runs):
        of = run.source
        length = run.rows.stop - run.rows.start
        following = runs[number + 1].start if number + 1 < len(runs) else None
        # Of the last verify step nobody knows what was accepted but the bonus token.
        keep = length if following is not None or not run.verify else 1
        kept = min(length, following - run.start) if following is not None else keep
        rows = slice(run.rows.start, run.rows.start + keep)
        ids.append(of.token_ids[rows])
        states.append(of.states[rows])
        positions.append(of.positions[rows])
        if of.last is not None:
            lasts.append(of.last[rows])
        accepted.append(torch.arange(keep) < kept)
        phases.append(torch.full((keep,), int(run.verify), dtype=torch.uint8))
        steps.append(torch.full((keep,), len(counts) if run.verify else -1))
        if run.verify and following is not None:
            drafted.append(of.token_ids[run.rows][1:keep])
            counts.append(kept - 1)
    trace = Trace(
        name=request.name, fc_input=torch.cat(states).flatten(1), token_ids=torch.cat(ids), accepted=torch.cat(accepted),
        phase=torch.cat(phases), step=torch.cat(steps), positions=torch.cat(positions),
        last_hidden=torch.cat(lasts) if len(lasts) == len(runs) else None,
    )
    widest = max((len(one) for one in drafted), default=0)
    if widest:
        trace.draft_token_ids = torch.full((len(drafted), widest), -1, dtype=torch.int64)
        for s, one in enumerate(drafted):
            trace.draft_token_ids[s, : len(one)] = one
        trace.accepted_counts = torch.tensor(counts, dtype=torch.int64)
    return trace
