"""Mergeable statistics of a source, and the file that holds them. `draftscope.scan(source)` makes a fingerprint."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The room under its name is also the function: `draftscope.scan(...)`."""

    def __call__(self, source: Any, **options: Any) -> Any:
        """See `scan.scan.scan`; a path is opened first, what `draftscope.open` gave stands for the source in it."""
        from draftscope.scan.scan import scan
        from draftscope.states.opening import open_source
        from draftscope.states.places import Place

        source = getattr(source, "source", source)
        return scan(open_source(source) if isinstance(source, str | Place) else source, **options)


sys.modules[__name__].__class__ = _Room
