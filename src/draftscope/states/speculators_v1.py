"""Training files of speculators up to 0.4: `data_{i}.pt` with `input_ids`, `loss_mask` and a list `hidden_states`.

The last list entry is the verifier's last state, the others are concatenated in order (`standardize_data_v1` in
`src/speculators/train/data.py`, reader removed after 0.8). `data_config.json` beside them describes the run
(`src/speculators/data_generation/config_generator.py`); its layer ids are those of the old generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.dtypes import is_floats
from draftscope.states.errors import StatesError
from draftscope.states.features import integers_of
from draftscope.states.folder import FileSource, list_files, number_of
from draftscope.states.mapped import stacked
from draftscope.states.places import Place
from draftscope.states.tensorfile import entry_labels
from draftscope.states.torchfile import TORCH_FILES, load_record, owns_its_data
from draftscope.states.torchsource import described as described_beside
from draftscope.states.types import Sample

NAME = "speculators-v1"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = False
EXPECTED = "`input_ids` and `hidden_states`"
ENTRIES_LIMIT = 512  # entries may share memory, so the file's size bounds their number badly


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    try:
        held = load_record(file, EXPECTED)
        states = _entries(file, held)[0]
        integers_of(held, "input_ids", str(file), len(states[0]), [])
    except DraftscopeError:
        return None
    return f"{file.name}: a torch file whose `hidden_states` is {len(states)} tensors {list(states[0].shape)} (tokens, width)"


def open(path: Place, chosen: str | None = None) -> FileSource[Sample]:
    """Samples of a folder or of one file, lazily, by number.

    Raises:
        DraftscopeError: nothing there.
    """
    files, others = list_files(path, SUFFIX)
    notes: list[str] = []
    meta = described_beside(path, "data_config.json", notes)
    described = meta.get("hidden_states")
    claimed = {"layer_ids": described["layer_ids"]} if isinstance(described, dict) and "layer_ids" in described else {}
    return FileSource(kind="samples", path=path, format=NAME, chosen=chosen, files=files, others=others, meta={**meta, **claimed},
                      read=lambda file, said: read_sample(file, said, claimed), notes=notes, numbered=True)


def read_sample(file: Place, notes: list[str], claimed: dict[str, Any] | None = None) -> Sample:
    """One sample. Entries of unlike dtype are widened, with a note.

    Args:
        claimed: layer ids of `data_config.json`, used as labels where the file has none.

    Raises:
        DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and key.
    """
    held = load_record(file, EXPECTED)
    states, names = _entries(file, held)
    if len({entry.dtype for entry in states}) > 1:
        notes.append("entries have unlike dtypes: widened to the widest")
    rows = len(states[0])
    together = stacked(states)
    metadata: dict[str, Any] = {**(claimed or {}), **{key: held[key] for key in ("labels", "layer_ids") if key in held}}
    if names is not None:
        metadata["labels"] = names
    mask = integers_of(held, "loss_mask", str(file), rows, notes, booleans=True) if "loss_mask" in held else None
    token_ids = integers_of(held, "input_ids", str(file), rows, notes).to(torch.int64)
    return Sample(name=file.name, token_ids=token_ids, states=together, loss_mask=None if mask is None else mask != 0,
                  labels=entry_labels(metadata, len(states), notes), index=number_of(file))


def _entries(file: Place, held: dict[str, Any]) -> tuple[list[Tensor], list[str] | None]:
    """The entries, each [T, H], and their names where the file keeps them by name."""
    where = f"{file}, hidden_states"
    if "hidden_states" not in held:
        keys = ", ".join(sorted(str(key) for key in held)[:8]) or "nothing"
        raise StatesError(f"has no `hidden_states` (it holds {keys})", cause="layout" if "input_ids" in held else "foreign",
                          where=str(file))
    value, names = held["hidden_states"], None
    if isinstance(value, dict):
        names, value = [str(key) for key in value], list(value.values())
    if isinstance(value, Tensor):
        if value.dim() != 3:
            raise StatesError(f"has shape {list(value.shape)} where [tokens, entries, width] is expected", where=where)
        value = list(value.unbind(1)) if owns_its_data(value) else [value]
    if not isinstance(value, list | tuple) or not value:
        raise StatesError("is no list of tensors", where=where)
    if len(value) > ENTRIES_LIMIT:
        raise StatesError(f"has {len(value)} entries", where=where)
    for i, entry in enumerate(value):
        if not isinstance(entry, Tensor) or not is_floats(entry.dtype) or entry.dim() != 2 or 0 in entry.shape:
            what = f"a {entry.dtype} of {list(entry.shape)}" if isinstance(entry, Tensor) else type(entry).__name__
            raise StatesError(f"is {what} where floating [tokens, width] is expected", where=f"{where}[{i}]")
        if not owns_its_data(entry):
            raise StatesError("declares more values than the file holds", where=f"{where}[{i}]")
        if entry.shape != value[0].shape:
            raise StatesError(f"has shape {list(entry.shape)}, entry 0 has {list(value[0].shape)}", where=f"{where}[{i}]",
                              cause="rows" if len(entry) != len(value[0]) else "layout")
    return list(value), names
