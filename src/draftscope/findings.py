"""The diagnosis as JSON: typed objects that print, serialise and validate (`draftscope.diagnosis/1`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftscope.showing import Shown
from draftscope.views import Views

NOT_REPLAYED = "the draft was not replayed"
"""How the entry of `next` begins that says why the ladder has no replayed rungs."""

Verdict = Literal["wiring", "runtime", "data", "training", "measurement", "clean", "undecided"]
Strength = Literal["proven", "supported", "suspected"]
STRONGEST_FIRST: dict[Strength, int] = {"proven": 0, "supported": 1, "suspected": 2}
Recovery = Literal["replayed", "bounded", "needs-retraining", "needs-serving"]
Readout = Literal["walk", "engine", "all"]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rung(Model):
    """Acceptance on one rung of the ladder. `length` counts the bonus token; `joint` is unconditional."""

    k: int
    length: float | None
    interval: tuple[float, float] | None = None
    joint: list[float]
    conditional: list[float | None]
    nll: float | None = None
    coverage: float | None = None
    rounds: int
    rows: int
    readout: Readout
    held_out: bool | None = None


class Effect(Model):
    """What a fault costs, by replay (None = not computed).

    `length_if_fixed` has only this fault undone, `left_in` all others undone but this one left in, `all_fixed` the whole
    repair; `gain` = all_fixed - left_in, paired by sequence: the loss by which faults are ranked. `nll_gain` is the same of -log
    p (by how much leaving this one in raises it), which moves where accept length does not.
    """

    k: int
    length_now: float | None
    length_if_fixed: float | None
    interval: tuple[float, float] | None = None
    nll_now: float | None = None
    nll_if_fixed: float | None = None
    left_in: float | None = None
    all_fixed: float | None = None
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    nll_gain: float | None = None
    nll_gain_interval: tuple[float, float] | None = None


class Mended(Model):
    """A step of the repair: replayed acceptance with this fault and all before it undone."""

    fault: str
    where: list[str]
    length: float | None
    nll: float | None


class Evidence(Model):
    """One test: what it would mean, what was expected, what was found."""

    hypothesis: str
    prediction: str
    measurement: str
    result: str
    decides: str
    figures: dict[str, Any] = Field(default_factory=dict)


class Patch(Model):
    """What a fix changes in the draft's checkpoint, whoever reads it.

    Attributes:
        config: keys of config.json, dotted, with their new value; null removes one.
        tensors: by native name, what to do: `remove`, `swap with NAME`, `transpose`, `subtract N` (of a map's entries),
            `from absolute ids`, `from t2d`, `from source` (the checkpoint that it was made from, `--source-draft`).
    """

    config: dict[str, Any] = Field(default_factory=dict)
    tensors: dict[str, str] = Field(default_factory=dict)


class Fix(Model):
    """The change to make, in words and as the configuration of each consumer, in its own convention."""

    says: str
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    patch: Patch | None = None


class Finding(Model):
    """A claim with its evidence."""

    fault: str
    where: list[str]
    says: str
    strength: Strength
    confidence: float | None = None
    recovery: Recovery
    acceptance: Effect | None = None
    evidence: list[Evidence] = Field(default_factory=list)
    fix: Fix
    caveats: list[str] = Field(default_factory=list)


class Placed(Model):
    """What a slot or entry is. `margin` = 1 - err(best) / err(second); unplaced: boundary None.

    `transform` names the reading under which it fits (`none`, `lag`, `scale`, ...), `share` the rows that do, `shares` what all
    rows match, `errors` the plain error under every stream boundary 0..n (null: without bound), `lag_errors` the error at the
    place found against the states of the tokens from two before to two after (lags -2, -1, 0, +1, +2; empty = not measured).
    `mlp`: a branch of the MLP alone.
    """

    slot: int
    label: str
    boundary: int | None
    norm: Literal["pre", "post"] | None
    kind: Literal["stream", "branch", "partial"] | None
    margin: float | None
    error: float | None = None
    lag: int | None = None
    scale: float | None = None
    transform: str = "none"
    share: float | None = None
    shares: dict[str, float] = Field(default_factory=dict)
    candidates: list[int] = Field(default_factory=list)
    errors: list[float | None] = Field(default_factory=list)
    mlp: bool = False
    lag_errors: list[float | None] = Field(default_factory=list)


class Placement(Model):
    train: list[Placed] = Field(default_factory=list)
    serve: list[Placed] = Field(default_factory=list)


class RowNorms(Model):
    """L2 norms of the rows of one slot and class; `quantiles` at `Norms.at`, over finite rows, empty without any."""

    rows: int
    nonfinite: int = 0
    zero: int = 0
    quantiles: list[float] = Field(default_factory=list)


class SlotNorms(Model):
    """One slot's norms by class of rows (slot -1: the last state); a class without rows is left out.

    Classes exclude each other: `first` tokens, `sink`s (ten times the sequence's median), then `prompt` and `answer` rows, or
    `unknown` where the data does not say which they are.
    """

    slot: int
    classes: dict[Literal["first", "sink", "prompt", "answer", "unknown"], RowNorms] = Field(default_factory=dict)


class Norms(Model):
    """How large the states are on both sides, over the rows taken."""

    at: list[float]
    train: list[SlotNorms] = Field(default_factory=list)
    serve: list[SlotNorms] = Field(default_factory=list)


class Ladder(Model):
    trained: Rung | None = None
    reference: Rung | None = None
    served: Rung | None = None
    as_read: Rung | None = None
    measured: Rung | None = None


class Absorbed(Model):
    """The repair of the served states folded into a copy of the draft, and what replay says of it on sequences not fitted on.

    `folder` is None where nothing was written. `length_if_fixed` has the states themselves repaired. `fit` (None where the fold
    is exact): rows, ridge, and the relative error of fc's output before and after. `rounding`: relative error of storing fc in
    `dtype`.
    """

    folder: str | None = None
    says: str
    faults: list[str] = Field(default_factory=list)
    exact: bool | None = None
    why_not_exact: str = ""
    k: int | None = None
    readout: Readout | None = None
    length_before: float | None = None
    length_after: float | None = None
    length_if_fixed: float | None = None
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    sequences: int = 0
    fit: dict[str, float] | None = None
    dtype: str = ""
    rounding: float | None = None
    changed: list[str] = Field(default_factory=list)
    left: list[str] = Field(default_factory=list)
class Applied(Model):
    """What `diagnose --apply` did.

    Attributes:
        folder: the copy; null where nothing was written.
        changes: every change to config.json and tensors.
        left: findings that it does not mend, and why.
        rung: on which the draft was replayed from the checkpoint (`before`) and from the copy (`after`).
    """

    folder: str | None
    changes: list[str] = Field(default_factory=list)
    left: list[str] = Field(default_factory=list)
    rung: str | None = None
    before: Rung | None = None
    after: Rung | None = None
    says: str


class Diagnosis(Model, Shown):
    """The whole answer.

    Attributes:
        verdict: what the first finding is about; `clean` where there is none, `undecided` where too little was handed over.
        findings: ranked, the first is the root cause.
        placement: what every slot and entry is, on both sides.
        norms: how large the states are.
        acceptance: the ladder; a rung without data is null.
        matched: how many rows and requests could be paired, and why others could not.
        power: the smallest effect that so much data would have shown.
        next: what could not be told, and what to hand over for it.
        steps: what was read and done, in order: every cast, crop, drop and re-order.
        provenance: the inputs as they were named, versions, and what the capture claims of itself.
        absorbed: what `diagnose --absorb` did; applied: what `diagnose --apply` did.
    """

    schema_: Literal["draftscope.diagnosis/1"] = Field("draftscope.diagnosis/1", alias="schema")
    verdict: Verdict
    findings: list[Finding] = Field(default_factory=list)
    repair: list[Mended] = Field(default_factory=list, description="the order in which to mend, with what each step brings")
    placement: Placement = Field(default_factory=Placement)
    norms: Norms | None = None
    acceptance: Ladder = Field(default_factory=Ladder)
    matched: dict[str, Any] = Field(default_factory=dict)
    power: dict[str, Any] = Field(default_factory=dict)
    next: list[str] = Field(default_factory=list)
    steps: list[str] = Field(default_factory=list)
    provenance: dict[str, Any] = Field(default_factory=dict)
    explained: dict[str, str] = Field(default_factory=dict)
    """By fault id, asked for with `--explain`: why it was, or was not, named, and where."""
    absorbed: Absorbed | None = None
    applied: Applied | None = None
    views: Views = Field(default_factory=Views, description="what the report draws besides")

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def __str__(self) -> str:
        return self._told()

    def json_text(self) -> str:
        """The contract's JSON, two-space indented."""
        return self.model_dump_json(by_alias=True, indent=2)
