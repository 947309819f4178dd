"""Figures of data, templates, training and operation, as the faults see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MarkedBy = Literal["the target's chat template", "what served requests begin and end with", "repeated separators"]


@dataclass(slots=True)
class MaskFacts:
    """Loss masks against the turns that the token ids themselves show. Shares are of samples or tokens as named.

    Attributes:
        marked_by: what the turns were found with.
        samples: with a known mask and at least one answer; turns: answers in them; closed: those that end within the sample.
        offsets: answers by (start, end) of their supervised run against their own; answers without a run are in `bare`.
        moved: answers of samples whose mask is that of their own answers, displaced as a whole, by the displacement; 0 = right.
        skipped: by a displacement towards the end, how many unlike tokens stand last among those that it leaves out.
        open: closed answers supervised up to the token before the closing one.
        bare: answers without one supervised token; bare_before_last: samples of several answers of which the last alone is.
        empty: samples without a supervised token; answerless: those of them without an answer in their tokens; longest: tokens of
            the longest sample; cut: the answerless ones of that length.
        whole: samples supervised throughout; other_share: supervised share of what is neither answer nor marker; header_share: of
            the markers before answers.
        other_sample: samples whose mask is not their own and fits another sample's tokens; of: those whose mask is not their own.
        by: by how many places in the order of the files it has moved, where one number holds for most.
        repeats: samples of several answers; all_turns: those in which each is supervised.
        first_agreement, last_agreement: the target's first choice against supervised answers but the last, and the last.
        generation: as `pipeline.turns.Markers`.
    """

    marked_by: MarkedBy
    samples: int = 0
    turns: int = 0
    closed: int = 0
    open: int = 0
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, int] = field(default_factory=dict)
    bare: int = 0
    bare_before_last: int = 0
    empty: int = 0
    answerless: int = 0
    longest: int = 0
    cut: int = 0
    whole: int = 0
    other_share: float = 0.0
    header_share: float = 0.0
    other_sample: int = 0
    of: int = 0
    by: int | None = None
    repeats: int = 0
    all_turns: int = 0
    first_agreement: float | None = None
    last_agreement: float | None = None
    generation: bool | None = None

    @property
    def displaced(self) -> float:
        """Share of the supervised answers whose masks are displaced."""
        return sum(times for by, times in self.moved.items() if by) / max(sum(self.offsets.values()), 1)


@dataclass(frozen=True, slots=True)
class Frame:
    """What one side's texts have in common outside of their contents, as token ids and as text where there is a tokenizer.

    Attributes:
        count: texts looked at.
        head: what nine tenths and more of them begin with, up to the first user's content.
        tail: what stands between the last content and the answer.
        opening: what answers begin with.
        doubled: whether the first token stands twice.
        system: share that begin with a system turn; None without a template to know one by.
        marked: share that hold the template's marker of answers; None without a template.
    """

    count: int
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    doubled: bool = False
    system: float | None = None
    marked: float | None = None
    shown: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class TemplateFacts:
    """How training texts and served requests are rendered.

    Attributes:
        known: by the template's own markers; without them a difference may be one of contents.
        lacking: marker tokens that nearly all of one side hold and none of the other: token -> (train share, serve share).
        named: these tokens as text.
        opened: share of served answers that begin as nearly all training answers do, and the other way round.
        rendered: with conversations given: samples compared with the target's own rendering, and those that differ, the first
            place where, and in how many of them the difference lies in a turn with tools.
        early, later: accepted drafts a step in the first `WINDOW` answer tokens and after them.
    """

    train: Frame | None = None
    serve: Frame | None = None
    known: bool = False
    lacking: dict[int, tuple[float, float]] = field(default_factory=dict)
    named: dict[int, str] = field(default_factory=dict)
    opened: tuple[float, float] = (1.0, 1.0)
    compared: int = 0
    differing: int = 0
    contents_differ: int = 0
    moved_lines: int = 0
    moved_by: int | None = None
    first_difference: str = ""
    early: float | None = None
    later: float | None = None


@dataclass(slots=True)
class PolicyFacts:
    """Who wrote the training answers: the target's distribution over them. Natural logarithms, per token.

    Attributes:
        by: the recorded last state through the target's head, or the target run again over the tokens.
        tokens, sequences: answer tokens looked at.
        agreement: share that are the target's first choice; nll: their -log p; entropy: of its distribution.
        interval: of nll - entropy, over sequences; None for few.
        temperature: at which text drawn from it would fit best; tail: share of tokens then less likely than `RARE`;
            tail_expected: what text drawn so would have; sureness: standard errors by which first choices
            are taken more often where the target is sure, against such text.
        lag: where the last state predicts tokens of another row better, by how many rows; 0 = where it should.
        recorded, again: agreement by recorded states and by the target run again, where both are known.
    """

    by: Literal["recorded", "again"]
    tokens: int
    sequences: int
    agreement: float
    nll: float
    entropy: float
    interval: tuple[float, float] | None
    temperature: float
    tail: float
    tail_expected: float
    sureness: float = 0.0
    lag: int = 0
    recorded: float | None = None
    again: float | None = None

    @property
    def excess(self) -> float:
        """How much less likely the answers are than the target's own would be."""
        return self.nll - self.entropy


@dataclass(slots=True)
class DomainFacts:
    """Served texts beside those trained on, by the pairs of neighbouring tokens they are made of.

    Attributes:
        own: share of a training sample's pairs that other training samples hold: (lowest twentieth, median).
        served: the median by request; below: share of requests under that lowest twentieth.
        near, far: accepted drafts a step in the better and the worse covered half of the requests.
    """

    own: tuple[float, float]
    served: float
    below: float
    requests: int
    near: float | None = None
    far: float | None = None


@dataclass(slots=True)
class LeakFacts:
    """What training may have seen that a server does not show.

    Attributes:
        logged: accuracy at the first position as the training log ends; replayed: on single training samples.
        documents: documents in packed samples; seen: rows compared; alone, together: median relative error of their states
            against the target run over that document alone, and over all before it too.
        heldout: held-out samples; known: those whose tokens are a training sample's; same_prompt: those whose prompt is.
    """

    logged: float | None = None
    replayed: float | None = None
    documents: int = 0
    seen: int = 0
    alone: float | None = None
    together: float | None = None
    heldout: int = 0
    known: int = 0
    same_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Where a training log goes on after a stop: loss and learning rate before and after."""

    step: int
    loss_before: float
    loss_after: float
    spread: float
    rate_before: float | None
    rate_after: float | None
    said: str = ""


@dataclass(slots=True)
class CurveFacts:
    """A training log as one curve.

    Attributes:
        format: whose log; points: records; steps: the last step.
        tokens: supervised tokens of the data, where the log tells; every pass shows the same.
        first_loss, last_loss: of the beginning and the end; uniform: loss of a draft that knows nothing (ln of its vocabulary).
        position_loss, accuracy: at the first position at the end.
        held: (step, figure) of evaluations; held_what: which figure, held_better: whether more of it is better.
        nonfinite: records whose loss is NaN or Inf; zero: records of loss exactly 0.
        rising: relative gain of the figure over the last half of the evaluations.
    """

    format: str
    points: int
    steps: int
    tokens: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    lowest_loss: float | None = None
    uniform: float | None = None
    position_loss: float | None = None
    accuracy: float | None = None
    held: list[tuple[int, float]] = field(default_factory=list)
    held_what: str = ""
    held_better: bool = True
    nonfinite: int = 0
    zero: int = 0
    restarts: list[Restart] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BudgetFacts:
    """What drafts of this kind reach with so much training, from a curve measured on one pair.

    Attributes:
        tokens: answer tokens of the training at hand; reached: (accept length, its interval) with as many; more: with four times
            as many; best: the longest of the curve; pair: what it was measured on.
        own: accept length here.
    """

    tokens: int
    reached: tuple[float, float, float]
    more: tuple[float, float, float]
    best: float
    pair: str
    own: float


@dataclass(slots=True)
class OpsFacts:
    """Files of a dump and of a run.

    Attributes:
        samples: training samples read; twice: those whose tokens an earlier one has; broken: files cut short; first_broken.
        gap: the longest run of missing indices and where it begins; span: highest index + 1.
        expected: usable conversations up to the last with a sample; missing: those of them without; behind: usable ones after it,
            if every sample was read.
        bytes_per_token, tokens_needed, free: what is still to be written against the space there.
        ranks: state files by rank, and the ranks that the run had.
    """

    samples: int = 0
    twice: int = 0
    broken: int = 0
    first_broken: str = ""
    gap: tuple[int, int] | None = None
    span: int = 0
    expected: int | None = None
    missing: int = 0
    behind: int = 0
    bytes_per_token: int = 0
    tokens_needed: int = 0
    free: int | None = None
    ranks: tuple[int, ...] = ()
    world: int | None = None
    where: str = ""


@dataclass(slots=True)
class DataFacts:
    """Everything of this family; None = not measured."""

    mask: MaskFacts | None = None
    template: TemplateFacts | None = None
    policy: PolicyFacts | None = None
    domain: DomainFacts | None = None
    leak: LeakFacts | None = None
    curve: CurveFacts | None = None
    budget: BudgetFacts | None = None
    ops: OpsFacts | None = None
