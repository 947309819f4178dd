"""Which target states an engine or a data writer puts into the draft's slots. Healthy ones take whole streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.boundaries import Boundary


@dataclass(frozen=True, slots=True)
class Wiring:
    """Slots as a producer fills them.

    Attributes:
        slots: where each slot is taken, in concatenation order.
        scale: one factor per slot, () = all 1.
        shift: d: the row labelled t holds the state of token t+d.
        poison: put NaN into this many rows of a request or sample.
    """

    slots: tuple[Boundary, ...]
    scale: tuple[float, ...] = ()
    shift: int = 0
    poison: int = 0

    @classmethod
    def of(cls, boundaries: tuple[int, ...]) -> Wiring:
        return cls(tuple(Boundary(b) for b in boundaries))

    def apply(self, states: Tensor, counts: Tensor, start: Tensor | int = 0) -> Tensor:
        """What the draft (or the file) gets of the states taken in one forward pass.

        A shift acts where engines err: inside the block of rows of a pass, whose edge rows keep their own state. Poisoned
        rows are those after the first, in order, whichever pass they come in.

        Args:
            states: [R, W, S, Ht], one block of rows per request, padded on the right.
            counts: [R], rows of each block that are not padding.
            start: [R] or one for all, position of each block's first row in its request.

        Returns:
            [R, W, S, Ht] in the same dtype; `states` itself where nothing is amiss.
        """
        rows = torch.arange(states.shape[1])
        if self.shift:
            source = rows + self.shift
            source = torch.where((source >= 0) & (source < counts[:, None]), source, rows)
            states = states[torch.arange(len(states))[:, None], source]
        if any(factor != 1 for factor in self.scale):
            states = states * torch.tensor(self.scale, dtype=states.dtype, device=states.device)[:, None]
        if self.poison:
            positions = torch.as_tensor(start).reshape(-1, 1) + rows
            spoilt = (positions >= 1) & (positions <= self.poison)
            states = states.masked_fill(spoilt[:, :, None, None].to(states.device), torch.nan)
        return states
