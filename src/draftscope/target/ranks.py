"""What each tensor-parallel rank gives to a layer's MLP, before their outputs are summed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MLPS = ("mlp", "block_sparse_moe", "feed_forward")
"""Names under which a decoder layer holds its MLP."""


def shares(layer: nn.Module, mlp_input: str, partial: Tensor, ranks: int) -> Tensor | None:
    """The parts of a layer's MLP: a rank holds an n-th of its inner channels, and the last projection's columns that read them.

    Args:
        mlp_input: the layer's child that reads the stream between attention and MLP.
        partial: [..., Ht], that stream.

    Returns:
        [..., ranks, Ht]; None where the MLP has no one last projection (experts), or no such parts.
    """
    mlp = next((child for name, child in layer.named_children() if name in MLPS), None)
    down = getattr(mlp, "down_proj", None)
    weights = down.plain() if down is not None and hasattr(down, "plain") else down  # of a packed target
    if not isinstance(weights, nn.Linear) or down is None or mlp is None or weights.in_features % ranks:
        return None
    entered: list[Tensor] = []
    before = getattr(layer, mlp_input)
    handle = down.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    try:
        with torch.no_grad():
            mlp(partial if before is mlp else before(partial))
    finally:
        handle.remove()
    with torch.no_grad():
        each = [nn.functional.linear(part, weight) for part, weight in
                zip(entered[0].chunk(ranks, -1), weights.weight.chunk(ranks, -1), strict=True)]
    if weights.bias is not None:
        each[0] = each[0] + weights.bias.detach()
    return torch.stack(each, -2)
