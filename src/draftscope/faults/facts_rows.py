"""What was measured row by row: what rows hold that are not what their slot should hold there, and what a side says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from draftscope.compare.within import Repeat

Cause = Literal["req-mix", "graph-capture", "capture-alias", "parallel-shard", "schema-width"]

RIGHT, ZEROS, PADDING, OTHER_PLACE = "right", "zeros", "padding", "another place"
SAME_SEQUENCE, OTHER_SEQUENCE, UNKNOWN = "same sequence", "another sequence", "unknown"


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of one slot by what they hold, where placement found them not to be of one kind. First and infinite rows are left out.

    Attributes:
        wanted: the boundary that the slot should hold.
        kinds: rows by kind: `right`, `zeros`, `padding` (one vector under unlike tokens), `another place` (of the same token),
            `same sequence` and `another sequence` (the wanted place of another row), `unknown`. `verify`: of them, those of
            verify steps; empty where the phases of rows are not known.
        places: rows of another place, by its name; `later`: those that lie behind the wanted one.
        offsets: rows of the same sequence, by row found less own row.
        steps: rows of verify steps whose step before had an accepted row in that place; last_step: those that hold its state.
        beside: sequences in which, within one phase, right rows and rows of another place alternate; whole: sequences all of
            whose rows hold another place, while other sequences are right.
        shard: n, where rows behind the first n-th of every prefill are zeros, or n-ths of it stand in another order.
        example: a row in question, in words.
    """

    slot: int
    wanted: int
    kinds: Mapping[str, int]
    verify: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    later: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)
    steps: int = 0
    last_step: int = 0
    beside: int = 0
    whole: int = 0
    shard: int | None = None
    example: str = ""

    @property
    def rows(self) -> int:
        return sum(self.kinds.values())

    def share(self, *kinds: str) -> float:
        return sum(self.kinds.get(kind, 0) for kind in kinds) / max(self.rows, 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Channels of a slot in equal blocks, one of n ranks each: which block of the right state each holds.

    Attributes:
        holds: per block the block of the right state, or None for zeros. Without a target only repetitions and zeros are known,
            and the first block counts as its own.
        error: median relative error of the blocks that are no zeros; None without a target.
    """

    slot: int
    ranks: int
    holds: tuple[int | None, ...]
    rows: int
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A slot short of what some tensor-parallel ranks gave to its layer's MLP: taken before their outputs were summed.

    Attributes:
        wanted: the boundary that the slot should hold. rank: whose part of `ranks` is there, counted from 0.
        rows: looked at. plain: median relative error against the whole stream; error: against that rank's part of it.
    """

    slot: int
    wanted: int
    ranks: int
    rank: int
    rows: int
    plain: float
    error: float


@dataclass(frozen=True, slots=True)
class Counted:
    """Files that hold another number of state rows than of tokens.

    Attributes:
        files: (name, rows, tokens) of each; of: how many were looked at.
        turned: those whose second axis has as many entries as there are tokens.
    """

    files: tuple[tuple[str, int, int], ...]
    of: int
    turned: int = 0

    def fewer(self) -> list[tuple[str, int, int]]:
        """Files with fewer rows than tokens, unless it is their axes that are turned."""
        return [] if self.turned else [file for file in self.files if file[1] < file[2]]

    def fraction(self) -> int | None:
        """n, where every file holds an n-th of its tokens' rows."""
        for n in (2, 4, 8, 16):
            alike = all(rows in (tokens // n, -(-tokens // n)) for _, rows, tokens in self.files)
            if alike and not self.turned and len(self.files) == self.of:
                return n
        return None

    def padded(self) -> int | None:
        """The bucket, a power of two of at least 8, to a multiple of which every file has more rows than tokens."""
        if not self.files or any(rows <= tokens for _, rows, tokens in self.files):
            return None
        for bucket in (256, 128, 64, 32, 16, 8):
            if all(rows % bucket == 0 and rows - tokens <= bucket for _, rows, tokens in self.files):
                return bucket
        return None


@dataclass(frozen=True, slots=True)
class Unfit:
    """Values of a slot that are not finite.

    Attributes:
        nan, inf: values; channels: of `of` that hold one somewhere.
        since, last: least and largest row number in a sequence; sequences: with such rows, of `longer` that reach row `since`.
    """

    nan: int
    inf: int
    channels: int
    of: int
    since: int
    last: int
    sequences: int
    longer: int


@dataclass(slots=True)
class RowFacts:
    """One side.

    Attributes:
        slots: of the slots whose rows are of several kinds.
        blocks: of the slots whose channels are.
        shares: slots that hold one rank's part of a sum.
        identical: slots that hold one and the same state, bit for bit, in nine rows of ten.
        places: boundary that each slot was placed at, None = unplaced or not placed.
        interleaved: median relative error of the slots read with axes [Ht, S] in place of [S, Ht]; None = not tried.
        repeats: by slot, rows that unlike tokens share bit for bit.
        rows, verify_rows: rows looked at for repeats, and those of verify steps.
        prefix_rows, prefix_differ: rows of two requests with the same tokens so far, and those whose states differ.
        chained, broken: rows whose `verified_ids` could be held against the next token, and those that differ.
        counted: files whose rows do not fit their tokens.
        width: channels of a slot there, and as many as the draft or target has, where the two differ.
        unfit: by slot (-1: the last state) the values that are not finite, in the sequences taken.
    """

    slots: list[SlotRows] = field(default_factory=list)
    blocks: list[Blocks] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    identical: tuple[int, ...] = ()
    places: tuple[int | None, ...] = ()
    interleaved: float | None = None
    repeats: list[Repeat] = field(default_factory=list)
    rows: int = 0
    verify_rows: int = 0
    prefix_rows: int = 0
    prefix_differ: int = 0
    prefix_example: str = ""
    chained: int = 0
    broken: int = 0
    broken_example: str = ""
    counted: Counted | None = None
    width: tuple[int, int] | None = None
    unfit: dict[int, Unfit] = field(default_factory=dict)
