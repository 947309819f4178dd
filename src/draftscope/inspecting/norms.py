"""The block that the first script printed: shape, dtype, per-token norms and first values of every entry of one file."""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.inspecting.report import Entry
from draftscope.text import visible

FIRST = 5


def norms_block(token_ids: Tensor, states: Tensor, entries: list[Entry]) -> str:
    """The block for one sequence.

    Args:
        token_ids: [T].
        states: [T, S, Ht], as stored; norms are float32's, over all tokens.
        entries: one per slot, with label and inference.
    """
    lines = [f"input_ids shape: {token_ids.shape}", f"Number of hidden state layers: {states.shape[1]}"]
    for number, entry in enumerate(entries):
        slot = states[:, number]
        norms = torch.cat([torch.linalg.vector_norm(block.float(), dim=-1) for block in slot.split(4096)])
        said = visible(entry.label or entry.name)
        lines += [
            f"  hs[{number}] ({said}; inferred: {entry.inferred}): shape={slot.shape}, dtype={slot.dtype}",
            f"    per-token norms: mean={float(norms.double().mean()):.4f}, first5={_four(norms[:FIRST])}",
            f"    first token, first5 values: {_four(slot[0, :FIRST].float())}",
        ]
    return "\n".join(lines)


def _four(values: Tensor) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in values.tolist())}]"
