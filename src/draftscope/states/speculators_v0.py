"""Training files of the first speculators: `*.pt` with `hidden_state` [S, 3H] (the slots) and `target` [S, H].

`standardize_data_v0` in `train/data.py` of 0.3.0, which calls `target` the verifier's last state and feeds it to the head
as it is; gone in 0.4.0. SpecForge uses the same two names, in memory only.
"""

from __future__ import annotations

from pathlib import Path

from draftscope.states.features import Layout
from draftscope.states.folder import FileSource, first_fit
from draftscope.states.torchfile import TORCH_FILES
from draftscope.states.torchsource import fits_file, open_files, read_file
from draftscope.states.types import Sample

NAME = "speculators-v0"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
LAYOUT = Layout(features="hidden_state", last="target")


def fits(file: Path) -> str | None:
    """Why a file is of this format; None if it is not."""
    return fits_file(file, LAYOUT)


def sniff(path: Path) -> str | None:
    """Why the path holds such files; None if no file there fits."""
    return first_fit(path, SUFFIX, fits, deep=DEEP)


def open(path: Path, chosen: str | None = None) -> FileSource[Sample]:
    """Samples of a folder, those below it, or of one file, lazily, by number.

    Raises:
        DraftscopeError: nothing there.
    """
    return open_files(path, chosen, name=NAME, suffix=SUFFIX, deep=DEEP, read=read_sample)


def read_sample(file: Path, notes: list[str]) -> Sample:
    """One sample, states in the dtype stored.

    Raises:
        DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and tensor.
    """
    return read_file(file, LAYOUT, notes)
