"""The fingerprint of a source: statistics by entry, class of rows and half of the sequences, in one versioned file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.scan.accumulators import ACCUMULATORS, Counts, Dimensions, Norms, Outliers
from draftscope.scan.joint import Cosines, RowSample
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile, parse_json, save_tensors

SCHEMA = "draftscope.fingerprint/2"
EARLIER = ("draftscope.fingerprint/1",)
"""Read as well: without parts and samples."""

RowClass = Literal["first", "sink", "answer", "other"]
CLASSES: tuple[RowClass, ...] = ("first", "sink", "answer", "other")
ORDINARY: tuple[RowClass, ...] = ("answer", "other")
HALVES = (0, 1)

Kind = Literal["group", "position"]
KINDS: tuple[Kind, ...] = ("group", "position")


@dataclass
class Statistics:
    """All accumulators over one set of rows."""

    counts: Counts = field(default_factory=Counts)
    norms: Norms = field(default_factory=Norms)
    dimensions: Dimensions = field(default_factory=Dimensions)
    outliers: Outliers = field(default_factory=Outliers)

    def update(self, rows: Tensor) -> None:
        """Take in rows [N, H] of any float dtype."""
        self.counts.update(rows)
        self.norms.update(rows)
        self.dimensions.update(rows)
        self.outliers.update(rows)

    def merge(self, other: Statistics) -> None:
        self.counts.merge(other.counts)
        self.norms.merge(other.norms)
        self.dimensions.merge(other.dimensions)
        self.outliers.merge(other.outliers)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": value for name in ACCUMULATORS for key, value in getattr(self, name).state().items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Statistics:
        made = cls()
        for name, kind in ACCUMULATORS.items():
            prefix = f"{name}."
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            setattr(made, name, kind.from_state(state))
        return made


@dataclass
class Part:
    """Ordinary rows of a natural group of sequences, or of a range of positions, by entry and class; cosines over both."""

    cells: dict[tuple[int, RowClass], Statistics] = field(default_factory=dict)
    cosines: Cosines = field(default_factory=Cosines)

    def merge(self, other: Part) -> None:
        for key, cell in other.cells.items():
            self.cells.setdefault(key, Statistics()).merge(cell)
        self.cosines.merge(other.cosines)

    def statistics(self, entry: int, classes: Iterable[RowClass]) -> Statistics:
        """Of one entry, over classes; empty where there are no rows."""
        total = Statistics()
        for row_class in classes:
            if (entry, row_class) in self.cells:
                total.merge(self.cells[entry, row_class])
        return total


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
    def cosines(self) -> Cosines:
        """Between entries, over all ordinary rows."""
        total = Cosines()
        for part in self.of_kind("group").values():
            total.merge(part.cosines)
        return total

    def merge(self, other: Fingerprint) -> Fingerprint:
        """Both together, as if they had been scanned as one.

        Raises:
            DraftscopeError: they have different entries or widths, or hold the same source.
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
        twice = sorted({o.path for o in self.origins if o in other.origins})
        if twice:
            raise DraftscopeError("is in both fingerprints: its rows would count twice", where=twice[0],
                                  remedy="Merge each shard once")
        cells = {}
        for key in [*self.cells, *(k for k in other.cells if k not in self.cells)]:
            total = Statistics()
            for cells_of in (self.cells, other.cells):
                if key in cells_of:
                    total.merge(cells_of[key])
            cells[key] = total
        parts: dict[tuple[Kind, str], Part] = {}
        samples: dict[int, RowSample] = {}
        for one in (self, other):
            for name, part in one.parts.items():
                parts.setdefault(name, Part()).merge(part)
            for entry, sample in one.samples.items():
                samples.setdefault(entry, RowSample(sample.keep)).merge(sample)
        renamed = () if self.entries == other.entries else (f"entries were called {', '.join(other.entries)} in a part",)
        return replace(
            self, cells=cells, origins=self.origins + other.origins, dtypes=tuple(sorted({*self.dtypes, *other.dtypes})),
            notes=tuple(dict.fromkeys((*self.notes, *other.notes, *renamed))), parts=parts, samples=samples,
            grouped=tuple(sorted({*self.grouped, *other.grouped})), every=tuple(sorted({*self.every, *other.every})),
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            DraftscopeError: the disk refuses.
        """
        tensors = {
            f"{entry}.{row_class}.{half}.{name}": tensor
            for (entry, row_class, half), cell in self.cells.items() for name, tensor in cell.tensors().items()
        }
        for number, part in enumerate(self.parts.values()):
            for (entry, row_class), cell in part.cells.items():
                tensors |= {f"part.{number}.{entry}.{row_class}.{name}": tensor for name, tensor in cell.tensors().items()}
            tensors |= {f"part.{number}.cosines.{name}": tensor for name, tensor in part.cosines.state().items()}
        for entry, sample in self.samples.items():
            tensors |= {f"sample.{entry}.{name}": tensor for name, tensor in sample.state().items()}
        header = {
            "schema": SCHEMA, "entries": self.entries, "last": self.last, "width": self.width, "dtypes": self.dtypes,
            "notes": self.notes, "origins": [vars(origin) for origin in self.origins],
            "parts": list(self.parts), "grouped": self.grouped, "every": self.every,
        }
        save_tensors(path, tensors, {"draftscope": json.dumps(header, ensure_ascii=False)})


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
        DraftscopeError: no fingerprint, one of another version, or one whose parts do not fit each other.
    """
    opened = TensorFile(path)
    header = _header(opened)
    if header is None:
        raise DraftscopeError("is no fingerprint", where=str(path), remedy="Make one with `draftscope scan SOURCE -o FILE`")
    if header.get("schema") not in (SCHEMA, *EARLIER):
        raise DraftscopeError(f"is a fingerprint of version {header.get('schema')}, this program reads {SCHEMA}", where=str(path),
                              remedy="Scan the source again")
    try:
        made = Fingerprint(
            entries=tuple(map(str, header["entries"])), last=bool(header["last"]), width=int(header["width"]),
            origins=tuple(Origin(**origin) for origin in header["origins"]), dtypes=tuple(header["dtypes"]),
            notes=tuple(header["notes"]), grouped=tuple(map(str, header.get("grouped", ()))),
            every=tuple(map(int, header.get("every", (1,)))),
        )
        groups: dict[tuple[int, RowClass, int], dict[str, Tensor]] = {}
        further: dict[str, Tensor] = {}
        for name in opened.names:
            if name.startswith(("part.", "sample.")):
                further[name] = opened.tensor(name)
                continue
            entry, row_class, half, key = name.split(".", 3)
            if row_class not in CLASSES or int(half) not in HALVES or not 0 <= int(entry) < len(made.entries):
                raise ValueError(f"unknown tensor {name}")
            groups.setdefault((int(entry), row_class, int(half)), {})[key] = opened.tensor(name)
        for cell, tensors in sorted(groups.items()):
            made.cells[cell] = _checked(tensors, made.width)
        _read_further(made, further, header.get("parts", []))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DraftscopeError(f"is a damaged fingerprint ({error})", where=str(path), remedy="Scan the source again") from None
    return made


def _read_further(made: Fingerprint, tensors: dict[str, Tensor], listed: list[list[str]]) -> None:
    """Parts and samples from their tensors."""
    names: list[tuple[Kind, str]] = []
    for kind, name in listed:
        if kind not in KINDS:
            raise ValueError(f"unknown part {kind}")
        names.append((kind, str(name)))
    cells: dict[tuple[int, int, RowClass], dict[str, Tensor]] = {}
    joint: dict[tuple[str, int], dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        kind, number, *rest = full.split(".")
        if kind == "part" and rest[0] != "cosines":
            if rest[1] not in ORDINARY or not 0 <= int(rest[0]) < len(made.entries):
                raise ValueError(f"unknown tensor {full}")
            cells.setdefault((int(number), int(rest[0]), rest[1]), {})[".".join(rest[2:])] = tensor
        else:
            joint.setdefault((kind, int(number)), {})[rest[-1]] = tensor
    for key in names:
        made.parts[key] = Part()
    for (number_, entry, row_class), held in sorted(cells.items()):
        made.parts[names[number_]].cells[entry, row_class] = _checked(held, made.width)
    for (kind, number_), held in sorted(joint.items()):
        if any(tensor.is_floating_point() and not bool(tensor.isfinite().all()) for tensor in held.values()):
            raise ValueError(f"{kind} {number_} holds values that are not finite")
        if kind == "part":
            cosines = Cosines.from_state(held)
            if cosines.count and cosines.mean.shape != (len(made.entries),) * 2:
                raise ValueError(f"cosines of {len(cosines.mean)} entries")
            made.parts[names[number_]].cosines = cosines
        elif not 0 <= number_ < len(made.entries) or held["rows"].shape != (len(held["keys"]), made.width if len(
                held["keys"]) else 0):
            raise ValueError(f"unknown sample {number_}")
        else:
            made.samples[number_] = RowSample.from_state(held)


def _checked(tensors: dict[str, Tensor], width: int) -> Statistics:
    """Statistics whose tensors have the shapes and dtypes that they are written with."""
    expected = Statistics()
    expected.dimensions, expected.outliers = Dimensions(width), Outliers(width)
    for name, tensor in expected.tensors().items():
        found = tensors[name]
        empty = found.shape == (0,) and tensor.shape == (width,)
        if found.dtype != tensor.dtype or (found.shape != tensor.shape and not empty):
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}")
    if any(not bool(torch.isfinite(tensors[f"dimensions.{key}"]).all()) for key in ("mean", "squares")):
        raise ValueError("dimensions hold values that are not finite")
    return Statistics.from_tensors(tensors)


def _header(opened: TensorFile) -> dict[str, Any] | None:
    text = opened.metadata.get("draftscope")
    if text is None:
        return None
    try:
        header = parse_json(text)
    except ValueError:
        return None
    return header if isinstance(header, dict) and str(header.get("schema", "")).startswith("draftscope.fingerprint/") else None
