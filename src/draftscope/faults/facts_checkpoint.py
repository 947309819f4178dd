"""Figures about a draft's checkpoint: its file, the engine's reading of it, and other readings tried on recorded states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Part = Literal["fc", "layer", "head"]


@dataclass(frozen=True, slots=True)
class Explained:
    """A stage of the engine's draft that departs from the checkpoint's, and the one other reading that reproduces it.

    Attributes:
        key: the reading: `altered WHAT`, `lost PREFIX`, or a switch as `NAME=VALUE`.
        own, other: median relative error under the checkpoint's reading and under this one; of the head the share of drafts
            that differ.
        next_best: the same under the best of the other readings tried, None if this is the only one.
        tried: how many readings were.
    """

    part: Part
    key: str
    own: float
    other: float
    next_best: float | None
    tried: int


@dataclass(frozen=True, slots=True)
class Otherwise:
    """Another reading of the file under which the draft does better on its training states.

    Attributes:
        key: as in `Explained`.
        own, other: -log p of the token to match; own_first, other_first: acceptance at the first position.
        own_length, other_length: accept lengths where there is a walk.
        next_best: what the best of the remaining readings gains, as a share of what this one does.
    """

    key: str
    own: float
    other: float
    own_first: float
    other_first: float
    own_length: float | None
    other_length: float | None
    next_best: float | None
    tried: int


@dataclass(frozen=True, slots=True)
class Learned:
    """The map from draft ids to tokens, learned from one half of the rows and tried on the other.

    Attributes:
        where: `trained` (draft ids against the tokens to match) or `engine` (against the tokens that the engine drafted).
        stored, learned: share of rows of the second half whose token the stored and the learned map give.
        common: the share that always the same token would give.
        rows: of the second half.
        shift: what the learned map is beyond the stored one, if it is one number for all ids.
        inside: share of the learned tokens that the stored map names at all, at whatever draft id.
        ids: the learned map [D], the stored entry where an id was never seen.
    """

    where: Literal["trained", "engine"]
    stored: float
    learned: float
    common: float
    rows: int
    shift: int | None
    inside: float
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Apart:
    """The checkpoint against the one that it was made from (`--source-draft`).

    Attributes:
        differing: tensor -> relative difference, of those that are not equal.
        absent, added: tensors of the source that are not here, and the other way round.
        settings: switch -> (source, here).
        tensors: how many were compared.
        own, source: -log p on training states with each, None where not replayed; lengths beside them.
    """

    differing: dict[str, float]
    absent: tuple[str, ...]
    added: tuple[str, ...]
    settings: dict[str, tuple[object, object]]
    tensors: int
    own: float | None = None
    source: float | None = None
    own_length: float | None = None
    source_length: float | None = None


@dataclass(frozen=True, slots=True)
class OtherTheta:
    """A rotary base that does better on training states than the configured one.

    Attributes:
        own: -log p of the token to match with the configured base; gain: its change with the other, below 0, with its interval,
            paired by sequence.
        parameters: the configured rotary parameters.
    """

    configured: float
    theta: float
    own: float
    gain: float
    interval: tuple[float, float]
    parameters: Mapping[str, Any]


@dataclass(slots=True)
class CheckpointFacts:
    """What there is to know of the checkpoint beyond its names.

    Attributes:
        ones: norms that are exactly 1; norms: how many norms there are.
        drawn: matrices that scatter like an initialiser's; matrices: how many there are.
        grids: matrix -> the format on whose grid its values lie (`fp8`, `int8`, `int4`, `codes`).
        tied: config.json ties the head to the embedding; own_head: the file has a head of its own; whole: it names every token.
        head_rows: share of the head's rows that are the target's, by the ids that they are taken at.
        mask_token: a mask token's id that the embedding has no row for, with the number of rows.
        idle: tensors of the file that the configuration has no use for.
        first_ids: the map names the first ids of the vocabulary alone.
        covered, coverable: share of the training answers' tokens inside the draft's vocabulary, and inside the best of its size.
        engine: stages explained by another reading; otherwise: the file read otherwise does better.
        learned: the map learned, on training states and from what the engine drafted.
        quantised_target: the target's quantisation method, where its config.json says one.
        theta: a rotary base under which the draft does better on its training states.
    """

    ones: tuple[str, ...] = ()
    norms: int = 0
    drawn: tuple[str, ...] = ()
    matrices: int = 0
    grids: dict[str, str] = field(default_factory=dict)
    tied: bool = False
    own_head: bool = True
    whole: bool = False
    head_rows: dict[str, float] = field(default_factory=dict)
    mask_token: tuple[int, int] | None = None
    idle: tuple[str, ...] = ()
    first_ids: bool = False
    covered: float | None = None
    coverable: float | None = None
    engine: list[Explained] = field(default_factory=list)
    otherwise: Otherwise | None = None
    learned: dict[str, Learned] = field(default_factory=dict)
    apart: Apart | None = None
    quantised_target: str = ""
    theta: OtherTheta | None = None

    def explains(self, key: str, part: Part | None = None) -> list[Explained]:
        """Stages explained by readings whose key begins so."""
        return [one for one in self.engine if one.key.startswith(key) and part in (None, one.part)]
