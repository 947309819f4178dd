"""How often a finding of this kind was right where the rules had not been tuned: counts from the exercise, kept as data.

`confidence.json` beside this module is written by `draftscope drill --calibrate`; what it does not hold has no confidence.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftscope.findings import Strength

FILE = Path(__file__).with_name("confidence.json")
FEWEST = 10
"""Findings below which a share says nothing."""
EDGES = (128, 512, 2048)
"""Rows of the smaller side that part one amount of data from the next."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Cell(Model):
    """Findings of one fault and strength: how many were right.

    Attributes:
        rows: which amount of data, as the number of `EDGES` below it; None = all, each case at its most.
        confidence: (right + 1/2) / (of + 1); interval: Wilson's at 95 %.
    """

    fault: str
    strength: Strength
    rows: int | None
    right: int
    of: int
    confidence: float
    interval: tuple[float, float]


class Calibration(Model):
    """The table, and what it rests on: pairs, cases and the version of the rules."""

    schema_: Literal["draftscope.confidence/1"] = Field("draftscope.confidence/1", alias="schema")
    version: str = ""
    pairs: list[str] = Field(default_factory=list)
    cases: int = 0
    healthy: int = 0
    cells: list[Cell] = Field(default_factory=list)


def amount(rows: int) -> int:
    """Which amount of data so many rows are."""
    return sum(rows >= edge for edge in EDGES)


@cache
def calibration() -> Calibration:
    """The table that the package carries."""
    return Calibration.model_validate_json(FILE.read_text(encoding="utf-8"))


def confidence_of(fault: str, strength: Strength, rows: int, table: Calibration | None = None) -> Cell | None:
    """The cell for a finding: of its own amount of data where that holds enough, else of all; None where neither does."""
    cells = {c.rows: c for c in (table or calibration()).cells if (c.fault, c.strength) == (fault, strength)}
    for key in (amount(rows), None):
        if key in cells and cells[key].of >= FEWEST:
            return cells[key]
    return None
