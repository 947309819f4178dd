"""Which examples make a batch, and batches made ahead of their use."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

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


def ahead(plan: Iterable[tuple[int, Callable[[], Made]]], limit: int) -> Iterator[Made]:
    """What the plan's functions make, in order, made by a thread that runs ahead.

    A function is called once its cost fits into `limit` beside the costs of all that was made and is not yet done with; what was
    handed out last counts until the next is asked for. Alone, anything fits.

    Args:
        plan: cost in bytes, and what makes it.

    Raises:
        Exception: whatever a function raises, where its result would have come.
    """
    ready: deque[tuple[int, Made | BaseException]] = deque()
    changed = threading.Condition()
    held, done, closed = 0, False, False

    def work() -> None:
        nonlocal held, done
        try:
            for cost, make in plan:
                with changed:
                    changed.wait_for(lambda cost=cost: closed or held == 0 or held + cost <= limit)  # type: ignore[misc]
                    if closed:
                        return
                    held += cost
                made: Made | BaseException
                try:
                    made = make()
                except BaseException as error:
                    made = error
                with changed:
                    ready.append((cost, made))
                    changed.notify_all()
                if isinstance(made, BaseException):
                    return
        finally:
            with changed:
                done = True
                changed.notify_all()

    thread = threading.Thread(target=work, name="batches ahead", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: ready or done)
                if not ready:
                    return
                cost, made = ready.popleft()
            if isinstance(made, BaseException):
                raise made
            yield made
            del made
            with changed:
                held -= cost
                changed.notify_all()
    finally:
        with changed:
            closed = True
            ready.clear()
            changed.notify_all()
        thread.join()
