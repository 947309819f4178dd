"""Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put a KeyboardInterrupt off to the end of the block. Outside the main thread there is none to put off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught += 1

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if caught:
            raise KeyboardInterrupt
