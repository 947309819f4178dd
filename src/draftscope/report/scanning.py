"""A scan while it runs, and an estimate with its intervals, for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftscope.scan.between import Between, Estimate
from draftscope.scan.fingerprint import CLASSES, Fingerprint
from draftscope.scan.scan import Progress
from draftscope.text import visible

REFRESH = 0.25
LINES = 30.0
"""Seconds between two lines where there is no terminal."""


class Front:
    """What one sees of a scan: how far it is, how fast, and the norms so far, so that wrong data show within seconds."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self._clock = what, clock
        self._begun, self._before = clock(), -1
        self.kept = ""

    def line(self, progress: Progress) -> str:
        """One line: files, rate, time left, bad samples."""
        if self._before < 0:
            self._before = max(progress.done - 1, 0)
        seconds = max(self._clock() - self._begun, 1e-9)
        done = progress.done - self._before
        parts = [f"{progress.done:,}/{progress.of:,} files", f"{progress.size / seconds / 1e9:.2f} GB/s"]
        if done and progress.of > progress.done:
            parts.append(f"{_span(seconds / done * (progress.of - progress.done))} left")
        parts.append(f"{progress.bad:,} bad" if progress.bad else "none bad")
        return ", ".join(parts)

    def table(self, progress: Progress) -> RenderableType:
        """The line, and mean norms by entry and class so far."""
        between = Between()
        for one in (progress.total, progress.current):
            if one is not None:
                between.merge(one.between)
        head = Text(f"{visible(self.what, 60)}  {self.line(progress)}")
        foot = Text(f"Ctrl-C stops; {self.kept or 'what was counted is kept'}", style="dim")
        known = progress.current or progress.total
        if known is None or between.count == 0:
            return Group(head, foot)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("mean norm so far")
        for name in CLASSES:
            table.add_column(name, justify="right")
        table.add_column("sinks", justify="right")
        for entry, label in enumerate(known.entries):
            norms = [between.norm(entry, name) for name in CLASSES]
            share = between.share(entry, "sink")
            table.add_row(f"{entry} {visible(label, 24)}", *("–" if norm is None else f"{norm.value:.4g}" for norm in norms),
                          "" if share is None else f"{100 * share.value:.2g} %")
        return Group(head, table, foot)


@contextmanager
def front(
    console: Console, what: str, quiet: bool = False, every: float = LINES
) -> Iterator[tuple[Front, Callable[[Progress], None]]]:
    """The front, and what to call with the progress: a live table on a terminal, else a line now and then."""
    made = Front(what)
    shown = time.monotonic()
    if quiet:
        yield made, lambda progress: None
    elif not console.is_terminal:
        def say(progress: Progress) -> None:
            nonlocal shown
            if time.monotonic() - shown >= every:
                shown = time.monotonic()
                console.print(Text(f"{visible(what, 60)}: {made.line(progress)}"), soft_wrap=True)

        yield made, say
    else:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            def draw(progress: Progress) -> None:
                nonlocal shown
                if time.monotonic() - shown >= REFRESH:
                    shown = time.monotonic()
                    live.update(made.table(progress), refresh=True)

            yield made, draw


def estimate_story(fingerprint: Fingerprint) -> Iterator[RenderableType]:
    """That the figures are estimates, and what of: mean norms with their intervals. Nothing where every sequence was taken."""
    if not fingerprint.estimated:
        return
    taken, of = sum(one.taken for one in fingerprint.estimated), sum(one.of for one in fingerprint.estimated)
    how = ", ".join(one.how for one in fingerprint.estimated)
    yield Text(f"An estimate ({how}): {taken:,} of {of:,} files, chosen by a hash of their names", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("entry", "", "mean norm", "95 % interval", "share of rows", "95 % interval"):
        table.add_column(heading, justify="left" if heading in ("entry", "") else "right")
    for row in estimates(fingerprint):
        norm, share = row["norm"], row["share"]
        table.add_row(f"  {row['entry']} {visible(row['label'], 24)}", row["class"], f"{norm['value']:.4g}",
                      _interval(norm, ".4g"), f"{share['value']:.3g}", _interval(share, ".3g"))
    yield table


def estimates(fingerprint: Fingerprint) -> list[dict[str, Any]]:
    """Mean norm and share of rows by entry and class, each with its interval from the spread between sequences."""
    found = []
    for entry, label in enumerate(fingerprint.entries):
        for name in CLASSES:
            norm = fingerprint.between.norm(entry, name, fingerprint.population)
            share = fingerprint.between.share(entry, name, fingerprint.population)
            if norm is not None and share is not None:
                found.append({"entry": entry, "label": label, "class": name, "norm": _plain(norm), "share": _plain(share)})
    return found


def _plain(one: Estimate) -> dict[str, float | None]:
    return {"value": one.value, "low": one.low, "high": one.high}


def _interval(one: dict[str, float | None], form: str) -> str:
    return "–" if one["low"] is None or one["high"] is None else f"[{one['low']:{form}}, {one['high']:{form}}]"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
