"""Files as a producer that errs in their layout writes them: healthy ones, rewritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

BUCKET = 32


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What the writer of either side's files does to their states; "" = nothing.

    Attributes:
        train, serve: `fewer rows` (every third is lost), `half of the rows`, `padded rows` (to a bucket), `axes swapped`
            ([L, T, H]), `interleaved` ([T, H, L] under the shape [T, L, H]), `one slot`, `a slot too few`, `another width`,
            `two widths`, `twice the width`.
        slots: of a served row.
    """

    train: str = ""
    serve: str = ""

    def apply(self, side: str, folder: Path, slots: int) -> None:
        """Rewrite the files of a side."""
        kind = self.train if side == "train" else self.serve
        if not kind:
            return
        name = "hidden_states" if side == "train" else "fc_input"
        for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata()
            tensors = load_file(file)
            states = tensors[name] if side == "train" else tensors[name].unflatten(1, (slots, -1))
            states = _REWRITERS[kind](states, number)
            tensors[name] = (states if side == "train" else states.flatten(1)).contiguous()
            if side == "serve" and len(tensors[name]) != len(tensors["token_ids"]):
                # Whoever hooks the states alone has no other column.
                tensors = {name: tensors[name], "token_ids": tensors["token_ids"]}
            save_file(tensors, file, metadata)


def _fewer(states: Tensor, number: int) -> Tensor:
    return states[torch.arange(len(states)) % 3 < 2 - number % 2]


def _padded(states: Tensor, number: int) -> Tensor:
    rows = (len(states) // BUCKET + 1) * BUCKET - len(states)
    return torch.cat([states, states[-1:].expand(rows, -1, -1)])


def _narrow(states: Tensor, number: int) -> Tensor:
    return states[..., : states.shape[-1] - 8]


_REWRITERS = {
    "fewer rows": _fewer,
    "half of the rows": lambda states, number: states[: -(-len(states) // 2)],
    "padded rows": _padded,
    "axes swapped": lambda states, number: states.transpose(0, 1),
    "interleaved": lambda states, number: states.transpose(1, 2).reshape(states.shape),
    "one slot": lambda states, number: states[:, -2:] if states.shape[1] > 3 else states[:, -1:],
    "a slot too few": lambda states, number: states[:, 1:],
    "another width": _narrow,
    "two widths": lambda states, number: _narrow(states, number) if number % 2 else states,
    "twice the width": lambda states, number: torch.cat([states, states], -1),
}
