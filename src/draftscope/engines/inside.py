"""Records what a speculative-decoding draft (EAGLE-3) receives inside a serving engine, as a draftscope plain capture.

This file is whole in itself: torch and the standard library, Python 3.10 or newer. Read it before you let it into a server.
(The option `statistics` needs the parts that follow this one in the copies that `draftscope capture vllm --emit FILE` writes;
where draftscope is installed they are modules of it.)
Nothing happens unless DRAFTSCOPE_CAPTURE names a directory:

    DRAFTSCOPE_CAPTURE=DIR                              where the capture goes: empty or new, one server each
    DRAFTSCOPE_CAPTURE_OPTIONS=max_bytes=2GB,share=0.1  see `Options` below

and one of these brings the file into the engine's processes (its directory on PYTHONPATH):

    vLLM, draftscope installed beside it    nothing more: it is a `vllm.general_plugins` entry point
    vLLM, this file alone                   vllm serve ... --worker-extension-cls NAME_OF_THIS_FILE.Extension
    SGLang from 0.5.11, draftscope beside   nothing more: it is an `sglang.srt.plugins` entry point
    SGLang from 0.5.10, this file alone     SGLANG_EXTERNAL_MODEL_PACKAGE=NAME_OF_THIS_FILE
    in any way, SGLang from 0.5.5           draftscope capture vllm (or sglang) -o DIR -- vllm serve ...

(Ray starts workers with an environment of its own: name the variables, PYTHONPATH too, in VLLM_RAY_EXTRA_ENV_VARS_TO_COPY.)

What it does to the engine: it copies rows that are at hand anyway and passes them to a thread of its own, which writes files.
It computes nothing that the engine uses, waits for nothing on the engine's thread, and never raises there: the first error
ends the capture, is logged and noted in DIR/capture.json, and the engine goes on. What does not fit into its bounds is left
out and counted. A request is held in memory until it ends and is a file then; what still runs when the server is killed is lost.
With `statistics` no request becomes a file: its rows are summed on the device where they are, on a stream of our own, and
one file holds the sums, with no token id and `sample_rows` rows.
It writes in its directory alone, and nothing leaves the machine. The files hold token ids and states of served text: treat
them as you treat that text.

Parts: 1 options, 2 files, 3 the recorder (knows no engine), 4 vLLM, 5 SGLang, 6 entry points.
Shapes: R requests of a pass, K drafted tokens, H the draft's width. Rows of a pass stand end to end, request after request.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import importlib
import importlib.abc
import importlib.metadata
import inspect
import itertools
import json
import logging
import multiprocessing.util
import os
import queue
import re
import sys
import threading
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

VERSION = "1"
LOG = logging.getLogger("vllm.draftscope_capture")  # below "vllm", so that vLLM's own handlers print it


# --- 1. Options ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """Bounds of a capture; 0 = no bound. In DRAFTSCOPE_CAPTURE_OPTIONS as `name=value,...`, sizes as 500MB or 2GiB."""

    folder: str
    max_bytes: int = 2_000_000_000  # of all files together
    max_rows: int = 0  # of all requests together
    max_requests: int = 0
    max_seconds: float = 0.0  # from the first pass on
    share: float = 1.0  # of requests, chosen by a hash of their ids
    max_held: int = 1_000_000_000  # bytes held in memory: waiting to be written, and of requests that still run
    keep_free: int = 1_000_000_000  # bytes left free on the disk
    fc_output: bool = True
    draft_states: bool = True
    statistics: bool = False  # sums of the rows in place of the rows; max_bytes does not apply
    sample_rows: int = 256  # with statistics: rows kept whole

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options | None:
        """None where no capture is asked for. Raises ValueError on an option that is none."""
        folder = environment.get("DRAFTSCOPE_CAPTURE", "").strip()
        return cls.parse(folder, environment.get("DRAFTSCOPE_CAPTURE_OPTIONS", "")) if folder else None

    @classmethod
    def parse(cls, folder: str, text: str) -> Options:
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls) if field.name != "folder"}
        given: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (side.strip() for side in part.partition("="))
            if name not in kinds:
                raise ValueError(f"no option {name!r}; there are {', '.join(kinds)}")
            given[name] = _parse(name, value, kinds[name])
        if given.get("statistics"):
            given |= {"fc_output": False, "draft_states": False}
        return cls(os.path.abspath(folder), **given)


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool and text.lower() in ("0", "1", "no", "yes", "false", "true"):
        return text.lower() in ("1", "yes", "true")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", text, re.IGNORECASE)
    if kind is bool or match is None:
        raise ValueError(f"option {name}: {text!r} is no {'yes or no' if kind is bool else 'number'}")
    return kind(float(match[1]) * (1024 if match[3] else 1000) ** (" kmgt".index(match[2].lower()) if match[2] else 0))


# --- 2. Files -----------------------------------------------------------------------------------------------------------

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}


@dataclasses.dataclass
class Column:
    """A tensor as the pieces that make it up, in order along its first axis."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Any]  # CPU tensors, arrays, bytes

    @classmethod
    def of(cls, pieces: Sequence[Tensor]) -> Column:
        return cls(_DTYPES[pieces[0].dtype], (sum(len(p) for p in pieces), *pieces[0].shape[1:]), pieces)


def write_safetensors(path: str, columns: Mapping[str, Column], metadata: Mapping[str, str]) -> int:
    """Write `path` whole or not at all (`path`.part first): 8 bytes of length, a JSON header, raw bytes. Returns the size."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, column in columns.items():
        start, end = end, end + sum(len(_bytes(piece)) for piece in column.pieces)
        header[name] = {"dtype": column.dtype, "shape": list(column.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path + ".part"
    try:
        with open(part, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for column in columns.values():
                for piece in column.pieces:
                    file.write(_bytes(piece))
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    return 8 + len(text) + end


def _copied(tensor: Tensor) -> Tensor:
    """A copy of a contiguous CPU tensor, made without torch's thread pool: OpenMP's barriers stop spinning, on machines of few
    cores, once a second thread has entered it, and the engine's own are the slower for it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return copy


def _bytes(piece: Any) -> memoryview:
    """The memory of a contiguous CPU tensor, an array or bytes, not copied; the piece must outlive it."""
    if isinstance(piece, Tensor):
        return memoryview((ctypes.c_ubyte * piece.nbytes).from_address(piece.data_ptr())) if piece.nbytes else memoryview(b"")
    return memoryview(piece).cast("B")


# --- 3. The recorder ----------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The directory cannot be had for a capture."""


@dataclasses.dataclass
class About:
    """What is known of a request when it begins. `max_tokens`, `min_tokens` count answer tokens, `max_length` all tokens."""

    prompt: Sequence[int]
    max_tokens: int = 1 << 62
    min_tokens: int = 0
    max_length: int = 1 << 62
    stop_ids: frozenset[int] = frozenset()
    temperature: float | None = None


@dataclasses.dataclass
class _Ticket:
    """A recorded request as the engine's thread knows it."""

    number: int
    name: str
    about: About
    reserved: int = 0
    cut: str | None = None  # why rows after some point are missing
    cut_rows: int = 0


class Pass:
    """One pass of the draft over rows of several requests: give it the tensors, then hand it to `Recorder.commit`."""

    def __init__(self, recorder: Recorder, tickets: list[_Ticket], chosen: list[int], bounds: Sequence[int],
                 drafted: Sequence[int], total: int) -> None:
        self.tickets, self.chosen, self.whole = tickets, chosen, len(chosen) == total
        self.drafted = [drafted[i] for i in chosen]
        self.counts = [bounds[i + 1] - bounds[i] for i in chosen]
        self.by_row: dict[str, Tensor] = {}
        self.by_request: dict[str, Tensor] = {}
        self.fits = [True] * len(chosen)
        self.drop_rejected = False  # the rejected rows are none of the draft's: an engine that fills up blocks
        self.event: Any = None  # of the copies, see `Carrier.mark`
        self._carrier = recorder.carrier
        self._summed = recorder.served is not None
        self._ranges: list[list[int]] = []
        for i in chosen:
            if self._ranges and self._ranges[-1][1] == bounds[i]:
                self._ranges[-1][1] = bounds[i + 1]
            else:
                self._ranges.append([bounds[i], bounds[i + 1]])

    def rows(self, name: str, tensor: Tensor) -> None:
        """A tensor with one row per row of the pass: what is recorded of it is copied now."""
        if self._summed and name not in ("fc_input", "token_ids", "positions"):
            return
        pieces = [tensor[start:stop] for start, stop in self._ranges]
        copy = self._carrier.keep if self._summed and name == "fc_input" else self._carrier.carry
        self.by_row[name] = copy(pieces[0] if len(pieces) == 1 else torch.cat(pieces), fresh=len(pieces) > 1)

    def each(self, name: str, tensor: Tensor) -> None:
        """A tensor with one row per request, likewise."""
        if self._summed and name.endswith("states"):
            return
        if not self.whole:
            # From pinned memory, or the device would be waited for.
            chosen = torch.tensor(self.chosen, pin_memory=tensor.device.type != "cpu")
            tensor = tensor[chosen.to(tensor.device, non_blocking=True)]
        self.by_request[name] = self._carrier.carry(tensor, fresh=not self.whole)

    def arrived(self) -> None:
        """Wait, on the writer's thread, until all copies are there."""
        if self.event is not None:
            self.event.synchronize()


class Carrier:
    """Copies tensors to the host without making the engine's thread wait for its device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def carry(self, tensor: Tensor, *, fresh: bool = False) -> Tensor:
        """The tensor's copy on the host, there after `mark`'s event. `fresh`: nobody else holds its memory."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.contiguous() if fresh else tensor.clone(memory_format=torch.contiguous_format)
        module = torch.get_device_module(tensor.device)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = module.Stream(tensor.device)
        tensor = tensor.contiguous()
        stream.wait_stream(module.current_stream(tensor.device))
        with module.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return host

    def keep(self, tensor: Tensor, *, fresh: bool = False) -> Tensor:
        """The tensor's copy where it is, there after `mark`'s event."""
        kept = tensor.detach()
        kept = kept.contiguous() if fresh else kept.clone(memory_format=torch.contiguous_format)
        if kept.device.type != "cpu":
            module = torch.get_device_module(kept.device)
            if kept.device not in self._streams:
                self._streams[kept.device] = module.Stream(kept.device)
            self._streams[kept.device].wait_stream(module.current_stream(kept.device))
        return kept

    def mark(self) -> Any:
        """An event after all copies so far; None where they are done already."""
        for device, stream in self._streams.items():
            event = torch.get_device_module(device).Event()
            event.record(stream)
            return event
        return None


def _part(name: str, module: str) -> Any:
    """What follows this file in its copies, and is a module of draftscope's where that is installed."""
    return globals()[name] if name in globals() else getattr(importlib.import_module(module), name)


STATISTICS_FILE = "statistics.safetensors"
_REST = 60.0  # seconds between two writings of it
_ROW_BYTES = 4 * 8 + 2  # token, position, step and verified token; phase and acceptance
_FILE_BYTES = 4096  # header and metadata


class Recorder:
    """Turns passes into files, one a request, under bounds. Knows no engine.

    An engine's attachment calls, on one thread: `started` for a new request, then for every pass `begin`, the pass's `rows`
    and `each`, `commit`, and `finished` when a request has ended. `close` writes what is there.

    Rows of a pass: `fc_input` [rows, slots x Ht], `token_ids` [rows], `positions` [rows], optionally `fc_output` [rows, H]
    and `draft_input_ids` [rows] (the token that the draft was given with each row).
    Per request: `rejected` [R] (rows at the end of its own that verification rejected), `following` [R] (the token that the
    target chose after the last row that was kept), `drafts` [R, K] (drafted in this pass, verified in the next),
    optionally `draft_states` [R, K, H] (what they were read from). Where drafts are known only when they are verified, their
    pass gives `tested` [R, K] instead, and `tested_states` [R, K, H]; a tree gives `first_child`, `next_sibling` [R, 1 + K] too
    (nodes, 0 = the last step's bonus token, -1 = none).
    """

    def __init__(self, options: Options, describe: Mapping[str, Any], *, k: int, log: logging.Logger = LOG) -> None:
        self.options, self.describe, self.k, self.log = options, dict(describe), k, log
        self.carrier = Carrier()
        slots = len(describe.get("layer_ids") or ()) or None
        self.served: Any = None
        if options.statistics:
            self.served = _part("Served", "draftscope.engines.served")(slots, options.sample_rows)
        self._summed_at = 0.0  # when its file was written
        self.idle: Callable[[], None] | None = None  # called on the writer's thread while nothing happens
        self.stopped: str | None = None
        self.notes: list[str] = []
        self.captured: dict[str, Any] = {
            "requests": 0, "unfinished": 0, "rows": 0, "bytes": 0, "steps": 0, "accepted": 0, "rows_rejected": 0,
            "prefix_rows_missing": 0, "rows_recomputed": 0, "rows_after_end": 0, "tails_cut": 0, "rows_cut": 0,
            "steps_without_draft_states": 0, "rows_without_draft_inputs": 0, "requests_left_out": {},
            "engine_seconds": 0.0, "writer_seconds": 0.0,  # on the engine's thread, and processor time of our own
        }
        self._tickets: dict[str, _Ticket | None] = {}  # None = left out
        self._abouts: dict[str, About] = {}
        self._begun = self._rows = self._spent = self._held = self._row_bytes = self._request_bytes = 0
        self._since: float | None = None
        self._full: str | None = None
        self._lock = threading.Lock()
        self._records: dict[int, _Record] = {}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self._claim()
        self._write_description()
        self._thread = threading.Thread(target=self._work, name="draftscope-capture", daemon=True)
        self._thread.start()

    def _claim(self) -> None:
        folder = self.options.folder
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._folder_lock = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = os.listdir(folder)
        except BlockingIOError:
            os.close(self._folder_lock)
            raise Refused(f"another server captures into {folder}") from None
        except OSError as error:
            raise Refused(f"{folder}: {error.strerror or error}") from None
        if any(name.endswith((".safetensors", ".part")) for name in names):
            os.close(self._folder_lock)
            raise Refused(f"{folder} holds a capture already; captures are not mixed")

    # On the engine's thread.

    def started(self, request: str, about: About) -> None:
        if request not in self._tickets:
            self._abouts[request] = about

    def begin(self, requests: Sequence[str], bounds: Sequence[int], drafted: Sequence[int]) -> Pass | None:
        """Choose what of a pass is recorded; None = nothing.

        Args:
            requests: R names; bounds: R+1 row numbers, request i has rows bounds[i] to bounds[i + 1].
            drafted: R numbers of drafted tokens that this pass verified, 0 in a prefill.
        """
        if self.stopped is not None or self._closed:
            return None
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if self._full is None and self.options.max_seconds and now - self._since > self.options.max_seconds:
            self._full = "max_seconds"
        tickets, chosen = [], []
        for i, name in enumerate(requests):
            count = bounds[i + 1] - bounds[i]
            ticket = self._tickets.get(name) if name in self._tickets else self._admit(name)
            if ticket is not None and self._reserve(ticket, count, count * self._row_bytes + self._request_bytes):
                tickets.append(ticket)
                chosen.append(i)
        return Pass(self, tickets, chosen, bounds, drafted, len(requests)) if chosen else None

    def commit(self, given: Pass) -> None:
        """The pass is complete: on to the writer."""
        given.event = self.carrier.mark()
        row = _ROW_BYTES + sum(t.nbytes for t in given.by_row.values()) // sum(given.counts) - self._row_bytes
        request = sum(t.nbytes for t in given.by_request.values()) // len(given.tickets) - self._request_bytes
        if row > 0 or request > 0:  # larger than any before: in the first pass, as a rule
            row, request = max(row, 0), max(request, 0)
            self._row_bytes, self._request_bytes = self._row_bytes + row, self._request_bytes + request
            given.fits = [self._reserve(ticket, 0, count * row + request)
                          for ticket, count in zip(given.tickets, given.counts, strict=True)]
        self._queue.put(given)

    def finished(self, request: str) -> None:
        self._abouts.pop(request, None)
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._queue.put(ticket)

    def _admit(self, name: str) -> _Ticket | None:
        """A ticket for a request that was not seen before, or None and a count of why not."""
        about = self._abouts.pop(name, None)
        share = zlib.crc32(name.encode()) / 2**32
        why = (
            "began before the capture" if about is None
            else "share" if share >= self.options.share
            else self._full if self._full is not None
            else "max_requests" if self.options.max_requests and self._begun >= self.options.max_requests
            else None
        )
        ticket = None
        if why is None and about is not None:
            ticket = _Ticket(self._begun, name, about)
            self._begun += 1
        else:
            self._leave_out(str(why))
        self._tickets[name] = ticket
        return ticket

    def _reserve(self, ticket: _Ticket, count: int, size: int) -> bool:
        """Room for more rows of a request; without it the request ends here, since a capture has no gaps."""
        options = self.options
        size += 0 if ticket.reserved or self.served is not None else _FILE_BYTES
        with self._lock:
            if ticket.cut is None:
                if self._full is not None:
                    ticket.cut = self._full
                elif options.max_bytes and self.served is None and self._spent + size > options.max_bytes:
                    ticket.cut = self._full = "max_bytes"
                elif options.max_rows and self._rows + count > options.max_rows:
                    ticket.cut = self._full = "max_rows"
                elif options.max_held and self._held + size > options.max_held:
                    ticket.cut = "max_held"
            if ticket.cut is not None:
                ticket.cut_rows += count
                return False
            ticket.reserved += size
            self._spent += size
            self._held += size
            self._rows += count
        return True

    def stop(self, why: str) -> None:
        """End the capture, from any thread; what was written stays."""
        if self.stopped is None:
            self.stopped = why
            self.log.warning("draftscope capture stopped: %s. The engine goes on.", why)
            self._queue.put(None)

    def close(self, timeout: float = 30.0) -> None:
        """Write what is there, requests that still run as far as they got, and end. Harmless when called again."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # On the writer's thread.

    def _work(self) -> None:
        try:
            while self.stopped is None:
                try:
                    item = self._queue.get(timeout=1.0)
                except queue.Empty:
                    if self.idle is not None:
                        self.idle()
                    self._write_running(final=False)  # an engine at rest may be left, or killed, at any moment
                    self._rest()
                    continue
                self._rest()
                if isinstance(item, Pass):
                    self._take(item)
                elif isinstance(item, _Ticket):
                    self._end(item)
                elif self._closed:
                    self._write_running(final=True)
                    if self.served is not None:
                        self._write_statistics()
                    break
        except OSError as error:
            self.stop(f"{self.options.folder}: {error.strerror or error}")
        except Exception as error:
            self.stop(f"{type(error).__name__}: {error}")
        self._records.clear()
        self.captured["writer_seconds"] = time.thread_time()
        self._write_description()
        os.close(self._folder_lock)
        self.log.info("draftscope capture: %s", json.dumps(self.captured))

    def _rest(self) -> None:
        """Write the statistics now and then."""
        if self.served is not None and self.served.requests and time.monotonic() - self._summed_at > _REST:
            self._write_statistics()

    def _take(self, given: Pass) -> None:
        """Deal the rows of a pass to its requests."""
        given.arrived()
        lists = {name: given.by_row.pop(name).tolist() for name in ("token_ids", "positions")}
        of_request = {name: tensor.tolist() for name, tensor in given.by_request.items() if not name.endswith("states")}
        states, tested_states = given.by_request.get("draft_states"), given.by_request.get("tested_states")
        alone = len(given.tickets) == 1 and given.event is None
        start = 0
        for i, (ticket, count) in enumerate(zip(given.tickets, given.counts, strict=True)):
            stop = start + count
            if not given.fits[i]:
                start = stop
                continue
            record = self._records.get(ticket.number)
            if record is None:
                record = self._records[ticket.number] = _Record(ticket, self.k)
            kept = count - of_request["rejected"][i]
            end = start + (kept if given.drop_rejected else count)
            rows = {name: tensor if alone and end - start == len(tensor) else
                    tensor[start:end] if self.served is not None else _copied(tensor[start:end])
                    for name, tensor in given.by_row.items()}
            tree = "first_child" in of_request
            record.add(
                rows, lists["token_ids"][start:end], lists["positions"][start:end],
                kept=kept, following=of_request["following"][i], verified=given.drafted[i],
                drafts=of_request["drafts"][i] if "drafts" in of_request else [],
                states=None if states is None else _copied(states[i]),
                tested=of_request["tested"][i] if "tested" in of_request else None,
                tested_states=None if tested_states is None else _copied(tested_states[i]),
                parents=_parents(of_request["first_child"][i], of_request["next_sibling"][i]) if tree else None,
            )
            if self.served is not None:
                self._sum(record, count)
            start = stop

    def _sum(self, record: _Record, count: int) -> None:
        """Hand the rows that a pass added to a request, accepted ones first, to the statistics; they are not kept here."""
        pieces = record.rows.pop("fc_input", [])
        fresh = sum(map(len, pieces))
        kept = sum(record.accepted[len(record.accepted) - fresh :])
        summed = 0
        if kept:
            end = len(record.positions) - fresh + kept
            summed = self.served.take(record.ticket.number, pieces[0][:kept], record.positions[end - kept : end].tolist(),
                                      record.phase[end - kept : end])
        self._release(record.ticket, (count - kept + summed) * self._row_bytes)

    def _release(self, ticket: _Ticket, size: int) -> None:
        """Room that rows no longer take."""
        with self._lock:
            size = min(size, ticket.reserved)
            ticket.reserved -= size
            self._held -= size
            self._spent -= size

    def _end(self, ticket: _Ticket) -> None:
        if ticket.number in self._records:
            self._write(ticket.number, finished=True)
        elif ticket.cut is not None:
            self._leave_out(ticket.cut)

    def _leave_out(self, why: str) -> None:
        left = self.captured["requests_left_out"]
        left[why] = left.get(why, 0) + 1

    def _write_running(self, *, final: bool) -> None:
        for number, record in list(self._records.items()):
            if record.changed or final:
                self._write(number, finished=False, final=final)

    def _write(self, number: int, *, finished: bool, final: bool = True) -> None:
        record = self._records[number]
        if self.served is not None:
            self._counted(number, finished or record.ended, final)
            return
        columns, told = record.columns(), record.told()
        finished = finished or record.ended
        path = os.path.join(self.options.folder, f"request-{number:06d}.safetensors")
        disk = os.statvfs(self.options.folder)
        if disk.f_bavail * disk.f_frsize - record.ticket.reserved < self.options.keep_free:
            raise OSError(28, f"less than keep_free ({self.options.keep_free} bytes) would be left on the disk")
        metadata = {"request": record.ticket.name, "finished": json.dumps(finished)}
        metadata |= {name: json.dumps(value) for name, value in told.items() if value}
        if record.ticket.cut is not None:
            metadata["cut"] = record.ticket.cut
        if record.ticket.about.temperature is not None:
            metadata["temperature"] = json.dumps(record.ticket.about.temperature)
        size = write_safetensors(path, columns, metadata)
        record.changed = False
        if final:
            del self._records[number]
            with self._lock:
                self._spent += size - record.ticket.reserved
                self._held -= record.ticket.reserved
            captured = self.captured
            captured["requests"] += 1
            captured["unfinished"] += not finished
            captured["bytes"] += size
            self._count(record, told)
            self._write_description()

    def _count(self, record: _Record, told: Mapping[str, int]) -> None:
        captured = self.captured
        captured["rows"] += len(record.token_ids)
        captured["rows_cut"] += record.ticket.cut_rows
        captured["tails_cut"] += record.ticket.cut is not None
        for name, value in told.items():
            captured[name] += value

    def _counted(self, number: int, finished: bool, final: bool) -> None:
        """A request's rows are summed: its figures alone are left."""
        record = self._records[number]
        record.changed = False
        if not final:
            return
        self.served.ended(number)
        self._release(record.ticket, record.ticket.reserved)
        del self._records[number]
        self.captured["requests"] += 1
        self.captured["unfinished"] += not finished
        told = {name: value for name, value in record.told().items() if "without" not in name}
        self._count(record, told)

    def _write_statistics(self) -> None:
        """All sums so far, in one file."""
        tensors, about = self.served.state()
        disk = os.statvfs(self.options.folder)
        if disk.f_bavail * disk.f_frsize - sum(t.nbytes for t in tensors.values()) < self.options.keep_free:
            raise OSError(28, f"less than keep_free ({self.options.keep_free} bytes) would be left on the disk")
        path = os.path.join(self.options.folder, STATISTICS_FILE)
        self.captured["bytes"] = write_safetensors(path, {name: Column.of([t]) for name, t in tensors.items()}, about)
        self._summed_at = time.monotonic()
        self._write_description()

    def _write_description(self) -> None:
        """capture.json: what the engine says of itself, and what was captured so far."""
        path = os.path.join(self.options.folder, "capture.json")
        about = {
            **self.describe, "written_by": f"draftscope inside {VERSION}", "options": dataclasses.asdict(self.options),
            "captured": self.captured, "full": self._full, "stopped": self.stopped, "closed": self._closed, "notes": self.notes,
        }
        try:
            with open(path + ".tmp", "w", encoding="utf-8") as file:
                json.dump(about, file, indent=1, default=str)
            os.replace(path + ".tmp", path)
        except OSError as error:
            self.log.warning("draftscope capture: %s: %s", path, error)


class _Record:
    """One request as far as it has got."""

    def __init__(self, ticket: _Ticket, k: int) -> None:
        self.ticket, self.k = ticket, k
        self.token_ids, self.positions, self.step, self.verified = (array("q") for _ in range(4))
        self.phase, self.accepted = bytearray(), bytearray()
        self.rows: dict[str, list[Tensor]] = {}
        self.drafted: list[list[int]] = []
        self.counts = array("q")
        self.states: list[Tensor | None] = []
        self.parents: list[list[int]] = []  # of trees: the column of the drafted token that each goes on from, -1 = the bonus
        self.missing = self.recomputed = self.after_end = 0
        self.changed = self.ended = False
        self._next: int | None = None  # position of the next row
        self._drafts: list[int] = []  # of the last pass, verified in the next
        self._draft_states: Tensor | None = None

    def add(self, rows: Mapping[str, Tensor], ids: list[int], positions: list[int], *, kept: int, following: int, verified: int,
            drafts: list[int], states: Tensor | None, tested: list[int] | None = None, tested_states: Tensor | None = None,
            parents: list[int] | None = None) -> None:
        """Rows of one pass: `kept` of them stand, the rest was rejected; `verified` drafted tokens were put to the test."""
        prompt = len(self.ticket.about.prompt)
        if self._next is None:
            self._next = self.missing = positions[0]
        if self.ended:
            # An engine that schedules ahead runs a pass for a request whose end it does not know yet.
            self.after_end += len(ids)
            return
        if positions[0] > self._next:
            self.ticket.cut, self.ended = f"rows before position {positions[0]} were not seen", True
            return
        # After a preemption an engine computes rows again that are here already.
        again = min(self._next - positions[0], kept)
        self.recomputed += again
        for name, tensor in rows.items():
            if again < len(ids):
                self.rows.setdefault(name, []).append(tensor[again:])
        number = len(self.counts) if verified else -1
        # In the prompt the next token is not the target's choice.
        chosen = [*ids[again + 1 : kept], following] if kept > again else []
        given = max(0, min(prompt - 1 - positions[again], len(chosen))) if chosen else 0
        fresh = len(ids) - again
        self.token_ids.extend(ids[again:])
        self.positions.extend(positions[again:])
        self.step.extend([number] * fresh)
        self.phase.extend(int(position >= prompt) for position in positions[again:])
        self.accepted.extend([1] * (kept - again) + [0] * (len(ids) - kept))
        self.verified.extend([-1] * given + chosen[given:] + [-1] * (len(ids) - kept))
        if verified:
            if tested is None:
                # Some engines hand the draft the kept rows alone: then the ids are known from when they were drafted.
                tested = ids[1:] if len(ids) == verified + 1 else self._drafts[:verified]
                same = self._draft_states is not None and self._drafts[:verified] == tested
                tested_states = self._draft_states[:verified] if same and self._draft_states is not None else None
            self.drafted.append(tested)
            self.counts.append(kept - 1)
            self.states.append(tested_states)
            self.parents.append(parents or [])
        self._drafts, self._draft_states = drafts, states
        self._next = max(self._next, positions[0] + kept)
        self.ended = self._ends(chosen[given:])
        self.changed = True

    def _ends(self, chosen: list[int]) -> bool:
        about = self.ticket.about
        known = (self._next or 0) + 1
        answered = known - len(about.prompt)
        return answered >= about.max_tokens or known >= about.max_length or (
            answered >= about.min_tokens and not about.stop_ids.isdisjoint(chosen))

    def told(self) -> dict[str, int]:
        return {
            "steps": len(self.counts), "accepted": sum(self.counts), "rows_rejected": self.accepted.count(0),
            "prefix_rows_missing": self.missing, "rows_recomputed": self.recomputed, "rows_after_end": self.after_end,
            "steps_without_draft_states": sum(state is None for state in self.states),
            "rows_without_draft_inputs": len(self.token_ids) - sum(map(len, self.rows.get("draft_input_ids", ()))),
        }

    def columns(self) -> dict[str, Column]:
        rows = (len(self.token_ids),)
        # What some passes had and others had not (`fc` inside a CUDA graph) is no column.
        found = {name: Column.of(pieces) for name, pieces in self.rows.items() if sum(map(len, pieces)) == rows[0]}
        found |= {
            "token_ids": Column("I64", rows, [self.token_ids]), "positions": Column("I64", rows, [self.positions]),
            "phase": Column("U8", rows, [self.phase]), "step": Column("I64", rows, [self.step]),
            "accepted": Column("BOOL", rows, [self.accepted]), "verified_ids": Column("I64", rows, [self.verified]),
        }
        if self.missing:
            found["prefix_token_ids"] = Column("I64", (self.missing,), [array("q", self.ticket.about.prompt[: self.missing])])
        if self.counts:
            k = max(self.k, *map(len, self.drafted))
            found["draft_token_ids"] = Column("I64", (len(self.counts), k), [_padded(self.drafted, k)])
            if any(self.parents):
                found["draft_parents"] = Column("I64", (len(self.counts), k), [_padded(self.parents, k)])
            found["accepted_counts"] = Column("I64", (len(self.counts),), [self.counts])
            states = [state for state in self.states if state is not None]
            if len(states) == len(self.counts):
                width, size = states[0].shape[1], states[0].element_size()
                pieces = [piece for state in states for piece in (state, bytes((k - len(state)) * width * size))]
                found["draft_states"] = Column(_DTYPES[states[0].dtype], (len(states), k, width), pieces)
        return found


def _padded(lists: Sequence[list[int]], width: int) -> array[int]:
    return array("q", (number for numbers in lists for number in [*numbers, *[-1] * (width - len(numbers))]))


def _parents(first_child: list[int], next_sibling: list[int]) -> list[int]:
    """Of each drafted node of a tree the column of the drafted node above it, -1 under the root (node 0, not a column)."""
    parents = [-1] * len(first_child)
    for node, child in enumerate(first_child):
        while child > 0:
            parents[child] = node - 1
            child = next_sibling[child]
    return parents[1:]


class Attachment:
    """What stands between an engine's objects and the recorder: nothing of it raises into the engine."""

    recorder: Recorder
    open: Pass | None = None  # of the pass that is under way

    def safely(self, call: Callable[..., Any], *args: Any) -> None:
        """Call; the first error ends the capture."""
        if self.recorder.stopped is None:
            begun = time.perf_counter()
            try:
                call(*args)
            except Exception as error:
                self.open = None
                self.recorder.stop(f"{type(error).__name__} in {getattr(call, '__name__', 'a call')}: {error}")
            self.recorder.captured["engine_seconds"] += time.perf_counter() - begun


# --- 4. vLLM ------------------------------------------------------------------------------------------------------------
#
# Two runners propose drafts: V1 (`gpu_model_runner.py`, `drafter.propose`) and V2 (`gpu/model_runner.py`,
# `speculator.propose`); read in vllm 0.32 and 0.33. Both call, on Python's side of compiled and graphed regions,
#   execute_model(scheduler_output)      new and finished requests, numbers of drafted tokens
#   propose(...)                         once an engine step, with the rows of all requests end to end
#     combine_hidden_states(states)      the input of `fc` and what comes out
#     model(...)                         once per drafted token; the second thing returned is fed back
# Only these are wrapped, on the objects of one worker; no class is changed but for `WorkerBase.__init__`, which tells when
# there is a worker. A verify step's rows are the last bonus token's, then the drafted ones, the rejected among them.

_MARK = "_draftscope_capture"
_SEEN = ("0.32", "0.33")
_V1 = {"target_token_ids", "target_positions", "next_token_ids", "common_attn_metadata"}
_V2 = {"input_batch", "num_sampled", "num_rejected", "last_sampled"}


class NotHere(Exception):
    """There is nothing that could be captured."""


def watch_vllm() -> None:
    """From now on every vLLM worker of this process is attached to once its models are loaded."""
    base = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    if hasattr(base, _MARK):
        return
    setattr(base, _MARK, VERSION)
    made = base.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        load = self.load_model

        @functools.wraps(load)
        def load_model(*args: Any, **named: Any) -> Any:
            result = load(*args, **named)
            try:
                _attach(self)
            except Exception as error:
                LOG.warning("draftscope captures nothing: %s: %s", type(error).__name__, error)
            return result

        self.load_model = load_model

    base.__init__ = __init__


def _attach(worker: Any) -> None:
    """Record on this worker if its place in the server is the right one, and there is an EAGLE-3 draft on it."""
    options = Options.from_environment()
    if options is None or _MARK in vars(worker):
        return
    setattr(worker, _MARK, VERSION)
    runner, parallel = worker.model_runner, worker.vllm_config.parallel_config
    speculative = worker.vllm_config.speculative_config
    tensor_parallel, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, shard = divmod(worker.rank % (tensor_parallel * pipeline), tensor_parallel)
    # What reaches `fc` is whole on every tensor-parallel rank; the draft is on the last pipeline stage.
    if shard or stage != pipeline - 1:
        return
    if parallel.data_parallel_size > 1:
        options = dataclasses.replace(options, folder=os.path.join(options.folder, f"dp{parallel.data_parallel_rank}"))
    try:
        describe = _describe_vllm(worker)
    except Exception as error:
        describe = {"engine": "vllm", "description_failed": f"{type(error).__name__}: {error}"}
    k = getattr(speculative, "num_speculative_tokens", None) or 0
    try:
        recorder = Recorder(options, describe, k=k)
    except Refused as error:
        LOG.warning("draftscope captures nothing: %s", error)
        return
    atexit.register(recorder.close)
    multiprocessing.util.Finalize(None, recorder.close, exitpriority=0)
    try:
        _Attached(runner, recorder).install()
        shutdown = worker.shutdown

        def shut_down(*args: Any, **named: Any) -> Any:
            recorder.close()
            return shutdown(*args, **named)

        worker.shutdown = shut_down
    except NotHere as error:
        recorder.stop(f"nothing to capture: {error}")
        recorder.close()
        return
    for note in recorder.notes:
        LOG.warning("draftscope capture: %s", note)
    LOG.info("draftscope captures into %s: layers %s", options.folder, describe.get("layer_ids"))


class _Attached(Attachment):
    """The wrappers around one runner and its draft."""

    def __init__(self, runner: Any, recorder: Recorder) -> None:
        self.runner, self.recorder = runner, recorder
        self.length = runner.vllm_config.model_config.max_model_len
        speculative = runner.vllm_config.speculative_config
        if speculative is None:
            raise NotHere("this vLLM runs without speculative decoding")
        if speculative.method != "eagle3":
            raise NotHere(f"its speculative method is {speculative.method}, not eagle3")
        if getattr(runner, "uses_mrope", False):
            raise NotHere("its positions have several axes (multimodal rope), which this file does not record")
        self.drafter = _drafter(runner)
        self.model = _unwrapped(getattr(self.drafter, "model", None))
        if not callable(getattr(self.model, "combine_hidden_states", None)):
            raise NotHere("its draft has no combine_hidden_states: another interface than this file knows")
        self.signature = inspect.signature(self.drafter.propose)
        names = set(self.signature.parameters)
        if names >= _V1:
            self.read, self.which = self._read_v1, "V1"
        elif names >= _V2 and not getattr(self.drafter, "enable_adaptive_verification", False):
            self.read, self.which = self._read_v2, "V2"
        else:
            raise NotHere(f"its draft's `propose` takes {sorted(names)}: another interface than this file knows")
        self.drafted: dict[str, int] = {}
        self.sampled_at: Tensor | None = None  # [R], the row of a pass that each request drafts from
        self.states: list[Tensor] = []
        self.steps: int | None = None  # drafted in this pass, where the engine varies it

    def install(self) -> None:
        recorder, version = self.recorder, str(self.recorder.describe.get("engine_version"))
        if not version.startswith(_SEEN):
            recorder.notes.append(f"vLLM {version} is not among the versions this was written for ({', '.join(_SEEN)}); "
                                  f"attached by what its {self.which} runner offers")
        propose, combine, execute = self.drafter.propose, self.model.combine_hidden_states, self.runner.execute_model

        @functools.wraps(execute)
        def execute_model(*args: Any, **named: Any) -> Any:
            self.safely(self.scheduled, named.get("scheduler_output", args[0] if args else None))
            return execute(*args, **named)

        @functools.wraps(combine)
        def combine_hidden_states(states: Tensor, *args: Any, **named: Any) -> Any:
            self.safely(self.row, "fc_input", states)
            output = combine(states, *args, **named)
            if recorder.options.fc_output:
                self.safely(self.row, "fc_output", output)
            return output

        @functools.wraps(propose)
        def proposed(*args: Any, **named: Any) -> Any:
            self.safely(self.begin, args, named)
            try:
                drafts = propose(*args, **named)
            except BaseException:
                self.open = None
                raise
            self.safely(self.complete, drafts)
            return drafts

        self.runner.execute_model, self.model.combine_hidden_states = execute_model, combine_hidden_states
        self.drafter.propose = proposed
        if recorder.options.draft_states:
            without = self.lacks_states()
            if without is None:
                if self.which == "V2" and "FULL" in str(_get(self.runner, "vllm_config.compilation_config.cudagraph_mode")):
                    recorder.notes.append("steps that vLLM's V2 runner replays as full CUDA graphs are recorded without "
                                          "draft_states and draft_input_ids; for these, serve with -cc.cudagraph_mode=PIECEWISE")
                self.model.register_forward_hook(lambda module, args, output: self.safely(self.ran, output))
            else:
                recorder.notes.append(f"draft_states are left out: {without}")
        self.model.register_forward_pre_hook(
            lambda module, args, named: self.safely(self.runs, named.get("input_ids")), with_kwargs=True)
        recorder._write_description()

    def lacks_states(self) -> str | None:
        """Why the draft's states are not to be had here."""
        if getattr(getattr(self.model, "model", None), "norm_output", False):
            return "with norm_output the draft hands out its states after its final norm only"
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            return "the draft is compiled as a whole; set enforce_eager"
        return None

    def scheduled(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.recorder.finished(name)
        for new in output.scheduled_new_reqs:
            sampling = new.sampling_params
            prompt = new.prompt_token_ids
            if sampling is not None and prompt is not None:
                stops = getattr(sampling, "all_stop_token_ids", None) or getattr(sampling, "stop_token_ids", None) or ()
                self.recorder.started(new.req_id, About(
                    prompt, max_tokens=sampling.max_tokens or 1 << 62, min_tokens=sampling.min_tokens or 0,
                    max_length=self.length, temperature=sampling.temperature,
                    stop_ids=frozenset(stops) | (frozenset() if sampling.ignore_eos else self.end_ids()),
                ))
        self.drafted = {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}

    def end_ids(self) -> frozenset[int]:
        ids = getattr(self.runner.vllm_config.model_config.hf_text_config, "eos_token_id", None)
        return frozenset(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))

    def begin(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before drafting, which overwrites positions and bounds of the batch in place."""
        given = self.signature.bind(*args, **named).arguments
        if not given.get("dummy_run") and not given.get("is_profile"):
            self.states, self.steps = [], given.get("num_speculative_tokens")
            self.read(given)

    def _read_v1(self, given: dict[str, Any]) -> None:
        batch, bounds = self.runner.input_batch, given["common_attn_metadata"]
        names = batch.req_ids[: batch.num_reqs]
        rejected, at = given.get("num_rejected_tokens_gpu"), given.get("token_indices_to_sample")
        following = given["next_token_ids"]
        self.open = self.start(names, bounds.query_start_loc_cpu[: len(names) + 1].tolist())
        if self.open is not None:
            positions = given["target_positions"]
            self.open.rows("token_ids", given["target_token_ids"].clone())
            self.open.rows("positions", (positions if positions.dim() == 1 else positions[0]).clone())
            self.open.each("following", following.clone())
            self.open.each("rejected", torch.zeros_like(following) if rejected is None else rejected.clone())
            self.sampled_at = (bounds.query_start_loc[1 : len(names) + 1] - 1 if at is None else at).clone()

    def _read_v2(self, given: dict[str, Any]) -> None:
        batch, rejected, sampled = given["input_batch"], given["num_rejected"], given["num_sampled"]
        r = batch.num_reqs
        self.open = self.start(batch.req_ids[:r], batch.query_start_loc_np[: r + 1].tolist())
        if self.open is not None:
            last = given["last_sampled"].flatten()[batch.idx_mapping[:r].long()]
            self.open.rows("token_ids", batch.input_ids.clone())
            self.open.rows("positions", batch.positions.clone())
            self.open.each("following", torch.where(sampled[:r] > 0, last.to(torch.int64), -1))
            self.open.each("rejected", rejected[:r].clone())
            self.sampled_at = batch.query_start_loc[1 : r + 1] - 1 - rejected[:r]

    def start(self, names: Sequence[str], bounds: list[int]) -> Pass | None:
        return self.recorder.begin(names, bounds, [self.drafted.get(name, 0) for name in names])

    def row(self, name: str, states: Tensor) -> None:
        if self.open is not None:
            self.open.rows(name, states)

    def runs(self, ids: Tensor | None) -> None:
        """The draft is about to make a step: in its first, keep the tokens that it is given."""
        if self.open is not None and ids is not None and "draft_input_ids" not in self.open.by_row:
            self.open.rows("draft_input_ids", ids.long())

    def ran(self, output: Any) -> None:
        """The draft made a step: keep the state that each request drafts from."""
        if self.open is not None and self.sampled_at is not None:
            states = output[1] if isinstance(output, tuple) else output
            self.states.append(states[: len(self.sampled_at)].clone() if self.states else states[self.sampled_at.long()])

    def complete(self, drafts: Tensor) -> None:
        done, self.open = self.open, None
        if done is not None:
            done.each("drafts", drafts.clone())
            # Fewer calls than drafted tokens: some ran inside a CUDA graph, which only its capture was seen of.
            if self.states and len(self.states) == (drafts.shape[1] if self.steps is None else self.steps):
                done.each("draft_states", torch.stack(self.states, 1))
            self.recorder.commit(done)


def _drafter(runner: Any) -> Any:
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def _unwrapped(model: Any) -> Any:
    unwrap = getattr(model, "unwrap", None)
    return unwrap() if callable(unwrap) else model


def _get(thing: Any, path: str) -> Any:
    """A value along a dotted path, in a form that JSON has; None where it ends early."""
    for name in path.split("."):
        thing = thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    return thing.name if hasattr(thing, "name") and isinstance(thing.name, str) else str(thing)


def _describe_vllm(worker: Any) -> dict[str, Any]:
    """capture.json's description, read from the objects in use rather than from what was asked for."""
    runner, config = worker.model_runner, worker.vllm_config
    drafter = _drafter(runner)
    draft, target = _unwrapped(getattr(drafter, "model", None)), _unwrapped(getattr(runner, "model", None))
    inner = getattr(draft, "model", None)
    modules = list(target.modules()) if isinstance(target, torch.nn.Module) else []
    layers = next((tuple(ids) for m in modules if (ids := getattr(m, "aux_hidden_state_layers", None))), None)
    first = next(iter(getattr(inner, "layers", ()) or ()), None)
    residual = getattr(getattr(first, "_residual_norm", None), "__name__", None)
    d2t = getattr(draft, "draft_id_to_target_id", None)
    held = {id(p) for p in target.parameters()} if modules else set()
    embedding, head = _get_weight(inner, "embed_tokens"), _get_weight(draft, "lm_head")
    return {
        "engine": "vllm", "engine_version": getattr(importlib.import_module("vllm"), "__version__", None),
        "model": _get(config, "model_config.model"), "draft": _get(config, "speculative_config.draft_model_config.model"),
        "layer_ids": layers, "num_spec_tokens": _get(config, "speculative_config.num_speculative_tokens"), "topk": 1,
        "draft_in_effect": {
            "class": type(draft).__name__, "fc_applied": getattr(inner, "use_aux_hidden_state", None),
            "fc_input_width": getattr(inner, "fc_input_size", None), "slots": getattr(inner, "num_aux_hidden_states", None),
            "norm_before_fc": getattr(inner, "norm_before_fc", None), "fc_norm": getattr(inner, "fc_norm", None) is not None,
            "norm_output": getattr(inner, "norm_output", None),
            "norm_before_residual": None if residual is None else residual == "_norm_before_residual",
            "d2t": d2t is not None, "d2t_all_zero": None if d2t is None else not bool(d2t.any()),
            "embedding_shared": embedding is not None and id(embedding) in held,
            "head_shared": head is not None and id(head) in held,
            "rope": _rope(first), "layers": len(getattr(inner, "layers", ()) or ()), "dtype": _get(drafter, "dtype"),
            "parallel_drafting": getattr(drafter, "parallel_drafting", False),
        },
        "switches": {name: _get(config, path) for name, path in {
            "method": "speculative_config.method", "rejection_sample_method": "speculative_config.rejection_sample_method",
            "draft_sample_method": "speculative_config.draft_sample_method",
            "padded_drafter_batch_off": "speculative_config.disable_padded_drafter_batch",
            "draft_enforce_eager": "speculative_config.enforce_eager", "enforce_eager": "model_config.enforce_eager",
            "dtype": "model_config.dtype", "quantization": "model_config.quantization",
            "max_model_len": "model_config.max_model_len", "compilation_mode": "compilation_config.mode",
            "cudagraph_mode": "compilation_config.cudagraph_mode", "prefix_caching": "cache_config.enable_prefix_caching",
            "cache_dtype": "cache_config.cache_dtype", "block_size": "cache_config.block_size",
            "chunked_prefill": "scheduler_config.enable_chunked_prefill",
            "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
            "async_scheduling": "scheduler_config.async_scheduling",
            "tensor_parallel_size": "parallel_config.tensor_parallel_size",
            "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
            "data_parallel_size": "parallel_config.data_parallel_size",
            "data_parallel_rank": "parallel_config.data_parallel_rank",
        }.items()},
        "rank": worker.rank, "tensor_parallel_rank": 0, "runner": type(runner).__module__ + "." + type(runner).__name__,
        "pid": os.getpid(), "torch": torch.__version__,
        "trees": "vLLM drafts chains; a tree would need draft_parents, which this file does not write",
    }


def _get_weight(module: Any, name: str) -> Any:
    return getattr(getattr(module, name, None), "weight", None)


def _rope(layer: Any) -> dict[str, Any] | None:
    rope = getattr(getattr(layer, "self_attn", None), "rotary_emb", None)
    names = ("base", "rotary_dim", "head_size", "max_position_embeddings", "is_neox_style", "scaling_factor")
    return None if rope is None else {"class": type(rope).__name__, **{n: _get(rope, n) for n in names if hasattr(rope, n)}}


# --- 5. SGLang ----------------------------------------------------------------------------------------------------------
#
# Two kinds of worker drive a draft; read in the releases 0.5.5 to 0.5.23 (docs/capture-sglang.md has the table):
#   V1 `eagle_worker.py` (to 0.5.12, one thread):
#     forward_draft_extend(batch, hidden_states, next_token_ids)   a prefill's rows
#     draft(batch), verify(batch)                                  drafted tokens and what became of them
#     forward_draft_extend_after_decode(batch)                     the accepted rows of requests that go on
#   V2 `eagle_worker_v2.py` (overlapped scheduling; the only one from 0.5.14 on):
#     _draft_extend_for_prefill(batch, target_hidden_states, next_token_ids)
#     draft(batch), _draft_extend_for_decode(batch, result)        all rows of a verify step; `accept_lens` counts the bonus
# All of them run between the CUDA graphs, on the stream that the graphs run on. They are wrapped on the classes; the first call
# on a worker, when models and graphs are in place, attaches to it. What the target left behind may lie in a graph's buffers:
# it is cloned on that stream, in its order. Row 0 of a step stands at `seq_lens`, the number of tokens computed before it.

_SGLANG = "sglang.srt.speculative."
_V1_CALLS = {"forward_draft_extend": "prefill", "draft": "drafting", "verify": "verifying",
             "forward_draft_extend_after_decode": "accepted"}
_V2_CALLS = {"_draft_extend_for_prefill": "prefill", "draft": "drafting", "_draft_extend_for_decode": "decode"}
_WORKERS: dict[str, tuple[str, dict[str, str]]] = {
    _SGLANG + "eagle_worker": ("EAGLEWorker", _V1_CALLS),
    _SGLANG + "multi_layer_eagle_worker": ("MultiLayerEagleWorker", _V1_CALLS),
    _SGLANG + "eagle_worker_v2": ("EagleDraftWorker", _V2_CALLS),
    _SGLANG + "multi_layer_eagle_worker_v2": ("MultiLayerEagleDraftWorker", _V2_CALLS),
}
_SGLANG_SEEN = ("0.5.5", "0.5.10", "0.5.11", "0.5.12", "0.5.14", "0.5.23")
_SGLANG_LOG = logging.getLogger("sglang.draftscope_capture")


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the workers' classes as soon as their modules have been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _WORKERS:
            return None
        found = (getattr(finder, "find_spec", None) for finder in sys.meta_path if not isinstance(finder, _Finder))
        spec = next((spec for find in found if find is not None and (spec := find(name, path, target)) is not None), None)
        loader = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                wrap_sglang(module)

            loader.exec_module = exec_module
        return spec


def watch_sglang() -> None:
    """From now on every EAGLE worker of this process is attached to when it first works."""
    for name in _WORKERS:
        if name in sys.modules:
            wrap_sglang(sys.modules[name])
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap_sglang(module: Any) -> None:
    """Wrap the calls of a worker module's class; twice is once."""
    name, calls = _WORKERS[module.__name__]
    kind = getattr(module, name, None)
    if kind is not None and _MARK not in vars(kind):
        setattr(kind, _MARK, VERSION)
        for call, handler in calls.items():
            if inspect.isfunction(vars(kind).get(call)):
                setattr(kind, call, _around(vars(kind)[call], handler))


def _around(inner: Callable[..., Any], handler: str) -> Callable[..., Any]:
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def called(self: Any, *args: Any, **named: Any) -> Any:
        attached = _attached_to(self)
        if attached is None or attached.recorder.stopped is not None:
            return inner(self, *args, **named)
        given: dict[str, Any] = {}

        def bind() -> None:
            given.update(signature.bind(self, *args, **named).arguments)
            given["batch"] = list(given.values())[1]  # `model_worker_batch` in some

        attached.safely(bind)
        before, after = getattr(attached, handler), getattr(attached, handler + "_done", None)
        attached.safely(before, given)
        try:
            result = inner(self, *args, **named)
        except BaseException:
            attached.open = None
            raise
        if after is not None:
            attached.safely(after, given, result)
        return result

    return called


def _attached_to(worker: Any) -> _SGLang | None:
    """What records on this worker, None where nothing does; attaches when asked first."""
    if _MARK not in vars(worker):
        setattr(worker, _MARK, None)
        try:
            setattr(worker, _MARK, _attach_sglang(worker))
        except NotHere as error:
            _SGLANG_LOG.warning("draftscope captures nothing: %s", error)
        except Exception as error:
            _SGLANG_LOG.warning("draftscope captures nothing: %s: %s", type(error).__name__, error)
    attached: _SGLang | None = vars(worker)[_MARK]
    return attached


def _attach_sglang(worker: Any) -> _SGLang | None:
    options = Options.from_environment()
    if options is None:
        return None
    shard, group = _place(worker)
    if shard:  # what reaches `fc` is whole on every tensor-parallel rank
        return None
    if group is not None:
        options = dataclasses.replace(options, folder=os.path.join(options.folder, f"dp{group}"))
    attached = _SGLang(worker)
    recorder = Recorder(options, _describe_sglang(worker), k=attached.nodes - 1, log=_SGLANG_LOG)
    attached.install(recorder)
    atexit.register(attached.close)
    multiprocessing.util.Finalize(None, attached.close, exitpriority=0)
    for note in recorder.notes:
        _SGLANG_LOG.warning("draftscope capture: %s", note)
    _SGLANG_LOG.info("draftscope captures into %s: layers_to_capture %s", options.folder, recorder.describe.get("layer_ids"))
    return attached


def _place(worker: Any) -> tuple[int, int | None]:
    """The worker's place among those that hold the same rows, and which data-parallel group's they are (None = there is one)."""
    arguments = worker.server_args
    tensor, groups = int(arguments.tp_size), int(getattr(arguments, "dp_size", 1) or 1)
    parts = int(getattr(arguments, "attn_cp_size", 1) or 1)
    if parts > 1:
        raise NotHere("context parallelism splits a request's rows among ranks")
    rank = getattr(worker, "tp_rank", None)
    if rank is None:  # 0.5.23 hands it to no worker
        rank = torch.distributed.get_rank() % tensor if torch.distributed.is_initialized() else 0
    if groups > 1 and getattr(arguments, "enable_dp_attention", False):
        same = tensor // groups
        return rank % same, rank // same
    if groups > 1:
        replica = getattr(worker, "dp_rank", None)
        if replica is None:
            replica = getattr(importlib.import_module("sglang.srt.runtime_context").get_parallel(), "dp_rank", None)
        return rank, os.getpid() if replica is None else int(replica)
    return rank, None


def _draft_runner(worker: Any) -> Any:
    """The model runner of the draft, the first of several."""
    if callable(several := getattr(worker, "mtp_model_runner", None)) and not hasattr(worker, "draft_runner_list"):
        return several(0)
    several = getattr(worker, "draft_runner_list", None)
    if several:
        return several[0]
    return getattr(worker, "draft_runner", None) or worker.draft_model_runner


class _SGLang(Attachment):
    """What records on one worker."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.runner = worker, _draft_runner(worker)
        self.several = "MultiLayer" in type(worker).__name__
        algorithm = str(getattr(worker.speculative_algorithm, "name", worker.speculative_algorithm))
        if algorithm.upper() == "STANDALONE":
            raise NotHere("a standalone draft receives no hidden states")
        self.fc: Any = getattr(getattr(self.runner.model, "model", None), "fc", None)
        if self.fc is None:
            raise NotHere(f"its draft, {type(self.runner.model).__name__}, has no `fc`: no EAGLE-3 draft")
        self.topk, self.nodes = int(worker.topk), int(worker.speculative_num_draft_tokens)
        self.following: dict[str, Any] = {}  # requests by id, weakly
        self.in_draft = self.wants_states = False
        self.states: list[Tensor] = []  # [R, H] each, what the drafted tokens were read from
        self.width: int | None = None  # of the states received
        self.verified: Any = None  # V1: what `verify` was given
        self.total = 0

    def install(self, recorder: Recorder) -> None:
        self.recorder = recorder
        recorder.idle = self.rest
        version = str(recorder.describe.get("engine_version"))
        if version not in _SGLANG_SEEN:
            recorder.notes.append(f"SGLang {version} is not among the versions this was written for "
                                  f"({', '.join(_SGLANG_SEEN)}); attached by what its workers offer")
        if recorder.options.fc_output:
            if getattr(self.worker, "cuda_graph_runner_for_draft_extend", None) is not None:
                recorder.notes.append("fc_output is left out: `fc` runs inside the draft's CUDA graph")
            else:
                self.fc.register_forward_hook(lambda module, args, output: self.safely(self.row, "fc_output", output))
        without = self.lacks_states()
        if recorder.options.draft_states and without is not None:
            recorder.notes.append(f"draft_states are left out: {without}")
        self.wants_states = recorder.options.draft_states and without is None
        if self.wants_states:
            forward = self.runner.forward

            @functools.wraps(forward)
            def step(*args: Any, **named: Any) -> Any:
                output = forward(*args, **named)
                if self.in_draft:
                    self.safely(self.ran, output)
                return output

            self.runner.forward = step
        recorder._write_description()

    def lacks_states(self) -> str | None:
        """Why the draft's states are not to be had here."""
        if self.topk > 1:
            return "a tree's are not in the order of its nodes"
        if self.several:
            return "every drafted token has a draft layer of its own"
        if getattr(self.runner.model.model, "norm_output", False):
            return "with norm_output the draft hands out its states after its final norm only"
        if getattr(self.worker, "cuda_graph_runner", None) is not None and self.worker.speculative_num_steps > 1:
            return "all but the first stay inside the draft's CUDA graph"
        return None

    # Requests.

    def follow(self, requests: Sequence[Any]) -> list[str]:
        """The ids of a pass's requests; those that are new begin, those that have ended end."""
        names = [str(request.rid) for request in requests]
        self.poll(frozenset(names))
        for name, request in zip(names, requests, strict=True):
            known = self.following.get(name)
            if known is not None and known() is not request:  # an id of the user's, used again
                self.recorder.finished(name)
                known = None
            if known is None:
                self.following[name] = weakref.ref(request)
                if name.startswith("HEALTH_CHECK"):
                    self.recorder._tickets[name] = None
                else:
                    self.recorder.started(name, _about_sglang(request))
        return names

    def poll(self, but: frozenset[str] = frozenset()) -> None:
        for name, known in list(self.following.items()):
            if name not in but and ((request := known()) is None or request.finished()):
                self.following.pop(name, None)
                self.recorder.finished(name)

    def rest(self) -> None:
        if self.open is None:
            self.poll()

    def close(self) -> None:
        self.poll()
        self.recorder.close()

    # Prefill, the same in both kinds of worker.

    def prefill(self, given: dict[str, Any]) -> None:
        batch = given["batch"]
        if batch.forward_mode.is_idle() or not (requests := self.requests(batch)):
            return
        counts = _numbers(_first(batch, "extend_lens", "extend_seq_lens"))
        starts = _numbers(_first(batch, "prefix_lens", "extend_prefix_lens"))
        hidden = given["target_hidden_states"] if "target_hidden_states" in given else given["hidden_states"]
        if self.begin(requests, counts, [0] * len(counts), hidden) and self.open is not None:
            self.open.rows("token_ids", batch.input_ids.long().clone())
            self.open.rows("positions", _ranges(starts, counts))
            following = given["next_token_ids"].long().clone()
            self.open.each("following", following)
            self.open.each("rejected", torch.zeros_like(following))

    def prefill_done(self, given: dict[str, Any], result: Any) -> None:
        if self.open is not None and not self.several:  # several layers go on rotating
            self.open.rows("draft_input_ids", given["batch"].input_ids.long().clone())
        self.commit()

    # V2: all rows of a verify step, with a device's numbers.

    def decode(self, given: dict[str, Any]) -> None:
        batch, result = given["batch"], given["batch_result"]
        if batch.forward_mode.is_idle() or not (requests := self.requests(batch)):
            return
        verified, r, nodes = batch.spec_info, len(requests), int(batch.spec_info.draft_token_num)
        if self.begin(requests, [nodes] * r, [nodes - 1] * r, result.logits_output.hidden_states) and self.open is not None:
            kept = result.accept_lens[:r].long()
            # After each row; of a tree, along the accepted path, which stands in front.
            chosen = result.next_token_ids[: r * nodes].long().view(r, nodes)
            tokens = verified.draft_token[: r * nodes].long().view(r, nodes)
            rows = tokens if int(verified.topk) == 1 else torch.cat([tokens[:, :1], chosen[:, :-1]], 1)
            places = batch.seq_lens[:r].long()[:, None] + torch.arange(nodes, device=batch.seq_lens.device)
            self.open.rows("token_ids", rows.flatten().clone())
            self.open.rows("positions", places.flatten())
            self.open.rows("draft_input_ids", chosen.flatten().clone())
            self.open.each("following", chosen.gather(1, (kept - 1)[:, None]).squeeze(1))
            self.open.each("rejected", nodes - kept)
            self.tell_tested(verified, tokens, None)

    def decode_done(self, given: dict[str, Any], result: Any) -> None:
        self.commit()

    # V1: the accepted rows of requests that go on.

    def verifying(self, given: dict[str, Any]) -> None:
        self.verified = given.get("spec_info", given["batch"].spec_info)

    def verifying_done(self, given: dict[str, Any], result: Any) -> None:
        """The draft has no use for the last step of a request that has ended, and gets nothing of it."""
        ended = [request for request in given["batch"].reqs if request.finished()]
        if ended and not given["batch"].forward_mode.is_idle():
            last = sum(self.recorder._tickets.get(name) is not None for name in (str(request.rid) for request in ended))
            counted = self.recorder.captured
            counted["last_steps_not_drafted"] = counted.get("last_steps_not_drafted", 0) + last

    def accepted(self, given: dict[str, Any]) -> None:
        batch = given["batch"]
        verified, self.verified = self.verified, None
        extend = batch.spec_info
        ids = getattr(extend, "input_ids", None)
        ids = extend.verified_id if ids is None else ids
        if batch.forward_mode.is_idle() or verified is None:
            return
        going = [i for i, request in enumerate(batch.reqs) if not request.finished()]
        if not going or not len(ids):
            return
        counts = getattr(extend, "num_accepted_tokens_cpu", None) or getattr(extend, "num_accept_tokens_cpu", None)
        counts = _numbers(counts) if counts else [count + 1 for count in _numbers(extend.accept_length_cpu)]
        nodes = int(verified.draft_token_num)
        requests = [batch.reqs[i] for i in going]
        if self.begin(requests, counts, [nodes - 1] * len(going), extend.hidden_states) and self.open is not None:
            ends = _numbers(_first(extend, "seq_lens_for_draft_extend_cpu", "seq_lens_cpu"))
            bounds = [0, *itertools.accumulate(counts)]
            tokens, ids = verified.draft_token.long().view(-1, nodes), ids.long()
            if len(going) < len(batch.reqs):
                tokens = tokens[_on(going, tokens)]
            rows = torch.cat([ids[:1], ids[:-1]])
            rows[_on(bounds[:-1], ids)] = tokens[:, 0]
            self.open.rows("token_ids", rows)
            self.open.rows("positions", _ranges([end - count for end, count in zip(ends, counts, strict=True)], counts))
            self.open.rows("draft_input_ids", ids.clone())
            following = ids[_on(bounds[1:], ids) - 1]
            self.open.each("following", following)
            self.open.each("rejected", torch.zeros_like(following))
            self.tell_tested(verified, tokens, going)

    def accepted_done(self, given: dict[str, Any], result: Any) -> None:
        self.commit()

    # The draft's own steps.

    def drafting(self, given: dict[str, Any]) -> None:
        self.states, self.in_draft = [], False
        hidden = getattr(given["batch"].spec_info, "hidden_states", None)
        if self.wants_states and hidden is not None and not given["batch"].forward_mode.is_idle():
            self.states.append(hidden.clone())
            self.in_draft = True

    def drafting_done(self, given: dict[str, Any], result: Any) -> None:
        self.in_draft = False

    def ran(self, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else getattr(output, "logits_output", output)
        self.states.append(output.hidden_states.clone())

    # What all passes have.

    def requests(self, batch: Any) -> Sequence[Any]:
        requests: Sequence[Any] | None = getattr(batch, "reqs", None)
        if requests is None:
            raise NotHere("its batches name no requests: run it with SGLANG_ENABLE_SPEC_V2=0")
        return requests

    def begin(self, requests: Sequence[Any], counts: list[int], drafted: list[int], hidden: Tensor) -> bool:
        names = self.follow(requests)
        self.total = sum(counts)
        if len(names) != len(counts) or len(hidden) < self.total:
            raise ValueError(f"{len(hidden)} states and {len(names)} requests for {self.total} rows of {len(counts)}")
        if self.width is None:
            # SGLang's draft decides by width: states as wide as its embedding go past `fc`.
            self.width, embedding = hidden.shape[-1], _get_weight(self.runner.model.model, "embed_tokens")
            applied = None if embedding is None else self.width != embedding.shape[-1]
            self.recorder.describe["draft_in_effect"] |= {"fc_applied": applied, "fc_received_width": self.width}
        self.open = self.recorder.begin(names, [0, *itertools.accumulate(counts)], drafted)
        if self.open is not None:
            self.open.rows("fc_input", hidden[: self.total].clone())
        return self.open is not None

    def tell_tested(self, verified: Any, tokens: Tensor, going: list[int] | None) -> None:
        """Drafted tokens, their tree and their states. `going`: which of the verified requests the pass is of, None = all."""
        if self.open is None:
            return
        r, nodes = tokens.shape
        at = None if going is None else _on(going, tokens)
        self.open.each("tested", tokens[:, 1:].clone())
        if int(verified.topk) > 1:
            self.open.drop_rejected = True
            for name, was, now in (("first_child", "retrive_next_token", "retrieve_next_token"),
                                   ("next_sibling", "retrive_next_sibling", "retrieve_next_sibling")):
                links = _first(verified, now, was).long()
                self.open.each(name, (links[:r] if at is None else links[at]).clone())
        elif 1 < nodes <= len(self.states) + 1:
            states = torch.stack(self.states[: nodes - 1], 1)
            self.open.each("tested_states", states[:r] if at is None else states[at])

    def row(self, name: str, tensor: Any) -> None:
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        whole = getattr(getattr(self.runner.model, "config", None), "hidden_size", tensor.shape[-1])  # else a rank's part
        if self.open is not None and name not in self.open.by_row and len(tensor) >= self.total and tensor.shape[-1] == whole:
            self.open.rows(name, tensor[: self.total].clone())

    def commit(self) -> None:
        done, self.open = self.open, None
        if done is not None:
            self.recorder.commit(done)


def _first(thing: Any, *names: str) -> Any:
    """The first of some attributes that a version has."""
    found = next((value for name in names if (value := getattr(thing, name, None)) is not None), None)
    if found is None:
        raise AttributeError(f"{type(thing).__name__} has none of {', '.join(names)}")
    return found


def _on(numbers: list[int], like: Tensor) -> Tensor:
    """As a tensor on another's device, without waiting for it."""
    return torch.tensor(numbers).to(like.device, non_blocking=True)


def _ranges(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def _about_sglang(request: Any) -> About:
    sampling, tokenizer = request.sampling_params, getattr(request, "tokenizer", None)
    stops = set(sampling.stop_token_ids or ())
    if not sampling.ignore_eos:
        stops |= set(request.eos_token_ids or ())
        if tokenizer is not None:
            stops |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())} - {None}
    most = sampling.max_new_tokens
    return About(
        list(request.origin_input_ids), max_tokens=1 << 62 if most is None else most, min_tokens=sampling.min_new_tokens or 0,
        # SGLang turns temperature 0 into 1 with the first token alone to choose from.
        stop_ids=frozenset(stops), temperature=0.0 if sampling.top_k == 1 else sampling.temperature,
    )


def _describe_sglang(worker: Any) -> dict[str, Any]:
    """capture.json's description, read from the objects in use: layer ids above all, which one may set and another reset."""
    arguments, runner = worker.server_args, _draft_runner(worker)
    target = worker.target_worker.model_runner.model
    draft, inner = runner.model, runner.model.model
    modules = list(target.modules()) if isinstance(target, torch.nn.Module) else []
    layers = next((list(ids) for m in modules if (ids := getattr(m, "layers_to_capture", None))), None)
    stack = list(getattr(inner, "layers", None) or filter(None, [getattr(inner, "midlayer", None)]))
    held = {id(p) for p in target.parameters()} if modules else set()
    embedding, head = _get_weight(inner, "embed_tokens"), _get_weight(draft, "lm_head")
    config = getattr(getattr(runner, "model_config", None), "hf_config", None)
    width, each = _width(inner.fc), getattr(inner, "hidden_size_in", None)
    hot = getattr(draft, "hot_token_id", None)
    algorithm = str(getattr(worker.speculative_algorithm, "name", worker.speculative_algorithm))
    try:
        version: Any = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = getattr(sys.modules.get("sglang"), "__version__", None)
    settled: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # 0.5.23 leaves in its arguments what was asked for, and keeps what came of it elsewhere
        settled = importlib.import_module("sglang.srt.runtime_context").get_context().resolved_server_args_dict()
    fields = [
        "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_token_map",
        "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "speculative_attention_mode",
        "speculative_draft_window_size", "speculative_use_rejection_sampling", "speculative_use_block_verification",
        "speculative_adaptive", "speculative_draft_model_quantization", "enable_multi_layer_eagle", "disable_overlap_schedule",
        "disable_cuda_graph", "enable_torch_compile", "disable_radix_cache", "chunked_prefill_size", "page_size", "dtype",
        "quantization", "kv_cache_dtype", "context_length", "attention_backend", "prefill_attention_backend",
        "decode_attention_backend", "tp_size", "pp_size", "dp_size", "enable_dp_attention", "ep_size", "disaggregation_mode",
    ]
    return {
        "engine": "sglang", "engine_version": version, "model": _get(arguments, "model_path"),
        "draft": _get(arguments, "speculative_draft_model_path"), "layer_ids": layers,
        "layer_ids_are": "layers_to_capture in effect: the residual stream before the layer of that number",
        "layer_ids_configured": _listed(_get_raw(config, "eagle_config", "eagle_aux_hidden_state_layer_ids")),
        "num_spec_tokens": int(worker.speculative_num_draft_tokens) - 1, "topk": int(worker.topk),
        "draft_in_effect": {
            "class": type(draft).__name__, "algorithm": algorithm,
            "fc_input_width": width,
            "slots": getattr(inner, "num_aux_hidden_states", None) or (width // each if width and each else None),
            "norm_before_fc": getattr(inner, "input_norm", None) is not None,
            "fc_norm": getattr(inner, "fc_norm", None) is not None,
            "norm_output": bool(getattr(inner, "norm_output", False)), "norm_before_residual": False,
            "d2t": hot is not None, "d2t_all_zero": None if hot is None else bool((hot.cpu() == torch.arange(len(hot))).all()),
            "embedding_shared": embedding is not None and id(embedding) in held,
            "head_shared": head is not None and id(head) in held,
            "rope": _rope(stack[0] if stack else None), "layers": len(stack), "dtype": str(getattr(runner, "dtype", None)),
            "capture_aux_hidden_states": next((True for m in modules if getattr(m, "capture_aux_hidden_states", False)), False),
        },
        "switches": {
            "algorithm": algorithm, "num_steps_in_effect": int(worker.speculative_num_steps),
            "draft_graph": getattr(worker, "cuda_graph_runner", None) is not None,
            "draft_extend_graph": getattr(worker, "cuda_graph_runner_for_draft_extend", None) is not None,
            **{name: _get(settled if name in settled else arguments, name) for name in fields},
            **{name: os.environ[name] for name in sorted(os.environ) if name.startswith("SGLANG_SIMULATE_ACC")},
        },
        "worker": type(worker).__module__ + "." + type(worker).__name__, "tensor_parallel_rank": 0, "pid": os.getpid(),
        "torch": torch.__version__,
    }


def _width(linear: Any) -> int | None:
    return getattr(linear, "in_features", None) or getattr(linear, "input_size", None)


def _get_raw(thing: Any, *names: str) -> Any:
    for name in names:
        thing = thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)
    return thing


def _listed(values: Any) -> list[Any] | None:
    return list(values) if isinstance(values, (list, tuple)) else None


# --- 6. Entry points ----------------------------------------------------------------------------------------------------


def register() -> None:
    """The `vllm.general_plugins` entry point, which vLLM calls in each of its processes; does nothing unless asked to."""
    try:
        if Options.from_environment() is not None:
            watch_vllm()
    except Exception as error:
        LOG.warning("draftscope captures nothing: %s: %s", type(error).__name__, error)


def register_sglang() -> None:
    """The `sglang.srt.plugins` entry point (SGLang 0.5.11 and newer calls it in each of its processes); likewise."""
    try:
        if Options.from_environment() is not None:
            watch_sglang()
    except Exception as error:
        _SGLANG_LOG.warning("draftscope captures nothing: %s: %s", type(error).__name__, error)


class Extension:
    """For `--worker-extension-cls`: vLLM imports this module for it in every worker process, and that is all it is for."""


if __name__ != "draftscope.engines.inside":  # a copy of this file, imported by an engine
    __path__: list[str] = []  # an empty package, which is what SGLANG_EXTERNAL_MODEL_PACKAGE wants
    if "sglang" in sys.modules:
        register_sglang()
    else:
        register()
