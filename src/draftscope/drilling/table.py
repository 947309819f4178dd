"""The exercise as a table: in Markdown, and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from draftscope.diagnose.confidence import EDGES, FEWEST, Calibration
from draftscope.drilling.report import Drill, Score, Share
from draftscope.text import visible

MISSES_SHOWN = 60


def told(one: Share | None) -> str:
    """`23 of 24 [0.80, 0.99]`."""
    if one is None or not one.of:
        return "–"
    low, high = one.interval or (0.0, 1.0)
    return f"{one.hits} of {one.of} [{low:.2f}, {high:.2f}]"


def amounts(drill: Drill) -> list[str]:
    """The amounts of data that occur, least first."""
    names = {name for one in drill.scores for name in one.by_tokens} | set(drill.clean.by_tokens if drill.clean else {})
    return sorted(names, key=lambda name: float("inf") if name == "all" else int(name))


def table(drill: Drill) -> Table:
    """Classes in rows, for the terminal."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("class", overflow="fold", min_width=16)
    for name in ("cases", "first", "both", "proven", "wrong proven", *(f"{n} rows" for n in amounts(drill)), "errors"):
        grid.add_column(name, justify="right")
    for one in drill.scores:
        grid.add_row(one.fault, str(one.cases), _rate(one.first), _rate(one.both), str(one.proven), str(one.wrong_proven),
                     *(_rate(one.by_tokens.get(n)) for n in amounts(drill)), str(one.errors))
    if drill.clean is not None:
        clean = drill.clean
        grid.add_row("healthy (alarms)", str(clean.cases), _rate(clean.alarms), "", "", str(clean.proven),
                     *(_rate(clean.by_tokens.get(n)) for n in amounts(drill)), str(clean.errors))
    return grid


def _cells(one: Score, names: Sequence[str]) -> list[str]:
    first = told(one.first) + ("" if one.both is None else f"; both: {told(one.both)}")
    return [one.fault, str(one.cases), first, str(one.proven), str(one.wrong_proven),
            *(_rate(one.by_tokens.get(n)) for n in names), str(one.errors)]


def _rate(one: Share | None) -> str:
    return "–" if one is None or one.share is None else f"{one.hits}/{one.of}"


def markdown(drill: Drill, calibration: Calibration | None = None) -> str:
    """The page: the table, the pairs it was run on, the calibration, false alarms, and every miss by name."""
    names = amounts(drill)
    head = ["class", "cases", "named first", "proven among these", "wrong and proven", *(f"first of {n} rows" for n in names),
            "crashed"]
    rows = [_cells(one, names) for one in drill.scores]
    parts = [
        "# The exercise",
        "Known faults are planted where real ones act, served and diagnosed from the files alone; `draftscope drill --markdown` "
        "does it and writes this page (`make drill` on every pair that it finds). Intervals are Wilson's at 95 %. A class counts "
        "each case once, at the most rows given; "
        "the columns at the right say from how many rows of each side (as asked for; whole sequences are taken) the fault was "
        "named first. A case is right if the first finding is a planted fault's, and wrong and proven if anything that nobody "
        "planted was called proven.",
        _grid(["pair", "cases", "named first", "false alarms in healthy runs", "seconds a case"],
              [[p.pair, str(p.cases), told(p.first), told(p.alarms), f"{p.seconds_per_case or 0:.1f}"] for p in drill.pairs]),
        _grid(head, rows),
    ]
    if calibration is not None:
        parts += _calibrated(calibration)
    if drill.clean is not None:
        clean = drill.clean
        parts.append(
            f"Healthy runs: {clean.cases}, each at every amount of rows. A fault was named in {told(clean.alarms)} diagnoses, "
            f"called proven in {clean.proven}; {clean.undecided} were undecided. By rows: "
            + ", ".join(f"{n}: {told(clean.by_tokens.get(n))}" for n in names) + "."
        )
        parts += _list("False alarms", clean.told)
    for one in drill.scores:
        parts += _list(f"Missed: {one.fault}", one.misses)
    return "\n\n".join(parts) + "\n"


def _calibrated(table: Calibration) -> list[str]:
    bounds = ["", *map(str, EDGES), ""]
    names = {None: "all"} | {i: f"{bounds[i] or '0'} to {bounds[i + 1] or '…'}" for i in range(len(EDGES) + 1)}
    cells = [
        [c.fault, c.strength, names[c.rows], f"{c.right} of {c.of}", "–" if c.of < FEWEST else f"{c.confidence:.2f}",
         f"[{c.interval[0]:.2f}, {c.interval[1]:.2f}]"]
        for c in table.cells if c.rows is None or c.of >= FEWEST
    ]
    said = (
        f"`confidence` of a finding is how often one of its fault and strength was right in {table.cases} cases that the rules "
        f"were not tuned on ({table.healthy} of them healthy): on {', '.join(table.pairs) or 'no pair yet'}; of the pairs that "
        "the rules were written on, only strengths and places that are no variant count. It is "
        "(right + 1/2) / (findings + 1), at the finding's own amount of rows (of the smaller side) where "
        f"{FEWEST} or more were seen, else over all; with fewer it stays null. In service faults come in other proportions than "
        "here, and so will this share."
    )
    grid = _grid(["fault", "strength", "rows", "right", "confidence", "interval"], cells)
    return ["## Calibration", said, *([grid] if cells else [])]


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(visible(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _list(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    shown = [f"- {visible(item, 300)}" for item in items[:MISSES_SHOWN]]
    more = [f"- and {len(items) - MISSES_SHOWN} more"] if len(items) > MISSES_SHOWN else []
    return [f"## {title}", "\n".join([*shown, *more])]
