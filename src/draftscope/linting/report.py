"""What lint found, as typed objects (`draftscope.lint/1`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftscope.findings import Finding

State = Literal["as trained", "differs", "not said", "refused"]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Row(Model):
    """One answer about a consumer.

    Attributes:
        effect: what is in effect; meant: what the checkpoint says that it was trained with, None = it does not.
        key: the config key that decided; empty = none did.
        source: file (and name in it) of the consumer's release.
    """

    question: str
    effect: Any
    meant: Any = None
    key: str = ""
    state: State = "as trained"
    says: str = ""
    source: str = ""


class ConsumerReading(Model):
    """The checkpoint as one consumer has it.

    Attributes:
        asked: the name given; consumer: the facts used.
        loads: whether it loads at all; if not, the rest says what would hold if it did.
        boundaries: None = unknown without the target's depth; [] = none are captured.
        ignored, initial: tensors that are not used, parameters that keep their initial value.
        config: keys that put the checkpoint's own meaning into effect here; `not_possible` where none do.
    """

    consumer: str
    asked: str
    kind: Literal["engine", "trainer"]
    loads: bool
    architecture: str
    boundaries: list[int] | None
    boundaries_from: str
    runners: dict[str, list[int] | None] = Field(default_factory=dict)
    embedding: str
    head: str
    rope: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    ignored: list[str] = Field(default_factory=list)
    initial: list[str] = Field(default_factory=list)
    rows: list[Row] = Field(default_factory=list)
    findings: list[Finding] = Field(default_factory=list)
    config: dict[str, Any] = Field(default_factory=dict)
    unknown: list[str] = Field(default_factory=list)

    @property
    def as_trained(self) -> bool:
        return self.loads and not self.findings


class Lint(Model):
    """The whole answer.

    Attributes:
        findings: of the checkpoint itself, then of the consumer asked for. Where several were asked for, theirs stand with each
            reading, and here only those of the checkpoint.
        unknown: what these inputs leave open, and what would settle it.
        verdict: `undecided` where nothing could be read, the reason being in `next`.
    """

    schema_: Literal["draftscope.lint/1"] = Field(default="draftscope.lint/1", alias="schema")
    verdict: Literal["clean", "undecided"] | None = None
    checkpoint: str = ""
    target: str | None = None
    facts: dict[str, Any] = Field(default_factory=dict)
    findings: list[Finding] = Field(default_factory=list)
    readings: list[ConsumerReading] = Field(default_factory=list)
    unknown: list[str] = Field(default_factory=list)
    next: list[str] = Field(default_factory=list)

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
