"""How a draft's parameters are descended: AdamW, or Muon for the matrices inside it and AdamW for norms and head.

Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of each matrix. Its steps are scaled to those of
AdamW (torch's `match_rms_adamw`), so that one learning rate means the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from draftscope.eagle3.model import Draft

Optimizer = Literal["adamw", "muon"]
Group = Literal["norm", "head", "body"]

_STATE = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


class Descent:
    """Steps on a draft's parameters; the head, which starts as the target's, takes `head_rate` of the learning rate."""

    def __init__(self, draft: Draft, optimizer: Optimizer, *, weight_decay: float, head_rate: float, clip: float) -> None:
        self.draft, self.head_rate, self.clip = draft, head_rate, clip
        self.named = list(draft.named_parameters())
        groups = {
            name: {"params": [p for n, p in self.named if group_of(n) == name], "group": name,
                   "weight_decay": 0.0 if name == "norm" else weight_decay}
            for name in ("norm", "head", "body")
        }
        self.optimizers: list[torch.optim.Optimizer] = []
        if optimizer == "muon":
            self.optimizers.append(torch.optim.Muon([groups.pop("body")], adjust_lr_fn="match_rms_adamw"))
        self.optimizers.append(torch.optim.AdamW(list(groups.values()), betas=(0.9, 0.95)))

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> float:
        """Descend along the gradients, clipped; their norm before that. Nothing is changed where it is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.clip))
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * (self.head_rate if group["group"] == "head" else 1.0)
                optimizer.step()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state, by name."""
        held = {f"weight.{name}": parameter.detach() for name, parameter in self.named}
        for name, parameter in self.named:
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    held[f"{key}.{name}"] = value
        return held

    def restore(self, held: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        owners = {p: o for o in self.optimizers for g in o.param_groups for p in g["params"]}
        with torch.no_grad():
            for name, parameter in self.named:
                parameter.copy_(held[f"weight.{name}"])
                owners[parameter].state[parameter] = {key: held[f"{key}.{name}"] for key in _STATE if f"{key}.{name}" in held}


def group_of(name: str) -> Group:
    """The group of a parameter, by its native name."""
    if name.startswith("lm_head"):
        return "head"
    return "norm" if "norm" in name or name.endswith(".bias") else "body"
