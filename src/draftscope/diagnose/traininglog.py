"""Trainers' logs as one typed curve: step, loss, learning rate, accuracy by position, held-out figures.

Read are our own `log.jsonl`; SpecForge's console lines `step N: {...}` (training/assembly.py, 0.2.0) and speculators' `key=value`
lines, which its console handler breaks over several lines (train/logger.py, 0.9.0); `trainer_state.json` of transformers'
Trainer; TensorBoard's event files of any of them; and JSON lines with a step and a loss. Nothing in them is executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from draftscope.diagnose.eventfile import scalars
from draftscope.errors import DraftscopeError

BYTES, LINE, POINTS, FILES, DEPTH = 1 << 30, 1 << 20, 2_000_000, 64, 3
"""Bytes of a file, of a line, records of a curve, and files of a folder, at most; how deep a folder is looked into."""
NUMBER = 1 << 60
"""A step or a count beyond this is none."""
SUFFIXES = (".jsonl", ".log", ".txt", ".out")
STATE = "trainer_state.json"
RESUMED = re.compile(
    r"Resuming (?:training|mid-epoch)|Found checkpoint at|\bresum\w{1,8} (?:from|at) .{0,256}?(?:step|checkpoint)|"
    r"Successfully loaded optimizer state_dict", re.IGNORECASE)
# Every repeat has an end or cannot begin anew within itself: a line of a million characters takes no longer than others.
STEP = re.compile(r"\bstep (\d{1,12}): \{([^{}]*)\}$")
PAIR = re.compile(r"'([^'\n]{1,128})': (\[[^\[\]]{0,4096}\]|[-+.\w]{1,64})")
ASSIGNED = re.compile(r"([A-Za-z][\w./]{0,127})=([-+.\w]+)(?=,|\s|$)")
RECORD = re.compile(r"^\s{2,}(?:INFO|WARNING|ERROR|DEBUG)\b|^\[\d\d[:\d.]*\]")
PLACE = re.compile(r"\s[\w.]{1,128}\.py:\d{1,7}$")
ACCURACY = re.compile(r"^(?:train/)?(?:full_acc|acc|accuracy)[_/](\d{1,2})$")
LOSS = ("loss", "train/loss", "train_loss", "training_loss")
RATE = ("lr", "train/lr", "learning_rate", "train/learning_rate")
HELD = {
    "length": ("eval/simulated_acc_len", "val/accepted_length_epoch", "eval_accept_length", "eval/accept_length"),
    "accuracy": ("eval/avg_acc", "val/full_acc_0_epoch", "eval_accuracy", "eval/accuracy"),
    "loss": ("eval/avg_loss", "val/loss_epoch", "eval_loss", "eval/loss"),
}


@dataclass(slots=True)
class Point:
    """One record of a log.

    Attributes:
        accuracy: by position, the first is 0.
        tokens: supervised tokens of this step, where the log tells.
        held: `length`, `accuracy` and `loss` of an evaluation.
        resumed: what the log said of a resume right before; "" = nothing.
        position_loss: of the first position, where it is logged beside the total.
        epoch: the pass over the data, the first is 0, where the log counts tokens.
    """

    step: int
    loss: float | None = None
    rate: float | None = None
    accuracy: dict[int, float] = field(default_factory=dict)
    tokens: int | None = None
    held: dict[str, float] = field(default_factory=dict)
    resumed: str = ""
    epoch: int | None = None
    position_loss: float | None = None


@dataclass(slots=True)
class Curve:
    """All records in the order of the files; `format` says whose they are, `files` where they lay."""

    format: str
    points: list[Point] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def read_curve(paths: tuple[Path, ...]) -> Curve:
    """The curve of one or more logs, files or folders.

    Raises:
        DraftscopeError: none of them holds a record that is known, or one cannot be read; file and line are named.
    """
    curve = Curve("")
    for path in paths:
        if not path.exists():
            raise DraftscopeError("no such file or folder", where=str(path), remedy="--log takes a training's log, or its folder")
        if not path.is_dir() and not path.is_file():
            # It would be read twice, and a device has no end.
            raise DraftscopeError("is no regular file", where=str(path), remedy="Write what comes out of it to a file first")
        files = _files(path) if path.is_dir() else [path]
        for file in files:
            _read(file, curve, named=not path.is_dir())
    if not curve.points:
        raise DraftscopeError(
            "no training log in a known form", where=", ".join(map(str, paths)),
            remedy=f"Known are our log.jsonl, the console output of SpecForge and speculators, {STATE}, TensorBoard's event "
                   "files "
                   'and JSON lines with "step" and "loss"')
    return curve


def _files(folder: Path) -> list[Path]:
    """Logs in a folder and those below it, in the order of their names."""
    found: list[Path] = []
    states: list[Path] = []
    for file in sorted(folder.rglob("*")):
        if len(file.relative_to(folder).parts) > DEPTH or not file.is_file():
            continue
        if file.name == STATE:
            states.append(file)
        elif "tfevents" in file.name or (file.suffix in SUFFIXES and file.name != "conversations.jsonl"):
            found.append(file)
    # Every checkpoint has one of these, and the last holds all before.
    longest = max(states, key=lambda file: file.stat().st_size, default=None)
    return sorted([*found[:FILES], *([longest] if longest else [])])


def _read(file: Path, curve: Curve, *, named: bool) -> None:
    try:
        if file.stat().st_size > BYTES:
            raise DraftscopeError(f"a log of more than {BYTES >> 20} MiB", where=str(file), remedy="Give the part in question")
        before = len(curve.points)
        if file.name == STATE or file.suffix == ".json":
            name, points = "transformers Trainer", _trainer_state(file)
        elif "tfevents" in file.name:
            name, points = "TensorBoard", (_point(step, values) for step, values in scalars(file))
        else:
            name, points = _lines(file, strict=named and file.suffix == ".jsonl")
        for point in points:
            if point is not None:
                curve.points.append(point)
            if len(curve.points) > POINTS:
                raise DraftscopeError(f"more than {POINTS} records", where=str(file), remedy="Give the part in question")
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be read", where=str(file)) from None
    if len(curve.points) > before:
        curve.format = curve.format or name
        curve.files.append(file)
        if "tfevents" in file.name and before:
            curve.points[before].resumed = curve.points[before].resumed or f"a new event file ({file.name})"


def _trainer_state(file: Path) -> Iterator[Point | None]:
    try:
        history = json.loads(file.read_bytes()).get("log_history")
    except (ValueError, RecursionError, AttributeError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DraftscopeError("is not the state of a Trainer: no JSON object", where=f"{file}{line}") from None
    if not isinstance(history, list):
        raise DraftscopeError("holds no log_history", where=str(file), remedy=f"Give {STATE} as transformers' Trainer saves it")
    for entry in history:
        if isinstance(entry, dict) and _counts(entry.get("step")):
            yield _point(entry["step"], _flat(entry))


def _lines(file: Path, *, strict: bool) -> tuple[str, Iterator[Point | None]]:
    """By the first line that is known."""
    with file.open("rb") as opened:
        head = [opened.readline(LINE).decode("utf-8", "replace") for _ in range(2000)]
    for line in head:
        if line.lstrip().startswith("{"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(row, dict) or not _counts(row.get("step", row.get("global_step"))):
                continue  # a console shows configurations, too
            own = "answer_tokens_per_s" in row or "heldout" in row
            return ("draftscope" if own else "JSON lines"), _json_lines(file, strict=strict)
        if STEP.search(line.rstrip()):
            return "SpecForge", _text(file, _specforge)
        if "train/" in line and ASSIGNED.search(line):
            return "speculators", _text(file, _assigned, joined=True)
    return "", iter(())


def _json_lines(file: Path, *, strict: bool) -> Iterator[Point | None]:
    for number, line in _numbered(file):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            if strict:
                raise DraftscopeError("is not a JSON object", where=f"{file}, line {number}",
                                      remedy="Give the log as it was written") from None
            continue
        step = row.get("step", row.get("global_step"))
        if not _counts(step):
            continue
        if isinstance(row.get("heldout"), dict):
            yield _own_heldout(step, row["heldout"])
            continue
        point = _point(step, _flat(row))
        if point is None:
            continue
        _own(point, row)
        yield point


def _own(point: Point, row: Mapping[str, Any]) -> None:
    """What our own log has as lists."""
    accuracy, rows, losses = row.get("accuracy"), row.get("rows"), row.get("losses")
    if isinstance(losses, list) and losses:
        point.position_loss = _figure(losses[0])
    if isinstance(accuracy, list):
        point.accuracy = {i: a for i, value in enumerate(accuracy[:32])
                          if (a := _figure(value)) is not None and math.isfinite(a)}
    if isinstance(rows, list) and rows and _counts(rows[0]):
        point.tokens = rows[0]
    if _counts(row.get("epoch")):
        point.epoch = row["epoch"]
    if row.get("resumed") is True:
        point.resumed = "resumed"


def _own_heldout(step: int, held: Mapping[str, Any]) -> Point:
    walk = _figure(held.get("walk"))
    length = _figure(held.get("length")) if walk is None else walk
    return Point(step, held={} if length is None else {"length": length})


def _counts(value: Any) -> TypeGuard[int]:
    """Whether a value can be a step or a count."""
    return type(value) is int and abs(value) < NUMBER


def _figure(value: Any) -> float | None:
    """A number, None for anything else; what no float holds is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def _text(file: Path, parse: Callable[[str, int], Point | None], *, joined: bool = False) -> Iterator[Point | None]:
    """Records of console output; what is said of a resume goes to the next."""
    said, step = "", 0
    for line in _joined(file) if joined else (line for _, line in _numbered(file)):
        if found := RESUMED.search(line):
            said = said or found[0]
        point = parse(line, step)
        if point is not None:
            point.resumed, said, step = said, "", point.step
            yield point


def _specforge(line: str, _: int) -> Point | None:
    found = STEP.search(line)
    return None if found is None else _point(int(found[1]), _pairs(found[2]))


def _pairs(text: str) -> dict[str, float]:
    """Numbers of a printed dictionary; the elements of a list get their number."""
    values: dict[str, float] = {}
    for name, value in PAIR.findall(text):
        if value.startswith("["):
            for i, element in enumerate(value[1:-1].split(",")[:32]):
                _put(values, f"{name}/{i}", element.strip())
        else:
            _put(values, name, value)
    return values


def _assigned(line: str, step: int) -> Point | None:
    if "train/" not in line and "val/" not in line:
        return None
    values: dict[str, float] = {}
    for name, value in ASSIGNED.findall(line):
        _put(values, name, value)
    own = values.get("global_step", math.nan)
    return _point(int(own) if abs(own) < NUMBER else step, values) if values else None


def _put(values: dict[str, float], name: str, text: str) -> None:
    try:
        values[name] = float(text)
    except ValueError:
        return


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as opened:
        number = 0
        while line := opened.readline(LINE):
            number += 1
            yield number, line.decode("utf-8", "replace").rstrip()


def _joined(file: Path) -> Iterator[str]:
    """Records of a console handler that breaks them at its width: a line that begins no record goes on with the one before."""
    record = ""
    for _, line in _numbered(file):
        begins = bool(RECORD.match(line)) or not line.startswith(" ")
        text = PLACE.sub("", line).strip()
        if begins or len(record) > LINE:
            if record:
                yield record
            record = text
        else:
            record += " " + text
    if record:
        yield record


def _flat(row: Mapping[str, Any], prefix: str = "", depth: int = 4) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping) and depth:
            values |= _flat(value, f"{prefix}{key}/", depth - 1)
        elif (figure := _figure(value)) is not None:
            values[f"{prefix}{key}"] = figure
    return values


def _point(step: int, values: Mapping[str, float]) -> Point | None:
    """A record by the names that trainers use; None where it holds none of them."""
    def first(names: tuple[str, ...]) -> float | None:
        return next((values[name] for name in names if name in values), None)

    accuracy = {int(found[1]): value for name, value in values.items() if (found := ACCURACY.match(name))}
    for name in ("acc", "train/acc", "accuracy", "train/accuracy"):
        if not accuracy and name in values:
            accuracy = {0: values[name]}
    held = {what: value for what, names in HELD.items() if (value := first(names)) is not None}
    position = first(("train/loss_0", "loss_0", "ploss_0", "train/ploss_0"))
    loss = first(LOSS)
    if loss is None:
        loss = position
    if loss is None and not accuracy and not held:
        return None
    return Point(step, loss, first(RATE), {k: v for k, v in accuracy.items() if math.isfinite(v)}, held=held,
                 position_loss=position)
