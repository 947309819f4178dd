"""A source made of files: listed at once, read one at a time, failures counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from draftscope import stopping
from draftscope.errors import DraftscopeError
from draftscope.states.errors import StatesError
from draftscope.states.places import Place, Unreachable, listing
from draftscope.states.scales import widened
from draftscope.states.types import Sample, Skipped, Trace

Item = TypeVar("Item", Sample, Trace)

BESIDE = frozenset({"capture.json", "data_config.json", "extract.json", "dataset_info.json", "state.json", "dataset.json",
                    "manifest.jsonl", "verified.json"})
"""Descriptions that lie beside the data."""
LOCK = ".lock"
"""Of the writer that is, or was, at work on the file of the same name."""
NOTES = 100
DEEPEST = 16


def natural(name: str) -> str:
    """Sort key of a name in which hs_2 comes before hs_10."""
    return re.sub(r"\d+", _digits, name)


def _digits(found: re.Match[str]) -> str:
    plain = found.group().lstrip("0")
    return f"{len(plain):03d}{plain}"


def number_of(path: Place) -> int:
    """The number that the file's name ends in, its suffixes left out; else -1."""
    found = re.search(r"(\d+)$", path.name.removesuffix(".gz").rpartition(".")[0])
    return int(found.group(1)) if found else -1


def list_files(path: Place, suffix: str | tuple[str, ...], *, deep: bool = False) -> tuple[list[Place], list[Skipped]]:
    """Files of a suffix in natural order, and what else lies there. Hidden files and descriptions count as neither.

    Args:
        suffix: what a file's name ends in; several are alternatives.
        deep: also files in folders below, in the order of the folders; links to folders are not followed.

    Raises:
        DraftscopeError: the path does not exist or cannot be listed.
    """
    if path.is_file():
        return [path], []
    files, others = [], []
    text = f"not a {suffix if isinstance(suffix, str) else ' or '.join(suffix)} file"
    for entry in _entries(path, deep):
        if entry.folder:
            others.append(Skipped(str(entry.path), "a folder"))
        elif entry.name.endswith(suffix):
            files.append(entry.path)
        else:
            others.append(Skipped(str(entry.path), text))
    return files, others


class _Entry(NamedTuple):
    key: tuple[str, ...]
    name: str
    path: Place
    folder: bool


_listed: dict[tuple[Place, bool], list[_Entry]] | None = None


@contextmanager
def listing_once() -> Iterator[None]:
    """Within this, a folder is listed from the disk once, however many formats ask for it."""
    global _listed
    outer = _listed
    _listed = {} if outer is None else outer
    try:
        yield
    finally:
        _listed = outer


def _entries(path: Place, deep: bool) -> list[_Entry]:
    """What lies in a folder, in natural order."""
    if _listed is not None and (path, deep) in _listed:
        return _listed[path, deep]
    found: list[_Entry] = []
    _scan(path, deep, (), found)
    found.sort(key=_key)
    if _listed is not None:
        _listed[path, deep] = found
    return found


def _key(entry: _Entry) -> tuple[str, ...]:
    return entry.key


def _scan(folder: Place, deep: bool, above: tuple[str, ...], found: list[_Entry]) -> None:
    try:
        entries = listing(folder)
    except NotADirectoryError:
        raise DraftscopeError("is no regular file, and no folder", where=str(folder), remedy="Name a file or a folder") from None
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be listed", where=str(folder)) from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in BESIDE or entry.name.endswith(LOCK):
            continue
        key = (*above, natural(entry.name))
        if entry.folder and deep and len(above) < DEEPEST and not entry.link:
            _scan(entry.place, deep, key, found)
        else:
            found.append(_Entry(key, entry.name, entry.place, entry.folder))


def turned_round(files: Sequence[Place]) -> tuple[Place, Place] | None:
    """Two files that sorting their names as text would turn round, the one that comes first by number first."""
    by_text = sorted(files, key=str)
    return next(((one, other) for one, other in zip(files, by_text, strict=True) if one != other), None)


def stated_order(files: Sequence[Place]) -> str:
    """In which order the files are taken, and where sorting their names as text would give another."""
    turned = turned_round(files)
    if turned is None:
        return "by the numbers in their names, which sorting as text gives too"
    return f"by the numbers in their names: {turned[0].name} before {turned[1].name}, which sorting as text turns round"


class FileSource(Generic[Item]):
    """Samples or traces from files, in the order of their numbers.

    No two sequences of files of one name have one name: theirs begin with the folders below the source.

    Attributes:
        files: one item each, or several; some may turn out to be unreadable.
        skipped: what was passed over so far, each once.
        notes: what was done to the data on the way in, and metadata that could not be used, each once.
        skip_bad: count a file that was named directly as passed over instead of raising.
        narrow: leave eight-bit states as they are stored.

    Raises:
        DraftscopeError: while iterating, when a file that was named directly cannot be read, or no file at all could.
    """

    def __init__(self, *, kind: Literal["samples", "traces"], path: Place, format: str, chosen: str | None, files: list[Place],
                 others: Iterable[Skipped], meta: dict[str, Any],
                 read: Callable[[Place, list[str]], Item | list[Item | Skipped]], notes: Iterable[str] = (),
                 numbered: bool = False) -> None:
        self.kind: Literal["samples", "traces"] = kind
        self.path, self.format, self.meta = path, format, meta
        self.chosen = chosen or "format named by the user"
        self.files = files
        self._alike = len({file.name for file in files}) < len(files)
        self.skipped = list(others)
        self.skip_bad = self.narrow = False
        self._passed: set[tuple[str, int]] = set()
        self.notes: list[str] = list(notes)
        self._read: Callable[[Place, list[str]], Item | list[Item | Skipped]] = read
        if not files:
            raise DraftscopeError("holds no file of this format", where=str(path), remedy="Name the folder that holds the data")
        if numbered:
            self.notes += _twice(files)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def order(self) -> str:
        """In which order the files are taken."""
        return stated_order(self.files)

    def __getitem__(self, position: int) -> Item:
        """The (first) item of one file, by its place in `files`; raises where the file is unreadable."""
        held = self.items(position)
        if not held:
            raise StatesError("holds no readable sequence", cause="layout", where=str(self.files[position]))
        return held[0]

    def items(self, position: int) -> list[Item]:
        """The items of one file, by its place in `files`; bad rows of it are counted.

        Raises:
            DraftscopeError: the file is unreadable, or one row of it where it was named directly.
        """
        file = self.files[position]
        notes: list[str] = []
        try:
            held = self._read(file, notes)
        finally:
            stopping.heed()
        for item in held if isinstance(held, list) else [held]:
            if isinstance(item, Skipped):
                continue
            item.name = self._named(file, item.name)
            if not self.narrow:
                widened(item, notes.append)
        for note in notes:
            if note not in self.notes and len(self.notes) < NOTES:
                self.notes.append(note)
        if not isinstance(held, list):
            return [held]
        good: list[Item] = []
        for item in held:
            if not isinstance(item, Skipped):
                good.append(item)
            elif file == self.path and not self.skip_bad:
                raise StatesError(item.why, cause=item.cause, where=f"{file}, row {item.row}",
                                  remedy="--skip-bad passes over it and counts it")
            else:
                self._pass(item)
        return good

    def _named(self, file: Place, name: str) -> str:
        """A sequence's name, with the folders below the source where another file's sequence may have the same."""
        of_file = name.startswith(file.name)
        if not (self._alike or (not of_file and len(self.files) > 1)):
            return name
        inner = str(file).removeprefix(str(self.path)).lstrip("/")
        if of_file:
            return inner + name.removeprefix(file.name)
        return f"{inner}/{name}" if inner else name

    def skip(self, position: int, error: DraftscopeError) -> None:
        """Count a file as passed over, once."""
        file = self.files[position]
        cause = error.cause if isinstance(error, StatesError) else "broken"
        self._pass(Skipped(str(file), why_of(error, file), cause=cause))

    def _pass(self, skip: Skipped) -> None:
        if (skip.path, skip.row) not in self._passed:
            self._passed.add((skip.path, skip.row))
            self.skipped.append(skip)

    def __iter__(self) -> Iterator[Item]:
        found, first = False, ""
        for position, file in enumerate(self.files):
            try:
                held = self.items(position)
            except Unreachable:
                raise
            except DraftscopeError as error:
                if file == self.path and not self.skip_bad:
                    raise
                first = first or str(error)
                self.skip(position, error)
                continue
            found = found or bool(held)
            yield from held
        if not found:
            first = first or next((f"{s.path}, row {s.row}: {s.why}" for s in self.skipped if s.row >= 0), "it is empty")
            raise DraftscopeError(f"none of {len(self.files)} files can be read; the first: {first}", where=str(self.path))


def _twice(files: Sequence[Place]) -> list[str]:
    """Numbers that more than one file carries: they stand for the same input line."""
    first: dict[int, Place] = {}
    said, count = "", 0
    for file in files:
        number = number_of(file)
        if number < 0 or first.setdefault(number, file) is file:
            continue
        count += 1
        said = said or f"number {number} is carried by {first[number]} and {file}"
    return [said + (f", and {count - 1} more numbers by two files or more" if count > 1 else "")] if said else []


def why_of(error: DraftscopeError, file: Place) -> str:
    """The reason without the file's name, which stands beside it."""
    inner = error.where.removeprefix(str(file)).lstrip(", ")
    return f"{inner} {error.what}" if inner else error.what
