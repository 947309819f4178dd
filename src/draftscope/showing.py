"""How results show themselves in a notebook: rendered where they stand, drawn with one call, as tables for pandas.

Results are made long before the room that draws them, which is found by its name when one of these is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any


class Shown:
    """Mixed into results."""

    def _told(self) -> str:
        """What a terminal shows of it."""
        return str(_room().text(self))

    def _repr_html_(self) -> str:
        return str(_room().html(self))

    def plot(self, *names: str) -> Any:
        """Figures by name, all without one; a notebook shows what comes back, `str()` of it is the page.

        Raises:
            UsageError: no figure has that name, or the result has no data for it; says which there are.
        """
        return _room().plot(self, names)

    def rows(self, name: str = "") -> list[dict[str, Any]]:
        """A table of this result as rows; without a name its first.

        Raises:
            UsageError: no table has that name; says which there are.
        """
        rows: list[dict[str, Any]] = _room().rows(self, name)
        return rows

    def frame(self, name: str = "") -> Any:
        """The same as a pandas DataFrame.

        Raises:
            UsageError: as `rows`, or pandas is not installed.
        """
        return _room().frame(self, name)


def _room() -> Any:
    return importlib.import_module("draftscope.report.notebook")
