"""Holding states against states: pairing, placement, statistics. `draftscope.compare(a, b)` compares two sources."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The room under its name is also the function: `draftscope.compare(a, b)`."""

    def __call__(self, a: Any, b: Any) -> Any:
        """See `compare.statistics.compare`."""
        from draftscope.compare.statistics import compare

        return compare(a, b)


sys.modules[__name__].__class__ = _Room
