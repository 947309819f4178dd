"""Several processes that train one draft: each takes its share of every batch, gradients are summed, weights stay equal.

Started by `torchrun`, which sets RANK, WORLD_SIZE and where to meet. Gradients are summed after the whole backward pass rather
than by torch's DistributedDataParallel: one step calls the draft once per draft step, and one layer is small enough that nothing
is gained by overlapping. No process holds anything that the others do not: order and noise follow from seed, step and sample, so
one saved state serves any number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from draftscope.errors import DraftscopeError, UsageError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a run. `device` is where tensors must lie that they exchange."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """The one that writes and talks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Of all processes, where `tensor` lies."""
        if self.world == 1:
            return tensor
        moved = tensor.to(self.device)
        with _told():
            dist.all_reduce(moved)
        return moved.to(tensor.device)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """In place; a parameter without a gradient counts as zeros."""
        if self.world == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters if p.requires_grad]
        flat = self.sum(torch.cat([g.flatten() for g in grads]))
        start = 0
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()

    def barrier(self) -> None:
        """Wait for all."""
        self.sum(torch.zeros(1))

    def all_names(self, name: str) -> list[str]:
        """One text of every process that has one, in their order."""
        if self.world == 1:
            return [name] if name else []
        held: list[str] = [""] * self.world
        with _told():
            dist.all_gather_object(held, name)
        return [text for text in held if text]


ALONE = Ranks()


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator[Ranks]:
    """The processes that `torchrun` started, met; one alone where it did not.

    Args:
        timeout_s: a process that waits longer than this for the others gives up.

    Raises:
        UsageError: of what torchrun sets some is missing.
        DraftscopeError: the others did not come, ended, or do not answer.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UsageError(f"RANK and WORLD_SIZE are set, {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
                         remedy="Start the processes with torchrun, or unset RANK and WORLD_SIZE to train in one")
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", place.index if place.index is not None else int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    with _told():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield Ranks(dist.get_rank(), world, place)
    finally:
        dist.destroy_process_group()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistBackendError and gloo's own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DraftscopeError(
            f"another process of this run ended or does not answer ({first})",
            where=f"process {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}",
            remedy="Its own error says why; the same command goes on from the state saved last",
        ) from None
