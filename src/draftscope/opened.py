"""What `draftscope.open` gives: samples or traces, lazily, and their fingerprint with one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from draftscope.scan.fingerprint import Fingerprint
from draftscope.scan.scan import Progress
from draftscope.scan.scan import scan as scan_source
from draftscope.states.opening import Kind, open_source
from draftscope.states.places import Place
from draftscope.states.types import Skipped, Source


class Opened:
    """A source (`states.types.Source`) that can be scanned. Iterating yields `Sample` or `Trace` objects, read one at a time.

    Attributes:
        source: what reads the files.
        kind: `samples` (training data) or `traces` (a capture).
        path: as it was opened.
        format: the name of the format; chosen: why it was taken.
        meta: what the files claim about themselves, never believed.
        skipped: what could not be read so far; it grows while one iterates.
        notes: what was done to the data on the way in; it grows, too.
    """

    def __init__(self, source: Source) -> None:
        self.source: Source = source
        self.kind: Literal["samples", "traces"] = source.kind
        self.path: Place = source.path
        self.format: str = source.format
        self.chosen: str = source.chosen
        self.meta: dict[str, Any] = source.meta
        self.skipped: list[Skipped] = source.skipped
        self.notes: list[str] = getattr(source, "notes", [])

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __repr__(self) -> str:
        return f"<{len(self)} files of {self.kind}, {self.format}, at {self.path}>"

    def scan(
        self, *, slots: int | None = None, shard: tuple[int, int] | None = None, skip_odd: bool = False,
        groups: Mapping[int, str] | None = None, every: int | None = 1, positions: Sequence[int] | None = None,
        engine: str | None = None, threads: int | None = None, on_item: Callable[[int, int], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Fingerprint:
        """The statistics of all accepted rows; arguments and errors are those of `draftscope.scan`."""
        return scan_source(self.source, slots=slots, shard=shard, skip_odd=skip_odd, groups=groups, every=every,
                           positions=positions, engine=engine, threads=threads, on_item=on_item, on_progress=on_progress)


def open(path: Place | str, format: str | None = None, *, kind: Kind | None = None, skip_bad: bool = False) -> Opened:
    """Samples or traces of a folder, of one file, or behind a URL.

    Args:
        format: None = found from the shapes in the files; else a name, of which a wrong one makes the error list all.
        kind: `samples` or `traces`, where the content may be read as either.
        skip_bad: what is unreadable is counted as passed over even where it was named directly.

    Raises:
        DraftscopeError: nothing readable there, or files of two formats in equal number.
        UsageError: no such format.
    """
    return Opened(open_source(path, format, kind=kind, skip_bad=skip_bad))


def scan(
    source: Place | str | Source | Opened, *, slots: int | None = None, shard: tuple[int, int] | None = None,
    skip_odd: bool = False, groups: Mapping[int, str] | None = None, every: int | None = 1,
    positions: Sequence[int] | None = None, engine: str | None = None, threads: int | None = None,
    on_item: Callable[[int, int], None] | None = None, on_progress: Callable[[Progress], None] | None = None,
) -> Fingerprint:
    """The mergeable statistics of a source, in one pass.

    Args:
        source: a path or URL, or what `draftscope.open` gave.
        slots: slots of a capture's rows; None = told by the width of the last state, else three.
        shard: (i, n): only every n-th file, from the i-th on; all n merge into the fingerprint of the whole.
        skip_odd: pass over sequences of another layout than the first, and count them, instead of raising.
        groups: natural group (source, domain, prompt kind) of a sample, by its input line.
        every: of how many ordinary rows one goes into what needs whole rows; None = by the number of sequences.
        positions: numbers of the files to take, in this order; None = all, or those of the shard.
        engine: `numba`, `torch` or `numpy`; None = the fastest that works.
        threads: that work on rows; the figures do not depend on it.
        on_item: called after each sequence with its rows and bytes; on_progress: with how far the scan is.

    Raises:
        DraftscopeError: nothing readable, or sequences of different layouts.
        UsageError: a shard outside 0 .. n-1, or a share below one row of one.
    """
    opened = source if isinstance(source, Opened) else Opened(source) if isinstance(source, Source) else open(source)
    return opened.scan(slots=slots, shard=shard, skip_odd=skip_odd, groups=groups, every=every, positions=positions,
                       engine=engine, threads=threads, on_item=on_item, on_progress=on_progress)
