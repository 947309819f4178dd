"""The report as a browser has it: every control used, by mouse and by keyboard, without a script, a request or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import Browser, running
from diagnoses import LONG, case, clean, hostile, large, mended, undecided

from draftscope.findings import Diagnosis
from draftscope.report.html import page

pytestmark = pytest.mark.browser

EXAMPLES = {"case": case, "clean": clean, "undecided": undecided, "hostile": hostile, "large": large, "mended": mended}
ANY = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
Example = Callable[[], Diagnosis]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running() as found:
        yield found


def written(diagnosis: Diagnosis, folder: Path) -> str:
    file = folder / "report.html"
    file.write_text(page(diagnosis), encoding="utf-8")
    return file.as_uri()


def fits(visit: object, width: int) -> bool:
    return bool(visit.page.evaluate("document.documentElement.scrollWidth") <= width)  # type: ignore[attr-defined]


@ANY
def test_it_opens_in_both_schemes_and_asks_for_nothing(example: Example, browser: Browser, tmp_path: Path) -> None:
    address = written(example(), tmp_path)
    with browser.visit(address) as visit:
        assert visit.page.locator("h1").is_visible()
        for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")):
            visit.page.emulate_media(color_scheme=scheme)
            assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        assert visit.asked == [address]
        assert visit.said == []
        assert visit.dialogs == []


@ANY
def test_it_never_scrolls_sideways(example: Example, browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(example(), tmp_path)) as visit:
        for opened in (False, True):
            visit.page.evaluate("opened => document.querySelectorAll('details').forEach(d => { d.open = opened; })", opened)
            for width in (320, 400, 1000, 1600):
                visit.page.set_viewport_size({"width": width, "height": 800})
                assert fits(visit, width), (width, opened)


def test_every_fold_opens_and_closes(browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(mended(), tmp_path)) as visit:
        folds = visit.page.locator("summary")
        assert folds.count() >= 12
        for fold in folds.all():
            inside = fold.locator("xpath=following-sibling::*[1]")
            assert not inside.is_visible()
            fold.click()
            assert inside.is_visible()
            fold.press("Enter")
            assert not inside.is_visible()
        assert visit.said == []


def test_every_entry_of_the_contents_leads_to_its_heading(browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(case(), tmp_path)) as visit:
        entries = visit.page.locator("a").all()
        assert len(entries) >= 8
        for entry in entries:
            place = entry.get_attribute("href")
            entry.click()
            assert visit.page.url.endswith(place)
            top = visit.page.locator(place).bounding_box()["y"]
            end = visit.page.evaluate("document.documentElement.scrollHeight - scrollY - innerHeight")
            assert -1 <= top <= 60 or end <= 1 or visit.page.evaluate("scrollY") == 0
        assert len(visit.asked) == 1


def test_the_keyboard_reaches_everything_and_is_seen(browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(case(), tmp_path)) as visit:
        stops = visit.page.locator("a, summary, [tabindex='0'], input:checked")
        wanted = sum(stop.is_visible() for stop in stops.all())  # what a fold hides waits until it is opened
        reached = 0
        for _ in range(wanted + 1):
            visit.page.keyboard.press("Tab")
            held = visit.page.evaluate(
                "() => { const e = document.activeElement; if (e === document.body) return null;"
                "const seen = e.tagName === 'INPUT' ? e.nextElementSibling : e; const s = getComputedStyle(seen);"
                "return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1.5; }")
            if held is None:
                break
            assert held, visit.page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            reached += 1
        assert reached == wanted


def shown(visit: object) -> str:
    """The read-out that lies on top."""
    return str(visit.page.evaluate(  # type: ignore[attr-defined]
        "() => [...document.querySelectorAll('.tip')].filter(t => getComputedStyle(t).clipPath === 'none')"
        ".sort((a, b) => getComputedStyle(b).zIndex - getComputedStyle(a).zIndex)[0].textContent"))


@pytest.mark.parametrize("script", [True, False])
def test_a_token_tells_what_became_of_it(script: bool, browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(case(), tmp_path), java_script_enabled=script) as visit:
        tokens = visit.page.locator(".tokens label")
        assert tokens.count() == 10
        tokens.nth(3).hover()
        if not script:  # what a page shows cannot be asked without one: a picture tells the two states apart
            before = visit.page.locator(".tokens").screenshot()
            tokens.nth(4).hover()
            assert visit.page.locator(".tokens").screenshot() != before
            return
        assert shown(visit) == "“ cat”, position 33: drafted, accepted; cosine slot 0 0.300, slot 1 0.990"
        visit.page.mouse.move(2, 2)
        assert shown(visit) == "“ down”, position 35: in place of a rejected draft “ up”; cosine slot 0 0.500, slot 1 0.990"
        visit.page.locator(".tokens input:checked").focus()
        visit.page.keyboard.press("ArrowRight")
        assert "“ and”, position 36" in shown(visit)
        for _ in range(3):
            visit.page.keyboard.press("ArrowRight")
        assert shown(visit).endswith("position 39: the target's own after all drafts; cosine slot 0 0.900")
        tokens.nth(0).click()
        visit.page.mouse.move(2, 2)
        assert "position 30: prompt" in shown(visit)


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(hostile(), tmp_path)) as visit:
        assert visit.page.locator("script, img, body style, iframe").count() == 0
        assert "alert(1)" in visit.page.locator("h1").inner_text()
        body = visit.page.content()
        assert "\u202e" not in body
        assert "\x00" not in body
        assert visit.page.locator(".strip figcaption").inner_text().startswith("</style></script><script>")
        assert len(visit.page.locator(".strip summary").inner_text()) < 400 < len(LONG)
        for fold in visit.page.locator("summary").all():
            fold.click()
        assert visit.dialogs == []
        assert visit.said == []
        assert len(visit.asked) == 1


def test_the_policy_is_in_force(browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(case(), tmp_path)) as visit:
        visit.page.evaluate("""() => {
            const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);
            const i = document.createElement('img'); i.src = 'http://192.0.2.1/x.png'; document.body.append(i);
            const t = document.createElement('style'); t.textContent = 'h1 { display: none }'; document.body.append(t);
        }""")
        assert visit.page.evaluate("window.ran") is None
        assert visit.page.locator("h1").is_visible()
        assert len(visit.said) >= 3
        assert all("Content Security Policy" in said for said in visit.said)


@ANY
def test_paper_has_what_the_screen_has(example: Example, browser: Browser, tmp_path: Path) -> None:
    with browser.visit(written(example(), tmp_path), viewport={"width": 680, "height": 960}, color_scheme="dark") as visit:
        visit.page.emulate_media(media="print")
        assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert fits(visit, 680)
        tables = visit.page.locator("details:not(.long) table")
        assert all(table.is_visible() for table in tables.all())
        assert not visit.page.locator("nav").is_visible()
        made = visit.page.pdf(format="A4")
        assert made.startswith(b"%PDF")


def test_every_drawing_lies_within_its_frame(browser: Browser, tmp_path: Path) -> None:
    for example in (case, large):
        with browser.visit(written(example(), tmp_path)) as visit:
            outside = visit.page.evaluate("""() => [...document.querySelectorAll('svg')].flatMap(svg => {
                const frame = svg.getBoundingClientRect();
                return [...svg.querySelectorAll('text, rect, circle, path, line, polyline')].filter(part => {
                    const box = part.getBoundingClientRect();
                    return box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2
                        || box.bottom > frame.bottom + 2;
                }).map(part => svg.getAttribute('aria-label').slice(0, 40) + ': ' + part.outerHTML.slice(0, 120)); })""")
            assert outside == []
