"""Results in a notebook: the page in a frame of its own, single figures, and every figure's numbers as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from markupsafe import escape
from rich.console import Console

from draftscope.compare.statistics import Comparison
from draftscope.counterfactual import Replays
from draftscope.errors import UsageError
from draftscope.findings import Diagnosis
from draftscope.report import clouds, curves, figures, parts, words
from draftscope.report.compared import comparison_page
from draftscope.report.drawing import Figure
from draftscope.report.html import page, render
from draftscope.report.terminal import show

HEIGHT = 720
"""Of a report's frame, in pixels."""
PLACED = {"slot", "label", "boundary", "norm", "kind", "lag", "scale", "error", "margin", "share"}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Figures that a notebook shows; `str()` is their page."""

    text: str
    height: int

    def _repr_html_(self) -> str:
        return _framed(self.text, self.height)

    def __str__(self) -> str:
        return self.text


def html(result: object) -> str:
    """A result as a notebook shows it."""
    if isinstance(result, Diagnosis):
        return _framed(page(result))
    if isinstance(result, Comparison):
        return _framed(comparison_page(result))
    held = rows(result, "")
    shown = [[_short(value) for value in row.values()] for row in held]
    text = render("rows.html", title="draftscope", head_cells=list(held[0]) if held else [], rows=shown)
    return _framed(text, 90 + 34 * len(held))


def text(result: Diagnosis) -> str:
    """What a terminal shows of it, of any length."""
    told = Console(file=StringIO(), width=100)
    show(result, told, lines=None)
    assert isinstance(told.file, StringIO)
    return told.file.getvalue().rstrip("\n")


def plot(result: object, names: Sequence[str]) -> Drawn:
    """Figures of a diagnosis by name, or all that it has data for."""
    known = _figures(result) if isinstance(result, Diagnosis) else {}
    for name in names:
        if name not in known:
            raise UsageError(f"no figure `{name}` here", remedy=f"There are: {', '.join(known) or 'none'}")
    chosen = [known[name] for name in names] or list(known.values())
    return Drawn(render("figures.html", title="draftscope", figures=chosen), 480 * max(len(chosen), 1))


def frame(result: object, name: str) -> Any:
    """A table as a DataFrame."""
    held = rows(result, name)
    try:
        import pandas
    except ImportError:
        remedy = "pip install 'draftscope[notebook]', or take .rows()"
        raise UsageError("tables as DataFrames need pandas", remedy=remedy) from None
    return pandas.DataFrame(held)


def rows(result: object, name: str) -> list[Row]:
    """A table by its name; the first without one."""
    known: dict[str, Callable[[], Iterator[Row]]] = {}
    if isinstance(result, Diagnosis):
        known = {table: lambda make=make, d=result: make(d) for table, make in TABLES.items()}  # type: ignore[misc]
    elif isinstance(result, Replays):
        known = {"rungs": lambda: ({**rung.model_dump(exclude={"text", "joint", "conditional"}), **_by_position(rung.joint)}
                                   for rung in result.rungs)}
    elif isinstance(result, Comparison):
        known = {"looks": lambda: (look.model_dump() for look in result.looks),
                 "dimensions": lambda: (dimension.model_dump() for dimension in result.dimensions)}
    chosen = name or next(iter(known), "")
    if chosen not in known:
        raise UsageError(f"no table `{name}` here", remedy=f"There are: {', '.join(known) or 'none'}")
    return list(known[chosen]())


def _figures(diagnosis: Diagnosis) -> dict[str, Figure]:
    maps = {f"boundaries {one.title.split(':')[0].lower()}": figures.heatmap(one) for one in figures.heatmaps(diagnosis)}
    held = {
        "ladder": figures.ladder(diagnosis), "positions": figures.positions(diagnosis),
        "context": parts.breakdown(diagnosis, "context"), "kind": parts.breakdown(diagnosis, "kind"), **maps,
        "lags": curves.lags(diagnosis), "components": clouds.components(diagnosis), "channels": clouds.channels(diagnosis),
        "norms": curves.norms(diagnosis),
        "training": parts.learning(diagnosis),
    }
    return {name: figure for name, figure in held.items() if figure is not None}


def _ladder(diagnosis: Diagnosis) -> Iterator[Row]:
    for name, rung, remark in words.rungs(diagnosis):
        if rung is not None:
            low, high = rung.interval or (None, None)
            yield {"rung": name, "length": rung.length, "low": low, "high": high, "k": rung.k, "nll": rung.nll,
                   "coverage": rung.coverage, "rounds": rung.rounds, "remark": remark, **_by_position(rung.joint)}


def _by_position(joint: Sequence[float]) -> Row:
    return {f"joint {i + 1}": value for i, value in enumerate(joint)}


def _findings(diagnosis: Diagnosis) -> Iterator[Row]:
    for found in diagnosis.findings:
        effect = found.acceptance
        yield {"fault": found.fault, "strength": found.strength, "where": ", ".join(found.where), "says": found.says,
               "fix": found.fix.says, "length now": None if effect is None else effect.length_now,
               "length if fixed": None if effect is None else effect.length_if_fixed,
               "gain": None if effect is None else effect.gain}


def _placement(diagnosis: Diagnosis) -> Iterator[Row]:
    for side, name in words.SIDES.items():
        for placed in getattr(diagnosis.placement, side):
            yield {"side": name, **placed.model_dump(include=PLACED), "is": words.place(placed)}


def _channels(diagnosis: Diagnosis) -> Iterator[Row]:
    for slot in diagnosis.views.channels:
        for channel, train, serve in zip(slot.channel, slot.train, slot.serve, strict=True):
            yield {"slot": slot.slot, "channel": channel, "training": train, "serving": serve,
                   "outlier": channel in slot.outliers}


def _components(diagnosis: Diagnosis) -> Iterator[Row]:
    for slot in diagnosis.views.components:
        for side, name in words.SIDES.items():
            for first, second in getattr(slot, side):
                yield {"slot": slot.slot, "side": name, "first": first, "second": second}


def _tokens(diagnosis: Diagnosis) -> Iterator[Row]:
    for request in diagnosis.views.requests:
        for i, token in enumerate(request.ids):
            yield {"request": request.name, "position": request.first + i, "id": token,
                   "text": request.text[i] if request.text else None, "from": request.status[i],
                   "rejected": request.drafted[i] if request.drafted and request.drafted[i] >= 0 else None,
                   **{f"cosine {slot}": column[i] for slot, column in enumerate(request.cosines)}}


def _breakdown(diagnosis: Diagnosis) -> Iterator[Row]:
    for one in diagnosis.views.breakdowns:
        for part in one.parts:
            low, high = part.interval or (None, None)
            yield {"by": one.by, "rung": one.rung, "part": part.name, "length": part.length, "low": low, "high": high,
                   "first": part.first, "rounds": part.rounds, "sequences": part.sequences}


def _training(diagnosis: Diagnosis) -> Iterator[Row]:
    curve = diagnosis.views.learning
    for i, (step, loss) in enumerate(() if curve is None else zip(curve.step, curve.loss, strict=True)):
        yield {"step": step, "loss": loss, "rate": curve.rate[i] if curve is not None and curve.rate else None}


TABLES: dict[str, Callable[[Diagnosis], Iterator[Row]]] = {
    "acceptance": _ladder, "findings": _findings, "placement": _placement, "breakdown": _breakdown, "tokens": _tokens,
    "channels": _channels, "components": _components, "training": _training,
}


def _short(value: object) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _framed(text: str, height: int = HEIGHT) -> str:
    """A page in a frame that may do nothing: its style stays its own, and the notebook's out of it."""
    return f'<iframe sandbox="" srcdoc="{escape(text)}" width="100%" height="{height}" style="border: 0"></iframe>'
