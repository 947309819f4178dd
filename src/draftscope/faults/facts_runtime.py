"""The engine's own draft steps, what it drafted and from which states, held against replays under known wrong runtimes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftscope.faults.measurements import GateFacts

NEARLY = 0.97
"""Share of states, or of drafted ids, from which a replay under some runtime is the engine's: the rest are near-ties."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How like the engine's recorded rounds those of a replay are.

    A state is compared while the tokens drafted before it are the engine's own; it is alike where its relative error is below
    `measurements.SAME`.

    Attributes:
        rounds: compared; counts: share of them with the recorded accepted count, None where none can be told.
        ids: share of drafted tokens that are the recorded ones, up to and including each round's first other one; None = not
            recorded. states: share of states that are alike; None = not recorded.
        errors: [K] median relative error of the states of each draft position (NaN = none compared); off: [K] share not alike.
        departs: share of states that are off by more than rounding could make of them; None = no states recorded.
    """

    rounds: int
    counts: float | None
    ids: float | None
    states: float | None
    errors: tuple[float, ...] = ()
    off: tuple[float, ...] = ()
    departs: float | None = None

    @property
    def share(self) -> float:
        """By the best evidence there is."""
        return next((x for x in (self.states, self.ids, self.counts) if x is not None), 0.0)

    @property
    def told_by(self) -> str:
        """That evidence, in words."""
        if self.states is not None:
            return "recorded draft states"
        return "recorded drafts" if self.ids is not None else "recorded counts"


@dataclass(frozen=True, slots=True)
class Tried:
    """One wrong runtime, or two at once, added to the reading.

    Attributes:
        names: `key=value` as in the table of trials; faults: the fault of each; says: each in words ("the engine ...").
        undone: fields of `Runtime` and settings that each sets, for undoing it.
        runtime, settings: those of all of them with their values: the reading with them is the engine's.
    """

    names: tuple[str, ...]
    faults: tuple[str, ...]
    says: tuple[str, ...]
    undone: tuple[tuple[str, ...], ...]
    like: Likeness
    gate: GateFacts | None = None
    runtime: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(slots=True)
class RuntimeFacts:
    """What trying the known wrong runtimes gave.

    Attributes:
        as_read: without any of them.
        tried: how many were.
        drawn: the engine drew its drafts from the draft's distribution, so that counts and ids of a replay are others by
            chance and states alone are compared, along the recorded drafts.
        explains: those under which the engine's rounds come out, equally well, the plainest first.
    """

    as_read: Likeness
    tried: int = 0
    drawn: bool = False
    explains: list[Tried] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether the engine's rounds come out as read, or under a wrong runtime that is known."""
        return bool(self.explains) or self.as_read.share >= NEARLY


DECIDED = 10.0
"""Log-likelihood by which one explanation of what was drawn has to be better than another."""


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """What became of the drafts of requests that were sampled.

    Attributes:
        temperature: as the capture claims; doubted: another at which the text is clearly likelier, so that nothing follows.
        drafts: that the target was asked about; best: share that were the draft's own argmax; kept: share that stood.
        expected_rejection, expected_equality: share that would have stood under speculative sampling, and where a draft has to
            equal what the target draws.
        for_rejection, for_equality: log-likelihood of what stood under either rule.
        impossible: drafts that speculative sampling keeps for sure, and that did not stand.
        overlap: mean of the sum of min(p, q), what speculative sampling of drawn drafts keeps.
        draft_temperature: at which the drafts are clearly likelier as draws, else the claimed one; temperature_gain: by how
            much in log-likelihood; over_chance: by how much the drafts are likelier there than if all draft ids were alike.
        length, length_rejection, length_overlap: accept lengths by position from what stood, from `expected_rejection`'s
            chances, and from `overlap`'s.
    """

    temperature: float
    doubted: float | None
    drafts: int
    best: float
    kept: float
    expected_rejection: float
    expected_equality: float
    for_rejection: float
    for_equality: float
    impossible: int
    overlap: float
    draft_temperature: float
    temperature_gain: float
    over_chance: float
    length: float
    length_rejection: float
    length_overlap: float

    @property
    def drawn_otherwise(self) -> bool:
        """Whether the drafts are draws of this draft's, at another temperature than the request's."""
        return self.draft_temperature != self.temperature and self.over_chance > DECIDED


@dataclass(frozen=True, slots=True)
class GivenFacts:
    """The tokens that the draft was given with its rows, as recorded.

    Attributes:
        rows: compared; other: of them given another token than the text's next.
        prompt_last: those of these inside the prompt that were given the prompt's last token; chunk: the rows that they lie a
            multiple of apart, counted from 1.
    """

    rows: int
    other: int
    prompt_last: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the rounds: how many, share with equal counts, acceptance of the first draft by replay and in the engine."""

    name: str
    rounds: int
    agreed: float | None
    replayed: float | None
    recorded: float | None


@dataclass(frozen=True, slots=True)
class ShapeFacts:
    """Where the engine's counts depart from the replay's.

    Attributes:
        parts: first and later rounds, short and long context.
        replayed, recorded: [K] acceptance at each position given that all before it stood.
    """

    parts: tuple[Part, ...]
    replayed: tuple[float | None, ...]
    recorded: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Recorded rounds that start within a range of positions [start, end): acceptance of the first draft, and accept length."""

    start: int
    end: int
    rounds: int
    first: float
    length: float


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Acceptance by context.

    Attributes:
        trained: rows of the longest training sequence.
        within, beyond: rounds from positions up to it and beyond; None where there is none.
        stretches: all rounds in quarters, by position.
    """

    trained: int
    within: Stretch | None
    beyond: Stretch | None
    stretches: tuple[Stretch, ...]
