"""One pass over a source: every accepted row of every sequence into its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.core import engine_of
from draftscope.scan.fingerprint import Estimated, Fingerprint, Odd, Origin, Provenance
from draftscope.scan.inputs import Input, identity_of
from draftscope.scan.reading import Read, read_ahead
from draftscope.scan.rich import share_of
from draftscope.scan.tally import Tally, quiet
from draftscope.states.folder import FileSource, why_of
from draftscope.states.places import Place
from draftscope.states.types import Sample, Skipped, Source, Trace
from draftscope.text import count, visible

RUNS = 8
SLOTS = 16
"""Numbers of slots that are named where another does not divide a row."""
CHUNK = 2**32
"""Bytes of states after which figures are handed over: what an interruption may lose."""
BAD, MASKED, SINGLE, COPY = "bad", "without an answer token", "of one token", "a copy of another"


@dataclass
class Settings:
    """What a scan is asked for; see `scan`."""

    slots: int | None = None
    skip_odd: bool = False
    groups: Mapping[int, str] | None = None
    every: int = 1
    engine: str | None = None
    threads: int | None = None


@dataclass
class Progress:
    """How far a scan is: told after each sequence.

    Attributes:
        done, of: files (or sequences) that were taken, and are to be.
        sequences, rows, size: counted so far, size in bytes of states.
        total: figures up to the last chunk; None before the first ends.
        current: figures of the chunk in hand: complete in `between`, of what was handed over else.
    """

    of: int = 0
    done: int = 0
    sequences: int = 0
    rows: int = 0
    size: int = 0
    bad: int = 0
    total: Fingerprint | None = None
    current: Fingerprint | None = None


def scan(
    source: Source, *, slots: int | None = None, shard: tuple[int, int] | None = None, skip_odd: bool = False,
    groups: Mapping[int, str] | None = None, every: int | None = 1, positions: Sequence[int] | None = None,
    engine: str | None = None, threads: int | None = None, command: str = "",
    on_item: Callable[[int, int], None] | None = None, on_progress: Callable[[Progress], None] | None = None,
) -> Fingerprint:
    """Statistics of all accepted rows of a source.

    Args:
        source: samples or traces.
        slots: slots of a capture's rows; None = told by the width of the last state, else three.
        shard: (i, n): only every n-th file, from the i-th on; all n merge into the fingerprint of the whole.
        skip_odd: pass over sequences of another layout than the first, and count them, instead of raising.
        groups: natural group (source, domain, prompt kind) of a sample, by its file's own number (its input line).
        every: of how many ordinary rows one goes into what needs whole rows, by a hash of the sequence's name and the position;
            None = by the number of sequences (`share_of`).
        positions: numbers of the files to take, in this order; None = all, or those of the shard.
        engine: `numba`, `torch` or `numpy`; None = the fastest that works.
        threads: that work on rows; None = as many as torch takes. The figures do not depend on it.
        command: what is written down as having made the fingerprint.
        on_item: called after each sequence with its rows and bytes.
        on_progress: called after each sequence.

    Raises:
        DraftscopeError: nothing readable, or sequences of different layouts.
        UsageError: a shard outside 0 .. n-1, or a share below one row of one.
    """
    if every is not None and every < 1:
        raise UsageError(f"one row of every {every}", remedy="Say 1 for all rows, or more")
    chosen: Sequence[int] = range(len(source)) if positions is None else positions
    if shard is not None:
        if not 0 <= shard[0] < shard[1]:
            raise UsageError(f"shard {shard[0]} of {shard[1]}", remedy="Shards are numbered from 0 to n - 1")
        chosen = chosen[shard[0] :: shard[1]]
    settings = Settings(slots, skip_odd, groups, share_of(len(source)) if every is None else every, engine, threads)
    course = Course(source, settings, chosen)
    for _ in course.run(on_item, on_progress):
        pass
    return course.finish(command, "" if shard is None else f"{shard[0]} of {shard[1]}")


class Course:
    """A scan under way. After each chunk `total` holds what the first `next` of the chosen files have.

    Args:
        chosen: numbers of the files to take, in order.
        total: what was counted before, with `next` the number in `chosen` to go on from.
        enough: asked after each file whether to end there.
        known: names of the inputs that were counted elsewhere, by identity; filled with those counted here.
    """

    def __init__(self, source: Source, settings: Settings, chosen: Sequence[int], total: Fingerprint | None = None, next: int = 0,
                 enough: Callable[[], bool] | None = None, known: dict[str, str] | None = None) -> None:
        self.source, self.settings, self.chosen = source, settings, chosen
        self.total, self.next = total, next
        self.engine = engine_of(settings.engine)
        self.progress = Progress(of=len(chosen), done=next, total=total)
        if total is not None:
            self.progress.sequences, self.progress.rows = total.sequences, total.rows
        if isinstance(source, FileSource):
            source.narrow = True
        self.known = {} if known is None else known
        if total is not None:
            self.known |= {one.identity: one.name for one in total.inputs}
        self.left_out: set[int] = set()  # files that changed while they were read
        self._enough, self._first = enough, ""

    def run(self, on_item: Callable[[int, int], None] | None = None,
            on_progress: Callable[[Progress], None] | None = None) -> Iterator[None]:
        """Go on to the end, chunk after chunk."""
        threads = self.settings.threads or torch.get_num_threads()
        ended = False
        with quiet(self.engine), _pool(threads) as pool:
            while not ended and self.next < len(self.chosen):
                with closing(read_ahead(self.source, self.chosen[self.next :])) as reads:
                    while True:
                        begun = replace(self.progress)
                        chunk = Chunk(self, pool, threads)
                        ended = chunk.fill(reads, on_item, on_progress)
                        changed = chunk.close()
                        if changed:  # what was taken of them is in the sums: the chunk is read again without them
                            self.left_out |= changed
                            self.progress = begun
                            ended = False
                            break
                        self._take(chunk)
                        yield
                        if ended or self.next == len(self.chosen):
                            ended = True
                            break

    def enough(self) -> bool:
        return self._enough is not None and self._enough()

    def _take(self, chunk: Chunk) -> None:
        self.next += chunk.files
        self._first = self._first or chunk.first
        if chunk.made is not None:
            self.known |= chunk.known
            if self.total is None:
                self.total = chunk.made
            else:
                self.total.absorb(chunk.made)
        if self.total is not None:
            skipped = len({skip.path for skip in self.source.skipped})
            self.total.origins = (Origin(str(self.source.path), self.source.format, self.source.kind, self.progress.sequences,
                                         self.progress.rows, skipped),)
        self.progress.total, self.progress.current = self.total, None

    def finish(self, command: str = "", part: str = "", estimated: str = "") -> Fingerprint:
        """The fingerprint of all that was taken.

        Args:
            command: what made it; part: which shard it is; estimated: what was asked for if not every sequence was to be taken.

        Raises:
            DraftscopeError: nothing was.
        """
        total = self.total
        if total is None:
            where = str(self.source.path)
            if not self.chosen and part:
                raise DraftscopeError(f"shard {part} is empty: the source has {count(len(self.source), 'file')}", where=where,
                                      remedy="Scan in no more shards than there are files, and merge those that hold some")
            if self._first:
                raise DraftscopeError(f"none of {len(self.chosen)} files can be read; the first: {self._first}", where=where)
            why = next((f" ({skip.path}: {skip.why})" for skip in self.source.skipped), "")
            raise DraftscopeError(f"holds no readable sequence{why}", where=where)
        if (copies := total.odd.get(COPY)) is not None:
            one, of = copies.named[0]
            said = count(copies.count, "sequence is a copy of another", "sequences are copies of others")
            total.notes += (f"{said} and not counted again: {visible(one)} is {visible(of)}",)
        total.origins = (replace(total.origins[0], part=part),)
        total.provenance = tuple(replace(one, command=command) for one in total.provenance)
        if estimated:
            total.estimated = (Estimated(estimated, self.next, len(self.source)),)
        return total


class Chunk:
    """Sequences that are added up apart, so that they can be left out whole: `made` holds them once it is closed."""

    def __init__(self, course: Course, pool: Executor | None, threads: int) -> None:
        self.course, self.settings = course, course.settings
        self.made: Fingerprint | None = None
        self.files = self.size = 0
        self.first = ""
        self._pool, self._threads = pool, threads
        self._tally: Tally | None = None
        self._reads: list[Read] = []
        self.known: dict[str, str] = {}
        self._odd: dict[str, Odd] = {}
        self._notes: dict[str, None] = {}
        self._dtypes: set[str] = set()
        self._grouped: set[str] = set()

    def fill(self, reads: Iterator[Read], on_item: Callable[[int, int], None] | None,
             on_progress: Callable[[Progress], None] | None) -> bool:
        """Take files until there are `CHUNK` bytes; whether the scan is to end here."""
        progress = self.course.progress
        for read in reads:
            self.add(read, on_item)
            progress.done += 1
            progress.current = self.made
            if on_progress is not None:
                on_progress(progress)
            if self.course.enough():
                return True
            if self.size >= CHUNK:
                return False
        return True

    def add(self, read: Read, on_item: Callable[[int, int], None] | None) -> None:
        source = self.course.source
        self.files += 1
        for skip in read.bad:
            self._bad(skip.path, f"row {skip.row}: {skip.why}")
        if read.position in self.course.left_out:
            assert read.file is not None
            why = "changed while it was read"
            source.skipped.append(Skipped(str(read.file), why, cause="broken"))
            self._bad(str(read.file), why)
            return
        if read.error is not None:
            assert isinstance(source, FileSource) and read.file is not None
            if read.file == source.path and not source.skip_bad:
                raise read.error
            self.first = self.first or str(read.error)
            source.skip(read.position, read.error)
            self._bad(str(read.file), why_of(read.error, read.file))
            return
        self._reads.append(Read(read.position, read.file, [], None, read.stamp))
        for item in read.items:
            size = self._sequence(read, item)
            if size is not None and on_item is not None:
                on_item(*size)
        read.items.clear()  # the tally lets go of them when they are taken up

    def _sequence(self, read: Read, item: Sample | Trace) -> tuple[int, int] | None:
        """One sequence into the tally: its rows and bytes; None where it was passed over."""
        course, source = self.course, self.course.source
        states, answer, names, last = entries_of(item, self.settings.slots, self._notes)
        stored, stamp = item.states if isinstance(item, Sample) else item.fc_input, read.stamp
        name, identity = _relative(read.file, source, item.name), identity_of(item.name, stamp.size, item.token_ids, stored)
        if (first := self.known.get(identity, course.known.get(identity))) is not None:
            self._odd.setdefault(COPY, Odd()).add(name, first)
            return None
        if self.made is None:
            before = course.total
            self.made = Fingerprint(names, last, int(states.shape[2])) if before is None else Fingerprint(
                before.entries, before.last, before.width)
            self._tally = Tally(self.made, self.settings.every, course.engine, self._pool, self._threads)
            self._tally.groups = set() if before is None else set(before.of_kind("group"))
        made, tally = self.made, self._tally
        assert tally is not None
        if (len(made.entries), made.last, made.width) != (len(names), last, states.shape[2]):
            if self.settings.skip_odd:
                why = f"rows of {len(names)} x {states.shape[2]}, not {len(made.entries)} x {made.width}"
                source.skipped.append(Skipped(item.name, why, cause="layout"))
                self._bad(item.name, why)
                return None
            raise DraftscopeError(
                f"has {len(names)} entries of width {states.shape[2]}, those before it {len(made.entries)} of {made.width}",
                where=f"{source.path}: {item.name}", remedy="Scan files of different layouts apart, or --skip-bad",
            )
        self._dtypes.add(str(states.dtype).removeprefix("torch."))
        given = None if self.settings.groups is None else self.settings.groups.get(getattr(item, "index", -1))
        grouped, group = group_of(item.name, read.position, len(source), str(source.path), given)
        self._grouped.add(grouped)
        if len(states) == 1:
            self._odd.setdefault(SINGLE, Odd()).add(name)
        elif answer is not None and not bool(answer.any()):
            self._odd.setdefault(MASKED, Odd()).add(name)
        made.inputs.add(Input(name, stamp.size, stamp.time, stamp.etag, len(states), identity))
        self.known[identity] = name
        tally.add(item.name, states, answer, group, item.token_ids if len(item.token_ids) == len(states) else None)
        self.size += states.nbytes
        progress = course.progress
        progress.sequences, progress.rows = progress.sequences + 1, progress.rows + len(states)
        progress.size += states.nbytes
        return len(states), states.nbytes

    def _bad(self, path: str, why: str) -> None:
        self.course.progress.bad += 1
        self._odd.setdefault(BAD, Odd()).add(path.removeprefix(str(self.course.source.path)).lstrip("/"), why)

    def close(self) -> set[int]:
        """End the sums; numbers of the files that changed meanwhile, so that the sums are of no use."""
        if self._tally is not None:
            self._tally.close()
        changed = {read.position for read in self._reads if read.changed()}
        if self.made is not None and self._tally is not None:
            if self.settings.every > 1:
                self._notes[f"what needs whole rows is of one ordinary row in {self.settings.every}"] = None
            self.made.dtypes, self.made.notes = tuple(sorted(self._dtypes)), tuple(self._notes)
            self.made.grouped, self.made.odd = tuple(sorted(self._grouped)), self._odd
            self.made.provenance = (Provenance(_version(), ", ".join(sorted(self._tally.used))),)
        elif self._odd and self.course.total is not None and not changed:
            for kind, odd in self._odd.items():
                self.course.total.odd.setdefault(kind, Odd()).merge(odd)
        return changed


@contextmanager
def _pool(threads: int) -> Iterator[Executor | None]:
    if threads == 1:
        yield None
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool


def _version() -> str:
    try:
        return metadata.version("draftscope")
    except metadata.PackageNotFoundError:  # sources that came in an archive
        return ""


def _relative(file: Place | None, source: Source, name: str) -> str:
    """A sequence's name with the folders below the source."""
    if file is None or file == source.path:
        return name
    inner = str(file).removeprefix(str(source.path)).lstrip("/").rpartition("/")[0]
    return f"{inner}/{name}" if inner and not name.startswith(f"{inner}/") else name


def entries_of(
    item: Sample | Trace, slots: int | None, notes: dict[str, None]
) -> tuple[Tensor, Tensor | None, tuple[str, ...], bool]:
    """States [T, L, Ht] of the accepted rows, answer rows [T] or None, names of entries, whether the last is the last state."""
    if isinstance(item, Sample):
        mask = None if item.loss_mask is None else item.loss_mask.bool()
        return item.states, mask, tuple(item.labels), item.states.shape[1] > 1
    total, last = int(item.fc_input.shape[1]), item.last_hidden
    width = None if last is None or total % last.shape[1] else int(last.shape[1])
    if slots is None:
        slots = 3 if width is None else total // width
    if total % slots:
        fitting = ", ".join(str(number) for number in range(1, SLOTS + 1) if total % number == 0)
        raise DraftscopeError(f"rows of width {total} do not divide into {slots} slots", where=item.name,
                              remedy=f"Say how many slots a row has (--slots): up to {SLOTS} these divide it: {fitting}")
    whole = bool(item.accepted.all())
    states = (item.fc_input if whole else item.fc_input[item.accepted]).unflatten(1, (slots, -1))
    names = tuple(f"slot {i}" for i in range(slots))
    if not whole:
        notes["rejected rows are left out"] = None
    joined = last is not None and last.shape[1] == states.shape[2]
    if last is not None and joined:
        if last.dtype != states.dtype:
            notes[f"last states cast from {last.dtype} to {states.dtype}".replace("torch.", "")] = None
        states = torch.cat([states, last[item.accepted][:, None].to(states.dtype)], 1)
        names = (*names, "last")
    answer = None if item.phase is None else item.phase[item.accepted] == 1
    return states, answer, names, joined


def group_of(name: str, position: int, total: int, path: str, given: str | None = None) -> tuple[str, str]:
    """What kind of natural group a sequence belongs to, and which: the one given, else its file of several, else its run.

    Sources are concatenated from others more often than they are shuffled, so that runs of neighbours (an eighth of the source)
    are the best that can be told where nothing else is.

    Args:
        name: of the sequence within its source; position: its number there, of `total`.
    """
    if given is not None:
        return "given", given
    if name.endswith("]") and "[" in name:
        return "files", f"{path}: {name[: name.rindex('[')]}"
    return "runs", f"{path}: run {min(position * RUNS // max(total, 1), RUNS - 1) + 1} of {RUNS}"
