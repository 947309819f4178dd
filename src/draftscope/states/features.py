"""Records that keep the slots as one wide tensor beside the last state: told apart by their widths, split by the narrower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftscope.states.dtypes import common, is_floats
from draftscope.states.errors import StatesError
from draftscope.states.mapped import fill, room
from draftscope.states.places import Place
from draftscope.states.tensorfile import INTEGERS, entry_labels
from draftscope.states.torchfile import owns_its_data
from draftscope.states.types import Norm, Sample

SLOTS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """How a trainer calls what it keeps.

    Attributes:
        features: the slots, concatenated on the last axis.
        last: the target's last state.
        norm: on which side of the final norm the trainer expects it.
    """

    features: str
    last: str
    ids: str = "input_ids"
    mask: str = "loss_mask"
    norm: Norm | None = None


def read_pair(held: Mapping[str, Any], layout: Layout, where: str, notes: list[str], *, name: str, index: int = -1,
              rows: int | None = None) -> Sample:
    """The sample in a record.

    Batch axes of one are dropped, the wider of the two states is split into slots of the narrower one's width; both are
    noted. Where the two are of the same width, the names decide.

    Args:
        where: the file (and row), for messages.
        rows: keep so many rows (the rest is padding); None = all.

    Raises:
        StatesError: names, ranks, dtypes, widths or numbers of rows that do not fit, named with the tensor.
    """
    wide_name, narrow_name = pair_names(held, layout, where)
    if wide_name != layout.features:
        notes.append(f"`{wide_name}` is the wider one: read as the slots by its shape, `{narrow_name}` as the last state")
    wide, narrow = states_of(held, wide_name, where, notes), states_of(held, narrow_name, where, notes)
    if len(wide) != len(narrow):
        raise StatesError(f"has {len(wide)} rows for {len(narrow)} of `{narrow_name}`", cause="rows",
                          where=f"{where}, {wide_name}")
    length, width = narrow.shape
    slots = wide.shape[1] // width
    notes.append(f"`{wide_name}` of {wide.shape[1]} columns split into {slots} slots of {width}, the width of `{narrow_name}`")
    dtype = common([wide.dtype, narrow.dtype])
    if wide.dtype != narrow.dtype:
        notes.append(f"`{wide_name}` is {_short(wide.dtype)}, `{narrow_name}` {_short(narrow.dtype)}: widened to {_short(dtype)}")
    kept = length if rows is None else min(rows, length)
    if kept < length:
        notes.append("rows of padding left out, as the attention mask marks them")
    states = room((kept, slots + 1, width), dtype)
    fill(states, [(slice(0, slots), wide[:kept].unflatten(1, (slots, width))), (slots, narrow[:kept])])
    ids = integers_of(held, layout.ids, where, length, notes)[:kept]
    mask = None
    if held.get(layout.mask) is not None:
        mask = integers_of(held, layout.mask, where, length, notes, booleans=True)[:kept] != 0
    claims = {key: held[key] for key in ("labels", "layer_ids") if key in held}
    labels = entry_labels(claims, slots + 1, notes)
    if not claims:
        labels = (*(f"{wide_name} {i}" for i in range(slots)), narrow_name)
    return Sample(name=name, token_ids=ids.to(torch.int64), states=states, loss_mask=mask, labels=labels, index=index,
                  claimed_norm=layout.norm)


def pair_names(held: Mapping[str, Any], layout: Layout, where: str) -> tuple[str, str]:
    """Names of the wide and of the narrow tensor, by their shapes.

    Raises:
        StatesError: one is absent, or no width is a multiple of the other.
    """
    lacking = [key for key in (layout.features, layout.last) if held.get(key) is None]
    if lacking:
        keys = ", ".join(sorted(str(key) for key in held)[:8]) or "nothing"
        raise StatesError(f"has no `{lacking[0]}` (it holds {keys})",
                          cause="foreign" if len(lacking) == 2 or layout.ids not in held else "layout", where=where)
    widths = {key: _width(held, key, where) for key in (layout.features, layout.last)}
    wide, narrow = layout.features, layout.last
    if widths[wide] < widths[narrow]:
        wide, narrow = narrow, wide
    if widths[wide] % widths[narrow] or widths[wide] // widths[narrow] > SLOTS_LIMIT:
        raise StatesError(f"is {widths[wide]} wide, no multiple of {widths[narrow]}, the width of `{narrow}`",
                          where=f"{where}, {wide}", remedy="Both must come from one target")
    return wide, narrow


def _width(held: Mapping[str, Any], key: str, where: str) -> int:
    value = held[key]
    if not isinstance(value, Tensor) or not is_floats(value.dtype) or value.dim() not in (2, 3) or 0 in value.shape:
        tensor = isinstance(value, Tensor)
        what = f"a {_short(value.dtype)} of {list(value.shape)}" if tensor else f"of type {type(value).__name__}"
        raise StatesError(f"is {what} where floating [tokens, width] is expected", where=f"{where}, {key}")
    return int(value.shape[-1])


def states_of(held: Mapping[str, Any], key: str, where: str, notes: list[str]) -> Tensor:
    """A floating [T, W], a batch axis of one dropped.

    Raises:
        StatesError: something else, or more values declared than the file holds.
    """
    _width(held, key, where)
    value: Tensor = held[key]
    if not owns_its_data(value):
        raise StatesError("declares more values than the file holds", where=f"{where}, {key}")
    if value.dim() == 3:
        if value.shape[0] != 1:
            raise StatesError(f"has shape {list(value.shape)} where one sequence is expected", where=f"{where}, {key}",
                              remedy="Keep one sequence a file")
        notes.append(f"batch axis of one dropped from `{key}`")
        value = value[0]
    return value


def integers_of(held: Mapping[str, Any], key: str, where: str, rows: int, notes: list[str], *, booleans: bool = False) -> Tensor:
    """An integer [rows] (or bool, where allowed); axes of one are dropped.

    Raises:
        StatesError: absent, of another dtype, or of another number of rows.
    """
    at = f"{where}, {key}"
    value = held.get(key)
    if value is None:
        raise StatesError(f"has no `{key}`", where=where)
    if isinstance(value, list):
        try:
            value = torch.tensor(value)
        except (ValueError, TypeError, RuntimeError, OverflowError):
            raise StatesError("is no list of integers", where=at) from None
    if not isinstance(value, Tensor) or not owns_its_data(value) or (value.dtype not in INTEGERS and not (
        booleans and value.dtype == torch.bool
    )):
        raise StatesError("is no integer tensor", where=at)
    if value.dim() > 1 and value.numel() == max(value.shape):
        notes.append(f"axes of one dropped from `{key}`")
        value = value.flatten()
    if value.shape != (rows,):
        raise StatesError(f"has shape {list(value.shape)} for {rows} rows of states", cause="rows", where=at)
    return value


def fits_pair(held: Any, layout: Layout, file: Place) -> str | None:
    """Why a record is of a layout, by shapes and names; None if it is not."""
    if not isinstance(held, dict) or held.get(layout.ids) is None:
        return None
    try:
        wide, narrow = pair_names(held, layout, str(file))
    except StatesError:
        return None
    slots, last = list(held[wide].shape), list(held[narrow].shape)
    return (f"{file.name}: a torch file whose `{wide}` {slots} is {slots[-1] // last[-1]} times as wide as `{narrow}` {last} "
            "(slots beside the last state)")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
