"""Why a fault was, or was not, named in a diagnosis."""

from __future__ import annotations

from draftscope.faults import fault
from draftscope.faults.measurements import Measurements
from draftscope.findings import Diagnosis, Finding


def explain(m: Measurements, diagnosis: Diagnosis, name: str) -> str:
    """The place of a fault in the diagnosis, or what spoke against it, in a few sentences.

    Raises:
        KeyError: no fault of that name.
    """
    asked = fault(name)
    for rank, finding in enumerate(diagnosis.findings, 1):
        if finding.fault == name:
            first = diagnosis.findings[0]
            return f"Named, {_ordinal(rank)} of {len(diagnosis.findings)}: {finding.says}." + (
                "" if rank == 1 else f" {_behind(finding, first)}")
    text = f"Not named: {asked.why_not(m)}."
    here = [f"{other}: {how}" for other, how in (asked.page.lookalikes if asked.page else {}).items()
            if any(f.fault == other for f in diagnosis.findings)]
    return text + (f" Told from what was named: {'; '.join(here)}." if here else "")


def _behind(finding: Finding, first: Finding) -> str:
    if finding.strength != first.strength:
        return f"{first.fault} comes first: it is {first.strength}, this one {finding.strength}."
    mine, other = (None if f.acceptance is None else f.acceptance.gain for f in (finding, first))
    if mine is None or other is None:
        return f"{first.fault} comes first: what this one costs could not be replayed, or {first.fault} voids other figures."
    return f"{first.fault} comes first: left in alone it costs {other:.2f} of accept length, this one {mine:.2f}."


def _ordinal(rank: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(rank, f"{rank}th")
