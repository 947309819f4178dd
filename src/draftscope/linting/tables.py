"""What lint found, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from draftscope.consumers.points import listed
from draftscope.findings import Finding
from draftscope.linting.report import ConsumerReading, Lint, Row
from draftscope.text import pairs, percent, sentence, visible

_STYLES = {"as trained": "green", "differs": "red", "refused": "red", "not said": "dim"}
QUESTIONS = ("loads", "boundaries", "switches", "tensors", "embedding", "head", "map", "rope")
ROOM = 100
"""Columns that the table of all consumers takes."""


def story(result: Lint) -> Iterator[RenderableType]:
    """The checkpoint, then each consumer or the matrix of all, then the findings."""
    yield Text(f"{visible(result.checkpoint)}: draft checkpoint", style="bold")
    yield _facts(result)
    if len(result.readings) == 1:
        yield from _reading(result.readings[0])
    elif result.readings:
        yield Matrix(result.readings)
    for finding in result.findings:
        yield found(finding)
    if not result.findings and result.facts:
        yield Text("  nothing wrong found" if len(result.readings) != 1 else "  read as it was trained", style="green")
    for line in result.unknown:
        yield Text(f"  not known: {visible(line)}", style="dim")
    for line in result.next:
        yield Text(f"  next: {visible(line)}", style="dim")


def _facts(result: Lint) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in pairs({k: v for k, v in result.facts.items() if v is not None}):
        table.add_row(f"  {name}", value)
    return table


def _reading(reading: ConsumerReading) -> Iterator[RenderableType]:
    refused = "" if reading.loads else ", which refuses it"
    yield Text(f"read by {reading.asked}{refused}", style="bold" if reading.loads else "bold red")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for heading in ("  what", "in effect", "from", "as trained"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "  what")
    for row in reading.rows:
        table.add_row(f"  {visible(row.question)}", _value(row, row.effect), visible(row.key), _state(row))
    yield table
    for row in reading.rows:
        if row.says and row.state != "differs":
            yield Text(f"  note: {visible(row.says)}" + (f" [{row.source}]" if row.source else ""), style="dim")
    if reading.ignored:
        yield Text(f"  not used: {visible(', '.join(reading.ignored), 300)}", style="dim")
    if reading.initial:
        yield Text(f"  at their initial value: {visible(', '.join(reading.initial), 300)}", style="yellow")


def _value(row: Row, value: Any) -> str:
    if row.question in ("boundaries", "other runner"):
        return "none" if value == [] else "unknown" if value is None else listed(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "–" if value is None else visible(value, 60)


def _state(row: Row) -> Text:
    if row.state == "differs":
        return Text("no" if row.meant is None else f"no: {_value(row, row.meant)}", style=_STYLES["differs"])
    return Text({"as trained": "yes", "not said": "–", "refused": "refused"}[row.state], style=_STYLES[row.state])


@dataclass(frozen=True, slots=True)
class Matrix:
    """Consumers down, questions across. Where a terminal is narrow, a paragraph for those that read the same in it."""

    readings: list[ConsumerReading]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= ROOM:
            table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
            table.add_column("  read by", no_wrap=True)
            for heading in QUESTIONS:
                table.add_column(heading, overflow="fold", no_wrap=heading == "boundaries", min_width=len(heading))
            for reading in self.readings:
                table.add_row(f"  {reading.asked}", *_cells(reading))
            yield table
            return
        alike: dict[str, list[ConsumerReading]] = {}
        for reading in self.readings:
            alike.setdefault(repr([(cell.plain, cell.style) for cell in _cells(reading)]), []).append(reading)
        for group in alike.values():
            readers = ", ".join(reading.asked for reading in group)
            yield Padding(Text(f"read by {readers}", style="dim"), (0, 0, 0, 2), expand=False)
            told = [Text.assemble(f"{heading} ", cell)
                    for heading, cell in zip(QUESTIONS, _cells(group[0]), strict=True) if cell.plain]
            yield Padding(Text(", ").join(told), (0, 0, 0, 4), expand=False)


def _cells(reading: ConsumerReading) -> list[Text]:
    rows = {row.question: row for row in reading.rows}
    if not reading.loads:
        why = next((row.question for row in reading.rows if row.state == "refused" or (row.state == "differs" and row.says)), "")
        return [Text(f"no: {why}" if why else "no", style="red"), *(Text("") for _ in range(7))]
    boundaries = rows["boundaries"]
    wrong = [row for row in reading.rows if row.state == "differs" and row.question in reading.settings]
    dropped = [row.question for row in reading.rows if row.question == "names"]
    lost = [*(["names unknown"] if dropped else []), *(f"{len(reading.initial)} initial" for _ in reading.initial[:1])]
    return [
        Text("yes", style="green"),
        Text(_value(boundaries, boundaries.effect), style=_STYLES[boundaries.state]),
        Text(", ".join(f"{row.question} {_value(row, row.effect)}" for row in wrong) or "as trained",
             style="red" if wrong else "green"),
        Text(", ".join(lost) or "all arrive", style="red" if lost else "green"),
        _cell(rows.get("embedding")), _cell(rows.get("head")), _cell(rows.get("map")), _cell(rows.get("rope")),
    ]


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text("–", style="dim")
    return Text(_value(row, row.effect), style="" if row.state == "not said" else _STYLES[row.state])


def found(finding: Finding) -> Text:
    """A finding in a few lines: what, on what evidence, what to do."""
    style = "red" if finding.strength == "proven" else "yellow"
    text = Text(f"  {finding.strength} {finding.fault} ({visible(', '.join(finding.where), 120)}): "
                f"{visible(sentence(finding.says))}", style=style)
    for evidence in finding.evidence:
        text.append(f"\n    found {visible(evidence.result, 400)} [{visible(evidence.measurement, 200)}]", style="")
    text.append(f"\n    fix {visible(sentence(finding.fix.says))}", style="")
    for consumer, keys in finding.fix.config.items():
        if keys and "not_possible" not in keys:
            text.append(f"\n    {consumer}  {visible(_json(keys), 300)}", style="")
    for caveat in finding.caveats:
        text.append(f"\n    but {visible(caveat)}", style="dim")
    return text


def _json(keys: dict[str, Any]) -> str:
    import json

    return json.dumps(keys)


def summary(result: Lint) -> str:
    """One line: how many consumers read it as it was trained."""
    sound = [r.asked for r in result.readings if r.as_trained]
    shown = ", ".join(sound) if len(sound) <= 4 else f"{len(sound)} of {len(result.readings)}"
    covered = result.facts.get("coverage")
    return f"read as trained by {shown or 'none'}" + ("" if covered is None else f"; vocabulary covers {percent(covered)}")
