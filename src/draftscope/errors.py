"""Errors that a user can act on.

    DraftscopeError         what went wrong, where, and what to do; exit code 3
    └── UsageError          the command line or the arguments contradict each other; exit code 2

Anything else that escapes is a bug (exit code 4). A readable file with bad content is not an error but a finding.
"""

from __future__ import annotations


class DraftscopeError(Exception):
    """Input that cannot be read, or that contradicts itself.

    Args:
        what: what went wrong, one clause.
        where: file, tensor, row: as near as is known.
        remedy: what the user can do about it.
    """

    exit_code = 3

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}. {remedy}" if remedy else text)


class UsageError(DraftscopeError):
    """Arguments that do not go together."""

    exit_code = 2
