"""A scan into a file that an interruption does not undo.

Beside the output lies `OUTPUT.partial` while the scan runs: a whole fingerprint of what was counted up to the last chunk, with
how far that is and what was asked for. It is written under another name and renamed, every `SECONDS` of work and when the scan is
stopped, and removed once the output is there. As figures are added up chunk by chunk, and chunks end where the data say, a scan
that goes on from it ends with the same bits as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.fingerprint import Fingerprint, is_fingerprint, load_fingerprint
from draftscope.scan.inputs import Stamp, stamp_of
from draftscope.scan.scan import Course, Progress, Settings
from draftscope.states.folder import FileSource
from draftscope.states.places import Place
from draftscope.states.types import Source

SECONDS = 30.0
ENDING = ".partial"
_ROW = re.compile(r"\[\d+\]$")


@dataclass(frozen=True)
class Choice:
    """Which files of a source are taken, in order, and what that is called.

    Attributes:
        positions: their numbers in the source.
        part: which shard of the source they are, such as `0 of 4`.
        estimated: what was asked for where they are some of it alone, such as `sample 100`.
        seconds: after how much time the scan ends even so; None = when all are taken.
    """

    positions: Sequence[int]
    part: str = ""
    estimated: str = ""
    seconds: float | None = None


def choice_of(
    source: Source, shard: tuple[int, int] | None = None, sample: int | None = None, budget: float | None = None
) -> Choice:
    """All files of a source, those of a shard, or some by a hash of their names: `sample`, or what `budget` seconds allow.

    Raises:
        UsageError: a shard outside 0 .. n-1, no sequences or no time, or more than one of these.
    """
    if sum(each is not None for each in (shard, sample, budget)) > 1:
        raise UsageError("a shard, a sample and a budget exclude each other")
    total = len(source)
    if shard is not None:
        if not 0 <= shard[0] < shard[1]:
            raise UsageError(f"shard {shard[0]} of {shard[1]}", remedy="Shards are numbered from 0 to n - 1")
        return Choice(range(shard[0], total, shard[1]), part=f"{shard[0]} of {shard[1]}")
    if (sample is not None and sample < 1) or (budget is not None and budget <= 0):
        raise UsageError("nothing to take", remedy="Name one sequence or more, or some seconds")
    if sample is None and budget is None:
        return Choice(range(total))
    if sample is not None and sample >= total:
        return Choice(range(total))
    order = sorted(range(total), key=lambda position: _key(name_of(source, position)))
    if sample is not None:  # in the order in which they lie
        return Choice(sorted(order[:sample]), estimated=f"sample {sample}")
    return Choice(order, estimated=f"budget {budget:g} s", seconds=budget)


def name_of(source: Source, position: int) -> str:
    """A file's path below the source."""
    if not isinstance(source, FileSource):
        return str(position)
    file = source.files[position]
    return file.name if file == source.path else str(file).removeprefix(str(source.path)).lstrip("/")


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8, person=b"estimate").digest()


def partial_of(out: Path) -> Path:
    """Where an unfinished scan into `out` lies."""
    return out.with_name(out.name + ENDING)


def scan_to(
    out: Path, source: Source, settings: Settings, choice: Choice, *, resume: bool = False, command: str = "",
    every_seconds: float = SECONDS, on_item: Callable[[int, int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None, on_kept: Callable[[int, int], None] | None = None,
) -> Fingerprint:
    """Scan into a file; whatever interrupts it, what was counted up to the last chunk is kept (module docstring).

    Args:
        resume: go on from what an interrupted scan left, if it left anything.
        every_seconds: of work between two checkpoints.
        on_kept: called with files and files in all, each time that they are safe.

    Raises:
        UsageError: there is an unfinished scan, and `resume` was not asked for; or it is of something else.
        DraftscopeError: as `scan`; a file that was counted has changed since; the disk refuses.
    """
    partial = partial_of(out)
    asked = _asked(source, settings, choice)
    total, done = _left(partial, asked, source, choice, resume)
    if resume and choice.seconds is not None:
        raise UsageError("a scan by time is not resumed", remedy="Start it again, or name a --sample")
    begun = time.monotonic()
    course = Course(source, settings, choice.positions, total, done, None if choice.seconds is None else (
        lambda: time.monotonic() - begun >= (choice.seconds or 0)))

    saved = begun

    def keep() -> None:
        nonlocal done, saved
        if course.total is not None and course.next > done and choice.seconds is None:
            _checkpoint(course, partial, asked)
            done, saved = course.next, time.monotonic()
            if on_kept is not None:
                on_kept(done, len(choice.positions))

    try:
        for _ in course.run(on_item, on_progress):
            if time.monotonic() - saved >= every_seconds:
                keep()
    except BaseException:
        with suppress(DraftscopeError):  # a full disk, of which the first error tells
            keep()
        raise
    estimated = choice.estimated if course.next < len(source) else ""
    result = course.finish(command, choice.part, estimated)
    result.save(out)
    partial.unlink(missing_ok=True)
    return result


def _checkpoint(course: Course, partial: Path, asked: Mapping[str, Any]) -> None:
    assert course.total is not None
    note = f"unfinished: the first {course.next:,} of {len(course.chosen):,} files"
    unfinished = {"next": course.next, "asked": dict(asked), "note": note}
    replace(course.total, unfinished=unfinished, notes=(*course.total.notes, note)).save(partial)


def _left(
    partial: Path, asked: Mapping[str, Any], source: Source, choice: Choice, resume: bool
) -> tuple[Fingerprint | None, int]:
    """What an interrupted scan left, and how many of the chosen files that is."""
    if not partial.exists():
        return None, 0
    if not resume:
        if not is_fingerprint(partial):
            raise UsageError("is in the way of the scan's checkpoints, and no fingerprint", where=str(partial), remedy="Move it")
        raise UsageError("is an unfinished scan into the same file", where=str(partial),
                         remedy="Go on with --resume, or remove it to start again")
    total = load_fingerprint(partial)
    found = total.unfinished
    if not found:
        raise UsageError("is a finished fingerprint, not an interrupted scan", where=str(partial), remedy="Move it")
    unlike = [key for key in asked if json.loads(json.dumps(asked[key])) != found.get("asked", {}).get(key)]
    if unlike:
        raise UsageError(f"is an unfinished scan of something else: its {' and '.join(unlike)} differ", where=str(partial),
                         remedy="Repeat the command that was interrupted with --resume, or remove the file to start again")
    done = int(found["next"])
    _unchanged(total, source, choice.positions[:done])
    total.notes = tuple(note for note in total.notes if note != found.get("note"))
    total.unfinished = {}
    return total, done


def _asked(source: Source, settings: Settings, choice: Choice) -> dict[str, Any]:
    """What makes two scans the same."""
    names = hashlib.blake2b(digest_size=16)
    for position in choice.positions:
        names.update(name_of(source, position).encode("utf-8", "surrogateescape") + b"\0")
    groups = None if settings.groups is None else hashlib.blake2b(
        json.dumps(sorted(settings.groups.items())).encode(), digest_size=16).hexdigest()
    return {"list of files": [len(choice.positions), names.hexdigest()], "format": source.format, "slots": settings.slots,
            "share of rows": settings.every, "groups": groups, "shard": choice.part, "sample": choice.estimated}


def _unchanged(total: Fingerprint, source: Source, positions: Sequence[int]) -> None:
    """Raise where a file that was counted is another by now."""
    if not isinstance(source, FileSource):
        return
    counted: dict[str, Stamp] = {}
    for one in total.inputs:
        counted.setdefault(_ROW.sub("", one.name), Stamp(one.size, one.time, one.etag))
    for position in positions:
        name = name_of(source, position)
        if name in counted and _stamp(source.files[position]) != counted[name]:
            raise DraftscopeError("has changed since it was counted", where=str(source.files[position]),
                                  remedy="Start the scan again without --resume, after removing the .partial file")


def _stamp(file: Place) -> Stamp | None:
    try:
        return stamp_of(file)
    except OSError:
        return None
