"""The text of what `--metrics` names: a file, a packed one, or a server's own pages; bounded, and only what was asked for."""

from __future__ import annotations

import gzip
import urllib.parse
import zlib
from dataclasses import dataclass
from pathlib import Path

from draftscope.engines.asking import ask
from draftscope.errors import DraftscopeError
from draftscope.text import visible

FILE_BYTES = 256 << 20
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


def _page(url: str, seconds: float) -> Document:
    return Document(url, _decoded(ask(url, seconds, remedy=_remedy), url))


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
