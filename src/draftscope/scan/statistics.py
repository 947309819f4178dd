"""What is told of a set of rows, and of a natural part of a source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torch import Tensor

from draftscope.scan.accumulators import ACCUMULATORS, Counts, Dimensions, Norms, Outliers
from draftscope.scan.joint import Cosines
from draftscope.scan.shapes import Neighbours, Sketch, Slices, ValueHistogram

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

    def copy(self) -> Statistics:
        """The same, sharing nothing with it."""
        return Statistics.from_tensors(self.tensors())

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


Key = TypeVar("Key")


def merge_into(cells: dict[Key, Statistics], key: Key, found: Statistics) -> None:
    """Merge statistics into those of a key, where there are any."""
    if key in cells:
        cells[key].merge(found)
    else:
        cells[key] = found.copy()


@dataclass
class Part:
    """Ordinary rows of a natural group of sequences, or of a range of positions, by entry and class; cosines over both."""

    cells: dict[tuple[int, RowClass], Statistics] = field(default_factory=dict)
    cosines: Cosines = field(default_factory=Cosines)

    def merge(self, other: Part) -> None:
        for key, cell in other.cells.items():
            merge_into(self.cells, key, cell)
        self.cosines.merge(other.cosines)

    def statistics(self, entry: int, classes: Iterable[RowClass]) -> Statistics:
        """Of one entry, over classes; empty where there are no rows."""
        total = Statistics()
        for row_class in classes:
            if (entry, row_class) in self.cells:
                total.merge(self.cells[entry, row_class])
        return total


@dataclass
class Shape:
    """What whole ordinary rows of an entry show, of a share of them."""

    values: ValueHistogram = field(default_factory=ValueHistogram)
    sketch: Sketch = field(default_factory=Sketch)
    slices: Slices = field(default_factory=Slices)
    neighbours: Neighbours = field(default_factory=Neighbours)

    def merge(self, other: Shape) -> None:
        self.values.merge(other.values)
        self.sketch.merge(other.sketch)
        self.slices.merge(other.slices)
        self.neighbours.merge(other.neighbours)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": value for name in SHAPES for key, value in getattr(self, name).state().items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Shape:
        made = cls()
        for name, kind in SHAPES.items():
            prefix = f"{name}."
            setattr(made, name, kind.from_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}))
        return made


SHAPES: dict[str, type[ValueHistogram] | type[Sketch] | type[Slices] | type[Neighbours]] = {
    "values": ValueHistogram, "sketch": Sketch, "slices": Slices, "neighbours": Neighbours,
}
