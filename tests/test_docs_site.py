"""The site as mkdocs builds it: strictly, every link and anchor leads somewhere, a browser fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from peers import python_of

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    quiet = os.environ | {"PYTHONPATH": "", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([python_of("docs"), "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)], cwd=ROOT, text=True,
                          capture_output=True, timeout=600, check=False, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


class Fetched(HTMLParser):
    """Addresses that a page loads by itself, and those that it links."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = {name: value or "" for name, value in attrs}
        if "id" in held:
            self.ids.add(held["id"])
        if tag == "a":
            self.links.add(held.get("href", ""))
        elif tag == "link" and "canonical" not in held.get("rel", ""):
            self.loads.add(held.get("href", ""))
        elif "src" in held:
            self.loads.add(held["src"])
        if "style" in held:
            self.loads |= set(re.findall(r"url\(([^)]*)\)", held["style"]))


def read(page: Path) -> Fetched:
    found = Fetched()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        for address in read(page).loads:
            assert not re.match(r"(?:[a-z]+:)?//", address), f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        for address in re.findall(r"(?:@import\s+|url\()[\"']?([^\"')]+)", text):
            assert not re.match(r"(?:https?:)?//", address), f"{sheet.name} loads {address}"


def test_links_and_anchors_of_the_built_pages_lead_somewhere(site: Path) -> None:
    known = {page.resolve(): read(page) for page in site.rglob("*.html")}
    for page, found in known.items():
        if page.name == "404.html":
            continue
        for link in found.links:
            if re.match(r"[a-z]+:", link) or not link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in known[target].ids, f"{page.name}: {link}"


def test_external_links_are_few_and_named(site: Path) -> None:
    """Listed, not visited: this has to pass without a network."""
    found = {link for page in site.rglob("*.html") for link in read(page).links if re.match(r"[a-z]+:", link)}
    assert all(link.startswith("https://") for link in found), found
    assert len(found) <= 20, sorted(found)


def test_the_search_index_is_part_of_the_site(site: Path) -> None:
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
