"""The same inspection on the machine where the data lie, through ssh; nothing but the answer is copied."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from draftscope.errors import DraftscopeError, UsageError

SSH_FAILED = 255


@dataclass(slots=True)
class Remote:
    """Where and with which Python.

    Attributes:
        host: USER@HOST, as ssh takes it.
        python: the interpreter there in which draftscope is installed.
    """

    host: str
    python: str = "python3"

    def run(self, arguments: Sequence[str], *, capture: bool) -> tuple[int, str]:
        """Run `draftscope ARGUMENTS` there; returns its exit code and, with `capture`, its stdout.

        Raises:
            UsageError: a host that ssh would take for an option.
            DraftscopeError: no ssh, no connection, or no draftscope there.
        """
        if self.host.startswith("-") or not self.host.strip():
            raise UsageError(f"`{self.host}` is no host", remedy="--on USER@HOST")
        command = shlex.join([self.python, "-m", "draftscope", *arguments])
        try:
            stdout = subprocess.PIPE if capture else None
            done = subprocess.run(["ssh", "--", self.host, command], stdout=stdout, text=True, check=False)
        except OSError as error:
            raise DraftscopeError(f"ssh cannot be run ({error.strerror})", where=self.host) from None
        if done.returncode in (SSH_FAILED, 126, 127):
            what = "no connection" if done.returncode == SSH_FAILED else f"`{self.python}` cannot be run there"
            raise DraftscopeError(what, where=self.host, remedy="--python names an interpreter that has draftscope")
        return done.returncode, done.stdout or ""
