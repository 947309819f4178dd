"""What TorchSpec leaves on disk: debug dumps of training batches, and the samples of its offline replay.

A dump (`save_debug_train_data`, `torchspec/utils/train_dump.py`) is a torch file with `step`, `batch_idx`, `rank` and a `batch`
of B sequences, padded on the right (`torchspec/data/utils.py`): `input_ids` [B, S], `loss_mask` [B, S], `hidden_states` [B, S,
3H] (the slots), `last_hidden_states` [B, S, H] or `target`. Losses, gradients and weights beside them are not read. A replay
sample (`samples/*.pt`, `torchspec/offline/dataset.py`) has the same tensors for one sequence and its mask as run lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.errors import StatesError
from draftscope.states.features import Layout, fits_pair, read_pair
from draftscope.states.folder import FileSource, list_files
from draftscope.states.places import Place
from draftscope.states.torchfile import TORCH_FILES, load_record, load_tensors, owns_its_data
from draftscope.states.torchsource import described
from draftscope.states.types import Norm, Sample, Skipped

NAME = "torchspec"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
OVER = frozenset({"speculators-v1"})
LAYOUTS = (Layout(features="hidden_states", last="last_hidden_states"), Layout(features="hidden_states", last="target"))


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    try:
        held = load_tensors(file)
    except DraftscopeError:
        return None
    if not isinstance(held, dict):
        return None
    batch = held.get("batch")
    record = batch if isinstance(batch, dict) else held
    for layout in LAYOUTS:
        if _is_state(record, layout) and (why := fits_pair(record, layout, file)) is not None:
            return why + (f", in the `batch` of step {held.get('step')}" if record is batch else "")
    return None


def open(path: Place, chosen: str | None = None) -> FileSource[Sample]:
    """Sequences of a folder, those below it, or of one file, lazily.

    Raises:
        DraftscopeError: nothing there.
    """
    files, others = list_files(path, SUFFIX, deep=DEEP)
    notes: list[str] = []
    meta = described(path, "dataset.json", notes)
    prenorm = meta.get("last_hidden_states_prenorm")
    norm: Norm | None = None if not isinstance(prenorm, bool) else "pre" if prenorm else "post"
    return FileSource(kind="samples", path=path, format=NAME, chosen=chosen, files=files, others=others, meta=meta,
                      read=lambda file, said: read_samples(file, said, norm), notes=notes)


def read_samples(file: Place, notes: list[str], norm: Norm | None = None) -> list[Sample | Skipped]:
    """The sequences of a file, padding left out; those that do not fit are handed back as skipped.

    Args:
        norm: which side of the final norm the data set beside the files claims.

    Raises:
        DraftscopeError: the file holds neither a batch nor a sample.
    """
    held = load_record(file, "`batch`, or `input_ids`, `hidden_states` and `last_hidden_states`")
    batch = held.get("batch", held)
    if not isinstance(batch, dict):
        raise StatesError(f"is a {type(batch).__name__}, no dict of tensors", where=f"{file}, batch")
    layout = next((one for one in LAYOUTS if _is_state(batch, one)), None)
    if layout is None:
        lacks = "`last_hidden_states`" if batch.get("target") is None else "last state: `target` is as wide as no state is"
        raise StatesError(f"has no {lacks}", cause="layout" if batch.get("hidden_states") is not None else "foreign",
                          where=str(file), remedy="TorchSpec stores it with store_last_hidden_states")
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or not owns_its_data(ids):
        raise StatesError("is no tensor of token ids", where=f"{file}, input_ids")
    count = 1 if ids.dim() == 1 else ids.shape[0]
    if (packed := held.get("packed_loss_mask")) is not None:
        if not isinstance(packed, str):
            raise StatesError(f"is a {type(packed).__name__}, no list of run lengths", where=f"{file}, packed_loss_mask")
        batch = {**batch, "loss_mask": _unpack(packed, ids.shape[-1], str(file))}
    return [_sequence(file, batch, layout, row, count, notes, norm) for row in range(count)]


def _is_state(batch: dict[str, Any], layout: Layout) -> bool:
    """`target` may be logits, whose width divides nothing."""
    wide, narrow = batch.get(layout.features), batch.get(layout.last)
    return (isinstance(wide, Tensor) and isinstance(narrow, Tensor) and wide.dim() >= 2 and narrow.dim() >= 2
            and narrow.shape[-1] > 0 and narrow.shape[-1] <= wide.shape[-1] and wide.shape[-1] % narrow.shape[-1] == 0)


def _sequence(file: Place, batch: dict[str, Any], layout: Layout, row: int, count: int, notes: list[str],
              norm: Norm | None) -> Sample | Skipped:
    where = f"{file}, row {row}"
    record: dict[str, Any] = {}
    for key in (layout.features, layout.last, layout.ids, layout.mask, "attention_mask"):
        value = batch.get(key)
        if isinstance(value, Tensor) and count > 1:
            if value.dim() < 2 or value.shape[0] != count:
                return Skipped(str(file), f"`{key}` has shape {list(value.shape)} in a batch of {count}", row, "rows")
            value = value[row]
        record[key] = value
    try:
        sample = read_pair(record, layout, where, notes, name=f"{file.name}[{row}]" if count > 1 else file.name,
                           rows=_real(record.get("attention_mask"), where))
    except StatesError as error:
        return Skipped(str(file), f"{error.where.removeprefix(where).lstrip(', ')} {error.what}".strip(), row, error.cause)
    sample.claimed_norm = norm
    return sample


def _real(attention: Any, where: str) -> int | None:
    """Rows before the padding.

    Raises:
        StatesError: padding elsewhere than behind the tokens.
    """
    if not isinstance(attention, Tensor) or attention.numel() == 0 or not owns_its_data(attention):
        return None
    real = attention.flatten() != 0
    rows = int(real.sum())
    if rows == 0 or not bool(real[:rows].all()):
        raise StatesError("marks padding before tokens" if rows else "marks every row as padding",
                          where=f"{where}, attention_mask")
    return rows


def _unpack(text: str, rows: int, where: str) -> Tensor:
    """The mask that run lengths stand for, prompt first (`unpack_loss_mask` in `torchspec/data/utils.py`)."""
    try:
        runs = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        runs = [-1]
    if min(runs, default=0) < 0 or sum(runs) > 2 * rows + 64:
        raise StatesError("is no list of run lengths", where=f"{where}, packed_loss_mask")
    mask = torch.zeros(rows, dtype=torch.int64)
    at = 0
    for i, run in enumerate(runs):
        if i % 2:
            mask[at : at + run] = 1
        at += run
    return mask
