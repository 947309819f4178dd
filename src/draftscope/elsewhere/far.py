"""What runs where the files lie: one job, its answers as frames on stdout.

stdout is the frames' alone, behind a line that is the mark (login shells may print before it). A frame is two lengths of eight
bytes, big-endian, a JSON object, and bytes. The process ends when its stdin does: the other side has gone.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from draftscope.errors import DraftscopeError, UsageError

SILENCE = 60.0
"""Seconds without a sign of life of the other side after which it counts as gone."""
GONE = 75
EVERY = 0.2
"""Seconds between words about the progress."""


class Frames:
    """Writes frames to what was stdout; whatever else prints goes to stderr from now on."""

    def __init__(self, mark: str) -> None:
        self._file = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._file.write(f"\n{mark}\n".encode())
        self._last = 0.0
        self._done = 0

    def send(self, held: dict[str, Any], more: bytes = b"") -> None:
        text = json.dumps(held, default=str).encode("utf-8", "backslashreplace")
        self._file.write(struct.pack(">QQ", len(text), len(more)) + text + more)
        self._file.flush()

    def advance(self) -> None:
        """One item more was read."""
        self._done += 1
        if time.monotonic() - self._last > EVERY:
            self.send({"kind": "progress", "items": self._done})
            self._last, self._done = time.monotonic(), 0


def work(mark: str, job: dict[str, Any]) -> None:
    """Do a job: niced, under its memory limit, in a temporary folder that is gone before the end is told."""
    frames = Frames(mark)
    folder = tempfile.mkdtemp(prefix="draftscope-")
    tempfile.tempdir = folder

    clearing = threading.Lock()  # two at once would leave what neither could remove

    def clear() -> None:
        with clearing:
            shutil.rmtree(folder, ignore_errors=True)

    def leave(code: int) -> None:
        clear()
        os._exit(code)

    def stop(*_: object) -> None:
        # In the middle of clearing it is over soon enough.
        if not clearing.locked():
            leave(GONE)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    threading.Thread(target=_watch, args=(leave,), daemon=True).start()
    code = 0
    try:
        _modestly(job)
        _do(job, frames)
        clear()
        frames.send({"kind": "end"})
    except BrokenPipeError:
        code = GONE
    except DraftscopeError as error:
        frames.send(_told(error))
    except ImportError as error:
        frames.send(_lacks(error))
    except BaseException as error:
        frames.send({"kind": "broken", "memory": _is_memory(error), "what": f"{type(error).__name__}: {error}"[:2000]})
    leave(code)


def _watch(leave: Callable[[int], None], lifeline: int = 0, silence: float = SILENCE) -> None:
    """Leave when the lifeline ends, or nothing has come over it for so many seconds."""
    while True:
        ready, _, _ = select.select([lifeline], [], [], silence)
        if not ready or not os.read(lifeline, 4096):
            leave(GONE)
            return


def _modestly(job: dict[str, Any]) -> None:
    """A server may be running here: yield to it, take few threads, no GPU and no more memory than was allowed."""
    with suppress(OSError):
        os.nice(10)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads = int(job["threads"])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    limit = int(job["memory"])
    # Private memory: what torch allocates, and files that are mapped to be read.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    torch.set_num_threads(threads)


def _do(job: dict[str, Any], frames: Frames) -> None:
    if job["what"] == "scan":
        from draftscope.elsewhere.tasks import scan_parts

        for answer, more in scan_parts(job, lambda said: frames.send({"kind": "begun", **said}), frames.advance):
            frames.send({"kind": "answer", **answer}, more)
        return
    from draftscope.elsewhere.tasks import inspect_one

    for path in job["paths"]:
        try:
            answer, more = inspect_one(path, job, frames.advance)
        except UsageError:
            raise
        except DraftscopeError as error:
            frames.send(_told(error))
        except ImportError as error:
            frames.send(_lacks(error))
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            frames.send({"kind": "broken", "memory": True, "what": str(error)[:2000]})
        else:
            frames.send({"kind": "answer", **answer}, more)


def _told(error: DraftscopeError) -> dict[str, Any]:
    return {"kind": "error", "what": error.what, "where": error.where, "remedy": error.remedy,
            "usage": isinstance(error, UsageError)}


def _lacks(error: ImportError) -> dict[str, Any]:
    return {"kind": "lacks", "module": (error.name or "").partition(".")[0], "what": str(error)}


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "not enough memory" in text
