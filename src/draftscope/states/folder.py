"""A source made of files, one sample or request each: listed at once, read one at a time, failures counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from draftscope.errors import DraftscopeError
from draftscope.states.errors import StatesError
from draftscope.states.types import Sample, Skipped, Trace

Item = TypeVar("Item", Sample, Trace)

BESIDE = frozenset({"capture.json", "data_config.json", "extract.json"})
"""Descriptions that lie beside the data."""


def natural(path: Path) -> tuple[Any, ...]:
    """Sort key in which hs_2 comes before hs_10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name) if part)


def number_of(path: Path) -> int:
    """The number that the file's name ends in, else -1."""
    found = re.search(r"(\d+)$", path.stem)
    return int(found.group(1)) if found else -1


def list_files(path: Path, suffix: str) -> tuple[list[Path], list[Skipped]]:
    """Files of a suffix in natural order, and what else lies there. Hidden files and descriptions count as neither.

    Raises:
        DraftscopeError: the path does not exist or cannot be listed.
    """
    if path.is_file():
        return [path], []
    try:
        entries = sorted(path.iterdir(), key=natural)
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be listed", where=str(path)) from None
    files, others = [], []
    for entry in entries:
        if entry.name.startswith(".") or entry.name in BESIDE:
            continue
        if entry.is_dir():
            others.append(Skipped(str(entry), "a folder"))
        elif entry.suffix == suffix:
            files.append(entry)
        else:
            others.append(Skipped(str(entry), f"not a {suffix} file"))
    return files, others


class FileSource(Generic[Item]):
    """Samples or traces from files, in the order of their numbers.

    Attributes:
        files: one item each; some may turn out to be unreadable.
        skipped: what was passed over so far, each once.
        notes: metadata that could not be used, each once.

    Raises:
        DraftscopeError: while iterating, when a file that was named directly cannot be read, or no file at all could.
    """

    def __init__(self, *, kind: Literal["samples", "traces"], path: Path, format: str, chosen: str, files: list[Path],
                 others: list[Skipped], meta: dict[str, Any], read: Callable[[Path, list[str]], Item]) -> None:
        self.kind: Literal["samples", "traces"] = kind
        self.path, self.format, self.chosen, self.meta = path, format, chosen, meta
        self.files = files
        self.skipped = list(others)
        self._passed: set[str] = set()
        self.notes: list[str] = []
        self._read: Callable[[Path, list[str]], Item] = read
        if not files:
            raise DraftscopeError("holds no file of this format", where=str(path), remedy="Name the folder that holds the data")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, position: int) -> Item:
        """The item of one file, by its place in `files`; raises where the file is unreadable."""
        file = self.files[position]
        notes: list[str] = []
        item = self._read(file, notes)
        for note in notes:
            if note not in self.notes and len(self.notes) < 100:
                self.notes.append(note)
        return item

    def skip(self, position: int, error: DraftscopeError) -> None:
        """Count a file as passed over, once."""
        file = str(self.files[position])
        if file not in self._passed:
            self._passed.add(file)
            cause = error.cause if isinstance(error, StatesError) else "broken"
            self.skipped.append(Skipped(file, why_of(error, self.files[position]), cause=cause))

    def __iter__(self) -> Iterator[Item]:
        found, first = False, ""
        for position, file in enumerate(self.files):
            try:
                item = self[position]
            except DraftscopeError as error:
                if file == self.path:
                    raise
                first = first or str(error)
                self.skip(position, error)
                continue
            found = True
            yield item
        if not found:
            raise DraftscopeError(f"none of {len(self.files)} files can be read; the first: {first}", where=str(self.path))


def why_of(error: DraftscopeError, file: Path) -> str:
    """The reason without the file's name, which stands beside it."""
    inner = error.where.removeprefix(str(file)).lstrip(", ")
    return f"{inner} {error.what}" if inner else error.what
