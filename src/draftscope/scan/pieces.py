"""A source in pieces that are scanned apart, on whatever machine, and merged in one fixed order.

Pieces follow from the number of files alone, and so does the tree in which their fingerprints are merged. So the figures do not
depend on how many workers there are, on who is done first, or on who was lost: they are bit for bit the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from draftscope.errors import DraftscopeError
from draftscope.scan.fingerprint import Fingerprint, Odd, Origin
from draftscope.scan.rich import share_of
from draftscope.scan.scan import BAD, scan
from draftscope.states.folder import FileSource
from draftscope.states.opening import open_source
from draftscope.states.places import place
from draftscope.states.types import Skipped, Source

MOST = 256
"""Pieces of a source, unless more are asked for."""

Held = TypeVar("Held")


@dataclass(frozen=True)
class Job:
    """What is scanned, and how; the same for every piece. `every` None = by the number of files."""

    path: str
    format: str | None = None
    slots: int | None = None
    every: int | None = None
    skip_bad: bool = False
    groups: Mapping[int, str] | None = None
    engine: str | None = None
    threads: int = 1

    def open(self) -> Source:
        return open_source(place(self.path), self.format, skip_bad=self.skip_bad)


@dataclass(frozen=True)
class Listing:
    """What a source holds, as one machine sees it; `digest` is over the files' names, below the source, in order."""

    files: int
    digest: str
    format: str
    chosen: str
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Done:
    """How a piece went.

    Attributes:
        files, rows, size: taken; size in bytes of states.
        seconds: that it took; disk: bytes that came from storage meanwhile, -1 unknown. What was in memory already did not.
        node: where.
        skipped: what was passed over.
    """

    files: int
    rows: int
    size: int
    seconds: float
    disk: int
    node: str
    skipped: tuple[Skipped, ...] = ()


@dataclass
class Piece:
    """A piece's fingerprint, None where nothing of it could be read, and how it went."""

    made: Fingerprint | None
    done: Done
    odd: dict[str, Odd] = field(default_factory=dict)


def listing_of(source: Source) -> Listing:
    """What a source holds."""
    names = [str(file).removeprefix(str(source.path)) for file in source.files] if isinstance(source, FileSource) else []
    digest = hashlib.blake2b(json.dumps([len(source), names]).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    notes = tuple(source.notes) if isinstance(source, FileSource) else ()
    return Listing(len(source), digest, source.format, source.chosen, notes, tuple(source.skipped))


def spans(files: int, pieces: int = MOST) -> list[range]:
    """The files of each piece, in order; none is empty."""
    pieces = max(1, min(pieces, files))
    return [range(files * i // pieces, files * (i + 1) // pieces) for i in range(pieces)]


def scan_piece(job: Job, listing: Listing, span: range) -> Piece:
    """Scan some files of a source.

    Raises:
        DraftscopeError: this machine sees other files than the listing has, or as `scan`.
    """
    source = job.open()
    seen = listing_of(source)
    if seen.digest != listing.digest:
        raise DraftscopeError(f"holds other files on {os.uname().nodename} ({seen.files:,}, elsewhere {listing.files:,})",
                              where=job.path, remedy="Every worker has to see the same files under this path")
    before = len(source.skipped)
    size = rows = 0

    def counted(more_rows: int, more: int) -> None:
        nonlocal size, rows
        size, rows = size + more, rows + more_rows

    begun, disk = time.monotonic(), from_disk()
    every = share_of(listing.files) if job.every is None else job.every
    try:
        made: Fingerprint | None = scan(
            source, slots=job.slots, skip_odd=job.skip_bad, groups=job.groups, every=every, positions=list(span),
            engine=job.engine, threads=job.threads, on_item=counted)
    except DraftscopeError:
        # None of these files can be read, which is no error where others can.
        if rows or not source.skipped[before:]:
            raise
        made = None
    skipped = tuple(source.skipped[before:])
    ended = from_disk()
    done = Done(len(span), rows, size, time.monotonic() - begun, ended - disk if min(disk, ended) >= 0 else -1,
                os.uname().nodename, skipped)
    odd = Odd()
    for skip in skipped if made is None else ():
        odd.add(skip.path.removeprefix(str(source.path)).lstrip("/"), skip.why)
    return Piece(made, done, {BAD: odd} if made is None else {})


def joined(one: Piece, other: Piece) -> Piece:
    """Two pieces as one, the first changed by it.

    Raises:
        DraftscopeError: they do not merge.
    """
    skipped = one.done.skipped + other.done.skipped
    done = replace(one.done, files=one.done.files + other.done.files, rows=one.done.rows + other.done.rows,
                   size=one.done.size + other.done.size, seconds=one.done.seconds + other.done.seconds,
                   disk=-1 if min(one.done.disk, other.done.disk) < 0 else one.done.disk + other.done.disk, skipped=skipped)
    made = one.made or other.made
    if one.made is not None and other.made is not None:
        one.made.absorb(other.made)
    odd = one.odd
    for kind, more in other.odd.items():
        odd.setdefault(kind, Odd()).merge(more)
    if made is not None:
        for kind, more in odd.items():
            made.odd.setdefault(kind, Odd()).merge(more)
        odd = {}
    return Piece(made, done, odd)


class Tree(Generic[Held]):
    """Merges things as they come, neighbours first: at no time are more than log2 of them held.

    Args:
        merge: of two neighbours, the earlier first.
    """

    def __init__(self, merge: Callable[[Held, Held], Held]) -> None:
        self._merge = merge
        self._held: list[tuple[int, Held]] = []

    def add(self, one: Held) -> None:
        level = 0
        while self._held and self._held[-1][0] == level:
            one, level = self._merge(self._held.pop()[1], one), level + 1
        self._held.append((level, one))

    def result(self) -> Held | None:
        """All of them merged; None where there were none."""
        if not self._held:
            return None
        held = [one for _, one in self._held]
        self._held = []
        while len(held) > 1:
            last = held.pop()
            held[-1] = self._merge(held[-1], last)
        return held[0]


def finished(piece: Piece | None, listing: Listing, command: str = "") -> Fingerprint:
    """The whole, with one origin.

    Raises:
        DraftscopeError: nothing could be read.
    """
    if piece is None or piece.made is None:
        bad = piece.done.skipped if piece is not None else ()
        first = f"; the first: {bad[0].path}: {bad[0].why}" if bad else ""
        raise DraftscopeError(f"none of {listing.files} files can be read{first}")
    made = piece.made
    made.origins = together(made.origins)
    origin = made.origins[0]
    passed = {skip.path for skip in (*listing.skipped, *piece.done.skipped)}
    made.origins = (replace(origin, skipped=len(passed)),)
    made.provenance = tuple(dict.fromkeys(replace(one, command=command) for one in made.provenance))
    return made


def together(origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """Origins that are pieces of one source as one."""
    found: dict[tuple[str, str, str, str], Origin] = {}
    for origin in origins:
        key = (origin.path, origin.format, origin.kind, origin.part)
        known = found.get(key)
        found[key] = origin if known is None else replace(
            known, sequences=known.sequences + origin.sequences, rows=known.rows + origin.rows,
            skipped=known.skipped + origin.skipped)
    return tuple(found.values())


def from_disk() -> int:
    """Bytes that this process has had read from storage so far, -1 where the system does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "read_bytes":
                return int(value)
    with suppress(AttributeError, ValueError):
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_inblock) * 512
    return -1


def in_order(pieces: Iterator[Piece]) -> Piece | None:
    """Pieces merged as they come."""
    tree: Tree[Piece] = Tree(joined)
    for piece in pieces:
        tree.add(piece)
    return tree.result()


def plain(done: Done) -> dict[str, Any]:
    """How a piece went, for JSON."""
    return {"files": done.files, "rows": done.rows, "bytes": done.size, "seconds": done.seconds, "from_disk": done.disk,
            "node": done.node, "skipped": len(done.skipped)}
