"""Counters scraped from a server: a real one on the loopback, with every way in which it can fail to answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from engine_reports import K, Simulated, sglang_info, sglang_scrape, simulate, vllm_scrape

from draftscope.cli.main import run as command
from draftscope.engines import asking, fetching
from draftscope.engines.counters import read_counters
from draftscope.errors import DraftscopeError, UsageError

Answer = tuple[int, dict[str, str], bytes]


class Pages:
    """A server whose pages are functions; `asked` are the paths it was asked for."""

    def __init__(self) -> None:
        self.pages: dict[str, Callable[[], Answer]] = {}
        self.asked: list[str] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                page = outer.pages.get(self.path)
                status, headers, body = page() if page else (404, {}, b"no such page")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def text(self, path: str, body: str | bytes, status: int = 200, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.pages[path] = lambda: (status, headers, data)

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    pages = Pages()
    yield pages
    pages.close()


@pytest.mark.parametrize("suffix", ["", "/", "/metrics"])
def test_a_server_is_scraped(server: Pages, suffix: str) -> None:
    run = simulate(1)
    server.text("/metrics", vllm_scrape(run))
    found = read_counters(server.root + suffix)
    assert (found.drafts, found.accepted) == (len(run.steps), run.per_position)
    assert server.asked[0] == "/metrics"


@pytest.mark.parametrize("page", ["/server_info?config_format=json", "/get_server_info"])
def test_what_the_server_tells_of_itself_is_asked_for(server: Pages, page: str) -> None:
    run = simulate(2)
    server.text("/metrics", sglang_scrape(run, "0.5.10", run.steps[-20:]))
    server.text(page, json.dumps(sglang_info(run.length, "0.5.10", single=0.8)))
    found = read_counters(server.root)
    assert found.k == K
    assert [d.key for d in found.distortions] == ["speculative_accept_threshold_single"]
    assert any(f.definition.name == "accept rate" for f in found.figures)


def test_a_window_counts_what_came_in_between(server: Pages) -> None:
    first, more = simulate(3), simulate(4)
    both = Simulated(first.requests + more.requests, first.cut + more.cut)
    scrapes = iter([vllm_scrape(first), vllm_scrape(both)])
    server.pages["/metrics"] = lambda: (200, {}, next(scrapes).encode())
    waited: list[float] = []
    found = read_counters(server.root, window=30, wait=waited.append)
    assert (found.drafts, found.accepted) == (len(more.steps), more.per_position)
    assert waited == [30]
    with pytest.raises(UsageError, match="a window needs the address"):
        read_counters("scrape.txt", window=30)
    with pytest.raises(UsageError, match="more than one server"):
        read_counters([server.root, server.root])


@pytest.mark.parametrize(("status", "says"), [
    (404, "answers 404.*--enable-metrics"), (401, "answers 401.*Save the scrape"), (500, "answers 500.*server's own log")])
def test_errors_of_the_server_are_named(server: Pages, status: int, says: str) -> None:
    server.text("/metrics", "no", status)
    with pytest.raises(DraftscopeError, match=says):
        read_counters(server.root)


def test_redirects_are_named_and_not_followed(server: Pages) -> None:
    server.text("/metrics", "", 302, Location=f"{server.root}/elsewhere")
    server.text("/elsewhere", vllm_scrape(simulate()))
    with pytest.raises(DraftscopeError, match=r"redirects \(302\) to http://127.0.0.1:\d+/elsewhere"):
        read_counters(server.root)
    assert server.asked == ["/metrics"]


def test_a_server_that_does_not_answer(server: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Answer:
        server.released.wait(20)
        return 200, {}, b""

    server.pages["/metrics"] = never
    with pytest.raises(DraftscopeError, match=r"no answer within 0\.2 s"):
        fetching.fetch(server.root, 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(DraftscopeError, match="can't be reached"):
        read_counters(f"http://127.0.0.1:{port}")


def test_answers_that_are_no_text_or_too_much(server: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    server.text("/metrics", b"vllm:spec_decode_num_drafts \xff")
    with pytest.raises(DraftscopeError, match="can't be read as text"):
        read_counters(server.root)
    server.text("/metrics", "short", **{"Content-Length": "100"})
    with pytest.raises(DraftscopeError, match="no proper answer"):
        read_counters(server.root)
    monkeypatch.setattr(asking, "PAGE_BYTES", 1 << 16)
    server.text("/metrics", b"x" * (1 << 20))
    with pytest.raises(DraftscopeError, match="answers with more than"):
        read_counters(server.root)


@pytest.mark.parametrize("address", ["http://", "http://127.0.0.1:99999999", "http://127.0.0.1:0", "http://[::1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(DraftscopeError, match="is no address"):
        read_counters(address)


def test_passwords_are_not_taken_nor_shown() -> None:
    with pytest.raises(DraftscopeError, match="names a user or a password") as refused:
        read_counters("http://me:secret@127.0.0.1:1/metrics")
    assert "secret" not in str(refused.value)


def test_from_the_command_line(server: Pages, tmp_path: Path) -> None:
    run = simulate(5)
    server.text("/metrics", vllm_scrape(run))
    out = tmp_path / "found.json"
    arguments = ["diagnose", "--metrics", server.root, "--json", str(out), "--quiet"]
    assert command(arguments) == 5
    found = json.loads(out.read_text())
    assert found["acceptance"]["measured"]["rounds"] == len(run.steps)
    assert found["provenance"]["inputs"]["metrics"] == server.root
    server.text("/metrics", "vllm:spec_decode_num_drafts_total NaN")
    assert command(arguments) == 3
    assert "is not finite" in json.loads(out.read_text())["next"][0]
