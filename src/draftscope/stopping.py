"""A wish to stop that libraries cannot swallow.

Compiled code that calls back into Python may turn the KeyboardInterrupt of a signal into an error of its own (torch does, when it
makes a tensor of a storage): the file in hand would be passed over as unreadable and the work go on. So the wish is kept, and
whoever catches a library's errors, or goes on to the next item, calls `heed`.
"""

from __future__ import annotations

import signal
from typing import NoReturn

_wish: Stopped | None = None


class Stopped(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP; `exit_code` is what a shell expects of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def watch() -> None:
    """From now on these signals raise `Stopped` and are remembered; those that are ignored (`nohup`) stay so."""
    global _wish
    _wish = None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)


def _stop(number: int, _: object) -> NoReturn:
    global _wish
    _wish = Stopped(number)
    raise _wish


def heed() -> None:
    """Raise `Stopped` if one was raised and got lost."""
    if _wish is not None:
        raise _wish
