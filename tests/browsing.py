"""A real browser for the report's tests: playwright from an environment of its own, driving the system's chromium."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftscope.target.embedded import cache_directory

QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str:
    named = os.environ.get("DRAFTSCOPE_CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium, or name one with DRAFTSCOPE_CHROMIUM")
    return found


def playwright() -> Any:
    """Its synchronous interface, from `make test-browser`'s environment where this one has none."""
    try:
        import playwright.sync_api as api
    except ImportError:
        folder = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "browser"
        packages = next(folder.glob("lib/python3*/site-packages/playwright"), None)
        if packages is None:
            pytest.skip("no playwright here: make test-browser")
        sys.path.append(str(packages.parent))
        import playwright.sync_api as api
    return api


class Visit:
    """A page that was opened, and what it did besides showing itself."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))


class Browser:
    def __init__(self, browser: Any) -> None:
        self.browser = browser

    @contextmanager
    def visit(self, address: str, **context: Any) -> Iterator[Visit]:
        """Open an address in a window of its own (`viewport`, `color_scheme`, `java_script_enabled`, ...)."""
        window = self.browser.new_context(**({"viewport": {"width": 1000, "height": 800}} | context))
        try:
            visit = Visit(window.new_page())
            visit.page.goto(address)
            yield visit
        finally:
            window.close()


@contextmanager
def running() -> Iterator[Browser]:
    program = chromium()
    with playwright().sync_playwright() as api:
        browser = api.chromium.launch(executable_path=program, args=QUIET)
        try:
            yield Browser(browser)
        finally:
            browser.close()
