"""One job on another machine, through the user's ssh: sources and job go to stdin of a Python there, frames come back."""

from __future__ import annotations

import json
import secrets
import shlex
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from draftscope.elsewhere.packing import OLDEST, TOO_OLD, packed
from draftscope.errors import DraftscopeError, UsageError
from draftscope.text import visible

SSH_FAILED = 255
BEAT = 5.0
"""Seconds between signs of life; the other side waits for a minute."""
MOST = 2**32
"""Bytes of one answer; more is no answer of ours."""
FIRST = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Host:
    """Where the files lie, and what may be used there.

    Attributes:
        name: USER@HOST, as ssh takes it.
        python: an interpreter there that has torch, numpy and safetensors.
        memory: GiB of private memory at most, mapped files among it.
        threads: CPU threads.
    """

    name: str
    python: str = "python3"
    memory: float = 4.0
    threads: int = 4

    def command(self) -> list[str]:
        """The ssh command.

        Raises:
            UsageError: a name that ssh would take for an option.
        """
        if self.name.startswith("-") or not self.name.strip():
            raise UsageError(f"`{self.name}` is no host", remedy="--on USER@HOST")
        home = "~/" if self.python.startswith("~/") else ""  # for the shell there
        python = home + shlex.quote(self.python.removeprefix("~/"))
        return ["ssh", *ALIVE, "--", self.name, f"exec {python} -c {shlex.quote(FIRST)}"]

    def path(self, path: str) -> str:
        """How a path there is called here."""
        return f"{self.name}:{path}"


@dataclass(frozen=True, slots=True)
class Frame:
    """What the other side says: `kind` is answer, error, lacks or broken; `more` are an answer's bytes."""

    kind: str
    held: dict[str, Any]
    more: bytes = b""


def run(host: Host, job: dict[str, Any], on_items: Callable[[int], None]) -> Iterator[Frame]:
    """Do a job there; yields its answers and errors as they come.

    Leaving the iterator early, or any error here, ends the process there.

    Args:
        on_items: told how many items more were read.

    Raises:
        DraftscopeError: no ssh, no connection or a lost one, no such Python there, or one that lacks what is needed.
    """
    mark = secrets.token_hex(16)
    limits = {"memory": int(host.memory * GIB), "threads": host.threads}
    try:
        process = subprocess.Popen(host.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise DraftscopeError(f"ssh cannot be run ({error.strerror})", where=host.name,
                              remedy="Install OpenSSH's client") from None
    assert process.stdin and process.stdout and process.stderr
    said: deque[str] = deque(maxlen=20)
    done = threading.Event()
    talker = threading.Thread(target=_talk, args=(process.stdin, packed(mark, {**job, **limits}), done), daemon=True)
    listener = threading.Thread(target=_listen, args=(process.stderr, said), daemon=True)
    talker.start()
    listener.start()
    try:
        yield from _answers(process.stdout, mark, on_items)
    except EOFError:
        listener.join(10)
        raise _lost(host, process.wait(), said) from None
    finally:
        done.set()
        process.terminate()  # what runs there ends when its stdin does
        process.wait()
        talker.join(10)
        listener.join(10)
        process.stdout.close()
        process.stderr.close()


def _talk(stdin: IO[bytes], held: bytes, done: threading.Event) -> None:
    """Send the job, then signs of life."""
    with suppress(OSError):
        stdin.write(held)
        stdin.flush()
        while not done.wait(BEAT):
            stdin.write(b"\n")
            stdin.flush()
    with suppress(OSError):
        stdin.close()


def _listen(stderr: IO[bytes], said: deque[str]) -> None:
    for line in stderr:
        text = line.decode(errors="replace").strip()
        if text:
            said.append(text)


def _answers(stdout: IO[bytes], mark: str, on_items: Callable[[int], None]) -> Iterator[Frame]:
    """Frames behind the mark.

    Raises:
        EOFError: they end before the last.
    """
    wanted = f"{mark}\n".encode()
    while (line := stdout.readline(65536)) != wanted:
        if not line:
            raise EOFError
    while True:
        length, more = struct.unpack(">QQ", _exactly(stdout, 16))
        if length > MOST or more > MOST:
            raise DraftscopeError("answered with something that is no answer", remedy="Try again")
        text, body = _exactly(stdout, length), _exactly(stdout, more)
        try:
            held = json.loads(text)
            kind = str(held.pop("kind"))
            items = int(held["items"]) if kind == "progress" else 0
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise DraftscopeError("answered with something that is no answer", remedy="Try again") from None
        if kind == "end":
            return
        if kind == "progress":
            on_items(items)
        else:
            yield Frame(kind, held, body)


def _exactly(stdout: IO[bytes], count: int) -> bytes:
    held = stdout.read(count)
    if len(held) < count:
        raise EOFError
    return held


def _lost(host: Host, code: int, said: deque[str]) -> DraftscopeError:
    last = visible(said[-1], 300) if said else ""
    because = f" ({last})" if last else ""
    wanted = ".".join(map(str, OLDEST))
    if code == SSH_FAILED:
        return DraftscopeError(f"no connection, or it was lost{because}", where=host.name,
                               remedy=f"Nothing is left there. Try `ssh {host.name} true`")
    if code in (126, 127):
        return DraftscopeError(f"`{host.python}` cannot be run there{because}", where=host.name,
                               remedy="--python names an interpreter there, such as ~/venv/bin/python")
    if code == TOO_OLD:
        return DraftscopeError(f"`{host.python}` there is too old{because}", where=host.name,
                               remedy=f"--python names one of version {wanted} or newer")
    if code in (-9, 137):
        return DraftscopeError("the process there was killed", where=host.name,
                               remedy="That machine may lack memory: --memory and --threads ask for less")
    return DraftscopeError(f"the process there ended with code {code} and gave no answer{because}", where=host.name)


def error_of(host: Host, frame: Frame) -> DraftscopeError:
    """An error that the other side told of."""
    held = frame.held
    if frame.kind == "lacks":
        module = held.get("module") or "a module"
        return DraftscopeError(f"`{host.python}` there lacks {module} ({visible(held.get('what', ''), 200)})", where=host.name,
                               remedy="--python names an interpreter that has torch, numpy and safetensors; a checkpoint takes "
                                      "pydantic and transformers, as the environments of vLLM and SGLang have them")
    if frame.kind == "broken":
        if held.get("memory"):
            return DraftscopeError(f"needs more than {host.memory:g} GiB of memory there", where=host.name,
                                   remedy="--memory GIB allows more")
        return DraftscopeError(f"failed there: {visible(held.get('what', ''), 500)}", where=host.name)
    kind = UsageError if held.get("usage") else DraftscopeError
    where = host.path(str(held["where"])) if held.get("where") else host.name
    remedy = str(held.get("remedy", ""))
    what = str(held.get("what", "failed there"))
    if "allocate memory" in what:
        remedy = "--memory GIB allows more"
    return kind(what, where=where, remedy=remedy)
