"""What befalls states between the target and the draft (or the file), where engines and data writers really err."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Phase = Literal["prefill", "verify"]
Basis = Literal["orthogonal", "hadamard", "reversed"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: prompts, or verify steps; of a data writer, a batch of samples (prefill).

    Attributes:
        counts: [R], rows of each block that are not padding (padding is on the right).
        start: [R], position of each block's first row in its request.
        requests: R numbers of requests or samples, in order; () = unknown.
        norm: the target's final norm, of states [..., Ht] in float32.
    """

    counts: Tensor
    start: Tensor
    phase: Phase = "prefill"
    requests: tuple[int, ...] = ()
    norm: Callable[[Tensor], Tensor] | None = None


class Spoiler(Protocol):
    """Something that goes wrong with the states of a pass."""

    @property
    def across(self) -> bool:
        """Whether a row depends on other rows of its block: of a tree that block is the accepted path."""
        ...

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        """States [R, W, S, Ht] as they come out, in the same dtype; those given are not written to."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A constant factor: a multiplier applied twice or not at all, a sum over ranks taken twice.

    Attributes:
        slots: which, () = all.
        channels: the half-open part of the channels concerned, as shares of the width: (0.5, 1.0) is the second of two
            tensor-parallel ranks.
        phase: only in such passes; None = in all.
    """

    factor: float
    slots: tuple[int, ...] = ()
    channels: tuple[float, float] = (0.0, 1.0)
    phase: Phase | None = None
    across = False

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if self.phase not in (None, of.phase):
            return states
        factors = torch.ones(states.shape[2:], dtype=states.dtype, device=states.device)
        first, last = (round(share * states.shape[3]) for share in self.channels)
        for slot in self.slots or range(states.shape[2]):
            factors[slot, first:last] = self.factor
        return states * factors


@dataclass(frozen=True, slots=True)
class Shifted:
    """Row t takes the state of row t + `by` of its block; rows at the block's edge keep their own.

    Engines err inside the block of rows of a pass: a gather index off by one, a roll.
    """

    by: int
    slots: tuple[int, ...] = ()
    phase: Phase | None = None
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if self.phase not in (None, of.phase) or self.by == 0:
            return states
        rows = torch.arange(states.shape[1])
        source = rows + self.by
        source = torch.where((source >= 0) & (source < of.counts[:, None]), source, rows)
        moved = states[torch.arange(len(states))[:, None], source]
        if not self.slots:
            return moved
        states = states.clone()
        states[:, :, list(self.slots)] = moved[:, :, list(self.slots)]
        return states


@dataclass(frozen=True, slots=True)
class Turned:
    """Another basis: states of a target whose weights a rotating quantiser (QuaRot, SpinQuant) has turned.

    Attributes:
        basis: `orthogonal` (random), `hadamard` (with random signs; its width must be a power of two) or `reversed` channels.
    """

    basis: Basis = "orthogonal"
    slots: tuple[int, ...] = ()
    phase: Phase | None = None
    seed: int = 0
    across = False

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if self.phase not in (None, of.phase):
            return states
        turned = turn(states, self.basis, self.seed)
        if not self.slots:
            return turned
        states = states.clone()
        states[:, :, list(self.slots)] = turned[:, :, list(self.slots)]
        return states


def turn(states: Tensor, basis: Basis, seed: int = 0) -> Tensor:
    """States [..., Ht] in another basis."""
    if basis == "reversed":
        return states.flip(-1)
    width = states.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    if basis == "hadamard":
        if width & (width - 1):
            raise ValueError(f"no Hadamard matrix of width {width} is made here: it must be a power of two")
        matrix = torch.ones(1, 1)
        while len(matrix) < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        signs = torch.randint(0, 2, (width, 1), generator=generator) * 2.0 - 1
        matrix = signs * matrix / width**0.5
    else:
        matrix = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    return (states.float() @ matrix.to(states.device)).to(states.dtype)


@dataclass(frozen=True, slots=True)
class Normed:
    """The target's final norm where none belongs, once or more."""

    slots: tuple[int, ...] = ()
    times: int = 1
    phase: Phase | None = None
    across = False

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if self.phase not in (None, of.phase):
            return states
        if of.norm is None:
            raise ValueError("the final norm of this target is not at hand")
        states = states.clone()
        for slot in self.slots or range(states.shape[2]):
            for _ in range(self.times):
                states[:, :, slot] = of.norm(states[:, :, slot]).to(states.dtype)
        return states


@dataclass(frozen=True, slots=True)
class Poisoned:
    """NaN in the first rows of a request after its very first, in order, whichever pass they come in."""

    rows: int
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        positions = of.start.reshape(-1, 1) + torch.arange(states.shape[1])
        spoilt = (positions >= 1) & (positions <= self.rows)
        return states.masked_fill(spoilt[:, :, None, None].to(states.device), torch.nan)
