"""Which target states an engine or a data writer puts into the draft's slots. Healthy ones take whole streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.target.spoiling import Pass, Phase, Poisoned, Scaled, Shifted, Spoiler


@dataclass(frozen=True, slots=True)
class Wiring:
    """Slots as a producer fills them: where each is taken, and what befalls it on the way.

    Attributes:
        slots: where each slot is taken, in concatenation order.
        verify: the same in verify steps, () = as in `slots`; graphs captured before the layer ids were set deliver others.
        less: (slot, state that is taken off it): the half of a fused pair that a layer's MLP gave out is the stream less the
            partial stream.
        scale: one factor per slot, () = all 1.
        shift: d: the row labelled t holds the state of token t+d.
        poison: put NaN into this many rows of a request or sample.
        spoilers: what else goes wrong, in this order, after the plain ones above.
    """

    slots: tuple[Boundary, ...]
    verify: tuple[Boundary, ...] = ()
    less: tuple[tuple[int, Boundary], ...] = ()
    scale: tuple[float, ...] = ()
    shift: int = 0
    poison: int = 0
    spoilers: tuple[Spoiler, ...] = ()

    @classmethod
    def of(cls, boundaries: tuple[int, ...]) -> Wiring:
        return cls(tuple(Boundary(b) for b in boundaries))

    def taps(self, phase: Phase = "prefill") -> tuple[Boundary, ...]:
        """The places of the target that a pass has to yield for `apply`."""
        slots = self.verify if phase == "verify" and self.verify else self.slots
        return (*slots, *(place for _, place in self.less))

    def apply(
        self, states: Tensor, counts: Tensor, start: Tensor | int = 0, *, phase: Phase = "prefill",
        requests: tuple[int, ...] = (), norm: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """What the draft (or the file) gets of the states taken in one forward pass.

        Args:
            states: [R, W, len(taps), Ht], one block of rows per request, padded on the right.
            counts: [R], rows of each block that are not padding.
            start: [R] or one for all, position of each block's first row in its request.
            phase, requests, norm: see `spoiling.Pass`.

        Returns:
            [R, W, S, Ht] in the same dtype; `states` itself where nothing is amiss.
        """
        if self.less:
            whole, states = states, states[:, :, : len(self.slots)].clone()
            for i, (slot, _) in enumerate(self.less):
                states[:, :, slot] -= whole[:, :, len(self.slots) + i]
        of = Pass(counts, torch.as_tensor(start).expand(len(counts)), phase, requests, norm)
        for spoiler in self.spoiled():
            states = spoiler.apply(states, of)
        return states

    def spoiled(self) -> tuple[Spoiler, ...]:
        """All that goes wrong, in order."""
        plain: list[Spoiler] = [Shifted(self.shift)] if self.shift else []
        plain += [Scaled(factor, (slot,)) for slot, factor in enumerate(self.scale) if factor != 1]
        plain += [Poisoned(self.poison)] if self.poison else []
        return (*plain, *self.spoilers)

    def row_by_row(self) -> Wiring:
        """The same without what depends on other rows of the block."""
        return replace(self, shift=0, poison=0, spoilers=tuple(s for s in self.spoilers if not s.across))
