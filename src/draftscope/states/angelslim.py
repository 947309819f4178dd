"""AngelSlim's offline data: `rows_*/data_{i}.ckpt` with `hidden_states` [1, S, 3H] and `target_hiddens` [1, S, H].

The slots are called `hidden_states` here; the last state is after the final norm, unless the vLLM back end found no norm to
hook and fell back with a warning in its log (`compressor/speculative/train/models/target/target_model_wrapper.py`, 0.5.0).
"""

from __future__ import annotations

from pathlib import Path

from draftscope.states.features import Layout
from draftscope.states.folder import FileSource, first_fit
from draftscope.states.torchfile import TORCH_FILES
from draftscope.states.torchsource import fits_file, open_files, read_file
from draftscope.states.types import Sample

NAME = "angelslim"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
OVER = frozenset({"speculators-v1"})
LAYOUT = Layout(features="hidden_states", last="target_hiddens", norm="post")


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
