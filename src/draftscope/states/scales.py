"""States stored in eight bits beside their scales, and back to what the trainer would see.

Of the released stacks speculators 0.9 alone writes such files (`hs_connectors/fp8_hidden_states_connector.py`): `hidden_states`
float8_e4m3fn [T, L, H] and `hidden_states_scales` float32 [T, 1, 1], one scale a token; its reader multiplies in bfloat16
(`hs_connectors/fp8_utils.py`). vLLM's own extraction refuses a quantised cache
(`vllm/model_executor/models/extract_hidden_states.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftscope.states.dtypes import NARROW, WIDE
from draftscope.states.mapped import pieces, release, room
from draftscope.states.tensorfile import TensorFile
from draftscope.states.types import Sample, Trace

SCALES = "hidden_states_scales"


def rescaled(opened: TensorFile, states: Tensor, notes: list[str]) -> Tensor:
    """States [T, L, H] as stored, or in bfloat16 where scales lie beside them.

    Raises:
        DraftscopeError: scales that are no finite floats, or fit neither tokens nor entries.
    """
    if states.dtype not in NARROW:
        if opened.has(SCALES):
            notes.append(f"`{SCALES}` beside states of {str(states.dtype).removeprefix('torch.')}: passed over")
        return states
    if not opened.has(SCALES):
        notes.append(f"states of {str(states.dtype).removeprefix('torch.')} without `{SCALES}`: taken as they are")
        return states
    shape = opened.shape(SCALES)
    tokens, entries, _ = states.shape
    if len(shape) not in (1, 2, 3):
        raise opened.fail(f"has shape {list(shape)} where [tokens, 1, 1] is expected", SCALES)
    scales = opened.floats(SCALES, len(shape), "[tokens, 1, 1]").to(torch.bfloat16)
    full = (*shape, *(1 for _ in range(3 - len(shape))))
    if full[0] != tokens or full[1] not in (1, entries) or full[2] != 1:
        raise opened.fail(f"has shape {list(shape)} for states {list(states.shape)}", SCALES,
                          "rows" if full[0] != tokens else "layout")
    notes.append(f"states of {str(states.dtype).removeprefix('torch.')} times `{SCALES}`, in bfloat16 as speculators does")
    return states.to(torch.bfloat16) * scales.reshape(full)


def widened(item: Sample | Trace, note: Callable[[str], None]) -> None:
    """Take an item's eight-bit states to bfloat16, in place: hardly any arithmetic takes them as they are. `note` is told."""
    names = ("states", "other_last") if isinstance(item, Sample) else ("fc_input", "last_hidden", "fc_output", "draft_states")
    for name in names:
        stored: Tensor | None = getattr(item, name)
        if stored is not None and stored.dtype in NARROW:
            setattr(item, name, _widened(stored))
            note(f"states of {str(stored.dtype).removeprefix('torch.')} are widened to bfloat16, exactly")


def _widened(stored: Tensor) -> Tensor:
    target = room(stored.shape, WIDE)
    at = 0
    for piece in pieces(stored):
        into = target[at : at + len(piece)]
        into.copy_(piece)
        at += len(piece)
        release(piece, whole=stored)
        release(into, whole=target)
    return target
