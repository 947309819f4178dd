"""One page of a server, asked of that server alone: bounded in bytes and time, every failure named with the address."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import IO

from draftscope.errors import DraftscopeError
from draftscope.text import visible

PAGE_BYTES = 64 << 20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message,
                         newurl: str) -> None:
        raise DraftscopeError(f"redirects ({code}) to {visible(newurl, 200)}", where=req.full_url,
                              remedy="Give that address, if it is the server that you mean")


def ask(url: str, seconds: float, body: bytes | None = None, remedy: Callable[[int], str] = lambda code: "") -> bytes:
    """The page at an address; with a JSON body it is posted.

    Args:
        seconds: how long the server may be silent; all together it may take six times as long.
        remedy: what to do about an HTTP status.

    Raises:
        DraftscopeError: no answer, an error with what the server said of it, a redirect, or more than PAGE_BYTES.
    """
    # A server is asked from where it runs: a proxy would answer for another host of that name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    request = urllib.request.Request(url, body, {} if body is None else {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=seconds) as answer:
            data = _read(answer, time.monotonic() + 6 * seconds)
    except urllib.error.HTTPError as error:
        with error:
            said = visible(error.read(2000).decode("utf-8", "replace").strip() if body is not None else error.reason, 300)
        raise DraftscopeError(f"answers {error.code} {said}".rstrip(), where=url, remedy=remedy(error.code)) from None
    except TimeoutError:
        raise DraftscopeError(f"no answer within {seconds:g} s", where=url, remedy="Is the server alive?") from None
    except urllib.error.URLError as error:
        slow = isinstance(error.reason, TimeoutError)
        what = f"no answer within {seconds:g} s" if slow else f"can't be reached ({visible(error.reason, 120)})"
        raise DraftscopeError(what, where=url, remedy="Is the server alive, and this its address?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DraftscopeError(f"gives no proper answer ({visible(error, 120) or type(error).__name__})", where=url) from None
    if len(data) > PAGE_BYTES:
        raise DraftscopeError(f"answers with more than {PAGE_BYTES >> 20} MiB", where=url)
    return data


def _read(answer: http.client.HTTPResponse, until: float) -> bytes:
    """At most PAGE_BYTES + 1 bytes, and no answer that drips for ever."""
    pieces, size = [], 0
    while size <= PAGE_BYTES and (piece := answer.read1(min(1 << 20, PAGE_BYTES + 1 - size))):
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() > until:
            raise TimeoutError
    if size <= PAGE_BYTES and answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(pieces)
