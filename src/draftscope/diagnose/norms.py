"""How large the rows of each slot are, by class of token, on either side: a hint that needs no target, never a proof."""

from __future__ import annotations

from torch import Tensor

from draftscope.diagnose.case import Case, Selected
from draftscope.diagnose.finite import states_of
from draftscope.findings import Norms, RowNorms, SlotNorms
from draftscope.scan.accumulators import Counts
from draftscope.scan.accumulators import Norms as Accumulated
from draftscope.scan.tally import classes_of

AT = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
CLASSES = ("first", "sink", "prompt", "answer", "unknown")


def measure_norms(case: Case) -> Norms | None:
    """The norms of both sides' rows; None without states."""
    if case.train is None and case.serve is None:
        return None
    return Norms(at=list(AT), train=_side(case.train), serve=_side(case.serve))


def _side(selected: Selected | None) -> list[SlotNorms]:
    found: dict[tuple[int, str], tuple[Counts, Accumulated]] = {}
    for sequence in () if selected is None else selected.sequences:
        for slot, rows in states_of(sequence):
            for name, chosen in _classes(rows, sequence.answer).items():
                if bool(chosen.any()):
                    counts, norms = found.setdefault((slot, name), (Counts(), Accumulated()))
                    counts.update(rows[chosen])
                    norms.update(rows[chosen])
    slots = sorted({slot for slot, _ in found}, key=lambda slot: (slot < 0, slot))
    return [
        SlotNorms(slot=slot, classes={name: _figures(*found[slot, name]) for name in CLASSES if (slot, name) in found})  # type: ignore[misc]
        for slot in slots
    ]


def _classes(rows: Tensor, answer: Tensor | None) -> dict[str, Tensor]:
    """By class which rows [T]."""
    first, sink, answered, other = classes_of(rows, None if answer is None else answer[: len(rows)])
    return {"first": first, "sink": sink, "answer": answered, "unknown" if answer is None else "prompt": other}


def _figures(counts: Counts, norms: Accumulated) -> RowNorms:
    seen = counts.result()
    quantiles = [value for q in AT if (value := norms.quantile(q)) is not None]
    if quantiles:
        # The histogram knows the middle of a bin only, the ends are known as they are.
        quantiles[0], quantiles[-1] = float(norms.extremes[0]), float(norms.extremes[1])
    return RowNorms(rows=seen.rows, nonfinite=seen.nonfinite_rows, zero=seen.zero_rows, quantiles=quantiles)
