"""Samples of a Prometheus scrape, read strictly: what an engine would not write is refused by line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from draftscope.errors import DraftscopeError
from draftscope.text import visible

MOST_SAMPLES = 100_000
_LARGEST = 2.0**53
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'[ \t]{0,8}([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"[ \t]{0,8}(,|(?=\}))')
_NUMBER = re.compile(r"[+-]?(?:\d[\d.]*(?:[eE][+-]?\d+)?|[iI]nf|[nN]a[nN])")
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Scrape:
    """Samples by name (without `_total`) and labels."""

    where: str
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str) -> float | None:
        """The sum over all series; None where there is none."""
        return sum(self.samples[name].values()) if name in self.samples else None

    def values(self, name: str) -> list[float]:
        return list(self.samples.get(name, {}).values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums over the series that share a label's value."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            held = dict(labels).get(label, "")
            found[held] = found.get(held, 0.0) + value
        return found


def parse(text: str, where: str, wanted: Callable[[str], bool], counts: Callable[[str], bool]) -> Scrape:
    """The samples whose name is `wanted`; those that `counts` have to be whole numbers.

    Raises:
        DraftscopeError: a wanted line that is no sample, NaN, infinite, negative, beyond 2^53, given twice, or more of them
            than any engine has.
    """
    scrape, kept = Scrape(where), 0
    for at, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        name = _NAME.match(line)
        if name is None or not wanted(name[0]):
            continue
        kept += 1
        if kept > MOST_SAMPLES:
            raise DraftscopeError(f"more than {MOST_SAMPLES:,} samples of speculative decoding", where=where,
                                  remedy="This is no scrape of one server")
        labels, end = _labels(line, name.end())
        # A time and an example may follow the value.
        rest = line[end:].split("#", 1)[0].split()
        if labels is None or not 1 <= len(rest) <= 2 or not all(_NUMBER.fullmatch(part) for part in rest):
            raise _bad("is no sample of Prometheus' text format", where, at, line)
        series = name[0].removesuffix("_total")
        value = _value(rest[0], where, at, line, whole=counts(series))
        mine = scrape.samples.setdefault(series, {})
        if labels in mine:
            raise _bad("gives a series a second time", where, at, line)
        mine[labels] = value
    return scrape


def difference(before: Scrape, after: Scrape, counts: Callable[[str], bool]) -> Scrape:
    """Counters as they grew from one scrape to the next; gauges as they are in the second.

    Raises:
        DraftscopeError: a counter that went back or a series that is gone.
    """
    out = Scrape(after.where)
    for name, series in after.samples.items():
        if not counts(name):
            out.samples[name] = dict(series)
            continue
        out.samples[name] = {labels: value - before.samples.get(name, {}).get(labels, 0.0) for labels, value in series.items()}
        if any(value < 0 for value in out.samples[name].values()):
            raise _not_later(name, before, after)
    gone = [name for name, series in before.samples.items() if counts(name) and set(series) - set(after.samples.get(name, {}))]
    if gone:
        raise _not_later(gone[0], before, after)
    return out


def _not_later(name: str, before: Scrape, after: Scrape) -> DraftscopeError:
    return DraftscopeError(
        f"counter {name} is lower than in {before.where}", where=after.where,
        remedy="Give the earlier scrape first; where the server was restarted in between, give the later one alone")


def _labels(line: str, at: int) -> tuple[Labels | None, int]:
    """The labels that begin at a place, None where they are none, and where they end."""
    if line[at : at + 1] != "{":
        return (), at
    found: dict[str, str] = {}
    at += 1
    while line[at : at + 1] != "}":
        match = _LABEL.match(line, at)
        if match is None or match[1] in found:
            return None, at
        found[match[1]] = match[2]
        at = match.end()
    return tuple(sorted(found.items())), at + 1


def _value(text: str, where: str, at: int, line: str, *, whole: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _bad("is no sample of Prometheus' text format", where, at, line) from None
    if not math.isfinite(value):
        raise _bad("is not finite", where, at, line)
    if value < 0:
        raise _bad("is negative", where, at, line)
    if value > _LARGEST:
        raise _bad("is larger than any count", where, at, line)
    if whole and value != int(value):
        raise _bad("is a counter that is no whole number", where, at, line)
    return value


def _bad(what: str, where: str, at: int, line: str) -> DraftscopeError:
    return DraftscopeError(f"line {at} {what}: {visible(line, 120)}", where=where, remedy="Scrape /metrics of the server again")


