"""The diagnoses in a folder, found by what they hold; nothing outside of it is opened, whatever links lie in it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from pydantic import ValidationError

from draftscope.findings import Diagnosis
from draftscope.text import visible

DEPTH, FILES, BYTES = 5, 5000, 64 << 20
"""How deep a folder is looked into, how many JSON files are looked at, and how large one may be."""
MARK = b'"draftscope.diagnosis/1"'
HEAD = 4096


@dataclass(frozen=True, slots=True)
class Run:
    """One diagnosis; `id` names it in addresses, so that no address holds a path.

    Attributes:
        name: its path below the folder.
        changed: seconds since the epoch.
        wrong: why it cannot be read; "" where it can.
    """

    id: str
    name: str
    path: Path
    changed: float
    diagnosis: Diagnosis | None
    wrong: str = ""


class Runs:
    """What lies below a folder; read again where it has changed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve(strict=True)
        self._known: dict[tuple[str, int, int], Run] = {}

    def all(self) -> list[Run]:
        """The newest first."""
        found = [run for path in files(self.root, ".json") if (run := self._run(path)) is not None]
        return sorted(found, key=lambda run: (-run.changed, run.name))

    def get(self, id: str) -> Run | None:
        return next((run for run in self.all() if run.id == id), None)

    def _run(self, path: Path) -> Run | None:
        try:
            with opened(path, self.root) as file:
                held = os.fstat(file.fileno())
                key = (str(path), held.st_mtime_ns, held.st_size)
                if key in self._known:
                    return self._known[key]
                if MARK not in file.peek(HEAD)[:HEAD]:
                    return None
                text = file.read(BYTES + 1)
        except OSError:
            return None
        name = path.relative_to(self.root).as_posix()
        diagnosis, wrong = None, ""
        if len(text) > BYTES:
            wrong = f"larger than {BYTES >> 20} MiB"
        else:
            try:
                diagnosis = Diagnosis.model_validate_json(text)
            except ValidationError as error:
                first = error.errors()[0]
                wrong = visible(f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}", 160)
        run = Run(hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest(), name, path, held.st_mtime, diagnosis, wrong)
        self._known[key] = run
        return run


def files(root: Path, suffix: str) -> Iterator[Path]:
    """Regular files below a folder, links and hidden names left out, up to a depth and a number."""
    count = 0
    for folder, below, names in os.walk(root, followlinks=False):
        here = Path(folder)
        depth = len(here.relative_to(root).parts)
        below[:] = sorted(name for name in below if not name.startswith(".")) if depth < DEPTH else []
        for name in sorted(names):
            path = here / name
            if name.startswith(".") or not name.endswith(suffix) or path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > FILES:
                return
            yield path


def opened(path: Path, root: Path) -> BufferedReader:
    """A regular file below the root, opened for reading.

    Raises:
        OSError: it is a link, no regular file, or leads out of the folder.
    """
    if not path.resolve(strict=True).is_relative_to(root):
        raise PermissionError(f"leads out of {root}")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PermissionError("is no regular file")
    return os.fdopen(handle, "rb")
