"""The outputs of a command, checked before its work: that each can be written, overwrites an earlier result of its option at
most, and is no file that something else of the same command uses.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftscope.errors import UsageError


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a command will write.

    Attributes:
        option: what names it.
        is_own: whether a file that starts with these bytes (some kilobytes) is an earlier result of the option.
        beside: what else is written on the way.
    """

    option: str
    path: Path
    is_own: Callable[[bytes], bool]
    beside: tuple[Path, ...] = ()


def check_outputs(outputs: Sequence[Output], others: Mapping[str, Path | None] | None = None) -> None:
    """Raise UsageError for the first output that should not be written. Changes nothing.

    Args:
        others: what else the command names, inputs and folders, by option.
    """
    for output in outputs:
        check_writable(output.path)
        check_own(output.path, output.is_own)
    used = {path.resolve(): option for option, path in (others or {}).items() if path is not None}
    for output in outputs:
        for path in (output.path, *output.beside):
            if path.exists() and not path.is_file() and not path.is_dir():
                continue  # what goes to a device or a pipe replaces nothing
            before = used.setdefault(path.resolve(), output.option)
            if before != output.option:
                raise UsageError(f"is used by {before} and by {output.option}", where=str(path),
                                 remedy="Give each a file of its own")


def own_json(schema: str) -> Callable[[bytes], bool]:
    """Whether JSON is of this schema (`lint` is `draftscope.lint` of any version), which it says first."""
    said = re.compile(rb'\s*\{\s*"schema"\s*:\s*"draftscope\.' + re.escape(schema.encode()) + rb'/\d+"')
    return lambda start: said.match(start) is not None


def check_own(path: Path, is_own: Callable[[bytes], bool]) -> None:
    """Raise UsageError where an output would overwrite a file that holds anything but an earlier result: it may be an input.

    Args:
        is_own: whether a file that starts with these bytes (some kilobytes) is one.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise UsageError(f"may not be read ({error.strerror}), so it is not overwritten", where=str(path)) from error
    if start and not is_own(start):
        raise UsageError("holds something that is no earlier result of this option: it is not overwritten", where=str(path),
                         remedy="Name another file, or remove this one")


def check_writable(path: Path) -> None:
    """Raise UsageError if a file could not be written there. Changes nothing."""
    path = path.resolve()
    if path.is_dir():
        raise UsageError("is a directory, not a file to write", where=str(path))
    if not path.parent.is_dir():
        raise UsageError("its folder does not exist", where=str(path), remedy=f"mkdir -p '{path.parent}'")
    if not os.access(path.parent if not path.exists() else path, os.W_OK):
        raise UsageError("may not be written", where=str(path))
    if path.exists() and not path.is_file():
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"):
            pass
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error
