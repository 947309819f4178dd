"""What a pass over states measures, as plain objects: they are made where the files lie, and nothing but torch need be there.

pydantic reads them as parts of the report (`draftscope.inspect/1`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from draftscope.findings import Placed

What = Literal["training data", "capture", "draft checkpoint", "target", "tensors", "conversations", "report"]


class Strict:
    """What pydantic is to do with names that these objects don't have."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(slots=True)
class NonFinite(Strict):
    """NaN and Inf of one entry; `first` is the first sample and row that has one."""

    values: int = 0
    rows: int = 0
    items: int = 0
    first: str = ""
    first_row: int = -1


@dataclass(slots=True)
class Entry(Strict):
    """One entry of a sample or slot of a trace.

    Medians are taken per sequence over rows that are neither sinks nor first tokens, then over sequences; the mean is over
    all rows. Float32 norms, float64 where they overflow.

    Attributes:
        name: `entry i`, `slot i` or `last`, as findings call it.
        token_alone: same token, same vector; None = no repeated token with unlike neighbours.
        token_share: 1 - distance between rows of the same token / distance between rows of unlike tokens, on unit vectors.
        rank: 1 = shallowest, by norm and token share; None = alone, or not ranked.
        embedding_factor, embedding_error: from an embedding row of the target to this entry (needs `--target`).
        text_pre, text_post: share of the next tokens that the target's head gives, the final norm applied first or not.
        rms_post, rms_spread: root mean square of rows divided by the final norm's weights, and how far nine tenths of the
            rows stray from it; 1 and about 0 after that norm.
    """

    name: str
    label: str = ""
    dtypes: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    norm_mean: float | None = None
    norm_median: float | None = None
    norm_first: float | None = None
    norm_by_phase: dict[str, float] = field(default_factory=dict)
    sinks: int = 0
    zero_rows: int = 0
    nonfinite: NonFinite = field(default_factory=NonFinite)
    token_alone: bool | None = None
    token_pairs: int = 0
    token_share: float | None = None
    rank: int | None = None
    embedding_factor: float | None = None
    embedding_error: float | None = None
    text_pre: float | None = None
    text_post: float | None = None
    rms_post: float | None = None
    rms_spread: float | None = None
    placed: Placed | None = None
    inferred: str = ""


@dataclass(slots=True)
class Skip(Strict):
    path: str
    why: str
    row: int = -1
    cause: str = "foreign"


@dataclass(slots=True)
class Group(Strict):
    """Files passed over for one kind of reason."""

    cause: str
    files: int
    examples: list[Skip] = field(default_factory=list)


@dataclass(slots=True)
class Inspected(Strict):
    """One path.

    Attributes:
        chosen: why this format.
        files: how many there are; `read` of them had their states read.
        claims: what the files say about themselves, never believed.
        widths: number of items by shape of a row (`4 x 7168`).
        facts: what only this kind has (a checkpoint's configuration, a capture's acceptance).
    """

    path: str
    what: What
    format: str = ""
    chosen: str = ""
    files: int = 0
    items: int = 0
    read: int = 0
    tokens: int = 0
    answer_tokens: int | None = None
    masked: int = 0
    empty_masks: int = 0
    full_masks: int = 0
    widths: dict[str, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    skipped: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
