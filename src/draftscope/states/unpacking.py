"""Compressed files (`.gz`) unpacked to a nameless temporary file, piece by piece, under a limit."""

from __future__ import annotations

import gzip
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftscope.states.errors import StatesError
from draftscope.states.leftover import workspace
from draftscope.states.places import Place

RATIO = 64
"""Floating states hardly shrink; from this factor on the file is taken for a bomb."""
FLOOR = 16 * 2**20
"""Small files may be anything: this much is always unpacked."""
RESERVE = 256 * 2**20
"""Of the disk's free space, never filled."""
PIECE = 2**20


@contextmanager
def unpacked(path: Path, named: Place | None = None) -> Iterator[Path]:
    """The content of a gzip file as a file, removed on leaving (what was mapped from it stays readable).

    Args:
        named: what messages call it.

    Raises:
        StatesError: no whole gzip file, or one that declares or gives more than a file of its size may.
    """
    named = named or path
    try:
        size = path.stat().st_size
        declared = _declared(path, named, size)
        limit = max(RATIO * size, FLOOR)
        free = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        raise StatesError(f"cannot be read ({error.strerror})", cause="broken", where=str(named)) from None
    if declared > limit:
        raise _bomb(named, f"declares {declared:,} bytes unpacked", size)
    if declared > free - RESERVE:
        raise StatesError(f"needs {declared:,} bytes unpacked, more than {tempfile.gettempdir()} has to spare", cause="broken",
                          where=str(named), remedy="Set TMPDIR to a larger disk")
    with workspace() as folder:
        target = folder / path.name.removesuffix(".gz")
        _unpack(path, target, named, min(limit, max(free - RESERVE, FLOOR)), size)
        yield target


def _declared(path: Path, named: Place, size: int) -> int:
    """What the trailer says, modulo 2**32."""
    if size < 18:
        raise StatesError("is too short for a gzip file", cause="broken", where=str(named), remedy="Copy or write it again")
    with path.open("rb") as file:
        file.seek(-4, 2)
        return int(struct.unpack("<I", file.read(4))[0])


def _unpack(path: Path, target: Path, named: Place, limit: int, size: int) -> None:
    written = 0
    try:
        with gzip.open(path, "rb") as source, target.open("wb") as sink:
            while piece := source.read(PIECE):
                written += len(piece)
                if written > limit:
                    raise _bomb(named, f"gives more than {limit:,} bytes", size)
                sink.write(piece)
    except (OSError, EOFError, zlib.error) as error:
        text = str(error).strip() or type(error).__name__
        raise StatesError(f"is no whole gzip file ({text[:200]})", cause="broken", where=str(named),
                          remedy="Copy or write it again") from None


def _bomb(path: Place, what: str, size: int) -> StatesError:
    return StatesError(f"{what} out of {size:,}: states do not shrink like that, so it was not unpacked further", cause="broken",
                       where=str(path), remedy="Unpack it yourself if you know what it is, and name the result")
