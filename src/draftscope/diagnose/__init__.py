"""From a user's files to the cause: measurements, ladder, repair, verdict. `draftscope.diagnose(...)` does it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The room under its name is also the function: `draftscope.diagnose(train=..., serve=..., draft=..., target=...)`."""

    def __call__(self, **given: Any) -> Any:
        """See `diagnose.calling.diagnose`."""
        from draftscope.diagnose.calling import diagnose

        return diagnose(**given)


sys.modules[__name__].__class__ = _Room
