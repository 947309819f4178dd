"""What inspect found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from draftscope.findings import Finding
from draftscope.inspecting.inspect import Answer
from draftscope.inspecting.meaning import FOREIGN, foreign
from draftscope.inspecting.report import AsTrainer, Entry, Inspected
from draftscope.inspecting.verify import Verified
from draftscope.text import count, pairs, percent, sentence, visible

EXAMPLES = 3
ROOM = 100
"""Columns that a table of all figures takes."""


def story(answer: Answer) -> Iterator[RenderableType]:
    """One path: what it is, what it holds, what looks odd."""
    report = answer.report
    title = f"{visible(report.path)}: {report.what}" + (f", {report.format}" if report.format else "")
    yield Text(title, style="bold")
    yield _facts(report)
    if report.entries:
        yield _Entries(report.entries)
    for group in report.skipped:
        shown = "; ".join(f"{visible(s.path)}{f', row {s.row}' if s.row >= 0 else ''} ({visible(s.why, 120)})"
                          for s in group.examples[:EXAMPLES])
        yield Text(f"  skipped, {group.cause}: {group.files}: {shown}", style="yellow")
    for note in report.notes:
        yield Text(f"  note: {visible(note)}", style="dim")
    if answer.as_trainer is not None:
        yield from _trainer(answer.as_trainer)
    for finding in answer.findings:
        yield _finding(finding)
    if not answer.findings:
        lost = foreign(report.entries)
        yield Text(f"  {FOREIGN if lost else 'nothing wrong found'}", style="yellow" if lost else "green")


def verified_story(result: Verified) -> Iterator[RenderableType]:
    """Captures tested: what each holds, how far the first agrees with the others, what differs."""
    for tested in result.captures:
        claims = [tested.claims[key] for key in ("engine", "engine_version") if key in tested.claims]
        claimed = " ".join(visible(str(claim), 40) for claim in claims)
        yield Text(f"{visible(tested.path)}: {count(tested.requests, 'request')}, {count(tested.rows, 'accepted row')} of "
                   f"{count(tested.slots, 'slot')}, {tested.dtype}" + (f" ({claimed})" if claimed else ""), style="bold")
        yield Text(f"  within itself: {count(tested.prefix_rows, 'row')} of shared prefixes, {count(tested.chained_rows, 'row')} "
                   "against the token that follows", style="dim")
    if result.comparisons:
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        table.add_column("against", overflow="fold")
        for heading in ("requests", "rows", "tolerance", "median error", "largest", "beyond"):
            table.add_column(heading, justify="right")
        for c in result.comparisons:
            table.add_row(visible(c.against), f"{c.matched} of {c.requests}", f"{c.rows:,}", _figure(c.tolerance),
                          _each(c.median_error), _each(c.largest_error), " ".join(map(str, c.beyond)))
        yield table
    for finding in result.findings:
        yield _finding(finding)
    if result.verdict == "clean":
        yield Text("  the same tokens have the same states", style="green")
    for remark in result.next:
        yield Text(f"  next: {visible(remark)}", style="dim")


def _each(values: list[float]) -> str:
    return " ".join(_figure(value) for value in values)


def _facts(report: Inspected) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    lines: list[tuple[str, str]] = []
    if report.chosen:
        lines.append(("why", visible(report.chosen)))
    if report.items:
        noun = "request" if report.what == "capture" else "sample"
        lines.append((f"{noun}s", f"{report.items:,} of {count(report.files, 'file')}"))
        lines.append(("tokens", f"{report.tokens:,}"))
        lines.append(("rows of", ", ".join(f"{shape} ({number:,})" for shape, number in list(report.widths.items())[:4])))
    if report.answer_tokens is not None:
        share = report.answer_tokens / max(report.tokens, 1)
        lines.append(("answers", f"{report.answer_tokens:,} tokens, {percent(share)}"))
    lines += pairs(report.facts)
    lines += [(f"claims {name}", value) for name, value in pairs(report.claims)]
    for name, value in lines:
        table.add_row(f"  {name}", value if len(value) <= 400 else value[:399] + "…")
    return table


@dataclass(frozen=True, slots=True)
class _Entries:
    """A row each. Where a terminal is narrow, what an entry holds stands on a line below it, and its mean norm is left out."""

    entries: list[Entry]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= ROOM:
            table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
            for heading, width in (("  entry", 8), ("label", 5), ("dtype", 8)):
                table.add_column(heading, overflow="fold", min_width=width)
            for heading in ("norm", "median", "first", "sinks", "bad"):
                table.add_column(heading, justify="right", no_wrap=True)
            table.add_column("token alone", no_wrap=True)
            table.add_column("inferred", overflow="fold", min_width=20)
            for entry in self.entries:
                table.add_row(*_named(entry), _figure(entry.norm_mean), *_measured(entry), visible(entry.inferred))
            yield table
            return
        head = ("  entry", "label", "dtype", "median", "first", "sinks", "bad", "token")
        rows = [(*_named(entry), *_measured(entry)) for entry in self.entries]
        widths = [max(map(cell_len, column)) for column in zip(head, *rows, strict=True)]
        over = sum(widths) + len(widths) - 1 - options.max_width
        for named in (1, 2, 0):  # labels are the longest, and what reads well folded
            cut = max(0, min(over, widths[named] - 8))
            widths[named], over = widths[named] - cut, over - cut
        widths[-1] += min(max(-over, 0), len(" alone"))
        yield _aligned((*head[:-1], "token alone"), widths, "dim")
        for entry, row in zip(self.entries, rows, strict=True):
            yield _aligned(row, widths)
            if entry.inferred:
                yield Padding(Text(visible(entry.inferred), overflow="fold"), (0, 0, 0, 4), expand=False)


def _named(entry: Entry) -> tuple[str, ...]:
    return f"  {entry.name}", visible(entry.label), ", ".join(entry.dtypes)


def _measured(entry: Entry) -> tuple[str, ...]:
    alone = {True: "yes", False: "no", None: "unknown"}[entry.token_alone]
    if entry.token_share is not None and entry.token_alone is not True:
        alone += f" ({entry.token_share:.2f})"
    return _figure(entry.norm_median), _figure(entry.norm_first), f"{entry.sinks:,}", f"{entry.nonfinite.rows:,}", alone


def _aligned(cells: Sequence[str], widths: Sequence[int], style: str = "") -> Table:
    """One row of a table whose rows have other lines between them: columns of given widths, the figures at their right ends."""
    row = Table.grid(padding=(0, 1, 0, 0))
    for nth, width in enumerate(widths):
        row.add_column(width=width, overflow="fold", justify="right" if 2 < nth < len(widths) - 1 else "left")
    row.add_row(*(Text(cell, style) for cell in cells))
    return row


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _trainer(read: AsTrainer) -> Iterator[RenderableType]:
    yield Text(f"  read as {read.trainer}: {read.reads}", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for heading in ("    entry", "label", "inferred", "goes to"):
        table.add_column(heading, overflow="fold")
    for feed in read.feeds:
        table.add_row(f"    {feed.entry}", visible(feed.label), visible(feed.inferred), feed.goes_to)
    yield table
    for feed in read.feeds:
        for warning in feed.warns:
            yield Text(f"    entry {feed.entry} {visible(warning)}", style="yellow")
    for refusal in read.refuses:
        yield Text(f"    refused: {refusal}", style="red")
    for line in read.alignment:
        yield Text(f"    rows: {line}", style="dim")
    for line in read.silently:
        yield Text(f"    silently: {line}", style="dim")


def _finding(finding: Finding) -> Text:
    styles = {"proven": "red", "supported": "yellow", "suspected": "yellow"}
    says = visible(sentence(finding.says))
    where = visible(", ".join(finding.where), 120)
    text = Text(f"  {finding.strength} {finding.fault} ({where}): {says}", style=styles[finding.strength])
    for evidence in finding.evidence:
        text.append(f"\n    found {visible(evidence.result, 400)}", style="")
    text.append(f"\n    fix {visible(sentence(finding.fix.says))}", style="")
    for caveat in finding.caveats:
        text.append(f"\n    but {visible(caveat)}", style="dim")
    return text
