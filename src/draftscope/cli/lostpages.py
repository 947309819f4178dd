"""A file that is cut short while it is mapped: the system stops the process with SIGBUS at the next touch of a page that is gone.

Python's own handlers run between its instructions, and the faulty one is repeated before it comes to that. So a handler is
installed under it, which says what happened and leaves; it never returns to the read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

ADDRESS_AT = 16
"""Of `si_addr` in `siginfo_t`, on 64-bit Linux."""
SA_SIGINFO = 4


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux' C libraries."""

    _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_byte * 128), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p))


_kept: list[object] = []


def watch(leave: Callable[[str], int]) -> None:
    """From now on, call `leave` with the path of the file whose pages are gone, and exit with what it returns.

    Nothing is installed where the layouts above are not known.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return

    first = threading.Lock()

    def handle(_: int, info: int, __: int) -> None:
        if not first.acquire(blocking=False):
            threading.Event().wait()  # another thread met the same pages and is about to leave
        try:
            code = leave(_file_at(ctypes.c_uint64.from_address(info + ADDRESS_AT).value))
        except BaseException:
            code = 4
        os._exit(code)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(handle)
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=SA_SIGINFO)
    _kept.append(handler)
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


def _file_at(address: int) -> str:
    """The file that is mapped there; empty where none is."""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            low, _, high = line.split(maxsplit=1)[0].partition(b"-")
            if int(low, 16) <= address < int(high, 16):
                parts = line.rstrip(b"\n").split(maxsplit=5)
                return os.fsdecode(parts[5]).removesuffix(" (deleted)") if len(parts) > 5 else ""
    return ""
