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
EVIDENCE_SHOWN, OTHERS_SHOWN, STEPS_SHOWN = 3, 6, 4
_PLAIN = str.maketrans({"–": "-", "−": "-", "→": ">", "…": "~", "·": "-", "≠": "!", "’": "'"})


@dataclass(frozen=True, slots=True)
class _Paper:
    """What the terminal can show."""

    width: int
    unicode: bool

    def text(self, content: str, style: str = "") -> Text:
        return Text(content if self.unicode else content.translate(_PLAIN).encode("ascii", "replace").decode(), style=style)

    def bar(self, share: float, width: int) -> str:
        """A bar of `share` of `width` cells, to an eighth of a cell."""
        eighths = round(max(0.0, min(share, 1.0)) * width * 8)
        if not self.unicode:
            return ("#" * round(eighths / 8)).ljust(width)
        return ("█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]).ljust(width)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print it, plain where the console is a pipe; 60 columns are enough."""
    paper = _Paper(console.width, (console.encoding or "").lower().startswith("utf"))
    if console.is_terminal:
        for part in _story(diagnosis, paper):
            console.print(part)
        return
    with console.capture() as captured:
        for part in _story(diagnosis, paper):
            console.print(part)
    console.out("\n".join(line.rstrip() for line in captured.get().splitlines()), highlight=False)


def _story(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    head = paper.text(diagnosis.verdict, VERDICTS.get(diagnosis.verdict, "bold red"))
    yield Text.assemble(head, "  ", paper.text(words.verdict(diagnosis), "bold"))
    yield from _ladder(diagnosis, paper)
    for rank, finding in enumerate(diagnosis.findings[: OTHERS_SHOWN + 1], 1):
        yield from _finding(rank, finding, paper)
    if len(diagnosis.findings) > OTHERS_SHOWN + 1:
        yield paper.text(f"{len(diagnosis.findings) - OTHERS_SHOWN - 1} more findings: --json, --html", "dim")
    yield from _applied(diagnosis, paper)
    yield from _placement(diagnosis, paper)
    yield Text("")
    yield from _norms(diagnosis, paper)
    yield from _list("Asked", [f"{fault}: {said}" for fault, said in diagnosis.explained.items()], paper, limit=12)
    yield from _list("Matched", words.matched(diagnosis.matched), paper, limit=12)
    yield from _power(diagnosis, paper)
    yield from _list("Steps", diagnosis.steps, paper, limit=STEPS_SHOWN, letters=max(paper.width - 15, 40))
    yield from _list("Next", diagnosis.next, paper, limit=12)


def _applied(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    """What `--apply` wrote, and what it left."""
    done = diagnosis.applied
    if done is None:
        return
    yield _title("Applied", paper, visible(done.folder or ""))
    yield _indent(paper.text(sentence(visible(done.says))), 2)
    for line in done.changes:
        yield _indent(paper.text(visible(line)), 4)
    for line in done.left:
        yield _indent(paper.text(f"left: {visible(line)}", "dim"), 4)


def _title(text: str, paper: _Paper, aside: str = "") -> Text:
    return Text.assemble("\n", paper.text(text, "bold"), paper.text(f"  {aside}" if aside else "", "dim"))


def _indent(text: Text, by: int) -> Padding:
    return Padding(text, (0, 0, 0, by))


def _ladder(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    rungs = words.rungs(diagnosis)
    if all(rung is None for _, rung, _ in rungs):
        return
    k = words.most_drafted(diagnosis.acceptance)
    yield _title("Acceptance", paper, f"accept length, 1 to {k + 1} (K = {k}); then the share accepted at each position, joint")
    joint = 5 * k
    room = paper.width - 34 - joint
    remarks = max(len(remark) for _, rung, remark in rungs if rung is not None)
    bar = max(0, min(24, room - remarks - 1 if room - remarks > 6 else room - 14))
    bar = bar if bar >= 6 else 0
    for name, rung, remark in rungs:
        if rung is None:
            yield _hanging(f"  {name:<10}", paper.text(f"– {remark}", "dim"), 12)
            continue
        yield _rung(name, rung, remark, k, bar, paper)
    if words.gaps(diagnosis):
        yield _indent(paper.text(visible(sentence(words.ladder(diagnosis)))), 2)


def _rung(name: str, rung: Rung, remark: str, k: int, bar: int, paper: _Paper) -> RenderableType:
    share = 0.0 if rung.length is None else (rung.length - 1) / k
    joint = "".join(f" {value:.2f}" for value in rung.joint)
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
    if rank > 1:
        yield _indent(paper.text(visible(sentence(finding.says))), 3)
    if finding.acceptance is not None:
        first, *others = words.effect(finding.acceptance) or [""]
        yield _indent(paper.text(first, "bold"), 3)
        yield _indent(paper.text("; ".join([*others, words.recovery(finding)]), "dim"), 3)
    else:
        yield _indent(paper.text(words.recovery(finding), "dim"), 3)
    shown = finding.evidence[: EVIDENCE_SHOWN if rank == 1 else 1]
    for nth, evidence in enumerate(shown):
        yield from _evidence(evidence, paper, brief=rank > 1 or nth > 0)
    if len(finding.evidence) > len(shown):
        yield _indent(paper.text(f"{len(finding.evidence) - len(shown)} more in --json and --html", "dim"), 3)
    yield _hanging("   fix      ", paper.text(visible(sentence(finding.fix.says)), "green"), 12)
    for consumer, settings in words.config_lines(finding.fix.config):
        yield _hanging("", paper.text(f"{consumer}  {settings}"), 12)
    for caveat in finding.caveats:
        yield _hanging("   but      ", paper.text(visible(sentence(caveat)), "yellow"), 12)


def _evidence(evidence: Evidence, paper: _Paper, *, brief: bool) -> Iterator[RenderableType]:
    lines = {"if": evidence.hypothesis, "then": evidence.prediction, "measured": evidence.measurement, "found": evidence.result,
             "decides": evidence.decides}
    for lead, text in lines.items():
        if text and not (brief and lead != "found"):
            yield _hanging(f"   {lead:<9}", paper.text(visible(text), "" if lead == "found" else "dim"), 12)


def _placement(diagnosis: Diagnosis, paper: _Paper) -> Iterator[RenderableType]:
    sides = {"training": diagnosis.placement.train, "serving": diagnosis.placement.serve}
    sides = {name: slots for name, slots in sides.items() if slots}
    if not sides:
        return
    yield _title("Placement", paper, "what each slot is, found from the data; its label; margin to the runner-up")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=True, header_style="dim")
    table.add_column("  slot", no_wrap=True)
    for name in sides:
        table.add_column(name)
    by_slot: dict[int, dict[str, Placed]] = {}
    for name, slots in sides.items():
        for placed in slots:
            by_slot.setdefault(placed.slot, {})[name] = placed
    for slot, held in sorted(by_slot.items(), key=lambda item: (item[0] < 0, item[0])):
        differ = len(held) == 2 and not words.same_place(held["training"], held["serving"])
        cells = [_cell(held.get(name), paper, differ and name == "serving") for name in sides]
        table.add_row(paper.text(f"  {'last' if slot < 0 else slot}"), *cells)
    yield table


def _cell(placed: Placed | None, paper: _Paper, differs: bool) -> Text:
    if placed is None:
        return Text("")
    margin = "" if placed.margin is None else f" {placed.margin:.2f}"
    return Text.assemble(
        paper.text(("≠ " if differs else "") + visible(words.place(placed)), "bold red" if differs else ""),
        paper.text(f" “{visible(placed.label, 32)}”" if placed.label and paper.unicode
                   else f' "{visible(placed.label, 32)}"' if placed.label else "", "dim"),
        paper.text(margin),
    )


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
        yield _hanging(title if i == 0 else "", paper.text(f"· {visible(sentence(item), letters)}"), 12)
    if more:
        yield _hanging("", paper.text(f"{more} more in --json and --html", "dim"), 12)
