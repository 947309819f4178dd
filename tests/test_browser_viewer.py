"""The viewer in a browser: from the list to a report, to two beside each other, and what is being done, all without a script."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Browser, running
from diagnoses import case, clean

from draftscope.cli.common import Noted

pytest.importorskip("starlette", reason="the viewer's extra is not installed")
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running() as found:
        yield found


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "broken.json").write_text(case().json_text())
    (tmp_path / "mended.json").write_text(clean().json_text())
    command = [sys.executable, "-m", "draftscope", "serve", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = server.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", found)
            yield found
        finally:
            server.terminate()


def test_every_control_of_the_viewer(address: str, browser: Browser, tmp_path: Path) -> None:
    with browser.visit(address) as visit:
        assert visit.page.locator("h1").inner_text() == f"Runs in {tmp_path.name}"
        assert "Nothing is being scanned" in visit.page.frame_locator("iframe").locator("body").inner_text()
        visit.page.get_by_role("link", name="broken.json").click()
        assert visit.page.locator(".verdict").first.inner_text().lower().startswith("wiring")
        visit.page.locator(".tokens label").nth(3).hover()
        visit.page.go_back()
        visit.page.get_by_label("left: broken.json").check()
        visit.page.get_by_label("right: mended.json").check()
        visit.page.get_by_role("button").click()
        visit.page.locator(".pair").wait_for()
        assert re.search(r"/pair\?[ab]=\w+&[ab]=\w+$", visit.page.url)
        assert "1.31" in visit.page.locator("tr", has_text="as read").first.inner_text()
        frames = visit.page.locator(".pair iframe")
        assert frames.count() == 2
        assert "Serving slots hold" in visit.page.frame_locator(".pair iframe >> nth=0").locator("h1").inner_text()
        assert "Nothing was found" in visit.page.frame_locator(".pair iframe >> nth=1").locator("h1").inner_text()
        visit.page.get_by_role("link", name="All runs").click()
        assert visit.page.url == address
        with Noted(tmp_path / "f.fingerprint", "scanning states/", 10, "sequences") as noted:
            noted.add(0, None)
            visit.page.frame_locator("iframe").locator("progress").wait_for(timeout=20_000)
            assert "scanning states/" in visit.page.frame_locator("iframe").locator("li").inner_text()
        for width in (400, 1600):
            visit.page.set_viewport_size({"width": width, "height": 800})
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visit.said == []
        assert all(asked.startswith(address) for asked in visit.asked)
