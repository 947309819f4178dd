"""The items of a source one after the other, the next of them read ahead while one is worked on."""

from __future__ import annotations

import ctypes
import mmap
import queue
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.scan.inputs import UNKNOWN, Stamp, stamp_of
from draftscope.states.folder import FileSource
from draftscope.states.places import Place, Unreachable
from draftscope.states.types import Sample, Skipped, Source, Trace

AHEAD = 48 * 2**20
"""Bytes of sequences that wait: with fewer the next file is read."""
LARGEST = 256 * 2**20
"""Bytes of a sequence that is mapped before it is its turn; of a larger one the disk is only told."""
STEP = 8 * 2**20
"""Bytes mapped by one call, so that a wish to stop is heard in between."""
_WILLNEED, _POPULATE_READ = 3, 22


@dataclass(slots=True)
class Read:
    """What lies at one position of a source.

    Attributes:
        position: number of the file in the source.
        file: None where the source is none of files.
        items: sequences of it; empty where it was unreadable.
        error: why it is.
        bad: rows of it that were passed over.
        stamp: of the file before it was opened.
    """

    position: int
    file: Place | None
    items: list[Any]
    error: DraftscopeError | None = None
    stamp: Stamp = UNKNOWN
    bad: tuple[Skipped, ...] = ()

    def changed(self) -> bool:
        """Whether the file is another by now."""
        if self.file is None:
            return False
        try:
            return stamp_of(self.file) != self.stamp
        except OSError:
            return True


def read_ahead(source: Source, positions: Sequence[int]) -> Generator[Read]:
    """What lies at the positions, in their order.

    A thread opens the next files and has their pages read and mapped; what is bad is told with the item, not raised.
    """
    if not isinstance(source, FileSource):
        wanted = set(positions)
        for position, item in enumerate(source):
            if position in wanted:
                yield Read(position, None, [item])
        return
    held: queue.SimpleQueue[tuple[int, Read | BaseException | None]] = queue.SimpleQueue()
    room, ended = threading.Condition(), threading.Event()
    waiting = 0

    def work() -> None:
        nonlocal waiting
        try:
            for position in positions:
                with room:
                    while waiting >= AHEAD and not ended.is_set():
                        room.wait()
                if ended.is_set():
                    return
                read = read_one(source, position)
                size = _touched(read, ended)
                with room:
                    waiting += size
                held.put((size, read))
                del read
            held.put((0, None))
        except BaseException as error:
            held.put((0, error))

    thread = threading.Thread(target=work, name="draftscope-read", daemon=True)
    thread.start()
    try:
        while True:
            size, one = held.get()
            if one is None:
                return
            if isinstance(one, BaseException):
                raise one
            with room:
                waiting -= size
                room.notify()
            yield one
    finally:
        ended.set()
        with room:
            room.notify()
        thread.join()


def read_one(source: FileSource[Any], position: int) -> Read:
    """One file of a source.

    Raises:
        Unreachable: a store does not answer.
    """
    file, before = source.files[position], len(source.skipped)
    try:
        stamp = stamp_of(file)
        items = source.items(position)
        return Read(position, file, items, None, stamp, tuple(skip for skip in source.skipped[before:] if skip.row >= 0))
    except Unreachable:
        raise
    except OSError as error:
        return Read(position, file, [], DraftscopeError(error.strerror or "cannot be read", where=str(file)))
    except DraftscopeError as error:
        return Read(position, file, [], error)


def _touched(read: Read, ended: threading.Event) -> int:
    """Bytes of what was read, its pages in memory by now."""
    states = [_states(item) for item in read.items]
    for one in states:
        _touch(one, ended)
    return sum(one.nbytes for one in states)


def _states(item: Sample | Trace) -> Tensor:
    return item.states if isinstance(item, Sample) else item.fc_input


def _touch(states: Tensor, ended: threading.Event) -> None:
    """Have the pages of states read, if they are mapped from a file; elsewhere this changes nothing."""
    if sys.platform != "linux" or states.device.type != "cpu" or states.numel() == 0:
        return
    call = ctypes.CDLL(None).madvise
    start = states.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = states.data_ptr() + states.nbytes
    advice = _WILLNEED if states.nbytes > LARGEST else _POPULATE_READ
    for at in range(start, end, STEP):
        size = min(STEP, end - at)
        if ended.is_set() or call(ctypes.c_void_p(at), ctypes.c_size_t(size), advice):
            return  # an older kernel, or memory that is no file's: it is read when it is used
