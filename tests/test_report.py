"""Reports: every contract field reaches the reader, nothing hostile does, and a pipe gets plain text."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from diagnoses import HOSTILE, case, clean, hostile, placed, rung, undecided
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftscope.findings import Diagnosis
from draftscope.report import figures, words
from draftscope.report.html import page
from draftscope.report.terminal import show
from draftscope.text import sentence, visible

EXAMPLES = {"case": case, "clean": clean, "undecided": undecided, "hostile": hostile}


def story(diagnosis: Diagnosis, width: int = 100, encoding: str = "utf-8", *, terminal: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    colour = "truecolor" if terminal else "auto"
    console = Console(file=stream, width=width, markup=False, highlight=False, force_terminal=terminal, color_system=colour)
    show(diagnosis, console)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.style = ""
        self._in_style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.style += data
        else:
            self.text += data


def test_the_story_tells_the_case() -> None:
    text = story(case())
    for part in (
        "[0, 2, 15]", "1. layer-set  proven", "1.31 now → 2.24 fixed [2.17, 2.31]", "sglang@0.5.23",
        '"eagle_aux_hidden_state_layer_ids": [1, 14, 26]', "the target was given as parts only", "boundary 27 “layer 31” 0.52",
        "≠ embedding (boundary 0) “2” 1.00", "rows without a token: 12", "12 rejected rows left out",
        "Acceptance after the fix is replayed", "2. template  suspected",
    ):
        assert part in text
    assert text.startswith("wiring  Serving slots hold")
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("width", [60, 72, 80, 100, 200])
def test_the_story_fits_its_width_and_has_no_trailing_blanks(example: Callable[[], Diagnosis], width: int) -> None:
    for line in story(example(), width).splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_a_pipe_gets_no_escapes_and_ascii_gets_ascii(example: Callable[[], Diagnosis]) -> None:
    assert "\x1b" not in story(example())
    story(example(), encoding="ascii")


def test_a_terminal_gets_colour_and_still_no_foreign_escapes() -> None:
    text = story(hostile(), terminal=True)
    assert "\x1b[1" in text
    assert "\u202e" not in text
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", text)
    assert "[bold red]" in text
    assert "\\x1b[31m" in text


def test_bars_are_proportional_to_what_is_accepted() -> None:
    lines = {line.split()[0]: line for line in story(case(), 140).splitlines() if line.startswith("  ")}
    full = lines["trained"].count("█")
    assert abs(lines["served"].count("█") / full - (1.31 - 1) / (2.31 - 1)) < 1.5 / full


def test_a_missing_rung_says_what_it_needs() -> None:
    needs = {name: remark for name, held, remark in words.rungs(clean()) if held is None}
    assert set(needs) == {"reference", "served", "measured"}
    assert "--target" in needs["reference"]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_page_asks_for_nothing_and_runs_nothing(example: Callable[[], Diagnosis]) -> None:
    text = page(example())
    parsed = Page(text)
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"a", "base", "embed", "foreignobject", "form", "iframe", "image", "img", "link", "object", "script"}
    for _, attributes in parsed.tags:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "href", "style", "xlink:href", "srcset")]
    assert "url(" not in parsed.style
    assert "@import" not in parsed.style
    assert len(text) < 3_000_000
    policy = next(a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(parsed.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_hostile_text_is_shown_and_inert() -> None:
    text = page(hostile())
    parsed = Page(text)
    assert visible(HOSTILE) in parsed.text
    for char in ("\x1b", "\u202e"):
        assert char not in text
    assert "{{7*7}}" in text
    assert text.count("<style>") == text.count("</style>") == 1


def test_the_page_holds_the_whole_diagnosis() -> None:
    text = " ".join(Page(page(case())).text.split())
    for part in (
        "[0, 2, 15]", "layer-set", "template", "1.31 now → 2.24 fixed [2.17, 2.31]", "sglang@0.5.23", "rows without a token",
        "the target was given as parts only", "12 rejected rows left out", "0 of 64 against 64 of 64", "engine version", "0.62",
        "Serving: median relative error of each slot", "Training: median relative error of each slot", "everything repaired 2.24",
    ):
        assert part in text


def test_the_heatmap_frames_what_was_placed() -> None:
    serve = figures.heatmaps(case())[1]
    assert serve.marked == (0, 2, 15)
    assert (len(serve.rows), len(serve.columns)) == (3, 31)
    drawn = figures.heatmap(serve)
    assert drawn.count('class="frame"') == 3
    assert drawn.count('class="heat h10"') == 3
    assert drawn.count('class="heat') == 3 * 31


def test_the_heatmap_copes_with_gaps() -> None:
    diagnosis = case()
    diagnosis.placement.train[0].errors = [0.5, float("nan")]
    diagnosis.placement.train[0].boundary = 40
    diagnosis.placement.train[1].boundary = None
    drawn = figures.heatmap(figures.heatmaps(diagnosis)[0])
    assert drawn.count('class="empty"') == 30
    assert "nan" not in drawn
    assert drawn.count('class="frame"') == 1  # one placed beyond what was measured, one not placed


def test_optional_figures_replace_those_of_the_placement() -> None:
    own = figures.Heatmap("My <own>", ("a",), ("0", "1"), ((0.1, None),), (0,))
    text = page(case(), heatmaps=[own])
    assert "My &lt;own&gt;" in text
    assert "Serving: median" not in text


@given(st.text())
def test_visible_is_one_inert_line(text: str) -> None:
    out = visible(text)
    assert out.isprintable()
    assert out.encode("utf-8").decode() == out
    if text.isascii() and text.isprintable():
        assert out == text


@given(st.text(min_size=1))
def test_any_string_survives_both_reports(text: str) -> None:
    diagnosis = undecided()
    diagnosis.next = [text]
    diagnosis.matched = {text: text}
    story(diagnosis)
    assert Page(page(diagnosis)).text


def test_places_in_words() -> None:
    slot = placed(1, "x", 15, 0.4)
    assert words.place(slot) == "boundary 15"
    slot = slot.model_copy(update={"lag": 1, "scale": 8.0, "candidates": [15, 16], "share": 0.5})
    assert words.place(slot) == "boundary 15 (or 16), of the token 1 later, times 8, 50 % of the rows"
    assert words.place(slot.model_copy(update={"boundary": None})) == "not placed"


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"boundary": 16}, False), ({"boundary": 16, "candidates": [15, 16]}, True), ({"norm": "post"}, False),
     ({"kind": "branch"}, False), ({"lag": 1}, False), ({"scale": 2.0}, False), ({"scale": None, "lag": None}, True)],
)
def test_same_place(change: dict[str, object], same: bool) -> None:
    slot = placed(1, "x", 15, 0.4)
    other = slot.model_copy(update={"candidates": [], **change})
    assert words.same_place(slot, other) == words.same_place(other, slot) == same


def test_a_rung_without_a_walk_has_no_bar() -> None:
    diagnosis = clean()
    diagnosis.acceptance.trained = rung(2.0, [0.5]).model_copy(update={"length": None, "readout": "all"})
    assert "no length" in figures.ladder(diagnosis)
    assert "–" in story(diagnosis)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("serving slots hold", "Serving slots hold."), ("capture.bin: gone", "capture.bin: gone."), ("d2t is zero", "d2t is zero."),
     ("layer-offset it is.", "layer-offset it is."), ("", ".")],
)
def test_sentences(text: str, expected: str) -> None:
    assert sentence(text) == expected
