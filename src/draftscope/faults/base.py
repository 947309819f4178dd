"""A fault: a named cause. One file each says what it is, how it is recognised, made, undone and fixed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.reading import D2T
from draftscope.faults.changes import Change
from draftscope.faults.measurements import Measurements, SideName
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Recovery, Strength, Verdict
from draftscope.target.model import Target


@dataclass(frozen=True, slots=True)
class Undo:
    """What a replay changes so that the fault is gone.

    Attributes:
        reference: serving slots to be replaced by the target's own states at the reference boundary (needs the target).
        order: slot i takes recorded slot order[i]; () = as recorded.
        states: changes of served slots, by rows of a phase and by channels.
        settings: the checkpoint's own switches in place of those that the engine has in effect.
        d2t, feedback: how the draft is read instead; None = unchanged.
        switches: of the draft's configuration, set so.
        target_embedding: the target's embedding in place of the checkpoint's own.
        loading: the checkpoint's tensors as they are, in place of what the engine's loader made of them.
        altered: of the checkpoint's tensors, as `eagle3.altered` names it.
        ids: target id of every draft id; () = unchanged.
        given: the draft is given the text's next token with every row, whatever was recorded.
        habits: fields of `eagle3.reading.Runtime` that are right again; unset: settings that are the checkpoint's again.
    """

    reference: frozenset[int] = frozenset()
    order: tuple[int, ...] = ()
    states: tuple[Change, ...] = ()
    settings: bool = False
    d2t: D2T | Literal["rebuilt"] | None = None
    feedback: Literal["pre", "post"] | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)
    target_embedding: bool = False
    loading: bool = False
    altered: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    given: bool = False
    habits: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(slots=True)
class Suspicion:
    """A fault that the measurements speak for, before its cost is known.

    Attributes:
        strength: `proven` where the evidence alone proves it (states, the file itself, the gate); replay then says what it costs.
        undo: None where replay cannot undo it; `recovery` then says what would.
        runtime: seen only in the engine's behaviour.
        recording: it is the capture that is wrong, not what it captured.
    """

    fault: str
    side: SideName
    where: list[str]
    says: str
    strength: Strength
    evidence: list[Evidence]
    fix: Fix
    recovery: Recovery
    undo: Undo | None = None
    runtime: bool = False
    recording: bool = False
    caveats: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one variant does and leaves behind: its row in docs/faults.md.

    Attributes:
        says: what goes wrong, and where it acts (engine, loader, capture, data writer, trainer).
        input: what has to be handed over for it to be seen, as options of `diagnose`, and what these must hold.
        shows: what is measured there, and how it differs from health.
        rung: the first rung of the ladder that falls; "none" where acceptance never shows it.
    """

    says: str
    input: str
    shows: str
    rung: Literal["trained", "reference", "served", "as read", "measured", "none"]


@dataclass(frozen=True, slots=True)
class Page:
    """What docs/ and `diagnose --explain` say of a fault.

    Attributes:
        symptom: what its owner sees first.
        traces: by variant.
        lookalikes: by fault id, the measurement that separates the two.
        unseen: kinds of this fault that leave no trace in what can be handed over or cannot be made without a GPU, and why.
        reports: public ones (`sglang PR #25454`).
    """

    symptom: str
    traces: Mapping[str, Trace]
    lookalikes: Mapping[str, str]
    unseen: Mapping[str, str] = field(default_factory=dict)
    reports: tuple[str, ...] = ()


class Fault(ABC):
    """A named cause.

    Class attributes:
        id: the catalogue's class name in lower case.
        verdict: the verdict it leads to when it comes first (training files alone: `data`; engine only: `runtime`).
        variants: names that `make` understands, the plainest first; those that begin with "train" act on the training side.
        page: what is said of it outside of a diagnosis.
        includes: faults whose made data may rightly show this one as well.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    verdict: ClassVar[Verdict]
    variants: ClassVar[tuple[str, ...]]
    page: ClassVar[Page | None] = None
    includes: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def recognise(self, m: Measurements) -> list[Suspicion]:
        """Suspicions that the measurements support; none on a healthy pair."""

    @abstractmethod
    def make(self, plant: Plant, variant: str) -> Plant:
        """The set-up with this fault planted; ValueError for an unknown variant."""

    def beyond(self, variant: str, target: Target, draft: DraftConfig) -> str:
        """Why this variant cannot befall such a pair; empty where it can."""
        return ""

    def why_not(self, m: Measurements) -> str:
        """Where nothing was recognised: what was measured against what this fault would have shown, or what to hand over.

        One or two sentences with their figures; `diagnose --explain` prints them.
        """
        return "nothing that it would leave behind was measured"

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        """The set-up with the fix applied, slots at the boundaries that the diagnosis found; None where it takes retraining."""
        return None


def of_side(side: SideName) -> str:
    """The side in words."""
    return "the served states" if side == "serve" else "the training states"


def verdict_of(fault: Fault, suspicion: Suspicion) -> Verdict:
    """Where the first finding leads (design, section 6)."""
    if suspicion.recording:
        return "measurement"
    if suspicion.runtime:
        return "runtime"
    if suspicion.side == "train" and fault.verdict == "wiring":
        return "data"
    return fault.verdict
