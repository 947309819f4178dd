"""Fingerprints and comparisons, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from draftscope.compare.distances import Distance
from draftscope.compare.statistics import Candidate, Comparison, Figures, Side
from draftscope.compare.yardstick import FAR
from draftscope.report.compared import carried_says, unit_says
from draftscope.text import count, number, percent, sentence, visible

OTHER_CONTENT = frozenset({"entry", "token alone", "less"})
"""Looks of a slot that holds something else altogether, so that no class of rows or dimension tells more."""


def fingerprint_story(side: Side, name: str = "") -> Iterator[RenderableType]:
    """What a fingerprint was made of, and its norms by entry and class of rows."""
    yield Text(f"{name + ': ' if name else ''}{', '.join(visible(path) for path in side.paths)}", style="bold")
    yield Text(f"  {count(side.sequences, 'sequence')}, {side.rows:,} rows of {side.width} {' '.join(side.dtypes)}")
    for note in side.notes:
        yield Text(f"  note: {visible(note)}", style="dim")
    yield _Norms(side)


@dataclass(frozen=True, slots=True)
class _Norms:
    side: Side

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = norms_table(self.side)
        needs = console.measure(whole, options=options.update(max_width=10 * options.max_width)).minimum
        yield whole if needs <= options.max_width else norms_table(self.side, narrow=True)


def norms_table(side: Side, narrow: bool = False) -> Table:
    """Norms by entry and class; `narrow` leaves out all but mean, median and largest, so that no figure is cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    remarked = any(_remark(figures) for entry in side.entries for figures in entry.classes.values() if figures.rows)
    labels = [f"  {entry.entry} {visible(entry.label, 24)}" + (", last" if entry.last and entry.label != "last" else "")
              for entry in side.entries]
    table.add_column("entry", overflow="fold", min_width=min(16, max(map(len, labels), default=0)))
    for heading in ("", "rows"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "rows" else "left")
    spread = [] if narrow else ["1 %", "99 %"]
    for heading in ("mean", "median", *spread, "largest", "outlier channels", *(["remark"] if remarked else [])):
        words = heading in ("outlier channels", "remark")
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for entry, label in zip(side.entries, labels, strict=True):
        for name in ("first", "sink", "answer", "other"):
            figures = entry.classes[name]
            if figures.rows == 0:
                continue
            tails = () if narrow else (figures.norm_p01, figures.norm_p99)
            table.add_row(label, name, f"{figures.rows:,}", *map(norm, (
                figures.norm_mean, figures.norm_median, *tails, figures.norm_max,
            )), " ".join(map(str, figures.outlier_channels[:4])), *([_remark(figures)] if remarked else []))
            label = ""
    return table


def norm(value: float | None) -> str:
    """A norm, to four figures."""
    return "–" if value is None else f"{value:,.0f}" if 1e3 <= value < 1e7 else f"{value:.4g}"


def _remark(figures: Figures) -> str:
    remarks = []
    if figures.nonfinite_rows:
        remarks.append(f"{figures.nonfinite_rows:,} not finite")
    if figures.zero_rows:
        remarks.append(f"{figures.zero_rows:,} zero")
    return ", ".join(remarks)


def comparison_story(comparison: Comparison) -> Iterator[RenderableType]:
    """Both sides, their distances, and which slot could be which entry."""
    yield from fingerprint_story(comparison.a, "A")
    yield Text("")
    yield from fingerprint_story(comparison.b, "B")
    yield Text("")
    yield Text(f"Distance of each entry of B to each of A, over {comparison.rows_compared} rows", style="bold")
    yield _distances(comparison)
    yield Text("")
    yield Text("What each slot of B could be", style="bold")
    for candidate in comparison.assignment:
        yield Text(f"  {_says(candidate)}", style="green" if candidate.clear else "yellow")
    yield Text("")
    yield from _looks(comparison)
    yield from _carriers(comparison)
    if comparison.series is not None:
        yield Text("")
        yield Text("One after the other, against A", style="bold")
        for number_, point in enumerate(comparison.series.points, 2):
            told, moved = (", ".join(number(effect, 2) for effect in effects) for effects in (point.effects, point.changes))
            before = f" ({moved} from the one before)" if number_ > 2 else ""
            when = f" of {point.began}" if point.began else ""
            yield Text(f"  {number_} {', '.join(visible(path) for path in point.paths)}{when}: {told} units, by slot{before}")
        yield Text(f"  {sentence(comparison.series.says)}", style="yellow" if comparison.series.drifts else "")
    if any(c.entry is not None for c in comparison.assignment):
        yield Text(f"  {sentence(next(c.says for c in comparison.assignment if c.entry is not None))}")
    for caveat in comparison.caveats:
        yield Text(f"  {sentence(caveat)}", style="dim")


def _looks(comparison: Comparison) -> Iterator[RenderableType]:
    """What each slot looks like, and what would have been seen."""
    yield Text(f"What each slot of B looks like (one unit: {unit_says(comparison)})", style="bold")
    for look in comparison.looks:
        seen = "" if look.smallest is None else f"; a distance of {number(look.smallest, 2)} would have been seen"
        yield Text(f"  slot {look.slot}: {look.says}{seen}", style="green" if look.kind == "own" else "yellow")
    for coupling in comparison.couplings:
        i, j = coupling.slots
        yield Text(f"  cosine of slots {i} and {j} in a row: {coupling.a:.3f} in A, {coupling.b:.3f} in B ({coupling.effect:.1f} "
                   "units)", style="yellow" if coupling.effect > FAR else "")


def _carriers(comparison: Comparison) -> Iterator[RenderableType]:
    """Rows and dimensions that carry a difference, of slots that are far from their own entry and hold no other."""
    far = [look.slot for look in comparison.looks if look.effect is not None and look.effect > FAR]
    far += [e.slot for e in comparison.effects if e.effect is not None and e.effect > FAR]
    others = {look.slot for look in comparison.looks if look.kind in OTHER_CONTENT}
    if not far:
        return
    yield Text("")
    yield Text("What carries the difference", style="bold")
    if others & set(far):
        slots = ", ".join(map(str, sorted(others & set(far))))
        yield Text(f"  slot{'s' if ',' in slots else ''} {slots}: everything, as told above; the JSON has the figures")
        far = [slot for slot in far if slot not in others]
    for slot in sorted(set(far)):
        for by in ("class", "position"):
            told = [e for e in comparison.effects if e.slot == slot and e.by == by]
            if told:
                yield Text(f"  slot {slot}, by {by}: " + ", ".join(
                    f"{e.name} {number(e.effect, 2)} units{'' if e.share is None else f' ({percent(e.share)})'}" for e in told))
        for carried in comparison.carried:
            if carried.slot == slot:
                yield Text(f"  {carried_says(carried, comparison)}")
        dimensions = [d for d in comparison.dimensions if d.slot == slot]
        if dimensions:
            yield Text(f"  slot {slot}, by dimension: " + ", ".join(
                f"{d.dimension} {percent(d.share)} at {number(d.effect, 1)} units{' (outlier)' if d.outlier else ''}"
                for d in dimensions))
        for sinks in comparison.sinks:
            if sinks.slot == slot:
                yield Text(f"  slot {slot}, channels that stand out in {'sinks' if sinks.rows == 'sink' else 'first tokens'}: "
                           f"{sinks.shared} of {len(sinks.a)} of A's are B's")


def _distances(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  B")
    for entry in comparison.a.entries:
        table.add_column(f"A {entry.entry} {visible(entry.label, 16)}", justify="right", overflow="fold")
    table.add_column("split halves of B", justify="right")
    for entry, row, halves in zip(comparison.b.entries, comparison.distances, comparison.split_half_b, strict=True):
        nearest = min((d.total for d in row if d.total is not None), default=None)
        table.add_row(
            f"  {entry.entry} {visible(entry.label, 24)}",
            *(Text(number(d.total, 3), style="bold" if d.total is not None and d.total == nearest else "") for d in row),
            _total(halves),
        )
    table.add_row("  split halves of A", *map(_total, comparison.split_half_a), "", style="dim")
    return table


def _total(distance: Distance) -> str:
    return number(distance.total, 3)


def _says(candidate: Candidate) -> str:
    name = f"slot {candidate.slot}"
    if candidate.slot_label != name:
        name += f" ({visible(candidate.slot_label, 24)})"
    if candidate.entry is None:
        return f"{name}: {candidate.says}"
    text = f"{name}: entry {candidate.entry} ({visible(candidate.label, 24)}), distance {number(candidate.distance, 3)}"
    text += f", next {number(candidate.second, 3)}, margin {percent(candidate.margin)}"
    if not candidate.clear:
        text += "; not told apart from the next"
    if candidate.nearest != candidate.entry:
        text += f"; nearest is entry {candidate.nearest}, which another slot takes"
    if candidate.by_shape is not None and candidate.by_shape != candidate.entry:
        text += f"; by shape alone entry {candidate.by_shape}"
    return text
