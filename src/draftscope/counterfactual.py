"""Drafts and counterfactuals replayed side by side over one source, paired with the first (`draftscope.replay/1`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from draftscope import findings
from draftscope.consumers import effective
from draftscope.eagle3.acceptance import Difference
from draftscope.eagle3.checkpoint import Checkpoint, build_draft, load_checkpoint
from draftscope.eagle3.depth import clipped, recorded_depth
from draftscope.eagle3.edits import Edits
from draftscope.eagle3.matching import Text
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.replay import Replay, compare, replay
from draftscope.eagle3.tree import TreeShape, claimed, claimed_depth
from draftscope.errors import DraftscopeError, UsageError
from draftscope.showing import Shown
from draftscope.states.opening import open_source
from draftscope.states.places import Place, place
from draftscope.states.types import Sample, Source, Trace, from_sample, from_trace
from draftscope.states.types import Sequence as Rows
from draftscope.target.parts import TargetParts, read_parts

DEFAULT_K = 3


class Change(findings.Model):
    """Against the first rung, paired by sequence. No interval below 8 sequences."""

    value: float | None
    interval: tuple[float, float] | None
    sequences: int
    unpaired: int

    @classmethod
    def of(cls, found: Difference) -> Change:
        return cls(value=found.value, interval=found.interval, sequences=found.sequences, unpaired=found.unpaired)


class Tie(findings.Model):
    name: str
    row: int
    position: int
    gap: float


class GateResult(findings.Model):
    """Share of the engine's own steps in which replay gives the recorded count."""

    share: float
    steps: int
    passed: bool
    left_out: int
    near_ties: list[Tie]


class ReplayRung(findings.Rung):
    """A rung, of one draft under one set of edits.

    Attributes:
        tokens: 1 + the sum of joint. It is the accept length where the rows are a server's (`walk`, `engine`).
        text: sequences by who wrote them, and the share of answer tokens that equal the target's choice.
        change: of `tokens`; nll_change: of nll.
        nonfinite: answer rows that see a NaN or Inf.
    """

    draft: str
    set: list[str]
    consumer: str | None = None
    sequences: int
    tokens: float | None
    text: dict[str, float | int | None]
    gate: GateResult | None = None
    change: Change | None = None
    nll_change: Change | None = None
    nonfinite: int = 0


class Tree(findings.Model):
    """The shape of the trees that were drafted; K is their depth. `nodes` counts the root."""

    topk: int
    steps: int
    nodes: int


class Replays(BaseModel, Shown):
    """The whole answer; `rungs` in the order drafts, then sets, the draft without edits first. No tree: chains."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal["draftscope.replay/1"] = Field("draftscope.replay/1", alias="schema")
    states: str = ""
    k: int | None = None
    tree: Tree | None = None
    readout: findings.Readout | None = None
    rungs: list[ReplayRung] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    next: list[str] = Field(default_factory=list)

    def json_text(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2)


def counterfactuals(
    drafts: Sequence[Place | str], states: Place | str, *, target: Place | str | None = None, sets: Sequence[str] = (),
    consumer: str | None = None, k: int | None = None, tree: TreeShape | None = None,
    readout: findings.Readout | None = None, text: Text = "auto",
    max_tokens: int | None = None, seed: int = 0, format: str | None = None, skip_bad: bool = False,
    on_tokens: Callable[[int], None] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Replays:
    """Replay every draft as it is and with each of the edits.

    Args:
        drafts: checkpoint folders; states: training states or a capture.
        target: folder with the target's embedding, final norm and head (weights do no harm).
        sets: each is one counterfactual, of one or more `KEY=VALUE` separated by blanks.
        consumer: whose reading of the checkpoints the edits start from; None = the checkpoint's own dialect.
        k: length of the drafted chains; tree: shape of the trees drafted instead. Neither: as the capture says of itself, else
            as its steps show, else chains of 3.
        readout: None = the walk where the target wrote the text, else the recorded steps, else all rows.
        max_tokens: stop after the sequence that reaches so many feature rows.
        format, skip_bad: how the states are read, as in `open_source`.

    Raises:
        UsageError: no embedding at hand, unknown edits or consumer, or nothing that says what to match the tokens with.
        DraftscopeError: a file that can't be read, or a draft, target and states that do not belong together.
    """
    if not drafts:
        raise UsageError("no draft to replay", remedy="Give --draft DIR")
    edits = [Edits(), *(Edits.parse([line]) for line in sets)]
    parts = None if target is None else read_parts(place(target))
    source = open_source(place(states), format, skip_bad=skip_bad)
    if tree is None and k is None:
        tree = claimed(source.meta)
    if tree is not None:
        depth = tree.steps
    else:
        depth = k or claimed_depth(source.meta) or _recorded_depth(source, max_tokens) or DEFAULT_K
    result = Replays(schema="draftscope.replay/1", states=str(place(states)), k=depth,
                     tree=None if tree is None else Tree(topk=tree.topk, steps=tree.steps, nodes=tree.nodes))
    done: list[tuple[ReplayRung, Replay]] = []
    chosen = readout
    counts: dict[str, Tensor] = {}
    for folder in map(place, drafts):
        checkpoint = load_checkpoint(folder, target_layers=None if parts is None else parts.layers)
        base = Reading()
        if consumer is not None:
            found = effective(
                checkpoint, consumer, None if parts is None else parts.layers, None if parts is None else parts.model_type,
            )
            base = found.reading
            result.notes += [f"{folder}: {note}" for note in found.notes]
        for edit in edits:
            draft = build_draft(checkpoint, parts, edit.reading(base))
            if draft.embedding is None:
                raise UsageError(
                    "the checkpoint has no embedding, and without the target there is none to lend", where=str(folder),
                    remedy="Give the target (--target DIR; its embedding, final norm and head are enough)",
                )
            report(f"{folder}{''.join(f' {word}' for word in edit.words)}")
            rows = (edit.apply(one) for one in _sequences(source, checkpoint, max_tokens, counts))
            run = replay(draft, rows, parts=parts, k=depth, tree=tree, text=text, on_tokens=on_tokens)
            if not run.sequences:
                raise DraftscopeError("holds no sequence", where=str(states), remedy="There is nothing to replay")
            chosen = chosen or run.readout
            done.append((_rung(run, chosen, str(folder), list(edit.words), consumer, seed), run))
    assert chosen is not None
    result.readout = chosen
    for rung, run in done[1:]:
        lengths, nlls = compare(done[0][1], run, chosen, seed=seed)
        rung.change, rung.nll_change = Change.of(lengths), Change.of(nlls)
    result.rungs = [rung for rung, _ in done]
    result.notes += _remarks(source, done[0][1], chosen, parts)
    if (said := clipped(counts.values(), depth)) is not None:
        result.notes.append(said)
    return result


def _recorded_depth(source: Source, max_tokens: int | None) -> int | None:
    """K as the steps of the requests to be replayed show it; training states have none."""
    if source.kind != "traces":
        return None

    def recorded() -> Iterator[Trace]:
        rows = 0
        for item in source:
            if max_tokens is not None and rows >= max_tokens:
                return
            rows += len(item.token_ids)
            yield item

    return recorded_depth(recorded())


def _sequences(source: Source, checkpoint: Checkpoint, max_tokens: int | None, counts: dict[str, Tensor]) -> Iterator[Rows]:
    """The rows to replay; `counts` takes in what was recorded as accepted, by name."""
    slots = checkpoint.config.slots
    rows = 0
    for item in source:
        if max_tokens is not None and rows >= max_tokens:
            return
        sequence = _sequence(item, slots, checkpoint)
        rows += sequence.rows
        if sequence.steps is not None:
            counts[sequence.name] = sequence.steps.accepted
        yield sequence


def _sequence(item: Any, slots: int, checkpoint: Checkpoint) -> Rows:
    if isinstance(item, Sample):
        return from_sample(item)
    assert isinstance(item, Trace)
    width, wanted = item.fc_input.shape[1], slots * checkpoint.config.target_hidden_size
    if width != wanted:
        raise DraftscopeError(
            f"fc_input is {width} wide, the draft takes {slots} slots of {checkpoint.config.target_hidden_size} = {wanted}",
            where=item.name, remedy=f"The capture is of another target than {checkpoint.folder}, or of another number of slots",
        )
    return from_trace(item, slots)


def _rung(
    run: Replay, readout: findings.Readout, draft: str, words: list[str], consumer: str | None, seed: int,
) -> ReplayRung:
    rung, gate = run.rung(readout, seed=seed), run.gate()
    return ReplayRung(
        **rung.model_dump(), draft=draft, set=words, consumer=consumer, sequences=len(run.sequences),
        tokens=1 + sum(rung.joint) if rung.rounds else None, text=run.text(),
        gate=None if gate is None else GateResult(
            share=gate.share, steps=gate.steps, passed=gate.passed, left_out=gate.left_out,
            near_ties=[Tie(name=t.name, row=t.row, position=t.position, gap=t.gap) for t in gate.near_ties],
        ),
        nonfinite=sum(one.nonfinite for one in run.sequences),
    )


def _remarks(source: Source, first: Replay, readout: findings.Readout, parts: TargetParts | None) -> list[str]:
    """What was left out, done on the way in, or taken on trust."""
    said = list(getattr(source, "notes", []))
    if source.skipped:
        reasons: dict[tuple[str, int], str] = {}
        for skip in source.skipped:
            reasons.setdefault((skip.path, skip.row), skip.why)
        (path, _), why = next(iter(reasons.items()))
        said.append(f"{len(reasons)} files or rows were passed over, the first {path}: {why}")
    text = first.text()
    if text["other"] and readout == "walk":
        said.append(f"{text['other']} of {len(first.sequences)} sequences were not written by the target and have no walk")
    if text["unknown"]:
        where = "the capture's `phase` tells it" if source.kind == "traces" else "a loss mask tells it"
        said.append(f"nothing says where answers begin in {text['unknown']} of {len(first.sequences)} sequences, so that it is "
                    f"unknown who wrote them, and they have no walk: {where}")
    if text["recorded"]:
        lacking = "no target at hand" if parts is None else "no last states in the capture"
        said.append(f"the served text is taken as it stands: {lacking} to test it with")
    if any(one.unlike for one in first.sequences):
        said.append("the recorded steps are left out: the engine drafted a tree of another shape than is replayed, or a chain")
    if readout == "engine":
        lost = sum(one.steps.unplaced + int((one.steps.outcome.accepted < 0).sum()) for one in first.sequences if one.steps)
        if lost:
            said.append(f"{lost} recorded steps are left out: they need a token beyond the last known one, or have no first row")
    return said
