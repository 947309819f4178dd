"""SpecForge's offline data: `rows_{a}-{b}/data_{i}.ckpt`, or `.ckpt.gz`, one sample each.

The file's `hidden_state` [1, S, H] is the last state after the final norm, its `aux_hidden_state` [1, S, 3H] the slots
(`scripts/prepare_hidden_states.py`). On loading the names are swapped: the trainer calls the slots `hidden_state` and the
last state `target` (`specforge/algorithms/eagle3/data.py`, 0.2.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftscope.states.features import Layout
from draftscope.states.torchfile import TORCH_FILES, owns_its_data
from draftscope.states.torchsource import PairFormat
from draftscope.states.types import Sample

NAME = "specforge"
SUFFIX = TORCH_FILES
KIND = "samples"
DEEP = True
LAYOUT = Layout(features="aux_hidden_state", last="hidden_state", norm="post")
OTHER = "hidden_state_prenorm"
"""[1, S, H], the last state before the final norm; written by `draftscope convert`, ignored by SpecForge."""


def _finish(sample: Sample, held: dict[str, Any], notes: list[str]) -> None:
    other = held.get(OTHER)
    if isinstance(other, Tensor) and owns_its_data(other) and other.shape == (1, len(sample.states), sample.states.shape[2]):
        sample.other_last = other[0]
    claimed = held.get("last_norm", "post")
    sample.claimed_norm = claimed if claimed in ("pre", "post") else None
    if held.get("loss_mask_unknown") is True:
        sample.loss_mask = None
        notes.append("the loss mask is a stand-in, as the file says: unknown")
    index = held.get("index")
    if isinstance(index, int) and not isinstance(index, bool):
        sample.index = index


_FORMAT = PairFormat(NAME, LAYOUT, _finish)
fits, open, read_sample = _FORMAT.fits, _FORMAT.open, _FORMAT.read_sample


def record_of(sample: Sample) -> dict[str, Any]:
    """What SpecForge reads of a sample, and what a later conversion needs to give back all of it."""
    rows = len(sample.states)
    mask = torch.ones(rows, dtype=torch.bool) if sample.loss_mask is None else sample.loss_mask
    record: dict[str, Any] = {
        "input_ids": sample.token_ids.to(torch.int64).clone(), "loss_mask": mask.to(torch.int64),
        "hidden_state": sample.states[:, -1].clone()[None], "labels": list(sample.labels),
        "aux_hidden_state": sample.states[:, :-1].flatten(1).clone()[None], "index": sample.index,
    }
    if sample.other_last is not None:
        record[OTHER] = sample.other_last.clone()[None]
    if sample.loss_mask is None:
        record["loss_mask_unknown"] = True
    if sample.claimed_norm != "post":
        record["last_norm"] = sample.claimed_norm or "unknown"
    return record
