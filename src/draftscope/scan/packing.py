"""Cells, parts and samples of a fingerprint as named tensors and back, and the checksum over a file of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from draftscope.scan.accumulators import Dimensions, Outliers
from draftscope.scan.joint import Cosines, RowSample
from draftscope.scan.shapes import Sketch
from draftscope.scan.statistics import CLASSES, HALVES, KINDS, ORDINARY, Kind, Part, RowClass, Shape, Statistics

Cells = dict[tuple[int, RowClass, int], Statistics]
Parts = dict[tuple[Kind, str], Part]

ABOUT = {
    "{entry}.{class}.{half}.*": "rows of one entry, class (first, sink, answer, other) and half of the sequences (by name)",
    "part.{number}.{entry}.{class}.*": "answer and other rows again, by the part of that number in `parts`: group or positions",
    "part.{number}.cosines.*": "cosines between the entries of a row: count, mean [L, L], squares [L, L] of deviations from it",
    "*.counts.counts": "[5] rows, rows with NaN or infinity, values NaN, values infinite, rows of zeros",
    "*.norms.histogram": "rows by log2 of the L2 norm, 32 bins an octave from 2^-40 on",
    "*.norms.moments": "[5] rows, sum of norms, rows not zero, mean of ln(norm), sum of squared deviations from it",
    "*.norms.extremes": "[2] smallest and largest norm",
    "*.dimensions.*": "rows; mean [H]; squares [H], sum of squared deviations from the mean",
    "*.outliers.*": "rows; largest [H] absolute value; exceeds [H], rows in which it is above 6 times the row's root mean square",
    "sample.{entry}.*": "rows with the smallest hashes of their values: keys [N], rows [N, H], keep = how many at most",
    "shape.{entry}.values.histogram": "[4096] values by the first 12 bits of their float32",
    "shape.{entry}.sketch.*": "mean of rows; sums of y = x - mean: total |y|^2, products y (y' Omega), Omega of `omega_of`",
    "shape.{entry}.slices.*": "rows projected onto the first 16 columns of Omega: moments, and histograms as of values",
    "shape.{entry}.neighbours.*": "cosine between a row and the one before it: count, mean, squares of deviations",
    "between.*": "over sequences, by entry and class: mean [L, 4, 3], comoments; of rows, rows of the class, their norms' sum",
    "kept.*": "sequences with the smallest hashes of their names: names, rows [N, 3], token ids, answers, norms [L, rows]",
    "inputs.*": "text: JSON of names and etags; numbers [N, 3]: size, time in ns, rows; identity [N, 16]",
}
"""What the tensors of a file are, written into it."""


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """Of header and tensors: BLAKE2b over the text, then name, dtype, shape and bytes of each in the order of the names."""
    found = hashlib.blake2b(header.encode("utf-8", "surrogatepass"), digest_size=16)
    for name in sorted(tensors):
        held = tensors[name].contiguous()
        found.update(f"\n{name} {held.dtype} {list(held.shape)}\n".encode())
        if held.numel():
            found.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def packed(cells: Cells, parts: Parts, samples: Mapping[int, RowSample], shapes: Mapping[int, Shape]) -> dict[str, Tensor]:
    """By the names of `ABOUT`."""
    tensors = {
        f"{entry}.{row_class}.{half}.{name}": tensor
        for (entry, row_class, half), cell in cells.items() for name, tensor in cell.tensors().items()
    }
    for number, part in enumerate(parts.values()):
        for (entry, row_class), cell in part.cells.items():
            tensors |= {f"part.{number}.{entry}.{row_class}.{name}": tensor for name, tensor in cell.tensors().items()}
        tensors |= {f"part.{number}.cosines.{name}": tensor for name, tensor in part.cosines.state().items()}
    for entry, sample in samples.items():
        tensors |= {f"sample.{entry}.{name}": tensor for name, tensor in sample.state().items()}
    for entry, shape in shapes.items():
        tensors |= {f"shape.{entry}.{name}": tensor for name, tensor in shape.tensors().items()}
    return tensors


def unpacked(tensors: Mapping[str, Tensor], listed: list[list[str]], entries: int, width: int) -> tuple[
        Cells, Parts, dict[int, RowSample], dict[int, Shape]]:
    """Cells, parts, samples and shapes.

    Args:
        listed: kind and name of each part, by number.

    Raises:
        ValueError, KeyError, IndexError: names, shapes or values that no writer makes.
    """
    groups: dict[tuple[int, RowClass, int], dict[str, Tensor]] = {}
    further: dict[str, Tensor] = {}
    shaped: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("shape."):
            _, entry, key = name.split(".", 2)
            if not 0 <= int(entry) < entries:
                raise ValueError(f"unknown tensor {name}")
            shaped.setdefault(int(entry), {})[key] = tensor
            continue
        if name.startswith(("part.", "sample.")):
            further[name] = tensor
            continue
        entry, row_class, half, key = name.split(".", 3)
        if row_class not in CLASSES or int(half) not in HALVES or not 0 <= int(entry) < entries:
            raise ValueError(f"unknown tensor {name}")
        groups.setdefault((int(entry), row_class, int(half)), {})[key] = tensor
    cells = {cell: _checked(held, width) for cell, held in sorted(groups.items())}
    shapes = {entry: _shape(held, width) for entry, held in sorted(shaped.items())}
    return cells, *_further(further, listed, entries, width), shapes


def _further(tensors: dict[str, Tensor], listed: list[list[str]], entries: int, width: int) -> tuple[Parts, dict[int, RowSample]]:
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
            if rest[1] not in ORDINARY or not 0 <= int(rest[0]) < entries:
                raise ValueError(f"unknown tensor {full}")
            cells.setdefault((int(number), int(rest[0]), rest[1]), {})[".".join(rest[2:])] = tensor
        else:
            joint.setdefault((kind, int(number)), {})[rest[-1]] = tensor
    parts: Parts = {key: Part() for key in names}
    samples: dict[int, RowSample] = {}
    for (number_, entry, row_class), held in sorted(cells.items()):
        parts[names[number_]].cells[entry, row_class] = _checked(held, width)
    for (kind, number_), held in sorted(joint.items()):
        if any(tensor.is_floating_point() and not bool(tensor.isfinite().all()) for tensor in held.values()):
            raise ValueError(f"{kind} {number_} holds values that are not finite")
        if kind == "part":
            cosines = Cosines.from_state(held)
            if cosines.count and cosines.mean.shape != (entries,) * 2:
                raise ValueError(f"cosines of {len(cosines.mean)} entries")
            parts[names[number_]].cosines = cosines
        elif not 0 <= number_ < entries or held["rows"].shape != (len(held["keys"]), width if len(held["keys"]) else 0):
            raise ValueError(f"unknown sample {number_}")
        else:
            samples[number_] = RowSample.from_state(held)
    return parts, samples


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


def _shape(tensors: dict[str, Tensor], width: int) -> Shape:
    """A shape whose tensors are as they are written."""
    expected = Shape()
    expected.sketch = Sketch(width)
    for name, tensor in expected.tensors().items():
        found = tensors[name]
        if found.dtype != tensor.dtype or (found.shape != tensor.shape and len(found) > 0):
            raise ValueError(f"shape {name} is {found.dtype} {list(found.shape)}")
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise ValueError(f"shape {name} holds values that are not finite")
    return Shape.from_tensors(tensors)
