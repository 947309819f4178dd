"""Temporary names beside what is being written, and what killed processes left under them.

Whatever is written whole goes to a temporary name first. A process that is killed on the way leaves that behind, so the name says
whose it is: the system (one boot of one kernel, with one numbering of processes) and the process's number there. What no living
process of this system can own is removed by the next that writes there; other machines that share the disk are left alone.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

from draftscope.errors import DraftscopeError

SUFFIX = ".part"
_NAME = re.compile(r"\.(?P<name>.+)\.(?P<system>[0-9a-f]{8})-(?P<pid>[1-9]\d{0,9})" + re.escape(SUFFIX), re.DOTALL)
_WORK = "draftscope-"


@cache
def _system() -> str:
    told = [platform.node()]
    with suppress(OSError):
        told.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        told.append(os.readlink("/proc/self/ns/pid"))
    return blake2b("|".join(told).encode(), digest_size=4).hexdigest()


def temporary(path: Path) -> Path:
    """The name beside `path` under which this process writes it."""
    return path.with_name(f".{path.name}.{_system()}-{os.getpid()}{SUFFIX}")


def save_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it.

    Raises:
        DraftscopeError: the disk refuses; what was there stays.
    """
    part = temporary(path)
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise DraftscopeError(f"cannot be written ({error.strerror})", where=str(path)) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def save_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it.

    Raises:
        DraftscopeError: the disk refuses; what was there stays.
    """
    save_bytes(path, text.encode())


def sweep_up(folder: Path, name: str = "", *, prefix: str = "") -> list[Path]:
    """Remove from a folder what killed processes of this system left there; what could not be removed is passed over.

    Args:
        name: only what was to become this file or folder. prefix: only what was to become one whose name begins so.

    Returns:
        What was removed.
    """
    removed = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is None or (name and found["name"] != name) or not found["name"].startswith(prefix):
                continue
            if found["system"] != _system() or _alive(int(found["pid"])):
                continue
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
                removed.append(Path(entry.path))
    return removed


@contextmanager
def scratch(folder: Path, name: str) -> Iterator[Path]:
    """A folder of this process alone below another one, gone afterwards; those of killed ones go first."""
    sweep_up(folder, name)
    made = temporary(folder / name)
    made.mkdir(mode=0o700)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder in the system's place for temporary files, gone afterwards; what killed processes left there goes first."""
    made = _make_workspace()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def lasting_workspace() -> Path:
    """The same until this process ends."""
    made = _make_workspace()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _make_workspace() -> Path:
    _sweep_temporary_files(tempfile.gettempdir())
    made = temporary(Path(tempfile.gettempdir()) / f"{_WORK}{secrets.token_hex(4)}")
    made.mkdir(mode=0o700)
    return made


@cache
def _sweep_temporary_files(folder: str) -> None:
    sweep_up(Path(folder), prefix=_WORK)


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # asking would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
