"""Folders of torch files that keep the slots beside the last state: what SpecForge, AngelSlim, ModelOpt and others share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftscope.errors import DraftscopeError
from draftscope.states.features import Layout, fits_pair, read_pair
from draftscope.states.folder import FileSource, list_files, number_of
from draftscope.states.tensorfile import read_json
from draftscope.states.torchfile import load_record, load_tensors
from draftscope.states.types import Sample

Finish = Callable[[Sample, dict[str, Any], list[str]], None]


def fits_file(file: Path, layout: Layout) -> str | None:
    """Why a torch file is of a layout; None if it is not, or cannot be read."""
    try:
        return fits_pair(load_tensors(file), layout, file)
    except DraftscopeError:
        return None


def read_file(file: Path, layout: Layout, notes: list[str], finish: Finish | None = None) -> Sample:
    """The sample of a file; `finish` adds what the format alone knows."""
    held = load_record(file, f"`{layout.ids}`, `{layout.features}` and `{layout.last}`")
    sample = read_pair(held, layout, str(file), notes, name=file.name, index=number_of(file))
    if finish is not None:
        finish(sample, held, notes)
    return sample


def open_files(path: Path, chosen: str | None, *, name: str, suffix: str | tuple[str, ...], deep: bool,
               read: Callable[[Path, list[str]], Sample], beside: str = "", numbered: bool = True) -> FileSource[Sample]:
    """A source of such files; a file that was named directly is read at once.

    Args:
        beside: a JSON description in the same folder, its object becomes the source's `meta`.
    """
    files, others = list_files(path, suffix, deep=deep)
    notes: list[str] = []
    meta = described(path, beside, notes) if beside else {}
    return FileSource(kind="samples", path=path, format=name, chosen=chosen, files=files, others=others, meta=meta, read=read,
                      notes=notes, numbered=numbered)


def described(path: Path, name: str, notes: list[str]) -> dict[str, Any]:
    """The JSON object beside the data, {} where there is none or it cannot be read (noted)."""
    beside = (path.parent if path.is_file() else path) / name
    if not beside.is_file():
        return {}
    try:
        found = read_json(beside)
    except DraftscopeError as error:
        notes.append(f"{error}; passed over")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{beside}: is no JSON object; passed over")
        return {}
    return found
