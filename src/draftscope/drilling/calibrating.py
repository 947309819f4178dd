"""Confidence from outcomes: of the findings of a fault and strength, how many were right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from importlib.metadata import version

from draftscope.diagnose.confidence import EDGES, Calibration, Cell, amount
from draftscope.drilling.report import Outcome
from draftscope.findings import Strength
from draftscope.shares import wilson

TUNED = frozenset({"tiny", "embedded"})
"""Pairs on which the rules were written: their variants and healthy runs say nothing about others."""


def untuned(outcomes: Iterable[Outcome], tuned: Collection[str] = TUNED) -> list[Outcome]:
    """Outcomes on other pairs, and at strengths that are none of the variants."""
    return [o for o in outcomes if o.error is None and (o.pair not in tuned or o.kind == "other strength")]


def calibrate(outcomes: Iterable[Outcome], tuned: Collection[str] = TUNED) -> Calibration:
    """The table from outcomes that the rules were not tuned on.

    A case counts once in an amount of data, with its most rows there, and once in all, so that a cell's findings are of
    different cases.
    """
    used = sorted(untuned(outcomes, tuned), key=lambda o: min(o.rows.values(), default=0))
    by_cell: dict[tuple[str, Strength, int | None], list[bool]] = defaultdict(list)
    for key in (None, *range(len(EDGES) + 1)):
        chosen: dict[tuple[str, str], Outcome] = {}
        for outcome in used:
            rows = min(outcome.rows.values(), default=0)
            if key is None or amount(rows) == key:
                chosen[outcome.pair, outcome.key] = outcome
        for outcome in chosen.values():
            for fault, strength in {(n.fault, n.strength) for n in outcome.findings}:
                by_cell[fault, strength, key].append(any(n.right for n in outcome.findings if n.fault == fault))
    cells = []
    for (fault, strength, key), hits in sorted(by_cell.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or -1)):
        right, of = sum(hits), len(hits)
        low, high = wilson(right, of) or (0.0, 1.0)
        cells.append(Cell(fault=fault, strength=strength, rows=key, right=right, of=of,
                          confidence=round((right + 0.5) / (of + 1), 3), interval=(round(low, 3), round(high, 3))))
    cases = {(o.pair, o.key): o.kind for o in used}
    return Calibration(
        schema="draftscope.confidence/1", version=version("draftscope"), pairs=sorted({o.pair for o in used}), cases=len(cases),
        healthy=sum(kind == "clean" for kind in cases.values()), cells=cells,
    )
