"""`draftscope serve`: the diagnoses of a folder in a browser."""

from __future__ import annotations

import secrets
import signal
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from draftscope import stopping
from draftscope.cli.common import QuietOption, setup
from draftscope.errors import UsageError


def command(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder that holds diagnoses (--json FILE), and what is being "
                                         "scanned or captured.")],
    host: Annotated[str, typer.Option(
        "--host", metavar="ADDRESS", help="Where to listen; the loopback alone unless you say otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="0 = any free one.")] = 0,
    quiet: QuietOption = False,
) -> None:
    """Show the diagnoses of a folder in a browser: a list, each report, two side by side, and work in progress.

    The address that is printed holds a random token: whoever has it can read the reports, and nobody else. Ctrl-C ends it.
    """
    ui = setup(quiet)
    if not runs.is_dir():
        raise UsageError("is no folder", where=str(runs), remedy="Name the folder that holds your diagnoses")
    try:
        import uvicorn

        from draftscope.viewing.app import viewer
    except ImportError as error:
        raise UsageError(f"the viewer needs {error.name}", remedy="pip install 'draftscope[viewer]'") from None
    token = secrets.token_urlsafe(24)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(f"cannot listen there: {error.strerror or error}", where=f"{host}:{port}",
                         remedy="Name another --host or --port") from None
    bound = listening.getsockname()[0]
    if ip_address(bound).is_unspecified:
        host, name = bound, socket.gethostname()
    else:
        name = f"[{host}]" if ":" in host else host
    ui.console.print(f"http://{name}:{listening.getsockname()[1]}/{token}/", soft_wrap=True)
    ui.note("Ctrl-C ends it")
    config = uvicorn.Config(viewer(runs, token, host), log_level="error", access_log=False, server_header=False, lifespan="off")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt as wish:
        if isinstance(wish, stopping.Stopped) and wish.exit_code != 128 + signal.SIGINT:
            raise
