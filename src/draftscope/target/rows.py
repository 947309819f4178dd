"""What befalls rows between the target and the draft (or the file): batches, graphs, buffers and shards.

Spoilers as `target.spoiling` has them, called once a pass as engines are; some remember the pass before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from draftscope.target.spoiling import Pass, Phase, Spoiler


@dataclass(frozen=True)
class On:
    """A spoiler that acts in places only.

    Attributes:
        slots, channels: () = all. rows: positions from `since` on and before `until`, every `every`-th of them.
    """

    spoiler: Spoiler
    phase: Phase | None = None
    slots: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    since: int = 0
    until: int | None = None
    every: int = 1
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if self.phase not in (None, of.phase):
            return states
        spoilt = self.spoiler.apply(states, of)
        positions = of.start[:, None].cpu() + torch.arange(states.shape[1])
        rows = (positions >= self.since) & (positions % self.every == self.every - 1)
        if self.until is not None:
            rows &= positions < self.until
        mask = rows[:, :, None, None] & _some(self.slots, states.shape[2])[:, None] & _some(self.channels, states.shape[3])
        return torch.where(mask, spoilt, states)


def _some(chosen: tuple[int, ...], of: int) -> Tensor:
    mask = torch.full((of,), not chosen)
    mask[list(chosen)] = True
    return mask


@dataclass(frozen=True)
class Held:
    """What a spoiler remembers of the pass before; empty at first."""

    passes: list[Tensor] = field(default_factory=list)

    def swap(self, states: Tensor) -> Tensor | None:
        """The states remembered, and these in their place."""
        before = self.passes.pop() if self.passes else None
        self.passes.append(states.clone())
        return before


@dataclass(frozen=True)
class OfNeighbour:
    """Each request is given the rows of the next one in the batch; where it is alone, those of the pass before."""

    held: Held = field(default_factory=Held, compare=False)
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        before = self.held.swap(states)
        if len(states) > 1:
            inside = torch.arange(states.shape[1]) < of.counts.roll(-1)[:, None]
            return torch.where(inside[:, :, None, None], states.roll(-1, 0), states)
        if before is None:
            return states
        rows = min(states.shape[1], before.shape[1])
        return torch.cat([before[:1, :rows], states[:, rows:]], 1)


@dataclass(frozen=True)
class Behind:
    """A buffer that was not emptied: the last `rows` rows of the call before come first, the call's own after them."""

    rows: int
    held: Held = field(default_factory=Held, compare=False)
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        last = int(of.counts[-1])
        before = self.held.swap(states[-1:, max(last - self.rows, 0) : last])
        if before is None:
            return states
        return torch.cat([before.expand(len(states), -1, -1, -1), states], 1)[:, : states.shape[1]]


@dataclass(frozen=True)
class WithoutPrefix:
    """The first `rows` rows (a cached prefix) have no states: the others move up, and nothing is left for the last."""

    rows: int
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        index = torch.arange(states.shape[1]) + self.rows
        inside = index < of.counts[:, None]
        moved = states[:, index.clamp(max=states.shape[1] - 1)]
        return torch.where(inside[:, :, None, None], moved, torch.zeros_like(states))


@dataclass(frozen=True)
class Filled:
    """A constant in every place: memory never written, or what overflowed."""

    value: float = 0.0
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        return torch.full_like(states, self.value)


@dataclass(frozen=True)
class Overflowing:
    """Values too large for the dtype of the capture become infinite."""

    largest: float
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        return torch.where(states.abs() > self.largest, states.sign() * torch.inf, states)


@dataclass(frozen=True)
class OfLastPass:
    """A static buffer read before this pass has written it: the rows of the pass before, whichever requests it held.

    Attributes:
        graphs: least and largest number of requests for which there is a graph, where only its passes write the buffer and are
            given their own rows; before the first it holds what the warm-up left there, one row in every place.
    """

    graphs: tuple[int, int] | None = None
    held: Held = field(default_factory=Held, compare=False)
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if self.graphs is not None and self.graphs[0] <= len(states) <= self.graphs[1]:
            self.held.swap(states)
            return states
        given = torch.zeros_like(states)
        if self.graphs is not None:
            if not self.held.passes:
                self.held.swap(states[:1, :1].expand_as(states))
            buffer: Tensor | None = self.held.passes[0]
        else:
            buffer = self.held.swap(states)
        if buffer is not None:
            some = tuple(slice(min(a, b)) for a, b in zip(buffer.shape[:2], states.shape[:2], strict=True))
            given[some] = buffer[some]
        return given


@dataclass(frozen=True)
class Padding:
    """One vector, that of the row with which the buffer was padded, whatever the token."""

    held: Held = field(default_factory=Held, compare=False)
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        if not self.held.passes:
            self.held.swap(states[:1, :1])
        return self.held.passes[0].expand_as(states).clone()


@dataclass(frozen=True)
class Later:
    """A buffer handed out without a copy: slots hold what stands in it later, that is the next slot's state or the last's.

    Attributes:
        race: of so many rows one, another in every pass and capture, was changed before it was read; 0 = all were.
    """

    last: bool = False
    race: int = 0
    passes: Held = field(default_factory=Held, compare=False)
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        moved = states[:, :, -1:].expand_as(states) if self.last else torch.cat([states[:, :, 1:], states[:, :, -1:]], 2)
        if not self.race:
            return moved.clone()
        made = len(self.passes.passes)
        self.passes.passes.append(states[:0, :0])
        rows = torch.arange(states.shape[1]) + 3 * torch.arange(len(states))[:, None] + 5 * made
        return torch.where((rows % self.race == 0)[:, :, None, None], moved, states)


@dataclass(frozen=True)
class Channels:
    """What `ranks` tensor-parallel ranks make of a row, each holding one n-th of its channels.

    Attributes:
        rest: only the first rank's are there and the others `zero`; `again`, the first's in every place; `turned`, all of
            them, put together in reverse order.
    """

    ranks: int = 2
    rest: Literal["zero", "again", "turned"] = "zero"
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        shards = list(states.chunk(self.ranks, -1))
        if self.rest == "turned":
            return torch.cat(shards[::-1], -1)
        other = torch.zeros_like(shards[0]) if self.rest == "zero" else shards[0]
        return torch.cat([shards[0], *[other] * (self.ranks - 1)], -1)


@dataclass(frozen=True)
class SequenceShards:
    """What `ranks` sequence-parallel ranks make of a prompt, each holding one n-th of its rows.

    Attributes:
        rest: the others' rows `zero`, or all of them put together in reverse order (`turned`).
    """

    ranks: int = 2
    rest: Literal["zero", "turned"] = "zero"
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        made = states.clone()
        for i, count in enumerate(of.counts.tolist()):
            each = -(-count // self.ranks)
            shards = [states[i, at : min(at + each, count)] for at in range(0, count, each)]
            made[i, :count] = torch.cat(shards[::-1]) if self.rest == "turned" else 0
            if self.rest == "zero":
                made[i, :each] = shards[0]
        return made


@dataclass(frozen=True)
class Interleaved:
    """Slots and channels written in the other order: [Ht, S] where [S, Ht] is read."""
    across = True

    def apply(self, states: Tensor, of: Pass) -> Tensor:
        return states.transpose(-1, -2).reshape(states.shape)
