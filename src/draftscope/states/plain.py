"""Plain training data: `hs_{i}.safetensors` with `hidden_states` [T, L, H], `token_ids` [T] and `loss_mask` [T].

It is the file of speculators >= 0.5 (`src/speculators/train/data.py`) plus the mask. Metadata `last_norm` = `post` marks a last
state that is after the final norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftscope.errors import DraftscopeError
from draftscope.states.folder import FileSource, list_files, number_of
from draftscope.states.places import Place
from draftscope.states.scales import rescaled
from draftscope.states.tensorfile import TensorFile, entry_labels, save_tensors
from draftscope.states.torchsource import described
from draftscope.states.types import Norm, Sample

NAME = "plain"
SUFFIX = ".safetensors"
KIND = "samples"
DEEP = False
UNKNOWN = "unknown"
OTHER = "last_on_other_side"
"""[T, H], the last state on the other side of the final norm, where a conversion kept both."""


def fits(file: Place) -> str | None:
    """Why a file is of this format, by the header alone; None if it is not."""
    try:
        opened = TensorFile(file)
        if not opened.has("hidden_states") or len(shape := opened.shape("hidden_states")) != 3:
            return None
    except DraftscopeError:
        return None
    if not opened.has("token_ids") or len(opened.shape("token_ids")) != 1:
        return None
    return f"{file.name}: `hidden_states` has three axes {list(shape)} (tokens, entries, width), with `token_ids` beside it"


def open(path: Place, chosen: str | None = None) -> FileSource[Sample]:
    """Samples of a folder or of one file, lazily, by number.

    Raises:
        DraftscopeError: nothing there.
    """
    files, others = list_files(path, SUFFIX)
    notes: list[str] = []
    meta = {} if path.is_file() else described(path, "data_config.json", notes)
    for file in files[:8]:
        try:
            meta = {**meta, **TensorFile(file).metadata}
            break
        except DraftscopeError:
            continue
    return FileSource(kind="samples", path=path, format=NAME, chosen=chosen, files=files, others=others, meta=meta,
                      read=read_sample, notes=notes, numbered=True)


def read_sample(file: Place, notes: list[str]) -> Sample:
    """One sample; its tensors stay mapped.

    Raises:
        DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and tensor.
    """
    opened = TensorFile(file)
    opened.require("hidden_states", "token_ids")
    states = opened.floats("hidden_states", 3, "[tokens, entries, width]")
    token_ids = opened.integers("token_ids", 1, "[tokens]")
    opened.fit("token_ids", len(token_ids), len(states), "hidden_states")
    mask = None
    if opened.has("loss_mask"):
        mask = opened.integers("loss_mask", 1, "[tokens]", booleans=True)
        opened.fit("loss_mask", len(mask), len(states), "hidden_states")
        mask = mask != 0
    labels = entry_labels(opened.metadata, states.shape[1], notes)
    states = rescaled(opened, states, notes)
    said = opened.metadata.get("last_norm", "pre")
    claimed: Norm | None = "post" if said == "post" else None if said == UNKNOWN else "pre"
    return Sample(name=file.name, token_ids=token_ids.to(torch.int64), states=states, loss_mask=mask, labels=labels,
                  index=number_of(file), claimed_norm=claimed, other_last=_other(opened, states))


def _other(opened: TensorFile, states: torch.Tensor) -> torch.Tensor | None:
    if not opened.has(OTHER) or opened.shape(OTHER) != (states.shape[0], states.shape[2]):
        return None
    return opened.floats(OTHER, 2, "[tokens, width]")


def write_sample(path: Path, sample: Sample, metadata: dict[str, Any] | None = None, *, said_norm: bool = False) -> None:
    """Write `hs_{i}.safetensors`, whole or not at all. Labels other than `entry i` go to the metadata.

    Args:
        said_norm: also what the sample says of its last state (`last_norm`), where that is not `pre`.

    Raises:
        DraftscopeError: rows that do not fit each other, or a disk that refuses.
    """
    rows = len(sample.states)
    lengths = [rows, len(sample.token_ids), *([] if sample.loss_mask is None else [len(sample.loss_mask)])]
    if sample.states.dim() != 3 or len(set(lengths)) > 1:
        raise DraftscopeError(f"states {list(sample.states.shape)}, token ids and mask have {lengths} rows", where=str(path))
    named = dict(metadata or {})
    if sample.labels and sample.labels != tuple(f"entry {i}" for i in range(sample.states.shape[1])):
        named.setdefault("labels", list(sample.labels))
    if said_norm and sample.claimed_norm != "pre":
        named.setdefault("last_norm", sample.claimed_norm or UNKNOWN)
    tensors = {
        OTHER: sample.other_last, "hidden_states": sample.states, "token_ids": sample.token_ids.to(torch.int64),
        "loss_mask": None if sample.loss_mask is None else sample.loss_mask.to(torch.uint8),
    }
    save_tensors(path, tensors, named)
