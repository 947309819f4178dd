"""What the exercise gave, as typed objects (`draftscope.drill/1`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftscope.findings import Strength, Verdict

CaseKind = Literal["single", "other strength", "pair", "clean"]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Planted(Model):
    """A fault that was put in: its id and variant, or what was done where it is none of its variants."""

    fault: str
    variant: str


class Named(Model):
    """A finding: `right` = its fault is among those planted, or those that these include; `loss` = what it costs (`gain`)."""

    fault: str
    strength: Strength
    right: bool
    where: list[str] = Field(default_factory=list)
    loss: float | None = None


class Outcome(Model):
    """One diagnosis of one case.

    Attributes:
        key: the case's name within its pair.
        pair: the target and draft that it was made on.
        tokens: the most rows that the diagnosis was given of each side, None = all; rows: how many it took.
        setting: of clean runs, how they differ from the plain one.
        first_right: the first finding is a planted fault's; of a clean run, nothing was found.
        both: every planted fault was found.
        wrong_proven: faults called proven that nobody planted.
        length_now, length_if_fixed: of the first finding.
        said: where nothing was found, why not; error: where the case crashed, with what.
    """

    key: str
    pair: str
    kind: CaseKind
    planted: list[Planted] = Field(default_factory=list)
    setting: str = ""
    tokens: int | None = None
    rows: dict[str, int] = Field(default_factory=dict)
    verdict: Verdict | None = None
    findings: list[Named] = Field(default_factory=list)
    first_right: bool = False
    both: bool = False
    wrong_proven: list[str] = Field(default_factory=list)
    length_now: float | None = None
    length_if_fixed: float | None = None
    said: list[str] = Field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


class Share(Model):
    """Hits of so many, with Wilson's interval at 95 %."""

    hits: int
    of: int
    share: float | None
    interval: tuple[float, float] | None


class Score(Model):
    """Outcomes of one class, of all its variants, at the most tokens given.

    Attributes:
        fault: a fault's id, `pairs of faults` or `all singles`.
        first: named first; proven: proven among those; any: named at all; both: of pairs, every planted fault was found.
        wrong_proven: cases in which something that nobody planted was called proven.
        by_tokens: named first, by the rows given (`all` = no limit).
        misses: key: what was said in its place.
    """

    fault: str
    cases: int
    errors: int
    first: Share
    any: Share
    proven: int
    both: Share | None = None
    wrong_proven: int
    by_tokens: dict[str, Share] = Field(default_factory=dict)
    misses: list[str] = Field(default_factory=list)


class Clean(Model):
    """Healthy runs: how many gave a false alarm, and how many could not be decided.

    Attributes:
        alarms: runs in which a fault was named; proven: those in which it was called proven; by_tokens: alarms by rows given.
        told: key: what was named.
    """

    cases: int
    errors: int
    alarms: Share
    proven: int
    undecided: int
    by_tokens: dict[str, Share] = Field(default_factory=dict)
    told: list[str] = Field(default_factory=list)


class PairScore(Model):
    """What was run on one pair of target and draft, and how long a case took."""

    pair: str
    cases: int
    first: Share
    alarms: Share
    seconds_per_case: float | None


class Drill(Model):
    """The whole answer. `cases` may be left empty to keep the file small; `next` says why nothing was run."""

    schema_: Literal["draftscope.drill/1"] = Field("draftscope.drill/1", alias="schema")
    version: str = ""
    pairs: list[PairScore] = Field(default_factory=list)
    scores: list[Score] = Field(default_factory=list)
    clean: Clean | None = None
    cases: list[Outcome] = Field(default_factory=list)
    next: list[str] = Field(default_factory=list)
