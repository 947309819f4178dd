"""ModelOpt's offline dumps: `{conversation_id}.pt`, anywhere below a folder.

`aux_hidden_states` [S, 3H] holds the slots, `hidden_states` [S, H] the last state. `hidden_states_prenorm` says whether that is
before the final norm; where the marker is absent the reader takes it for after it (`modelopt/torch/speculative/eagle/utils.py`,
0.47.0), although the vLLM dump (`examples/speculative_decoding/collect_hidden_states/compute_hidden_states_vllm.py`) stores it
before the norm and writes no marker.
"""

from __future__ import annotations

from typing import Any

from draftscope.states.features import Layout
from draftscope.states.folder import FileSource
from draftscope.states.places import Place
from draftscope.states.torchfile import TORCH_FILES
from draftscope.states.torchsource import fits_file, open_files, read_file
from draftscope.states.types import Sample

NAME = "modelopt"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
LAYOUT = Layout(features="aux_hidden_states", last="hidden_states")
MARKER = "hidden_states_prenorm"
UNMARKED = (f"no `{MARKER}`: ModelOpt takes the last state for one after the final norm, its vLLM dump stores it before it; "
            "only the data tell")


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    return fits_file(file, LAYOUT)


def open(path: Place, chosen: str | None = None) -> FileSource[Sample]:
    """Samples of a folder, those below it, or of one file, lazily, by name.

    Raises:
        DraftscopeError: nothing there.
    """
    owners: dict[str, str] = {}

    def read(file: Place, notes: list[str]) -> Sample:
        return read_file(file, LAYOUT, notes, lambda sample, held, said: _finish(file, held, sample, owners, said))

    return open_files(path, chosen, name=NAME, suffix=SUFFIX, deep=DEEP, read=read, numbered=False)


def read_sample(file: Place, notes: list[str]) -> Sample:
    """One sample, states in the dtype stored.

    Raises:
        DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and tensor.
    """
    return read_file(file, LAYOUT, notes, lambda sample, held, said: _finish(file, held, sample, {}, said))


def _finish(file: Place, held: dict[str, Any], sample: Sample, owners: dict[str, str], notes: list[str]) -> None:
    marker = held.get(MARKER)
    if marker is None:
        notes.append(UNMARKED)
    elif isinstance(marker, bool):
        sample.claimed_norm = "pre" if marker else "post"
    else:
        notes.append(f"`{MARKER}` is no bool: passed over")
    conversation = held.get("conversation_id")
    if isinstance(conversation, str | int):
        first = owners.setdefault(str(conversation), str(file))
        if first != str(file):
            notes.append(f"conversation {conversation} is in {first} and in {file}")
