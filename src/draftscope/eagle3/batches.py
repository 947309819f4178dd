"""Which examples make a batch, and batches made ahead of their use."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")


def batch_order(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of examples of similar length, at most `tokens` each once padded, in the order of this epoch."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{epoch}".encode()))
    jitter = 1 + 0.2 * torch.rand(len(lengths), generator=draw)
    order = sorted(range(len(lengths)), key=lambda i: float(lengths[i] * jitter[i]))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if batches and longest * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]


def ahead(plan: Iterable[tuple[int, Callable[[], Made]]], limit: int) -> Generator[Made, None, None]:
    """What the plan's functions make, in order, made by a thread that runs ahead.

    A function is called once its cost fits into `limit` beside the costs of all that was made and is not yet done with; what was
    handed out last counts until the next is asked for. Alone, anything fits.

    Args:
        plan: cost in bytes, and what makes it.

    Raises:
        BaseException: whatever a function raises, where its result would have come.
    """
    shelf: _Shelf[Made] = _Shelf(limit)
    thread = threading.Thread(target=shelf.fill, args=(plan,), name="batches ahead", daemon=True)
    thread.start()
    try:
        while (taken := shelf.take()) is not None:
            cost, made = taken
            if isinstance(made, BaseException):
                raise made
            yield made
            del made, taken
            shelf.release(cost)
    finally:
        shelf.close()
        thread.join()


class _Shelf(Generic[Made]):
    """Between the thread that makes and the one that takes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.ready: deque[tuple[int, Made | BaseException]] = deque()
        self.done = self.closed = False
        self.changed = threading.Condition()

    def fill(self, plan: Iterable[tuple[int, Callable[[], Made]]]) -> None:
        try:
            for cost, make in plan:
                if not self._reserve(cost):
                    return
                self._put(cost, make())
        except BaseException as error:  # told to the taker, who raises it
            self._put(0, error)
        with self.changed:
            self.done = True
            self.changed.notify_all()

    def _reserve(self, cost: int) -> bool:
        """Wait for room; False where nobody takes any more."""
        with self.changed:
            while not (self.closed or self.held == 0 or self.held + cost <= self.limit):
                self.changed.wait()
            self.held += cost
            return not self.closed

    def _put(self, cost: int, made: Made | BaseException) -> None:
        with self.changed:
            self.ready.append((cost, made))
            self.changed.notify_all()

    def take(self) -> tuple[int, Made | BaseException] | None:
        """The next, None after the last."""
        with self.changed:
            while not self.ready and not self.done:
                self.changed.wait()
            return self.ready.popleft() if self.ready else None

    def release(self, cost: int) -> None:
        with self.changed:
            self.held -= cost
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()
