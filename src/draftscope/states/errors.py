"""An unreadable states file, with the kind of trouble, so that skipped files can be told apart."""

from __future__ import annotations

from typing import Literal

from draftscope.errors import DraftscopeError

Cause = Literal["foreign", "broken", "layout", "rows"]


class StatesError(DraftscopeError):
    """A file that does not hold what its format asks for; `cause` as in `Skipped`."""

    def __init__(self, what: str, *, cause: Cause = "layout", where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.cause = cause
