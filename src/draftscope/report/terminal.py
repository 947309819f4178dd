"""A diagnosis as a story for the terminal: the verdict, the ladder, each finding with its evidence and fix, what was placed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from draftscope.findings import Diagnosis, Evidence, Finding, Placed, Rung
from draftscope.report import words
from draftscope.report.curves import norms
from draftscope.text import interval, number, pairs, sentence, visible

STYLES = {"proven": "bold red", "supported": "yellow", "suspected": "dim yellow"}
VERDICTS = {"clean": "bold green", "undecided": "bold yellow"}
LINES = 40
"""A story is no longer, whatever the width: more does not fit the eye, and stands in --json and --html."""
EVIDENCE_SHOWN, OTHERS_SHOWN, STEPS_SHOWN = 3, 6, 4
BRIEF_STEPS, NO_STEPS, NO_POWER, BRIEF_OTHERS, LESS_EVIDENCE, FINDING_ONLY, BARE, NO_PLACES = range(1, 9)
"""What is left out, one after the other, until a story is short enough."""
_PLAIN = str.maketrans({"–": "-", "−": "-", "→": ">", "…": "~", "·": "-", "≠": "!", "’": "'"})


@dataclass(frozen=True, slots=True)
class _Paper:
    """What the terminal can show."""

    width: int
    unicode: bool
    cut: int = 0

    def brief(self, content: str, lines: int, indent: int = 12) -> str:
        """At most about so many lines of it, beside an indent."""
        room = max(lines * (self.width - indent) - 6 * (lines - 1), 24)
        return content if len(content) <= room else content[: room - 1].rstrip() + "…"

    def aside(self, content: str) -> str:
        return "" if self.cut >= NO_POWER else content

    def text(self, content: str, style: str = "") -> Text:
        return Text(content if self.unicode else content.translate(_PLAIN).encode("ascii", "replace").decode(), style=style)

    def bar(self, share: float, width: int) -> str:
        """A bar of `share` of `width` cells, to an eighth of a cell."""
        eighths = round(max(0.0, min(share, 1.0)) * width * 8)
        if not self.unicode:
            return ("#" * round(eighths / 8)).ljust(width)
        return ("█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]).ljust(width)


def show(diagnosis: Diagnosis, console: Console, lines: int | None = LINES) -> None:
    """Print it, plain where the console is a pipe; 60 columns are enough.

    Args:
        lines: how many at most; None = all that there is to say.
    """
    unicode = (console.encoding or "").lower().startswith("utf")
    told: list[str] = []
    for cut in range(NO_PLACES + 1):
        paper = _Paper(console.width, unicode, cut)
        with console.capture() as captured:
            for part in _story(diagnosis, paper):
                console.print(part)
        told = captured.get().split("\n")[:-1]
        if lines is None or len(told) <= lines:
            break
    if lines is not None and len(told) > lines:
        told = [*told[: lines - 1], told[-1]]  # the last line says where the rest is
    if console.is_terminal:
        console.file.write("\n".join(told) + "\n")  # with the escapes that rich made of the styles
        return
    console.out("\n".join(line.rstrip() for line in told), highlight=False)


def _story(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    head = paper.text(diagnosis.verdict, VERDICTS.get(diagnosis.verdict, "bold red"))
    said = words.verdict(diagnosis)
    yield Text.assemble(head, "  ", paper.text(paper.brief(said, 5, 2) if paper.cut >= BARE else said, "bold"))
    yield from _ladder(diagnosis, paper)
    others = (2 if paper.cut >= BARE else 3) if paper.cut >= BRIEF_OTHERS else OTHERS_SHOWN
    for rank, finding in enumerate(diagnosis.findings[: others + 1], 1):
        yield from _finding(rank, finding, paper)
    if len(diagnosis.findings) > others + 1:
        yield paper.text(f"{len(diagnosis.findings) - others - 1} more findings: --json, --html", "dim")
    yield from _applied(diagnosis, paper)
    if paper.cut < NO_PLACES:
        yield from _placement(diagnosis, paper)
    yield Text("")
    line = max(paper.width - 15, 40)
    if paper.cut < BARE:
        yield from _norms(diagnosis, paper)
    asked = [f"{fault}: {said}" for fault, said in diagnosis.explained.items()]
    yield from _list("Asked", asked, paper, *((3, 2 * line) if paper.cut >= LESS_EVIDENCE else (12, None)))
    if paper.cut < FINDING_ONLY:
        matched = words.matched(diagnosis.matched)
        if paper.cut >= NO_POWER:  # what was passed over is told whole, the rest in a line each
            matched = [visible(sentence(said), 4 * line if "passed over" in said else line) for said in matched[:2]]
        yield from _list("Matched", matched, paper, 12)
    if paper.cut < NO_POWER:
        yield from _power(diagnosis, paper)
    if paper.cut < NO_STEPS:
        yield from _list("Steps", diagnosis.steps, paper, STEPS_SHOWN, line if paper.cut >= BRIEF_STEPS else None)
    yield from _list("Next", diagnosis.next, paper, *(
        (2, 2 * line) if paper.cut >= BARE else (3, 2 * line) if paper.cut >= LESS_EVIDENCE else (12, None)))
    if paper.cut:
        yield paper.text("All of it, with figures and steps: --html, --json", "dim")


def _applied(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    """What `--apply` wrote, and what it left."""
    done = diagnosis.applied
    if done is None:
        return
    yield _title("Applied", paper, visible(done.folder or ""))
    yield _indent(paper.text(sentence(visible(done.says))), 2)
    changes, more = words.first_of(done.changes, 3 if paper.cut >= LESS_EVIDENCE else len(done.changes))
    for line in changes:
        yield _indent(paper.text(paper.brief(visible(line), 1, 4) if more else visible(line)), 4)
    if more:
        yield _indent(paper.text(f"{more} more changes", "dim"), 4)
    for line in done.left[: 2 if paper.cut >= LESS_EVIDENCE else None]:
        left = f"left: {visible(line)}"
        yield _indent(paper.text(paper.brief(left, 1, 4) if paper.cut >= LESS_EVIDENCE else left, "dim"), 4)


def _title(text: str, paper: _Paper, aside: str = "") -> Text:
    return Text.assemble("\n", paper.text(text, "bold"), paper.text(f"  {aside}" if aside else "", "dim"))


def _indent(text: Text, by: int) -> Padding:
    return Padding(text, (0, 0, 0, by))


def _ladder(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    rungs = words.rungs(diagnosis)
    if all(rung is None for _, rung, _ in rungs):
        return
    k = words.most_drafted(diagnosis.acceptance)
    yield _title("Acceptance", paper, f"accept length, 1 to {k + 1} (K = {k})" + paper.aside(
        "; then the share accepted at each position, joint"))
    joint = 5 * k
    room = paper.width - 34 - joint
    remarks = max(len(remark) for _, rung, remark in rungs if rung is not None)
    bar = max(0, min(24, room - remarks - 1 if room - remarks > 6 else room - 14))
    bar = bar if bar >= 6 else 0
    for name, rung, remark in rungs:
        if rung is None:
            needs = paper.brief(remark, 1, 14) if paper.cut >= LESS_EVIDENCE else remark
            yield _hanging(f"  {name:<10}", paper.text(f"– {needs}", "dim"), 12)
            continue
        yield _rung(name, rung, "" if paper.cut >= LESS_EVIDENCE and paper.width < 80 else remark, k, bar, paper)
    if words.gaps(diagnosis):
        drop = visible(sentence(words.ladder(diagnosis)))
        yield _indent(paper.text(paper.brief(drop, 2, 2) if paper.cut >= BARE else drop), 2)


def _rung(name: str, rung: Rung, remark: str, k: int, bar: int, paper: _Paper) -> RenderableType:
    share = 0.0 if rung.length is None else (rung.length - 1) / k
    joint = "".join(f" {value:.2f}" for value in words.shares(rung))
    line = Text.assemble(paper.text(paper.bar(share, bar) + " " if bar else "", "cyan"),
                         paper.text(f"{number(rung.length):>5}", "bold"),
                         paper.text(f" {interval(rung.interval):<13}{joint:<{5 * k}}"),
                         paper.text(f" {remark}", "dim"))
    return _hanging(f"  {name:<10}", line, 12)


def _hanging(lead: str, text: Text, by: int) -> RenderableType:
    grid = Table.grid(padding=0)
    grid.add_column(width=by, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(lead), text)
    return grid


def _finding(rank: int, finding: Finding, paper: _Paper) -> Iterator[RenderableType]:
    where = visible(", ".join(finding.where))
    yield Text.assemble(
        "\n", paper.text(f"{rank}. {visible(finding.fault)}", "bold"), "  ",
        paper.text(finding.strength, STYLES[finding.strength]), paper.text(f"  {where}" if where else "", "dim"),
    )
    short = rank > 1 and paper.cut >= BRIEF_OTHERS
    if rank > 1:
        says = visible(sentence(finding.says))
        yield _indent(paper.text(paper.brief(says, 1 if paper.cut >= BARE else 2, 3) if short else says), 3)
    if short:
        if paper.cut < BARE:
            yield _hanging("   fix      ", paper.text(paper.brief(visible(sentence(finding.fix.says)), 1), "green"), 12)
        return
    if finding.acceptance is not None:
        first, *others = words.effect(finding.acceptance) or [""]
        yield _indent(paper.text(first, "bold"), 3)
        if paper.cut < FINDING_ONLY:
            yield _indent(paper.text("; ".join([*others, words.recovery(finding)]), "dim"), 3)
    else:
        yield _indent(paper.text(words.recovery(finding), "dim"), 3)
    shown = finding.evidence[: EVIDENCE_SHOWN if rank == 1 and paper.cut < LESS_EVIDENCE else 1]
    for nth, evidence in enumerate(shown):
        yield from _evidence(evidence, paper, brief=rank > 1 or nth > 0)
    if len(finding.evidence) > len(shown) and paper.cut < LESS_EVIDENCE:
        yield _indent(paper.text(f"{len(finding.evidence) - len(shown)} more in --json and --html", "dim"), 3)
    remedy = visible(sentence(finding.fix.says))
    yield _hanging("   fix      ", paper.text(paper.brief(remedy, 3) if paper.cut >= BARE else remedy, "green"), 12)
    for consumer, settings in words.config_lines(finding.fix.config):
        yield _hanging("", paper.text(f"{consumer}  {settings}"), 12)
    for caveat in finding.caveats[: 2 if paper.cut >= FINDING_ONLY else None]:
        but = visible(sentence(caveat))
        yield _hanging("   but      ", paper.text(paper.brief(but, 1) if paper.cut >= FINDING_ONLY else but, "yellow"), 12)


def _evidence(evidence: Evidence, paper: _Paper, *, brief: bool) -> Iterator[RenderableType]:
    lines = {"if": evidence.hypothesis, "then": evidence.prediction, "measured": evidence.measurement, "found": evidence.result,
             "decides": evidence.decides}
    for lead, text in lines.items():
        kept = lead == "found" or not (brief or paper.cut >= FINDING_ONLY or (paper.cut >= LESS_EVIDENCE and lead != "if"))
        if text and kept:
            room = {FINDING_ONLY: 5}.get(paper.cut, 3)
            said = paper.brief(visible(text), room) if paper.cut >= FINDING_ONLY else visible(text)
            yield _hanging(f"   {lead:<9}", paper.text(said, "" if lead == "found" else "dim"), 12)


def _placement(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    sides = {"training": diagnosis.placement.train, "serving": diagnosis.placement.serve}
    sides = {name: slots for name, slots in sides.items() if slots}
    if not sides:
        return
    yield _title("Placement", paper, paper.aside("what each slot is, found from the data; its label; margin to the runner-up"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=True, header_style="dim")
    table.add_column("  slot", no_wrap=True)
    for name in sides:
        table.add_column(name)
    by_slot: dict[int, dict[str, Placed]] = {}
    for name, slots in sides.items():
        for placed in slots:
            by_slot.setdefault(placed.slot, {})[name] = placed
    for slot, held in sorted(by_slot.items(), key=lambda item: (item[0] < 0, item[0])):
        if slot < 0 and paper.cut >= BARE:
            continue
        differ = len(held) == 2 and not words.same_place(held["training"], held["serving"])
        cells = [_cell(held.get(name), paper, differ and name == "serving") for name in sides]
        table.add_row(paper.text(f"  {'last' if slot < 0 else slot}"), *cells)
    yield table


def _cell(placed: Placed | None, paper: _Paper, differs: bool) -> Text:
    if placed is None:
        return Text("")
    margin = "" if placed.margin is None else f" {placed.margin:.2f}"
    place = ("≠ " if differs else "") + visible(words.place(placed))
    found = paper.text(place, "bold red" if differs else "")
    if paper.cut >= FINDING_ONLY:
        return found
    quoted = f" “{visible(placed.label, 32)}”" if paper.unicode else f' "{visible(placed.label, 32)}"'
    return Text.assemble(found, paper.text(quoted if placed.label else "", "dim"), paper.text(margin))


def _norms(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    """What the sizes of the states hint at, where the serving slots could not all be placed."""
    slots = diagnosis.placement.serve
    shown = None if slots and all(placed.boundary is not None for placed in slots) else norms(diagnosis)
    if shown is not None:
        yield _hanging("Norms", paper.text(visible(sentence(shown.says))), 12)


def _power(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    """What so much data excludes, or the figures that this follows from. How many rows there were stands under Matched."""
    facts = words.power(diagnosis)
    if "excludes" in facts:
        line = "excludes " + "; ".join(map(str, facts["excludes"]))
    else:
        told = {name: value for name, value in facts.items() if name != "rows" or "train" not in diagnosis.matched}
        line = "; ".join(f"{name} {value}" for name, value in pairs(told))
    if line:
        yield _hanging("Power", paper.text(visible(line, 600)), 12)


def _list(title: str, items: list[str], paper: _Paper, limit: int, letters: int | None = None) -> Iterator[RenderableType]:
    shown, more = words.first_of(items, limit)
    for i, item in enumerate(shown):
        said = item if item.endswith("…") else sentence(item)
        yield _hanging(title if i == 0 else "", paper.text(f"· {visible(said, letters)}"), 12)
    if more:
        yield _hanging("", paper.text(f"{more} more in --json and --html", "dim"), 12)
