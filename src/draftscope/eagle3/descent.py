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
from draftscope.eagle3.settings import Settings

Group = Literal["norm", "head", "body"]

_STATE = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


class Descent:
    """Steps on a draft's parameters; the head takes `head_rate` of the learning rate, and is frozen where that is 0."""

    def __init__(self, draft: Draft, settings: Settings) -> None:
        self.draft, self.head_rate, self.clip = draft, settings.head_rate, settings.clip
        self.named = list(draft.named_parameters())
        decay = settings.weight_decay
        decays = {"norm": 0.0, "head": decay, "body": decay}
        draft.lm_head.requires_grad_(settings.head_rate > 0)
        muon = settings.optimizer == "muon"
        if muon and settings.matrix_decay is not None:
            decays["body"] = settings.matrix_decay
        groups = {name: {"params": held, "group": name, "weight_decay": decays[name]} for name in decays
                  if (held := [p for n, p in self.named if group_of(n) == name and p.requires_grad])}
        self.optimizers: list[torch.optim.Optimizer] = []
        if muon:
            self.optimizers.append(torch.optim.Muon([groups.pop("body")], adjust_lr_fn="match_rms_adamw"))
        self.optimizers.append(torch.optim.AdamW(list(groups.values()), betas=settings.betas))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All, in one order."""
        return [p for _, p in self.named]

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
        """Take over what `tensors` gave.

        Raises:
            KeyError: a weight is missing.
        """
        owners = {p: o for o in self.optimizers for g in o.param_groups for p in g["params"]}
        with torch.no_grad():
            for name, parameter in self.named:
                parameter.copy_(held[f"weight.{name}"])
                if parameter not in owners:
                    continue
                owners[parameter].state[parameter] = {
                    # The number of steps stays on the CPU, as torch has it.
                    key: held[f"{key}.{name}"].to("cpu" if key == "step" else parameter.device)
                    for key in _STATE if f"{key}.{name}" in held
                }


def group_of(name: str) -> Group:
    """The group of a parameter, by its native name."""
    if name.startswith("lm_head"):
        return "head"
    return "norm" if "norm" in name or name.endswith(".bias") else "body"
