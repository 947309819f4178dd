"""What inspect found, as typed objects (`draftscope.inspect/1`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftscope.findings import Finding, Placed
from draftscope.inspecting.figures import Entry, Group, Inspected, NonFinite, Skip


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Feed(Model):
    """What a trainer would do with one entry."""

    entry: int
    label: str
    inferred: str
    goes_to: str
    warns: list[str] = Field(default_factory=list)


class AsTrainer(Model):
    """A training file as a named trainer reads it.

    Attributes:
        alignment: which mask supervises a row, what is shifted against what.
        sources: where in the trainer's code the facts used here were read.
    """

    trainer: str
    path: str
    reads: str
    feeds: list[Feed] = Field(default_factory=list)
    alignment: list[str] = Field(default_factory=list)
    silently: list[str] = Field(default_factory=list)
    sources: list[str] = Field(default_factory=list)
    refuses: list[str] = Field(default_factory=list)


class Inspection(Model):
    """The whole answer. `verdict` is `undecided` where nothing could be read, the reason being in `next`."""

    schema_: Literal["draftscope.inspect/1"] = Field(default="draftscope.inspect/1", alias="schema")
    verdict: Literal["clean", "undecided"] | None = None
    findings: list[Finding] = Field(default_factory=list)
    inspected: list[Inspected] = Field(default_factory=list)
    norms: list[str] = Field(default_factory=list)
    as_trainer: list[AsTrainer] = Field(default_factory=list)
    next: list[str] = Field(default_factory=list)

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


# The figures name `Placed` without importing it.
Inspection.model_rebuild(_types_namespace={"Placed": Placed})

__all__ = ["AsTrainer", "Entry", "Feed", "Group", "Inspected", "Inspection", "NonFinite", "Skip"]
