"""The fingerprint of a source: statistics by entry, class of rows and half of the sequences, in one versioned file.

The file is safetensors. Metadata `draftscope` is a JSON object (schema, entries, inputs' origin, provenance, `about`: what each
tensor is), metadata `checksum` is over that text and all tensors. A later version reads every earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.scan.between import Between
from draftscope.scan.inputs import Inputs
from draftscope.scan.joint import Cosines, RowSample
from draftscope.scan.kept import KeptSequences
from draftscope.scan.packing import ABOUT, checksum, packed, unpacked
from draftscope.scan.statistics import CLASSES, HALVES, KINDS, ORDINARY, Kind, Part, RowClass, Shape, Statistics, merge_into
from draftscope.states.leftover import sweep_up
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile, parse_json, save_tensors

__all__ = ["CLASSES", "HALVES", "KINDS", "ORDINARY", "SCHEMA", "Estimated", "Fingerprint", "Kind", "Odd", "Origin", "Part",
           "Provenance", "RowClass", "Shape", "Statistics", "is_fingerprint", "load_fingerprint"]

FAMILY = "draftscope.fingerprint/"
VERSION = 3
SCHEMA = f"{FAMILY}{VERSION}"
EARLIER = (1, 2)
"""Read as well. 1: without parts and samples; both: without inputs, provenance and checksum."""
NAMED = 1000
"""Odd sequences that are named, of each kind; the rest is counted."""


@dataclass(frozen=True)
class Origin:
    """A source that went into a fingerprint; `part` tells shards of one source from each other."""

    path: str
    format: str
    kind: str
    sequences: int
    rows: int
    skipped: int = 0
    part: str = ""


@dataclass(frozen=True)
class Provenance:
    """What made a fingerprint, the same on every machine that does the same.

    Attributes:
        version: of draftscope.
        engine: what passed over the rows: `numba`, `torch` or `numpy`.
        command: the command line, or the call from Python.
    """

    version: str
    engine: str
    command: str = ""


@dataclass(frozen=True)
class Estimated:
    """A scan that took some sequences alone, chosen by a hash of their names.

    Attributes:
        how: what was asked for, such as `sample 100`.
        taken: files that were read.
        of: files in all.
    """

    how: str
    taken: int
    of: int


@dataclass
class Odd:
    """Sequences of one oddity (`bad`: not counted among the rows).

    Attributes:
        count: how many.
        named: the first `NAMED` of them, each with what is odd where that is not said by the kind alone.
    """

    count: int = 0
    named: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, why: str = "") -> None:
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append((name, why))

    def merge(self, other: Odd) -> None:
        self.count += other.count
        self.named += other.named[: NAMED - len(self.named)]


@dataclass
class Fingerprint:
    """Mergeable statistics of a source.

    Attributes:
        entries: names of the entries, in order: what the files call them, never believed.
        last: whether the last entry is the last state.
        width: Ht.
        cells: by (entry, class, half); a sequence belongs to one half, by its name. Classes exclude each other: the first
            token, sinks, answer tokens, the others (all of them where answers are unknown).
        origins: what was scanned.
        dtypes: dtypes met.
        notes: what the scan changed or left out.
        parts: the ordinary rows again, by natural group of sequences and by position.
        samples: by entry, some ordinary rows.
        grouped: what the groups are: `given`, `files`, or `runs` (of sequences, in the source's order).
        every: of how many ordinary rows one is in `samples` and the cosines, by a hash of sequence and position; 1 = all are.
            Several where fingerprints of different shares were merged.
        inputs: every sequence that was counted; empty in files of version 1 and 2, and where nothing was read from files.
        provenance: what made it; several where fingerprints were merged.
        odd: sequences that could not be counted (`bad`) or are unlike what one expects, by kind.
        shapes: by entry, what whole rows show; of one ordinary row in `every`.
        between: how much sequences differ from each other.
        kept: a few sequences by name.
        estimated: empty where every sequence was taken.
        unfinished: of a scan that was interrupted: how far it came, and what was asked for (`scan.resuming`); else empty.
    """

    entries: tuple[str, ...]
    last: bool
    width: int
    cells: dict[tuple[int, RowClass, int], Statistics] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    dtypes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parts: dict[tuple[Kind, str], Part] = field(default_factory=dict)
    samples: dict[int, RowSample] = field(default_factory=dict)
    grouped: tuple[str, ...] = ()
    every: tuple[int, ...] = (1,)
    inputs: Inputs = field(default_factory=Inputs)
    provenance: tuple[Provenance, ...] = ()
    odd: dict[str, Odd] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    between: Between = field(default_factory=Between)
    kept: KeptSequences = field(default_factory=KeptSequences)
    estimated: tuple[Estimated, ...] = ()
    unfinished: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return sum(origin.sequences for origin in self.origins)

    @property
    def rows(self) -> int:
        return sum(origin.rows for origin in self.origins)

    @property
    def slots(self) -> int:
        return len(self.entries) - self.last

    def statistics(
        self, entry: int, classes: Iterable[RowClass] = CLASSES, halves: Iterable[int] = HALVES
    ) -> Statistics:
        """Of one entry, over classes and halves together; empty where there are no rows."""
        total = Statistics()
        wanted_halves = tuple(halves)
        for row_class in classes:
            for half in wanted_halves:
                cell = self.cells.get((entry, row_class, half))
                if cell is not None:
                    total.merge(cell)
        return total

    def of_kind(self, kind: Kind) -> dict[str, Part]:
        """The parts of one kind, by name."""
        return {name: part for (own, name), part in self.parts.items() if own == kind}

    @property
    def population(self) -> int | None:
        """Sequences that the figures stand for where they are estimates, else None."""
        taken = sum(one.taken for one in self.estimated)
        return round(self.sequences * sum(one.of for one in self.estimated) / taken) if taken else None

    @property
    def cosines(self) -> Cosines:
        """Between entries, over all ordinary rows."""
        total = Cosines()
        for part in self.of_kind("group").values():
            total.merge(part.cosines)
        return total

    def merge(self, other: Fingerprint) -> Fingerprint:
        """Both together, as if they had been scanned as one; neither is changed.

        Raises:
            DraftscopeError: they have different entries or widths, or hold the same input.
        """
        total = Fingerprint(self.entries, self.last, self.width, every=self.every)
        total.absorb(self)
        total.absorb(other)
        return total

    def absorb(self, other: Fingerprint) -> None:
        """The same in place.

        Raises:
            DraftscopeError: as `merge`; nothing is taken in then.
        """
        for what, a, b in (
            ("entries", len(self.entries), len(other.entries)), ("width", self.width, other.width),
            ("last state", self.last, other.last),
        ):
            if a != b:
                raise DraftscopeError(
                    f"fingerprints of different {what} do not merge: {a} and {b}",
                    remedy="Merge fingerprints of one data set only; use `draftscope compare` for two",
                )
        twice = [] if len(self.inputs) and len(other.inputs) else sorted({o.path for o in self.origins if o in other.origins})
        if twice:  # a file of an earlier version knows no inputs
            raise DraftscopeError("is in both fingerprints: its rows would count twice", where=twice[0],
                                  remedy="Merge each shard once")
        self.inputs.merge(other.inputs)
        for key, cell in other.cells.items():
            merge_into(self.cells, key, cell)
        for name, part in other.parts.items():
            self.parts.setdefault(name, Part()).merge(part)
        for entry, sample in other.samples.items():
            self.samples.setdefault(entry, RowSample(sample.keep)).merge(sample)
        for entry, shape in other.shapes.items():
            self.shapes.setdefault(entry, Shape()).merge(shape)
        self.between.merge(other.between)
        self.kept.merge(other.kept)
        for kind, odd in other.odd.items():
            self.odd.setdefault(kind, Odd()).merge(odd)
        renamed = () if self.entries == other.entries else (f"entries were called {', '.join(other.entries)} in a part",)
        self.origins += other.origins
        self.dtypes = tuple(sorted({*self.dtypes, *other.dtypes}))
        self.notes = tuple(dict.fromkeys((*self.notes, *other.notes, *renamed)))
        self.grouped = tuple(sorted({*self.grouped, *other.grouped}))
        self.every = tuple(sorted({*self.every, *other.every}))
        self.estimated += other.estimated
        self.provenance = tuple(dict.fromkeys((*self.provenance, *other.provenance)))

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            DraftscopeError: the disk refuses.
        """
        tensors = packed(self.cells, self.parts, self.samples, self.shapes)
        for group, held in (("inputs", self.inputs.tensors()), ("between", self.between.state()), ("kept", self.kept.state())):
            tensors |= {f"{group}.{name}": tensor for name, tensor in held.items()}
        header = json.dumps({
            "schema": SCHEMA, "entries": self.entries, "last": self.last, "width": self.width, "dtypes": self.dtypes,
            "notes": self.notes, "origins": [vars(origin) for origin in self.origins], "parts": list(self.parts),
            "grouped": self.grouped, "every": self.every, "provenance": [asdict(one) for one in self.provenance],
            "odd": {kind: asdict(odd) for kind, odd in self.odd.items()},
            "estimated": [asdict(one) for one in self.estimated], "unfinished": self.unfinished, "about": ABOUT,
        }, ensure_ascii=False)
        sweep_up(path.absolute().parent, path.name)
        save_tensors(path, tensors, {"draftscope": header, "checksum": checksum(header, tensors)})


def is_fingerprint(path: Place) -> bool:
    """Whether a file says that it is a fingerprint, of any version."""
    if not path.is_file():
        return False
    try:
        return _header(TensorFile(path)) is not None
    except DraftscopeError:
        return False


def load_fingerprint(path: Place) -> Fingerprint:
    """Read a fingerprint.

    Raises:
        DraftscopeError: no fingerprint, one of a later version, one that was changed since, or whose parts do not fit each other.
    """
    opened = TensorFile(path)
    header = _header(opened)
    if header is None:
        raise DraftscopeError("is no fingerprint", where=str(path), remedy="Make one with `draftscope scan SOURCE -o FILE`")
    version = str(header.get("schema")).removeprefix(FAMILY)
    if version not in map(str, (*EARLIER, VERSION)):
        raise DraftscopeError(f"is a fingerprint of version {version}, this program reads those up to {VERSION}", where=str(path),
                              remedy="Read it with the draftscope that wrote it, or a newer one; or scan the source again")
    tensors = {name: opened.tensor(name) for name in opened.names}
    if version == str(VERSION) and opened.metadata.get("checksum") != checksum(opened.metadata["draftscope"], tensors):
        raise DraftscopeError("was damaged after it was written: its checksum does not fit", where=str(path),
                              remedy="Copy it again, or scan the source again")
    try:
        return _made(header, tensors)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DraftscopeError(f"is a damaged fingerprint ({error})", where=str(path), remedy="Scan the source again") from None


def _made(header: dict[str, Any], tensors: dict[str, Tensor]) -> Fingerprint:
    made = Fingerprint(
        entries=tuple(map(str, header["entries"])), last=bool(header["last"]), width=int(header["width"]),
        origins=tuple(Origin(**origin) for origin in header["origins"]), dtypes=tuple(header["dtypes"]),
        notes=tuple(header["notes"]), grouped=tuple(map(str, header.get("grouped", ()))),
        every=tuple(map(int, header.get("every", (1,)))),
        provenance=tuple(Provenance(**one) for one in header.get("provenance", ())),
        odd={str(kind): Odd(int(odd["count"]), [(str(name), str(why)) for name, why in odd["named"]])
             for kind, odd in header.get("odd", {}).items()},
        estimated=tuple(Estimated(str(one["how"]), int(one["taken"]), int(one["of"])) for one in header.get("estimated", ())),
        unfinished=dict(header.get("unfinished", {})),
    )
    own: dict[str, dict[str, Tensor]] = {"inputs": {}, "between": {}, "kept": {}}
    rest = {}
    for full, tensor in tensors.items():
        group, _, name = full.partition(".")
        if group in own:
            own[group][name] = tensor
        else:
            rest[full] = tensor
    if own["inputs"]:
        made.inputs = Inputs.from_tensors(own["inputs"])
        made.kept = KeptSequences.from_state(own["kept"])
        made.between = Between.from_state(own["between"])
        if made.between.count and made.between.mean.shape != (len(made.entries), len(CLASSES), 3):
            raise ValueError(f"sequences of {len(made.between.mean)} entries")
    made.cells, made.parts, made.samples, made.shapes = unpacked(rest, header.get("parts", []), len(made.entries), made.width)
    return made


def _header(opened: TensorFile) -> dict[str, Any] | None:
    text = opened.metadata.get("draftscope")
    if text is None:
        return None
    try:
        header = parse_json(text)
    except ValueError:
        return None
    return header if isinstance(header, dict) and str(header.get("schema", "")).startswith(FAMILY) else None
