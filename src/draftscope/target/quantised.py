"""A target whose weights were rounded to few bits and back, as weight-only quantisers leave them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftscope.target.model import Target
from draftscope.target.packed import pack, plain_copy

Precision = Literal["int8", "fp8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("int8", "fp8", "int4")
GROUP = 32
"""Neighbouring weights of a row that share a scale at four bits; at eight the whole row does."""


def quantised(target: Target, precision: Precision) -> Target:
    """The target with every matrix of its layers rounded; embedding, norms and head stay, as quantisers leave them."""
    model, packed = plain_copy(target)
    for layer in model.get_decoder().layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = rounded(module.weight.data, precision)
    made = Target(model, target.folder)
    if packed:
        pack(made)
    return made


def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """A matrix [out, in] rounded to the nearest level, with a scale per row (eight bits) or per GROUP of a row (four).

    The integers are symmetric, 2^bits - 1 levels; fp8 is e4m3.
    """
    held = weight.float()
    if precision == "int4" and weight.shape[1] % GROUP == 0:
        held = held.unflatten(1, (weight.shape[1] // GROUP, GROUP))
    largest = {"int8": 127.0, "int4": 7.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}[precision]
    scale = held.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / largest
    levels = held / scale
    levels = levels.to(torch.float8_e4m3fn).float() if precision == "fp8" else levels.round()
    return (levels * scale).reshape(weight.shape).to(weight.dtype)
