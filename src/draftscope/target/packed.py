"""Weights laid out once for the CPU's matrix product.

With a few tokens a pass, as in verifying a chain, the product of float32 matrices spends half its time on laying out the
weights anew at every call. oneDNN keeps them in its own layout instead; torch's compiler does the same when it freezes a
model. It halves a verify pass and does not slow any other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from draftscope.target.model import Target

_ROWS = 16  # tokens per pass that the layout is chosen for; others work as well


class PackedLinear(nn.Module):
    """A linear layer for inference, its weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Plain attributes: a packed tensor can be neither saved nor moved.
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        return self  # its weight cannot be copied, and never changes

    def plain(self) -> nn.Linear:
        """The layer with its weight [out, in] as it was: a product with ones and zeros gives it back to the bit."""
        with torch.no_grad():
            bare = torch.ops.mkldnn._linear_pointwise(torch.eye(self.in_features), self._packed, None, "none", [], "")
            made = nn.Linear(self.in_features, self.out_features, bias=self._bias is not None, device="meta")
            made.weight = nn.Parameter(bare.T.contiguous(), requires_grad=False)
            if self._bias is not None:
                made.bias = nn.Parameter(self._bias.clone(), requires_grad=False)
        return made


def plain_copy(target: Target) -> tuple[Any, bool]:
    """A copy of a target's model whose linear layers have weights that can be changed, and whether they were packed."""
    model, packed = copy.deepcopy(target.model), False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PackedLinear):
                setattr(module, name, child.plain())
                packed = True
    return model, packed


def pack(target: Target, draft: nn.Module | None = None) -> bool:
    """Replace the linear layers of a float32 target on the CPU, its head, and a draft's layers; what was theirs is let go.

    Returns:
        False where it cannot be done (another device or dtype, a torch without oneDNN): all is as it was.
    """
    if target.device.type != "cpu" or target.dtype != torch.float32 or not _works():
        return False
    _replace(target.model.get_decoder())
    target.head = PackedLinear(target.parts.head)
    if draft is not None:
        _replace(draft)
    return True


def _replace(root: nn.Module) -> None:
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias))


def _works() -> bool:
    """The operators are no public interface: trust them as far as they agree with the plain product."""
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 40, generator=draw), torch.randn(24, generator=draw)
    x = torch.randn(2, 5, 40, generator=draw)
    try:
        with torch.inference_mode():
            found = PackedLinear(weight, bias)(x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return torch.allclose(found, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
