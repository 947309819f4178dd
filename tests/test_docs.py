"""The documentation: generated parts are current, links lead somewhere, commands exist and the pages' own are run."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from docs_case import LAYOUTS, PLANTED, lay_out, normed, run_case
from state_files import WRITERS
from tiny import TARGET

from draftscope.cli.main import available, load, run
from draftscope.eagle3.counting import Acceptance
from draftscope.states.opening import open_source

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of shell commands; `title` says what it needs or how it ends."""

    page: Path
    title: str
    commands: tuple[str, ...]

    @property
    def needs(self) -> bool:
        return self.title.startswith("needs")

    @property
    def codes(self) -> set[int]:
        if not self.title.startswith("exit code"):
            return {0}
        codes = {int(code) for code in re.findall(r"\d+", self.title.partition(":")[0])}
        return codes | {0} if " where " in self.title else codes


def blocks(page: Path) -> Iterator[Block]:
    for language, title, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "sh":
            joined = text.replace("\\\n", " ")
            lines = (re.sub(r"\s+#.*", "", line).strip().removesuffix("&").strip() for line in joined.splitlines())
            yield Block(page, title, tuple(line for line in lines if line and not line.startswith("#")))


def test_generated_parts_are_current() -> None:
    for path, text in runpy.run_path(str(ROOT / "scripts" / "docs-pages"))["texts"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make docs-pages`"


def test_titles_say_what_the_tests_do() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert not block.title or block.title.startswith(("needs ", "exit code ")), f"{page.name}: {block.title}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_commands_and_options_exist(page: Path) -> None:
    for block in blocks(page):
        for line in block.commands:
            words = shlex.split(line.split(" -- ")[0])
            if words[0] != "draftscope":
                continue
            assert words[1] in available(), line
            command = load(words[1])
            for word in words[2:]:
                command = getattr(command, "commands", {}).get(word, command)
            options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
            for word in words[2:]:
                if re.match(r"--?[a-z]", word):
                    assert word.split("=")[0] in options, f"{page.name}: {line}: no {word}"


def slugs(text: str) -> set[str]:
    """Anchors of a page's headings, as mkdocs makes them."""
    plain = FENCE.sub("", text)
    headings = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    names = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", name).strip().lower()) for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.resolve().is_file(), f"{page.name}: {link}"
        assert target.resolve().is_relative_to(DOCS), f"{page.name}: {link} is not part of the site"
        assert not anchor or anchor in slugs(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


def test_every_page_is_linked() -> None:
    texts = {page: page.read_text("utf-8") for page in PAGES}
    linked = {(page.parent / link.partition("#")[0]).resolve() for page, text in texts.items() for link in LINK.findall(text)}
    assert set(PAGES) - linked <= {DOCS / "index.md"}


def test_pages_of_the_navigation_exist() -> None:
    named = re.findall(r"\b([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {DOCS / name for name in named} <= set(PAGES)
    assert {page for page in PAGES if page.parent.name not in ("faults", "json")} <= {DOCS / name for name in named}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_case(tmp_path_factory.mktemp("case") / "run")


@pytest.mark.parametrize("name", LAYOUTS)
def test_commands_do_what_the_page_says(
    name: str, case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / f"{name}.md" if name in ("decide", "bundle") else DOCS / "with" / f"{name}.md"
    lay_out(name, case, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    ran = 0
    for block in blocks(page):
        for line in () if block.needs else block.commands:
            words = shlex.split(line)
            assert words[0] == "draftscope", f"{page.name}: only draftscope's own commands can be run here: {line}"
            code = run(words[1:])
            said = capsys.readouterr()
            assert code in block.codes, f"{line}: {code}\n{said.out}\n{said.err}"
            assert said.out
            ran += 1
    assert ran >= 1
    if (tmp_path / "work" / "diagnosis.json").exists():
        found = json.loads((tmp_path / "work" / "diagnosis.json").read_text())
        assert found["findings"][0]["fault"] == PLANTED
        assert found["findings"][0]["strength"] == "proven"
        assert (tmp_path / "work" / "diagnosis.html").read_text().startswith("<!doctype html>")


def test_the_last_state_is_right_where_the_format_has_it(case: Path, tmp_path: Path) -> None:
    """After the norm in SpecForge's files, before it in ours; the other way round is a finding in both."""
    for name, wrong in (("specforge", _plain_as_specforge), ("plain", _normed_as_plain)):
        wrong(case, tmp_path / name)
        assert run(["inspect", str(tmp_path / name), "--target", str(TARGET), "--json", str(tmp_path / f"{name}.json")]) == 1
        found = json.loads((tmp_path / f"{name}.json").read_text())["findings"]
        assert [(one["fault"], one["where"], one["strength"]) for one in found] == [("final-norm", ["entry 3"], "proven")]


def _plain_as_specforge(case: Path, folder: Path) -> None:
    for number, sample in enumerate(open_source(case / "train")):
        WRITERS["specforge"](folder, sample, number)


def _normed_as_plain(case: Path, folder: Path) -> None:
    folder.mkdir()
    for number, sample in enumerate(open_source(case / "train")):
        WRITERS["plain"](folder, replace(normed(sample), claimed_norm="pre"), number)


def test_what_is_not_run_says_why() -> None:
    for name in LAYOUTS:
        page = DOCS / f"{name}.md" if name in ("decide", "bundle") else DOCS / "with" / f"{name}.md"
        for block in blocks(page):
            if any(re.search(r"draftscope capture (vllm|sglang|transformers)|--url", line) for line in block.commands):
                assert block.needs, block.commands


# -- the formulas of docs/acceptance.md ----------------------------------------------------------------------------------------


def example() -> tuple[list[int], dict[str, str]]:
    """The worked example: A of each step, and by figure its cells."""
    part = (DOCS / "acceptance.md").read_text().partition("<!-- generated: worked -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.strip().splitlines()[2:]]
    counts = [int(one) for one in rows[0][2].split(",")]
    return counts, {f"{row[0]} {row[1]}".strip(): row[2] if not row[3] else f"{row[2]} = {row[3]}" for row in rows[1:]}


def test_the_worked_example_follows_from_the_formulas() -> None:
    counts, said = example()
    n, k = len(counts), 3
    joint = [sum(a > i for a in counts) / n for i in range(k)]
    conditional = [joint[0], *(joint[i] / joint[i - 1] for i in range(1, k))]
    length = 1 + sum(joint)
    assert said["draftscope joint"] == ", ".join(f"{p:.2f}" for p in joint)
    assert said["draftscope conditional"] == ", ".join(f"{a:.2f}" for a in conditional)
    assert said["draftscope accept length"] == f"{length:.2f} = {length:.2f}"
    histogram = [counts.count(j) for j in range(k + 1)]
    assert length == pytest.approx(1 + sum(j * h for j, h in enumerate(histogram)) / sum(histogram))
    assert joint == pytest.approx([sum(histogram[i + 1 :]) / n for i in range(k)])
    assert length == pytest.approx(1 + sum(itertools.accumulate(conditional, lambda a, b: a * b)))
    assert length == pytest.approx(1 + k * (sum(counts) / (n * k)))
    tools = {figure: value for figure, value in said.items() if not figure.startswith("draftscope")}
    assert len(tools) >= 8
    for figure, value in tools.items():  # whatever a tool prints, it stands for the same accept length
        assert value.endswith(f"= {length:.2f}"), figure


@pytest.mark.parametrize("a", [0.2, 0.55, 0.9])
def test_constant_acceptance_by_enumeration(a: float) -> None:
    """Over all 2^K outcomes of K independent tests, against Leviathan's equation 1 and the code's own counting."""
    k, expected, joint = 3, 0.0, [0.0] * 3
    for outcome in itertools.product((True, False), repeat=k):
        chance = 1.0
        for passed in outcome:
            chance *= a if passed else 1 - a
        accepted = next((i for i, passed in enumerate(outcome) if not passed), k)
        expected += chance * (accepted + 1)
        joint = [p + chance * (accepted > i) for i, p in enumerate(joint)]
    assert expected == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert joint == pytest.approx([a ** (i + 1) for i in range(k)])


def test_the_code_counts_by_the_same_definitions() -> None:
    found = Acceptance.of([3, 0, 1], 3)
    assert found.length == pytest.approx(1 + 4 / 3)
    assert found.joint == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert found.conditional == pytest.approx([2 / 3, 1 / 2, 1])
