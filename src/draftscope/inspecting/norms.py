"""The block that the first script printed: shape, dtype, per-token norms and first values of every entry of one file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.inspecting.figures import Entry
from draftscope.inspecting.measure import Pass, slots_of
from draftscope.states.mapped import pieces, release
from draftscope.states.types import Sample
from draftscope.text import visible

FIRST = 5


@dataclass(slots=True)
class Slots:
    """One sequence: its number of tokens; of every slot shape, dtype, mean norm, first norms and first values."""

    tokens: int
    shapes: list[list[int]]
    dtypes: list[str]
    means: list[float]
    norms: list[list[float]]
    values: list[list[float]]


def first_norms(found: Pass, width: int | None = None) -> Slots | None:
    """Figures of the first item kept that has no more slots than the pass has entries; None if none has.

    Norms are float32's, over all tokens.

    Args:
        width: the target's, where it is known.
    """
    for item in found.kept:
        if isinstance(item, Sample):
            states = item.states
        else:
            states = item.fc_input.unflatten(1, (slots_of(item, width)[0], -1))
        if states.shape[1] <= len(found.report.entries):
            return _slots(item.token_ids, states)
    return None


def _slots(token_ids: Tensor, states: Tensor) -> Slots:
    blocks = []
    for block in pieces(states):
        blocks.append(torch.linalg.vector_norm(block.float(), dim=-1))
        release(block, whole=states)
    norms = torch.cat(blocks)
    count, (tokens, _, width) = states.shape[1], states.shape
    return Slots(tokens, [[tokens, width]] * count, [str(states.dtype)] * count, norms.double().mean(0).tolist(),
                 norms[:FIRST].T.tolist(), states[0, :, :FIRST].float().tolist())


def norms_block(held: Slots, entries: list[Entry]) -> str:
    """The block, with label and inference of each entry."""
    lines = [f"input_ids shape: {torch.Size([held.tokens])}", f"Number of hidden state layers: {len(held.shapes)}"]
    for number, entry in enumerate(entries[: len(held.shapes)]):
        said = visible(entry.label or entry.name)
        lines += [
            f"  hs[{number}] ({said}; inferred: {entry.inferred}): shape={torch.Size(held.shapes[number])}, "
            f"dtype={held.dtypes[number]}",
            f"    per-token norms: mean={held.means[number]:.4f}, first5={_four(held.norms[number])}",
            f"    first token, first5 values: {_four(held.values[number])}",
        ]
    return "\n".join(lines)


def _four(values: list[float]) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in values)}]"
