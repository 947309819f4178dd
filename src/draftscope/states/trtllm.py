"""Raw dumps of TensorRT-LLM's SaveHiddenStates: `{prefix}_{n}.pt`, a list of dicts, one a request.

Each has `id`, `input_ids`, `hidden_state` [S, H] and `aux_hidden_states` [S, 3H] (`hidden_state_features` in older ones), and
no loss mask; ModelOpt turns them into its own files (`collect_hidden_states/compute_hidden_states_trtllm.py`).
"""

from __future__ import annotations

from typing import Any

from draftscope.errors import DraftscopeError
from draftscope.states.errors import StatesError
from draftscope.states.features import Layout, fits_pair, read_pair
from draftscope.states.folder import FileSource, list_files
from draftscope.states.places import Place
from draftscope.states.torchfile import TORCH_FILES, load_tensors
from draftscope.states.types import Sample, Skipped

NAME = "trtllm"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
LAYOUTS = (Layout(features="aux_hidden_states", last="hidden_state", norm="post"),
           Layout(features="hidden_state_features", last="hidden_state", norm="post"))


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    try:
        held = load_tensors(file)
    except DraftscopeError:
        return None
    if not isinstance(held, list):
        return None
    for record in held[:8]:
        for layout in LAYOUTS:
            if (why := fits_pair(record, layout, file)) is not None:
                return f"{why}, in a list of {len(held)}"
    return None


def open(path: Place, chosen: str | None = None) -> FileSource[Sample]:
    """Samples of a folder, those below it, or of one file, lazily.

    Raises:
        DraftscopeError: nothing there.
    """
    files, others = list_files(path, SUFFIX, deep=DEEP)
    return FileSource(kind="samples", path=path, format=NAME, chosen=chosen, files=files, others=others, meta={},
                      read=read_samples)


def read_samples(file: Place, notes: list[str]) -> list[Sample | Skipped]:
    """The requests of a file; those that do not fit are handed back as skipped.

    Raises:
        DraftscopeError: the file holds no list of requests.
    """
    held = load_tensors(file)
    if not isinstance(held, list) or not held:
        raise StatesError(f"holds {'an empty list' if isinstance(held, list) else f'a {type(held).__name__}'} where a list of "
                          "requests is expected", cause="foreign", where=str(file))
    return [_request(file, row, record, notes, len(held)) for row, record in enumerate(held)]


def _request(file: Place, row: int, record: Any, notes: list[str], of: int) -> Sample | Skipped:
    if not isinstance(record, dict):
        return Skipped(str(file), f"is a {type(record).__name__}, no request", row, "layout")
    layout = LAYOUTS[1] if LAYOUTS[1].features in record else LAYOUTS[0]
    try:
        return read_pair(record, layout, f"{file}, row {row}", notes, name=f"{file.name}[{row}]" if of > 1 else file.name)
    except StatesError as error:
        return Skipped(str(file), f"{error.where.removeprefix(f'{file}, row {row}').lstrip(', ')} {error.what}".strip(), row,
                       error.cause)
