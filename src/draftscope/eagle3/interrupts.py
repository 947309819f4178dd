"""A wish to stop (Ctrl-C, SIGTERM of a scheduler, SIGHUP), heard at a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put what these signals do off to the end of the block; those that Python does not handle stay as they are.

    An error of the block's own comes first. Outside the main thread there is nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for held in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(held)
        if callable(handler):
            before[held] = handler
            signal.signal(held, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in dict.fromkeys(caught):
        before[number](number, None)
