"""What was measured, as the faults see it: figures only, each taken once, each from the user's own files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from draftscope.eagle3.replayed import GATE_SHARE, Gate
from draftscope.engines.counted import Counters
from draftscope.faults.facts_checkpoint import CheckpointFacts
from draftscope.faults.facts_data import DataFacts
from draftscope.faults.facts_rows import RowFacts
from draftscope.faults.facts_runtime import GivenFacts, LengthFacts, RuntimeFacts, SamplerFacts, ShapeFacts
from draftscope.faults.facts_slots import SlotFacts
from draftscope.faults.facts_unpaired import UnpairedFacts
from draftscope.findings import Placed

SideName = Literal["train", "serve"]
TRAINED = "the training states"
CONFIGURED = "the checkpoint's configuration"
LEARNED = 0.5
"""-log p on training states over that under token frequencies, from which a draft looks as if it had learned nothing."""
CLEARLY = 0.3
"""Fall of -log p from which another reading of the checkpoint is the one that it was trained with."""
TURNED = 0.1
"""Disagreement of cosines, in units of their spread, up to which an orthogonal map explains them."""
SAME, OTHER = 0.03, 0.2
"""Relative error of a stage reproduced within rounding (bf16 included), and of one computed with other weights or input."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """NaN or Inf in one slot: how many rows of how many, and where first (slot -1: the last state)."""

    slot: int
    rows: int
    of: int
    first: str
    first_row: int


@dataclass(slots=True)
class SideFacts:
    """One side, training or serving.

    Attributes:
        slots: what each slot is, as placed; empty when nothing could be placed.
        proof: how it was placed: by a `sweep` of the target over the same tokens, by `pairs` with training rows of the same text,
            by `parts` (boundary 0 only), or not.
        embedding: per slot, whether it equals the token's embedding row up to one factor; None = not tested.
        detail: of the slots, beyond their places.
        masked: samples whose loss mask is known; empty: those of them without one answer token.
    """

    name: SideName
    sequences: int
    tokens: int
    slots: list[Placed] = field(default_factory=list)
    proof: Literal["sweep", "pairs", "parts", "none"] = "none"
    nonfinite: list[NonFinite] = field(default_factory=list)
    embedding: list[bool | None] = field(default_factory=list)
    last: Placed | None = None
    detail: SlotFacts = field(default_factory=SlotFacts)
    masked: int = 0
    empty: int = 0
    answer_tokens: int = 0

    def where(self, slot: int) -> str:
        """The slot's name in findings."""
        name = f"slot {slot}" if slot >= 0 else "last"
        return name if self.name == "serve" else f"train:{name}"


@dataclass(slots=True)
class MapFacts:
    """The draft's vocabulary map as it stands in the checkpoint.

    Attributes:
        stored: `offset` (every stack's convention), `absolute`, `zero`, `missing`, `contradicts` (neither meaning agrees with
            t2d), or `none needed` (D == V).
        why: the figures that decide it.
        rebuilt: whether the map can be rebuilt from `t2d`.
    """

    draft_vocab: int
    vocab: int
    stored: Literal["offset", "absolute", "zero", "missing", "contradicts", "none needed"]
    why: str
    rebuilt: bool


@dataclass(slots=True)
class StageFacts:
    """Where the engine's draft departs from the checkpoint's, stage by stage (None = not recorded).

    Relative errors are medians over rows; agreements are shares of recorded first drafts.

    Attributes:
        fc_error_reference: of `fc` over the states that it should have received, where those recorded do not explain its output.
    """

    fc_error: float | None = None
    fc_error_reference: float | None = None
    layer_error: float | None = None
    head_agreement: dict[str, float] = field(default_factory=dict)
    feedback_error: dict[str, float] = field(default_factory=dict)
    steps: int = 0


@dataclass(slots=True)
class GateFacts:
    """Share of the engine's own steps in which replay gives the recorded accepted count."""

    share: float
    steps: int
    near_ties: int
    left_out: int

    @classmethod
    def of(cls, gate: Gate) -> Self:
        """The figures of a gate that rules read."""
        return cls(gate.share, gate.steps, len(gate.near_ties), gate.left_out)

    @property
    def passed(self) -> bool:
        return self.share >= GATE_SHARE


@dataclass(slots=True)
class RungFacts:
    """A rung's figures that rules read."""

    length: float | None
    joint: list[float]
    nll: float | None
    coverage: float | None
    rows: int


@dataclass(frozen=True, slots=True)
class EmbeddingFacts:
    """The checkpoint's own embedding, where it is not the target's, and what replay makes of either.

    Attributes:
        same_rows: share of its rows that are the target's.
        rung: the rung on which both were tried.
        own, target: -log p of the token to match with the checkpoint's own and with the target's.
        own_length, target_length: accept lengths.
        turned: how far the cosines between its rows are from those of the target's (`transforms.gram_error`): 0 under an
            orthogonal map.
    """

    same_rows: float
    rung: str
    own: float | None
    target: float | None
    own_length: float | None
    target_length: float | None
    turned: float | None = None


@dataclass(frozen=True, slots=True)
class TurnedFacts:
    """A switch of the configuration whose other value does better on the training states.

    Attributes:
        name, value: the switch and the value that does better.
        own, turned: -log p of the token to match; own_length, turned_length: accept lengths.
        next_best: what the next best of the other readings tried gains there, as a share of what this switch does.
    """

    name: str
    value: bool
    own: float
    turned: float
    own_length: float | None
    turned_length: float | None
    next_best: float | None = None


@dataclass(frozen=True, slots=True)
class LiveFacts:
    """What a running server's counts on training prompts and fresh ones separate (`diagnose.live.separated`)."""

    separates: str
    says: str


@dataclass(slots=True)
class Measurements:
    """Everything the faults may look at.

    Attributes:
        expected: boundaries that the checkpoint's own configuration names, or None.
        reference: what the draft's slots have to be: the training side as placed, else as `expected` says.
        shapes: slots by side (`train`, `serve`, and `draft` for what the checkpoint takes); other_shapes: sequences by
            `SLOTSxWIDTH` that differ from the first of their side.
        departed: which side departs from the reference where the two differ.
        missing: tensors the checkpoint lacks (native names).
        poisoned: its tensors that hold NaN or Inf, with how many such values.
        feedback: which state the checkpoint was trained to receive at later steps.
        changed: switches that the consumer has in effect otherwise than the checkpoint means: name -> (checkpoint, consumer).
        gate: as read; gate_with: the same with a known runtime fault added to the reading, by `key=value`.
        in_sample: the draft on states that it learned from, where the rung `trained` is of held-out ones and low.
        unigram_nll: -log p of the training answers' tokens under their own frequencies.
        counters: acceptance as the engine tells it; recorded_steps: verify steps of the capture that `measured` is of.
        runtime: the engine's own rounds run again under known wrong runtimes.
        shape: where the engine's counts depart from the replay's as read; given: the tokens that the draft was given.
        lengths: acceptance by context, against the lengths that were trained on.
        sampler: what became of the drafts of sampled requests.
        data: texts, masks, training logs and what else tells of data and training.
        unpaired: what statistics of other texts say, where no token is shared.
        rows: by side, what was measured row by row.
    """

    train: SideFacts | None = None
    serve: SideFacts | None = None
    expected: tuple[int, ...] | None = None
    reference: tuple[Placed, ...] | None = None
    reference_from: str = ""
    departed: SideName = "serve"
    layers: int | None = None
    model_type: str | None = None
    shapes: dict[str, int] = field(default_factory=dict)
    other_shapes: dict[str, dict[str, int]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    poisoned: dict[str, int] = field(default_factory=dict)
    feedback: Literal["pre", "post"] = "pre"
    vocabulary: MapFacts | None = None
    stages: StageFacts | None = None
    gate: GateFacts | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    gate_with: dict[str, GateFacts] = field(default_factory=dict)
    runtime: RuntimeFacts | None = None
    shape: ShapeFacts | None = None
    given: GivenFacts | None = None
    lengths: LengthFacts | None = None
    sampler: SamplerFacts | None = None
    rungs: dict[str, RungFacts] = field(default_factory=dict)
    in_sample: RungFacts | None = None
    unigram_nll: float | None = None
    unpaired: UnpairedFacts | None = None
    consumer: str | None = None
    counters: Counters | None = None
    live: LiveFacts | None = None
    embedding: EmbeddingFacts | None = None
    turned: TurnedFacts | None = None
    recorded_steps: int = 0
    rows: dict[SideName, RowFacts] = field(default_factory=dict)
    checkpoint: CheckpointFacts | None = None
    data: DataFacts = field(default_factory=DataFacts)

    @property
    def wanted_by(self) -> str:
        """Who says what the slots should hold, in words that the evidence carries."""
        return "the draft was trained on" if self.reference_from == TRAINED else "the draft's configuration says"

    def sides(self) -> list[SideFacts]:
        """The sides at hand, training first."""
        return [side for side in (self.train, self.serve) if side is not None]
