"""States stored in eight bits beside their scales, and back to what the trainer would see.

Of the released stacks speculators 0.9 alone writes such files (`hs_connectors/fp8_hidden_states_connector.py`): `hidden_states`
float8_e4m3fn [T, L, H] and `hidden_states_scales` float32 [T, 1, 1], one scale a token; its reader multiplies in bfloat16
(`hs_connectors/fp8_utils.py`). vLLM's own extraction refuses a quantised cache
(`vllm/model_executor/models/extract_hidden_states.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.states.tensorfile import TensorFile

SCALES = "hidden_states_scales"
EIGHT_BITS = frozenset(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
                       if hasattr(torch, name))


def rescaled(opened: TensorFile, states: Tensor, notes: list[str]) -> Tensor:
    """States [T, L, H] as stored, or in bfloat16 where scales lie beside them.

    Raises:
        DraftscopeError: scales that are no finite floats, or fit neither tokens nor entries.
    """
    if states.dtype not in EIGHT_BITS:
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
