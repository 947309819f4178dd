"""Folders of torch files that keep the slots beside the last state: what SpecForge, AngelSlim, ModelOpt and others share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftscope.errors import DraftscopeError
from draftscope.states.features import Layout, fits_pair, read_pair
from draftscope.states.folder import FileSource, list_files, number_of
from draftscope.states.places import Place
from draftscope.states.tensorfile import read_json
from draftscope.states.torchfile import TORCH_FILES, load_record, load_tensors
from draftscope.states.types import Sample

Finish = Callable[[Sample, dict[str, Any], list[str]], None]


def fits_file(file: Place, layout: Layout) -> str | None:
    """Why a torch file is of a layout; None if it is not, or cannot be read."""
    try:
        return fits_pair(load_tensors(file), layout, file)
    except DraftscopeError:
        return None


def read_file(file: Place, layout: Layout, notes: list[str], finish: Finish | None = None) -> Sample:
    """The sample of a file; `finish` adds what the format alone knows."""
    held = load_record(file, f"`{layout.ids}`, `{layout.features}` and `{layout.last}`")
    sample = read_pair(held, layout, str(file), notes, name=file.name, index=number_of(file))
    if finish is not None:
        finish(sample, held, notes)
    return sample


@dataclass(frozen=True, slots=True)
class PairFormat:
    """A format that is a layout under a name: what its module offers is bound from here.

    Attributes:
        finish: adds to a sample what the format alone knows.
    """

    name: str
    layout: Layout
    finish: Finish | None = None

    def fits(self, file: Place) -> str | None:
        """Why a file is of this format; None if it is not."""
        return fits_file(file, self.layout)

    def open(self, path: Place, chosen: str | None = None) -> FileSource[Sample]:
        """Samples of a folder, those below it, or of one file, lazily, by number.

        Raises:
            DraftscopeError: nothing there.
        """
        return open_files(path, chosen, name=self.name, suffix=TORCH_FILES, deep=True, read=self.read_sample)

    def read_sample(self, file: Place, notes: list[str]) -> Sample:
        """One sample, states in the dtype stored.

        Raises:
            DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and tensor.
        """
        return read_file(file, self.layout, notes, self.finish)


def open_files(path: Place, chosen: str | None, *, name: str, suffix: str | tuple[str, ...], deep: bool,
               read: Callable[[Place, list[str]], Sample], beside: str = "", numbered: bool = True) -> FileSource[Sample]:
    """A source of such files; a file that was named directly is read at once.

    Args:
        beside: a JSON description in the same folder, its object becomes the source's `meta`.
    """
    files, others = list_files(path, suffix, deep=deep)
    notes: list[str] = []
    meta = described(path, beside, notes) if beside else {}
    return FileSource(kind="samples", path=path, format=name, chosen=chosen, files=files, others=others, meta=meta, read=read,
                      notes=notes, numbered=numbered)


def described(path: Place, name: str, notes: list[str]) -> dict[str, Any]:
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
