"""Reports: every contract field reaches the reader, nothing hostile does, and a pipe gets plain text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser

import pytest
from diagnoses import HOSTILE, case, clean, hostile, large, mended, placed, rung, slot_norms, suspected, undecided
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftscope.diagnose.norms import AT
from draftscope.diagnose.verdict import SPANS
from draftscope.findings import Diagnosis, Norms, RowNorms, SlotNorms
from draftscope.report import clouds, curves, figures, parts, strip, words
from draftscope.report.drawing import decades
from draftscope.report.html import page
from draftscope.report.terminal import LINES, show
from draftscope.text import sentence, visible

EXAMPLES = {"case": case, "clean": clean, "undecided": undecided, "hostile": hostile, "large": large, "mended": mended}


def story(
    diagnosis: Diagnosis, width: int = 100, encoding: str = "utf-8", *, terminal: bool = False, lines: int | None = None,
) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    colour = "truecolor" if terminal else "auto"
    console = Console(file=stream, width=width, markup=False, highlight=False, force_terminal=terminal, color_system=colour)
    show(diagnosis, console, lines)
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
    assert "The largest drop, 1.00, is from trained (2.31) to served (1.31)" in text
    assert len(text.splitlines()) <= 52
    assert len(story(case(), 200).splitlines()) <= 45


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("width", [60, 72, 80, 120, 200])
def test_the_story_fits_its_width_and_has_no_trailing_blanks(example: Callable[[], Diagnosis], width: int) -> None:
    for lines in (None, LINES):
        for line in story(example(), width, lines=lines).splitlines():
            assert len(line) <= width
            assert line == line.rstrip()


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_story_has_forty_lines_at_most(example: Callable[[], Diagnosis], width: int) -> None:
    diagnosis = example()
    short, whole = story(diagnosis, width, lines=LINES), story(diagnosis, width)
    assert len(short.splitlines()) <= LINES == 40
    if len(whole.splitlines()) <= LINES:
        assert short == whole
    else:
        assert short.rstrip().endswith("All of it, with figures and steps: --html, --json")
    escaped = short.replace("\n", " ")
    assert escaped.startswith(diagnosis.verdict)
    if diagnosis.findings and example is not hostile:
        told = " ".join(escaped.split())
        first = diagnosis.findings[0]
        assert f"1. {first.fault} {first.strength}" in told
        assert "1.31 now → 2.24 fixed [2.17, 2.31]" in told
        assert "fix Do not capture the embedding" in told
        assert "found slot 0 holds the embedding, wanted boundary 2" in told
        for consumer, settings in first.fix.config.items():
            assert "".join(f"{consumer} {json.dumps(settings)}".split()) in "".join(escaped.split())
    assert "\x1b" not in short


def test_a_terminal_gets_the_same_story_as_a_pipe() -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", story(case(), 80, terminal=True, lines=LINES))
    assert [line.rstrip() for line in plain.splitlines()] == story(case(), 80, lines=LINES).splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_was_passed_over_is_folded_and_not_cut(width: int) -> None:
    diagnosis = clean()
    why = "`hidden_states` has shape [40, 3, 64] where the first file has [40, 4, 64]: another set of slots was captured"
    others = {f"odd {i}": 1 for i in range(9)}
    side = {"read": 40, "taken": 24, "rows": 3447, "steps": 605, "skipped": {"is cut short": 2, why: 14} | others}
    diagnosis.matched = {"train": side, "serve": side}
    diagnosis.steps = [f"step {i}: the capture was placed against every boundary of the target, and the first fifteen of "
                       f"them were tried again with rows of other requests, end {i}" for i in range(4)]
    for lines in (None, LINES):
        told = story(diagnosis, width, lines=lines)
        said = " ".join(told.split())
        assert said.count(f"14 passed over: {why}; 2 passed over: is cut short;") == 2
        assert said.count("8 for other reasons") == 2 and "…" not in said.partition("Steps")[0]
        assert all(f"end {i}" in said for i in range(4)) or lines is not None


def test_findings_beyond_the_first_are_told_shortly_where_there_is_no_room() -> None:
    diagnosis = case()
    diagnosis.findings += [suspected().model_copy(update={"fault": f"other-{i}"}) for i in range(9)]
    short = story(diagnosis, 60, lines=LINES)
    assert len(short.splitlines()) <= LINES
    assert re.search(r"\d+ more findings: --json, --html", short)


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


def test_power_excludes_only_where_nothing_was_found() -> None:
    said = "a loss of 0.35 of accept length or more"
    found, nothing = case(), clean()
    found.power["excludes"] = nothing.power["excludes"] = [said]
    assert "Power       smallest effect 0.06; sequences 64" in story(found)
    assert said not in story(found) + page(found)
    assert f"Power       excludes {said}\n" in story(nothing)
    assert said in page(nothing)


def test_a_missing_rung_says_what_it_needs() -> None:
    needs = {name: remark for name, held, remark in words.rungs(clean()) if held is None}
    assert set(needs) == {"reference", "served", "measured"}
    assert "--target" in needs["reference"]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_page_asks_for_nothing_and_runs_nothing(example: Callable[[], Diagnosis]) -> None:
    text = page(example())
    parsed = Page(text)
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"base", "embed", "foreignobject", "form", "iframe", "image", "img", "link", "object", "script"}
    places = {attributes.get("id") for _, attributes in parsed.tags} - {None}
    for tag, attributes in parsed.tags:
        assert not [key for key in attributes if key.startswith("on")]
        assert not attributes.keys() & {"src", "style", "xlink:href", "srcset", "action"}
        if "href" in attributes:
            assert tag == "a"
            assert str(attributes["href"]).removeprefix("#") in places
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
    shown = figures.heatmap(serve)
    assert shown.drawn.count('class="frame"') == 3 + 1  # and one in the legend
    assert shown.drawn.count('class="heat h10"') == 3 + 1
    assert shown.drawn.count('class="heat') == 3 * 31 + 5
    assert shown.says == "The error is least for slot 0 at 0 (1e-07), slot 1 at 2 (1e-07) and slot 2 at 15 (1e-07)"
    assert len(shown.table.rows) == 31
    assert shown.table.rows[15] == ("15", "0.40", "0.36", "1e-07")


def test_the_heatmap_copes_with_gaps() -> None:
    diagnosis = case()
    diagnosis.placement.train[0].errors = [0.5, float("nan")]
    diagnosis.placement.train[0].boundary = 40
    diagnosis.placement.train[1].boundary = None
    diagnosis.placement.train[2].boundary = 3
    shown = figures.heatmap(figures.heatmaps(diagnosis)[0])
    assert shown.drawn.count('class="empty"') == 30
    assert "nan" not in shown.drawn
    assert shown.drawn.count('class="frame"') == 1 + 1  # one placed beyond what was measured, one not placed; one in the legend
    assert "placed by another reading than this plain error: slot 2 at 3" in shown.says
    assert "slot 0 and slot 1: no place among these was found" in shown.says


def test_optional_figures_replace_those_of_the_placement() -> None:
    own = figures.Heatmap("My <own>", ("a",), ("0", "1"), ((0.1, None),), (0,))
    text = page(case(), heatmaps=[own])
    assert "My &lt;own&gt;" in text
    assert "Serving: median" not in text


def test_every_drop_names_what_it_spans() -> None:
    first, second, third = words.gaps(case())
    assert (first.upper, first.lower) == ("trained", "served")
    assert first.drop == pytest.approx(1.0)
    assert first.apart is True
    assert first.spans == f"{SPANS['reference']}; {SPANS['served']}"  # the reference is missing
    assert (second.spans, third.spans) == (SPANS["as_read"], SPANS["measured"])
    assert second.apart is None
    drawn = figures.ladder(case())
    assert drawn.drawn.count('<rect class="lost"') + drawn.drawn.count('class="lost"><title>') == 1
    assert "−1.00 across text" in drawn.drawn
    assert ("trained to served", "−1.00") in [row[:2] for row in drawn.table.rows]
    assert drawn.says.startswith("The largest drop, 1.00, is from trained (2.31) to served (1.31) and spans text")
    assert drawn.says.endswith("the intervals do not overlap")


def test_a_drop_within_the_intervals_may_be_chance() -> None:
    diagnosis = case()
    assert diagnosis.acceptance.served is not None
    diagnosis.acceptance.served.interval = (1.2, 2.3)
    assert words.ladder(diagnosis).endswith("the intervals overlap, so that it may be chance")
    drawn = figures.ladder(diagnosis).drawn
    assert 'class="lost"' not in drawn
    assert "(may be chance)" in drawn


def test_rungs_of_another_k_are_not_compared() -> None:
    diagnosis = clean()
    diagnosis.acceptance.as_read = rung(1.5, [0.5])
    (gap,) = words.gaps(diagnosis)
    assert gap.drop is None
    assert words.ladder(diagnosis) == "No rung that is known lies below another before it (rungs of another K are not compared)"
    assert "not compared: another K" in figures.ladder(diagnosis).drawn


@pytest.mark.parametrize(("lengths", "said"), [
    ((), "No rung has an accept length"), ((2.0,), "Only trained is known, at 2.00"),
    ((2.0, 2.4), "No rung that is known lies below another"), ((2.4, 2.3), "The largest drop, 0.10, is from trained"),
])
def test_the_ladder_says_what_its_figures_say(lengths: tuple[float, ...], said: str) -> None:
    diagnosis = undecided()
    for field, length in zip(("trained", "served"), lengths, strict=False):
        setattr(diagnosis.acceptance, field, rung(length, [0.6, 0.3, 0.1]))
    assert words.ladder(diagnosis).startswith(said)


def test_no_k_is_claimed_where_no_rung_is_known() -> None:
    assert "K = 3" in page(case())
    assert "K = " not in page(undecided())
    assert 'class="grid"' not in figures.ladder(undecided()).drawn


def test_positions_say_what_their_figures_say() -> None:
    shown = figures.positions(case())
    assert shown is not None
    assert shown.says == (
        "At position 1 acceptance lies between 0.21 (measured) and 0.66 (trained); at position 3 acceptance lies between "
        "0.02 (served) and 0.24 (trained)")
    assert shown.table.rows[0][:3] == ("1", "0.660", "0.660")
    assert figures.positions(undecided()) is None


def test_the_lag_curve_says_where_it_is_least() -> None:
    shown = curves.lags(case())
    assert shown is not None
    assert shown.says == "The error is least at lag 0 for every slot: 1e-07 or less there, 1.2 or more at the other lags"
    assert shown.table.rows[0] == ("training slot 0", "boundary 2", "1.3", "1.2", "1e-07", "1.2", "1.3")
    diagnosis = case()
    diagnosis.placement.serve[1].lag_errors = [None, 1.3, 1.2, 0.002, 1.2]
    shown = curves.lags(diagnosis)
    assert shown is not None
    assert shown.says.endswith("at lag +1 for serving slot 1: 0.002 or less there, 1.2 or more at the other lags")
    assert "serving slot 1, lag -2" not in shown.drawn
    assert curves.lags(clean()) is None


def test_norms_say_what_differs() -> None:
    shown = curves.norms(case())
    assert shown is not None
    # Sinks are three rows a slot: too few to be compared.
    assert shown.says.startswith(
        "The medians differ most for slot 0, first token: 100 in service, 800 in training, a factor of 0.12")
    assert shown.says.endswith("0 of 9 pairs of 8 rows or more lie within 10 %")
    assert shown.drawn.count('class="pale') == 4 * (4 + 3)
    assert len(shown.table.rows) == 4 * (4 + 3)
    assert shown.table.head[4:] == ("least", "1 %", "5 %", "10 %", "25 %", "median", "75 %", "90 %", "95 %", "99 %", "largest")


def test_norms_of_one_side_or_without_values() -> None:
    diagnosis = case()
    assert diagnosis.norms is not None
    diagnosis.norms.train = []
    shown = curves.norms(diagnosis)
    assert shown is not None
    assert shown.says == "Only serving rows are at hand: medians from 1.000 (slot 0, prompt) to 2000.000 (slot 2, first token)"
    spoilt = RowNorms(rows=9, nonfinite=9)
    zero = RowNorms(rows=9, zero=9, quantiles=[0.0] * len(AT))
    diagnosis.norms = Norms(at=list(AT), serve=[SlotNorms(slot=0, classes={"unknown": spoilt})])
    assert curves.norms(diagnosis) is None
    diagnosis.norms.serve.append(SlotNorms(slot=1, classes={"unknown": zero}))
    assert curves.norms(diagnosis) is None
    diagnosis.norms.train = [slot_norms(0, 3.0)]
    shown = curves.norms(diagnosis)
    assert shown is not None
    assert "nan" not in shown.drawn
    assert ("serving slot 0, not told", "9", "9", "0", *"–" * len(AT)) in shown.table.rows
    assert shown.says.endswith("; 9 rows of serving slot 0 are not finite; 9 rows of serving slot 1 are zero")


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.4), (0.9, 33.0), (1e-3, 1e6), (1e-12, 3e26)])
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    ticks = decades(low, high)
    assert 1 <= len(ticks) <= 10
    assert all(low <= tick <= high for tick in ticks)
    assert all(f"{tick:.0e}"[0] in "1235" and float(f"{tick:.0e}") == tick for tick in ticks)


VOID = ("meta", "rect", "line", "polyline", "circle", "path", "input")


class Outline(HTMLParser):
    """Headings, figures and what a keyboard reaches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.figures: list[list[str]] = []
        self.scrolling: list[dict[str, str | None]] = []
        self.drawings: list[dict[str, str | None]] = []
        self.columns: list[int] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag == "figure":
            self.figures.append([])
        if self.figures and "figure" in self._open:
            self.figures[-1].append(tag)
        if held.get("class") == "wide":
            self.scrolling.append(held)
        if tag == "svg":
            self.drawings.append(held)
        if tag == "tr":
            self.columns.append(0)
        if tag in ("td", "th"):
            self.columns[-1] += 1
            assert tag == "td" or held.get("scope") in ("row", "col")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_every_figure_has_its_sentence_and_its_data(example: Callable[[], Diagnosis]) -> None:
    outline = Outline(page(example()))
    assert outline.levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(outline.levels, outline.levels[1:], strict=False))
    assert outline.levels.count(1) == 1
    assert len(outline.figures) == len(outline.drawings) >= 1
    for held in outline.figures:
        assert [tag for tag in held if tag in ("figcaption", "svg", "details", "summary", "table")] == [
            "figcaption", "svg", "details", "summary", "table"]
        assert held.count("tr") >= 2
    for drawing in outline.drawings:
        assert drawing["role"] == "img"
        assert len(str(drawing["aria-label"])) > 40
    for region in outline.scrolling:
        assert region["tabindex"] == "0"
        assert region["role"] == "group"
        assert region["aria-label"]


def test_tables_are_as_wide_as_their_heads() -> None:
    for shown in (figures.ladder(case()), figures.positions(case()), curves.lags(case()), curves.norms(case()),
                  clouds.channels(case()), clouds.components(case()), parts.breakdown(case(), "context"),
                  parts.breakdown(case(), "kind"), parts.learning(case()), *strip.strips(case()),
                  *map(figures.heatmap, figures.heatmaps(case()))):
        assert shown is not None
        assert {len(row) for row in shown.table.rows} == {len(shown.table.head)}


def test_the_page_has_both_schemes_and_prints() -> None:
    style = Page(page(case())).style
    assert "@media screen and (prefers-color-scheme: dark)" in style
    assert "details:not(.long)::details-content" in style.split("@media print")[1]
    used = set(re.findall(r'class="([a-z0-9 ]+)"', page(large()) + page(case())))
    plain = {"d0", "h10", "wiring"}  # an unbroken line, a full colour, the colour of most verdicts
    for name in {name for names in used for name in names.split()} - plain:
        assert f".{name}" in style, name


def test_a_large_case_stays_small() -> None:
    diagnosis = large()
    assert len(page(diagnosis)) < 1_000_000
    assert diagnosis.norms is not None
    assert len(diagnosis.norms.model_dump_json()) < 20_000
    assert len(figures.heatmaps(diagnosis)[0].columns) == 62


def test_the_story_tells_of_norms_where_slots_are_not_placed() -> None:
    diagnosis = case()
    assert "Norms" not in story(diagnosis)
    diagnosis.placement.serve[1].boundary = None
    assert "Norms       The medians differ most for slot 0, first token" in story(diagnosis)
    diagnosis.placement.serve = []
    assert "Norms       The medians differ most for slot 0, first token" in story(diagnosis)


def test_a_cause_names_its_page() -> None:
    text = page(case())
    assert "<code>docs/faults/layer-set.md</code>" in text
    odd = hostile().findings[1]
    assert words.page_path(odd) is None
    assert words.page_path(odd.model_copy(update={"fault": "../../etc/passwd"})) is None


def test_what_was_asked_for_is_told() -> None:
    text = unescape(" ".join(re.sub("<[^>]+>", " ", page(mended())).split()))
    for part in (
        "layer-offset Not named: the slots moved by 2, 13 and 12 boundaries.", "the draft's config.json", '"norm_output": false',
        "the draft's tensor fc.weight transpose", "1. layer-set slot 0 2.24 1.80 2. template – –", "1 change, replayed at 2.20.",
        "Config norm_output: true to false.", "template: not a file.", "Folded exactly.", "length after 2.19",
    ):
        assert part in text, part
    told = story(mended())
    assert "layer-offset: Not named: the slots moved by 2, 13 and 12 boundaries." in " ".join(told.split())
    plain = page(case())
    for heading in ("Why it was, or was not, named", "In which order", "Applied", "Absorbed"):
        assert heading not in plain


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
    assert "no length" in figures.ladder(diagnosis).drawn
    assert "–" in story(diagnosis)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("serving slots hold", "Serving slots hold."), ("capture.bin: gone", "capture.bin: gone."), ("d2t is zero", "d2t is zero."),
     ("layer-offset it is.", "layer-offset it is."), ("", ".")],
)
def test_sentences(text: str, expected: str) -> None:
    assert sentence(text) == expected
