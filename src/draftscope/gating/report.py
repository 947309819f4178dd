"""What a gate keeps of a build (`draftscope.baseline/1`), and what it says of one (`draftscope.gate/1`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftscope.findings import Finding, Placed, Placement, Readout

MOST = 1 << 40
"""A count beyond this is none."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Counted(Model):
    """One sequence: rows that reached each position, rows that passed it (`eagle3.acceptance.Counts`)."""

    name: str
    rounds: int
    reached: list[int]
    passed: list[int]


class Counts(Model):
    """Acceptance on one rung, sequence by sequence. `readout`: the rows that it starts from; `says`: where it comes from."""

    readout: Readout
    says: str
    sequences: list[Counted]


class Observed(Model):
    """A build as it was measured.

    Attributes:
        k: drafted tokens in a step; tree: the shape of trees, empty for chains.
        rungs: by name (`trained`, `served`, `measured`).
    """

    schema_: Literal["draftscope.baseline/1"] = Field("draftscope.baseline/1", alias="schema")
    k: int
    tree: str = ""
    rungs: dict[str, Counts] = Field(default_factory=dict)
    placement: Placement = Field(default_factory=Placement)
    version: str = ""
    inputs: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def counts_that_can_be(self) -> Self:
        """Counts are read back from a file that anyone may have edited."""
        if not 1 <= self.k <= MOST:
            raise ValueError(f"k is {self.k}")
        for name, rung in self.rungs.items():
            for one in rung.sequences:
                fits = len(one.reached) == len(one.passed) == self.k and 0 <= one.rounds < MOST
                if not fits or not all(0 <= p <= r < MOST for r, p in zip(one.reached, one.passed, strict=True)):
                    raise ValueError(f"the counts of {name} cannot be")
        return self


How = Literal["paired", "two samples", "pooled"]


class Tested(Model):
    """One one-sided test: did it fall?

    Attributes:
        of: `position 1` (accepted, given that all before it were) or `accept length`.
        how: paired by sequence; two samples of sequences; or pooled counts, whose steps are taken as independent.
        sequences: what the error is estimated over; None where counts are pooled.
        p: chance of such a fall without one, beyond the margin; adjusted: the same for all tests together (Holm).
        least: the smallest fall that this much data would have shown in four of five cases, None = not known.
    """

    rung: str
    of: str
    how: How
    baseline: float
    current: float
    sequences: int | None
    p: float
    adjusted: float
    least: float | None
    fell: bool


class Slot(Model):
    """A slot that is not what it was: `moved`, `lost` (not placed any more) or `worse` (its error grew, or rows fell out)."""

    side: Literal["train", "serve"]
    slot: int
    what: Literal["moved", "lost", "worse"]
    says: str
    baseline: Placed
    current: Placed | None


class Gate(Model):
    """The answer. `level`: chance of a false alarm over all tests together; `margin`: a fall of accept length that is allowed."""

    schema_: Literal["draftscope.gate/1"] = Field("draftscope.gate/1", alias="schema")
    verdict: Literal["passed", "failed", "undecided"]
    level: float = 0.05
    margin: float = 0.0
    tests: list[Tested] = Field(default_factory=list)
    slots: list[Slot] = Field(default_factory=list)
    compared_slots: int = 0
    findings: list[Finding] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    next: list[str] = Field(default_factory=list)
