"""The viewer: a list of runs, each run's report, two side by side, and what is being done; no page of it runs a script.

An address holds a random token, which is the only key, and ids; never a path. What is shown is made by the report's templates.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from draftscope.report.html import page, policy, render
from draftscope.viewing.pairs import beside
from draftscope.viewing.runs import Run, Runs
from draftscope.viewing.work import working

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
Answer = Callable[[Request], Awaitable[Response]]


def viewer(root: Path, token: str, host: str = "127.0.0.1") -> Starlette:
    """The application over a folder of runs.

    Args:
        token: the first part of every address; without it nothing is answered.
        host: the name under which it may be asked for, besides those of the loopback; of one that stands for every address
            (`0.0.0.0`, `::`), this machine's name and any address in figures. Another is refused, so that no web page can reach
            it through a name of its own.
    """
    runs = Runs(root)
    names = LOCAL | {host.lower()}
    everywhere = _numeric(host) and ip_address(host).is_unspecified
    if everywhere:
        names |= {socket.gethostname().lower()}

    def guarded(answer: Callable[[Request], Response]) -> Answer:
        async def asked(request: Request) -> Response:
            known = secrets.compare_digest(request.path_params["token"].encode(), token.encode())
            named = request.url.hostname or ""
            if not known or not (named in names or (everywhere and _numeric(named))):
                return _safe(PlainTextResponse("not found", 404))
            return _safe(await run_in_threadpool(answer, request))

        return asked

    def listed(request: Request) -> Response:
        found = runs.all()
        chosen = [run.id for run in found if run.diagnosis is not None][:2] or [""]
        return HTMLResponse(render("runs.html", root=runs.root.name, runs=found, chosen=chosen))

    def one(request: Request) -> Response:
        run = runs.get(request.path_params["id"])
        return _missing() if run is None else _report(run)

    def two(request: Request) -> Response:
        chosen = [runs.get(request.query_params.get(name, "")) for name in ("a", "b")]
        if any(run is None or run.diagnosis is None for run in chosen):
            return _missing()
        first, second = (run for run in chosen if run is not None)
        assert first.diagnosis is not None and second.diagnosis is not None
        return HTMLResponse(render("pair.html", first=first, second=second, rows=beside(first.diagnosis, second.diagnosis)))

    def work(request: Request) -> Response:
        return HTMLResponse(render("work.html", works=working(runs.root)))

    return Starlette(routes=[
        Route("/{token}/", guarded(listed)), Route("/{token}/run/{id}", guarded(one)), Route("/{token}/pair", guarded(two)),
        Route("/{token}/work", guarded(work)),
    ], exception_handlers={404: _unknown, 405: _unknown})


def _numeric(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _report(run: Run) -> Response:
    if run.diagnosis is None:
        return PlainTextResponse(f"{run.name}: {run.wrong}", 422)
    return HTMLResponse(page(run.diagnosis, title=f"draftscope: {run.name}"))


def _missing() -> Response:
    return PlainTextResponse("no such run", 404)


async def _unknown(request: Request, error: Exception) -> Response:
    return _safe(PlainTextResponse("not found", 404))


def _safe(response: Response) -> Response:
    """Nothing is kept, framed by others, sniffed, or told to another site."""
    response.headers.update({
        "Content-Security-Policy": policy(form="'self'", frame="'self'", ancestors="'self'"), "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
    })
    return response
