"""Statistics of what drafts receive while serving, in place of the rows: what `capture --statistics` keeps.

This file needs torch, the standard library, Python 3.10 or newer, and `scan/sums.py`; copies of both stand in the copy of
`engines/inside.py` that runs inside an engine. Rows are summed where they are, on the engine's device if it has one, in blocks,
by a thread that is not the engine's. What comes out becomes a fingerprint outside (`scan/served.py`), with the figures of every
value that a scan of the same requests' rows has; only sinks are told by the median of a request's rows up to then, at most the
first 4,096.

Shapes: N rows, S slots, H channels of a slot.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import heapq
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftscope.scan.sums import POSITIONS, SINK, Sums, norms_of

STATISTICS = "draftscope.statistics/1"
BLOCK = 64
"""Rows of a request that are summed together; fewer when it ends."""
MEDIAN_OF = 4096
RUNS = 16
"""Runs of neighbouring requests that are kept apart at most; then two become one."""
FIRST, SUNK, ANSWER, OTHER = range(4)

Key = tuple[str, int, int]


@dataclasses.dataclass
class _Request:
    """Rows of a request that are not summed yet, and the norms of those that are."""

    number: int
    half: int
    pieces: list[Tensor] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    answers: list[bool] = dataclasses.field(default_factory=list)
    norms: list[Tensor] = dataclasses.field(default_factory=list)  # [n, S] float64 on the host
    seen: int = 0


class Served:
    """Sums over requests by class, half, range of positions and run of requests, and a few whole rows.

    Args:
        slots: of a row; None = three, where the width allows it.
        sample: rows that are kept whole, chosen by a hash of request and position; they are states of served text.
    """

    def __init__(self, slots: int | None, sample: int) -> None:
        self.slots, self.sample = slots, sample
        self.requests = self.rows = 0
        self.dtype = ""
        self.width = 0  # of a slot
        self.sums: dict[Key, Sums] = {}
        self.apart = 1  # requests of a run
        self._open: dict[int, _Request] = {}
        self._kept: list[tuple[int, int, int, int, Tensor]] = []  # -key, request, position, answer, row [S, H]
        self._streams: dict[torch.device, Any] = {}

    @staticmethod
    def name_of(number: int) -> str:
        """A request's name, which a capture of its rows would give its file: its half follows from it."""
        return f"request-{number:06d}.safetensors"

    def take(self, number: int, rows: Tensor, positions: Sequence[int], answers: Sequence[int]) -> int:
        """Take in the next rows of a request, all accepted; returns how many rows of it were summed by that.

        Args:
            rows: [N, S x H], not changed by anyone from now on; positions, answers: N each, rising and 0 or 1.
        """
        request = self._open.get(number)
        if request is None:
            hashed = hashlib.blake2b(self.name_of(number).encode(), digest_size=1).digest()
            request = self._open[number] = _Request(number, hashed[0] & 1)
            self.requests += 1
        if len(rows):
            request.pieces.append(rows)
            request.positions += positions
            request.answers += map(bool, answers)
        return self._sum(request) if len(request.positions) >= BLOCK else 0

    def ended(self, number: int) -> int:
        """Sum what is left of a request; returns its rows."""
        request = self._open.pop(number, None)
        return 0 if request is None else self._sum(request)

    def catch_up(self) -> None:
        """Sum what is there of requests that go on."""
        for request in self._open.values():
            self._sum(request)

    @contextlib.contextmanager
    def on(self, tensor: Tensor) -> Iterator[None]:
        """Work on a stream of our own, beside the engine's; `tensor` is used there."""
        if tensor.device.type == "cpu":
            yield
            return
        module = torch.get_device_module(tensor.device)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = module.Stream(tensor.device)
        stream = self._streams[tensor.device]
        tensor.record_stream(stream)
        with module.device(tensor.device), module.stream(stream):
            yield

    def _sum(self, request: _Request) -> int:
        pieces, positions, answers = request.pieces, request.positions, request.answers
        request.pieces, request.positions, request.answers = [], [], []
        if not positions:
            return 0
        with contextlib.ExitStack() as stack, torch.no_grad():
            for piece in pieces:
                stack.enter_context(self.on(piece))
            rows = self._divided(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
            norms = norms_of(rows).cpu()
            sunk = norms > self._bar(request, norms)
            sunk &= norms.isfinite()
            cells = [(FIRST, -1) if position == 0 else (ANSWER if answer else OTHER, bisect.bisect(POSITIONS, position) - 1)
                     for position, answer in zip(positions, answers, strict=True)]
            start = 0
            for (kind, at), run in itertools.groupby(cells):
                stop = start + len(list(run))
                self._add(request, kind, at, rows[start:stop], sunk[start:stop])
                start = stop
            self._keep(request, rows, positions, answers, (norms.isfinite() & ~sunk).all(1).tolist())
        self.rows += len(positions)
        return len(positions)

    def _divided(self, rows: Tensor) -> Tensor:
        """[N, S x H] as [N, S, H]."""
        width = rows.shape[1]
        if not self.width:
            self.slots = next((s for s in (self.slots, 3, 1) if s and width % s == 0), 1)
            self.width, self.dtype = width // self.slots, str(rows.dtype).rpartition(".")[2]
        if width != self.width * (self.slots or 1):
            raise ValueError(f"rows of width {width}, those before of {self.slots} slots of {self.width}")
        return rows.unflatten(1, (self.slots or 1, self.width))

    def _bar(self, request: _Request, norms: Tensor) -> Tensor:
        """The norm from which a row is a sink, by slot: [S] float64."""
        if request.seen < MEDIAN_OF:
            request.norms.append(norms[: MEDIAN_OF - request.seen])
            request.seen += len(request.norms[-1])
        held = torch.cat(request.norms)
        request.norms = [held]
        usable = held.isfinite() & (held > 0)
        ranked = torch.where(usable, held, torch.full_like(held, torch.inf)).sort(0).values
        middle = ranked.gather(0, ((usable.sum(0) - 1).clamp_min(0) // 2)[None])[0]
        return SINK * middle

    def _add(self, request: _Request, kind: int, at: int, rows: Tensor, sunk: Tensor) -> None:
        """Rows of one class and range, of which some slots may be sinks [N, S] on the host."""
        if kind == FIRST or not bool(sunk.any()):
            taken = None
        else:
            some = sunk.any(1).nonzero()[:, 0]
            self._held("cell", SUNK, request.half, rows).add(rows[some.to(rows.device)], sunk[some].to(rows.device))
            taken = (~sunk).to(rows.device)
        made = Sums(rows.shape[1], rows.shape[2], rows.device)
        made.add(rows, taken)
        self._held("cell", kind, request.half, rows).merge(made)
        if kind != FIRST:
            self._held("position", at, kind, rows).merge(made)
            self._held("group", self._run_of(request.number), kind, rows).merge(made)

    def _held(self, what: str, first: int, second: int, like: Tensor) -> Sums:
        key = (what, first, second)
        if key not in self.sums:
            self.sums[key] = Sums(like.shape[1], like.shape[2], like.device)
        return self.sums[key]

    def _run_of(self, number: int) -> int:
        """The run of requests that one belongs to; the runs are twice as long once there are too many."""
        while number // self.apart >= RUNS:
            self.apart *= 2
            for key in sorted(key for key in self.sums if key[0] == "group"):
                held = self.sums.pop(key)
                joined = ("group", key[1] // 2, key[2])
                if joined in self.sums:
                    self.sums[joined].merge(held)
                else:
                    self.sums[joined] = held
        return number // self.apart

    def _keep(self, request: _Request, rows: Tensor, positions: list[int], answers: list[bool], usual: list[bool]) -> None:
        """The rows whose keys are the smallest."""
        for i, position in enumerate(positions):
            if position == 0 or not usual[i] or not self.sample:
                continue
            hashed = hashlib.blake2b(f"{self.name_of(request.number)}:{position}".encode(), digest_size=8).digest()
            key = int.from_bytes(hashed, "big") >> 1
            if len(self._kept) < self.sample or key < -self._kept[0][0]:
                heapq.heappush(self._kept, (-key, request.number, position, int(answers[i]), rows[i].cpu().clone()))
                if len(self._kept) > self.sample:
                    heapq.heappop(self._kept)

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors by name and metadata of the file; what runs is taken as far as it has got."""
        self.catch_up()
        keys = sorted(self.sums)
        tensors = {f"{i}.{name}": tensor for i, key in enumerate(keys) for name, tensor in self.sums[key].state().items()}
        kept = sorted(self._kept, key=lambda one: one[:3], reverse=True)
        if kept:
            tensors["sample.rows"] = torch.stack([row for *_, row in kept])
            tensors["sample.about"] = torch.tensor([[number, position, answer] for _, number, position, answer, _ in kept])
        about = {"schema": STATISTICS, "keys": keys, "slots": self.slots or 0, "width": self.width, "dtype": self.dtype,
                 "requests": self.requests, "rows": self.rows, "requests_of_a_run": self.apart}
        return tensors, {"draftscope": json.dumps(about)}
