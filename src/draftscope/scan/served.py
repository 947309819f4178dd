"""The statistics that a capture kept in place of rows, as a fingerprint.

The part that runs inside an engine writes tensors and a JSON header (`engines/served.py`): sums by class and half of the
requests, by range of positions, and by run of neighbouring requests, each of all slots. What they mean is told here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.scan.core import name_of
from draftscope.scan.core_tensors import statistics_of
from draftscope.scan.fingerprint import CLASSES, ORDINARY, Fingerprint, Origin, Part, Provenance, Shape
from draftscope.scan.joint import RowSample, cosines_of
from draftscope.scan.sums import BINS, POSITIONS, Sums
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile, parse_json

SCHEMA = "draftscope.statistics/1"
NAME = "statistics.safetensors"


def is_statistics(path: Place) -> bool:
    """Whether a path is such a file, or the folder of a capture that holds one."""
    return _file(path) is not None


def load_statistics(path: Place) -> Fingerprint:
    """The fingerprint of what was served.

    Raises:
        DraftscopeError: no such file, one of another version, or one whose parts do not fit each other.
    """
    file = _file(path)
    if file is None:
        raise DraftscopeError("holds no statistics of a capture", where=str(path),
                              remedy="Take some with `draftscope capture vllm --statistics -o DIR -- ...`")
    opened = TensorFile(file)
    header = _header(opened)
    assert header is not None
    if header.get("schema") != SCHEMA:
        raise DraftscopeError(f"holds statistics of version {header.get('schema')}, this program reads {SCHEMA}", where=str(file))
    try:
        return _made(opened, header, str(path))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise DraftscopeError(f"holds damaged statistics ({error})", where=str(file)) from None


def _file(path: Place) -> Place | None:
    for file in (path, path / NAME):
        try:
            if file.is_file() and _header(TensorFile(file)) is not None:
                return file
        except (DraftscopeError, OSError):
            continue
    return None


def _header(opened: TensorFile) -> dict[str, Any] | None:
    try:
        header = parse_json(opened.metadata.get("draftscope", "null"))
    except ValueError:
        return None
    known = isinstance(header, dict) and str(header.get("schema", "")).startswith("draftscope.statistics/")
    return header if known else None


def _made(opened: TensorFile, header: Mapping[str, Any], path: str) -> Fingerprint:
    slots, width, apart = int(header["slots"]), int(header["width"]), int(header["requests_of_a_run"])
    requests, rows = int(header["requests"]), int(header["rows"])
    if slots <= 0 or width <= 0 or not rows:
        raise ValueError("no rows")
    made = Fingerprint(tuple(f"slot {i}" for i in range(slots)), False, width, dtypes=(str(header["dtype"]),), grouped=("runs",))
    made.origins = (Origin(path, "statistics", "traces", requests, rows),)
    made.provenance = (Provenance(metadata.version("draftscope"), "torch", "capture --statistics"),)
    for number, (what, first, second) in enumerate(header["keys"]):
        state = {name: opened.tensor(f"{number}.{name}") for name in Sums.NAMES}
        check(state, slots, width)
        for entry in range(slots):
            found = statistics_of(state, entry)
            if what == "cell":
                made.cells[entry, CLASSES[first], second] = found
                continue
            name = name_of(first) if what == "position" else run_name(first, apart, requests)
            if what not in ("position", "group") or CLASSES[second] not in ORDINARY:
                raise ValueError(f"unknown sums {what} of {second}")
            made.parts.setdefault((what, name), Part()).cells[entry, CLASSES[second]] = found
    _sampled(made, opened, apart, requests)
    return made


def check(state: Mapping[str, Tensor], slots: int, width: int) -> None:
    """Raises ValueError where sums of so many slots and channels have other shapes or dtypes, or a moment that is not finite."""
    whole, exact = torch.int64, torch.float64
    for name, shape, dtype in (
        ("counts", (slots, 5), whole), ("histogram", (slots, BINS), whole), ("norms", (slots, 5), exact),
        ("extremes", (slots, 2), exact), ("mean", (slots, width), exact), ("squares", (slots, width), exact),
        ("largest", (slots, width), torch.float32), ("exceeds", (slots, width), whole),
    ):
        if tuple(state[name].shape) != shape or state[name].dtype != dtype:
            raise ValueError(f"{name} is {state[name].dtype} {list(state[name].shape)}")
    if any(not bool(state[name].isfinite().all()) for name in ("norms", "mean", "squares")):
        raise ValueError("moments that are not finite")


def run_name(number: int, apart: int, requests: int) -> str:
    """A run of neighbouring requests in words."""
    return f"requests {number * apart + 1} to {min((number + 1) * apart, requests)}"


def _sampled(made: Fingerprint, opened: TensorFile, apart: int, requests: int) -> None:
    """Samples and cosines of the rows that were kept whole."""
    if "sample.rows" not in opened.names:
        made.notes = ("no row was kept whole: no sample, no cosines between slots",)
        return
    rows, about = opened.tensor("sample.rows"), opened.tensor("sample.about")
    if rows.shape[1:] != (len(made.entries), made.width) or about.shape != (len(rows), 3) or not rows.is_floating_point() or not (
            bool(rows.isfinite().all())):
        raise ValueError("a sample of other rows")
    every = max(1, round(made.rows / len(rows)))
    made.every, made.notes = (every,), (f"samples and cosines are of {len(rows)} rows that were kept whole",)
    for entry in range(rows.shape[1]):
        made.samples.setdefault(entry, RowSample()).update_finite(rows[:, entry])
        shape = made.shapes.setdefault(entry, Shape())
        shape.values.update(rows[:, entry])
        shape.sketch.update(rows[:, entry])
        shape.slices.update(rows[:, entry])
    usable = (rows != 0).any(-1).all(1)
    found = cosines_of(rows[usable].float())
    places = torch.bucketize(about[usable, 1], torch.tensor(POSITIONS), right=True) - 1
    runs = about[usable, 0] // apart
    for kind, numbers in (("position", places), ("group", runs)):
        for number in numbers.unique().tolist():
            name = name_of(number) if kind == "position" else run_name(number, apart, requests)
            made.parts.setdefault((kind, name), Part()).cosines.update_found(found[numbers == number])  # type: ignore[arg-type]

