"""Options of commands that can work where the files lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draftscope.elsewhere.session import Host

OnOption = Annotated[
    str | None, typer.Option("--on", metavar="USER@HOST", help="Work where the data lie, through ssh; it installs nothing there.")
]
PythonOption = Annotated[
    str, typer.Option("--python", metavar="PATH", help="Python on that host that has torch, numpy and safetensors.")
]
MemoryOption = Annotated[
    float, typer.Option("--memory", min=0.25, metavar="GIB", help="Memory to take on that host at most, mapped files among it.")
]
THREADS = 4


def host_of(on: str | None, python: str, memory: float, threads: int | None) -> Host | None:
    """Where to work; None = here.

    Raises:
        UsageError: a host that ssh would take for an option.
    """
    if on is None:
        return None
    from draftscope.elsewhere.session import Host

    host = Host(on, python, memory, threads or THREADS)
    host.command()
    return host
