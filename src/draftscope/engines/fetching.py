"""The text of what `--metrics` names: a file, a packed one, or a server's own pages; bounded, and only what was asked for."""

from __future__ import annotations

import gzip
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO

from draftscope.errors import DraftscopeError
from draftscope.text import visible

FILE_BYTES = 256 << 20
PAGE_BYTES = 64 << 20
SECONDS = 10.0
LOG_MARKS = (b"accept len:", b"SpecDecoding metrics", b"server_args=", b"non-default args")
SETTINGS = ("/server_info?config_format=json", "/get_server_info")
"""Where a server tells its settings: SGLang from 0.5.10 and vLLM in development mode (which takes the format), SGLang before."""


@dataclass(frozen=True, slots=True)
class Document:
    """Text and where it is from."""

    where: str
    text: str


def is_url(place: str) -> bool:
    return place.lower().startswith(("http://", "https://"))


def read_document(path: Path) -> Document:
    """A text file, packed with gzip or not.

    Raises:
        DraftscopeError: not readable, larger than 256 MiB unpacked, or no text.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            unpacked = gzip.GzipFile(fileobj=file) if packed else file
            data = unpacked.read(FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DraftscopeError(f"can't be read ({error})", where=where) from None
    if len(data) > FILE_BYTES:
        raise DraftscopeError(f"is larger than {FILE_BYTES >> 20} MiB", where=where,
                              remedy="Give the part of interest: the server's arguments and the lines that tell acceptance")
    return Document(where, _decoded(data, where))


def fetch(url: str, seconds: float = SECONDS) -> tuple[Document, Document | None]:
    """A server's metrics and, where it tells them, its settings.

    Args:
        url: the server's root, or its /metrics.
        seconds: how long the server may be silent.

    Raises:
        DraftscopeError: no answer, an error, a redirect, or no text.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        named = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    if not named:
        raise DraftscopeError("is no address of a server", where=visible(url, 200), remedy="Give it as http://HOST:PORT")
    if parts.username or parts.password:
        raise DraftscopeError("names a user or a password", where=f"{parts.scheme}://{parts.hostname}",
                              remedy="Save the scrape to a file and give that")
    root = parts._replace(path=parts.path.rstrip("/").removesuffix("/metrics"), query="", fragment="").geturl()
    page = parts.geturl() if parts.path.rstrip("/").endswith("/metrics") else f"{root}/metrics"
    metrics = _page(page, seconds)
    for path in SETTINGS:
        try:
            return metrics, _page(root + path, seconds)
        except DraftscopeError:
            continue
    return metrics, None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Names where a server sends us, and does not go there."""

    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message,
                         newurl: str) -> None:
        raise DraftscopeError(f"redirects ({code}) to {visible(newurl, 200)}", where=req.full_url,
                              remedy="Give that address, if it is the server that you mean")


def _page(url: str, seconds: float) -> Document:
    # A server's metrics are asked from where it runs: a proxy would answer for another host of that name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())
    try:
        with opener.open(url, timeout=seconds) as answer:
            data = _read(answer, time.monotonic() + 6 * seconds)
    except urllib.error.HTTPError as error:
        with error:
            raise DraftscopeError(f"answers {error.code} {visible(error.reason, 80)}", where=url,
                                  remedy=_remedy(error.code)) from None
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
    return Document(url, _decoded(data, url))


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


def _remedy(code: int) -> str:
    if code == 404:
        return "SGLang has /metrics only when started with --enable-metrics"
    if code in (401, 403):
        return "Save the scrape to a file and give that"
    return "Look into the server's own log"


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        # Logs hold what users typed; a scrape has to be UTF-8.
        if any(mark in data for mark in LOG_MARKS):
            return data.decode("utf-8", "backslashreplace")
        raise DraftscopeError(f"can't be read as text ({error.reason} at byte {error.start})", where=where) from None
