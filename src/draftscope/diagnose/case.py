"""The inputs of a diagnosis, opened: a bounded, evenly spread selection of each source, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftscope.diagnose.counting import count_rows
from draftscope.diagnose.cutting import head, spread, steps_of, wanted_rows
from draftscope.diagnose.finite import count_nonfinite
from draftscope.diagnose.source import open_source_draft
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.eagle3.depth import recorded_depth
from draftscope.eagle3.tree import TreeShape, claimed_depth
from draftscope.eagle3.tree import claimed as tree_of
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.facts_rows import Counted
from draftscope.findings import Finding
from draftscope.linting.opening import open_checkpoint
from draftscope.states.opening import Kind, format_kind, open_source
from draftscope.states.places import Place, Remote, model_folder
from draftscope.states.types import Sample, Sequence, Source, Trace, from_sample, from_trace
from draftscope.target.model import Target, load_target
from draftscope.target.parts import TargetParts, read_parts
from draftscope.target.recorded import RecordedSweep

INTEGRITY_BYTES = 512 << 20
TEXT_TOKENS = 4 << 20


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the user handed over; any subset.

    Attributes:
        target: a folder with weights, or with only the target parts; loaded: the same, where the caller has it in memory.
        sweep: every boundary of the target over the tokens in question, recorded by an engine (`target.recorded`).
        metrics: what tells the engine's own counts, one or several as `engines.counters.read_counters` takes them: files, or a
            server's address; metrics_window: seconds between two scrapes of an address, 0 = one.
        url: a running server, asked for greedy answers; prompts: fresh ones for it, beside those of the training data; requests
            and max_new: how many of each, and how long.
        consumer: whose reading of the checkpoint is in effect, as `vllm@0.32`; None = what the capture says.
        max_tokens: feature rows taken from each source.
        formats: how states are read: those of training data count for `train`, those of captures for `serve`.
        skip_bad: as in `open_source`.
        explain: ids of faults of which it is to be said why they were, or were not, named.
        absorb: where a copy of the draft goes that has the repair of the served states folded in; None = none is made.
        source_draft: the checkpoint that `draft` was made from (the trainer's own, before a conversion or export).
        apply: where to write a copy of the checkpoint with the fixes in it.
        logs: the training's own logs: files, or folders that hold them.
        conversations: what was rendered into training data, as JSONL.
    """

    train: Place | None = None
    train_heldout: Place | None = None
    serve: Place | None = None
    draft: Place | None = None
    target: Place | None = None
    loaded: Target | None = None
    sweep: Place | None = None
    metrics: Path | str | Several[Path | str] | None = None
    metrics_window: float = 0.0
    url: str | None = None
    prompts: Path | None = None
    requests: int = 24
    max_new: int = 64
    consumer: str | None = None
    k: int | None = None
    max_tokens: int = 4096
    seed: int = 0
    formats: tuple[str, ...] = ()
    skip_bad: bool = False
    explain: tuple[str, ...] = ()
    absorb: Path | None = None
    source_draft: Place | None = None
    apply: Path | None = None
    logs: tuple[Path, ...] = ()
    conversations: Path | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A sample's or request's tokens without its states: token_ids [T], answer [T] (None = unknown)."""

    name: str
    index: int
    token_ids: Tensor
    answer: Tensor | None


@dataclass(slots=True)
class Selected:
    """A source and the sequences taken from it.

    Attributes:
        labels: the entries' names as the files claim, last state's included.
        masked, empty, answer_tokens: loss masks over all samples read.
        begins_late: requests recorded from a later position than their first (a cached prefix): their history is not here.
        other_shape: sequences left out by their own slots and width, `SLOTSxWIDTH`, where the source's first has another.
        looked: by slot, -1 being the last state, rows whose values were looked at; nonfinite: (slot, rows, of those looked at,
            first name, first row).
        longest: rows of the longest sequence read, whether it was taken or not.
        claimed_norm: what all samples say of their last state, `pre` or `post`; "" where they say nothing, or not the same.
        steps_cut: verify steps that lie beyond the rows taken; cut_at: the fewest rows that a request which lost some was cut to.
        checked: samples whose values were all looked at.
        texts: of every sample or request read, up to `TEXT_TOKENS` tokens together.
    """

    source: Source
    sequences: list[Sequence] = field(default_factory=list)
    total: int = 0
    rows_left_out: int = 0
    steps_cut: int = 0
    cut_at: int = 0
    labels: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    masked: int = 0
    empty: int = 0
    answer_tokens: int = 0
    begins_late: int = 0
    other_shape: dict[str, int] = field(default_factory=dict)
    looked: dict[int, int] = field(default_factory=dict)
    nonfinite: list[tuple[int, int, int, str, int]] = field(default_factory=list)
    longest: int = 0
    checked: int = 0
    claimed_norm: str = ""
    texts: list[Text] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(sequence.rows for sequence in self.sequences)

    def take(self, sequence: Sequence, rows: int) -> Sequence:
        """Take in the first rows of a sequence, and count what is cut away with the others."""
        taken = head(sequence, rows)
        self.rows_left_out += sequence.rows - taken.rows
        if lost := steps_of(sequence) - steps_of(taken):
            self.steps_cut, self.cut_at = self.steps_cut + lost, min(self.cut_at or taken.rows, taken.rows)
        self.sequences.append(taken)
        return taken


@dataclass(slots=True)
class Case:
    """Everything opened.

    Attributes:
        target: None where only its parts are at hand; recorded: its states at every boundary, where an engine made them.
        answers: by name, where the answer stands [T'] in served requests of which the capture does not say it; for replay alone.
        counted: by side, files whose rows do not fit their tokens; where none does, the side itself is None.
        tree: None where chains are replayed, of length k.
        found: what is wrong with a checkpoint that can be read but not opened (`checkpoint` is then None), or only just.
    """

    inputs: Inputs
    train: Selected | None = None
    heldout: Selected | None = None
    serve: Selected | None = None
    checkpoint: Checkpoint | None = None
    source: Checkpoint | None = None
    target: Target | None = None
    recorded: RecordedSweep | None = None
    parts: TargetParts | None = None
    k: int = 3
    tree: TreeShape | None = None
    answers: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counted: dict[str, Counted] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)

    @property
    def layers(self) -> int | None:
        return None if self.parts is None else self.parts.layers


def open_case(inputs: Inputs, report: Callable[[str], None] = lambda _: None) -> Case:
    """Open what was handed over.

    Raises:
        UsageError: nothing to work on.
        DraftscopeError: a file that can't be read, or files that contradict each other (widths, vocabulary).
    """
    if not (inputs.train or inputs.serve or inputs.draft or inputs.metrics or inputs.url or inputs.logs):
        raise UsageError("nothing to diagnose", remedy="Give at least one of --train, --serve, --draft, --metrics, --log, --url")
    case = Case(inputs)
    if inputs.target is not None:
        case.parts = read_parts(inputs.target)
        if isinstance(inputs.target, Remote):
            case.notes.append("of a target behind a URL only the ends are read: states could not be re-made")
        elif _has_layers(inputs.target):
            report("loading the target")
            case.target = inputs.loaded or load_target(inputs.target)
        else:
            case.notes.append("the target folder holds no layers: states could not be re-made, only its ends were read")
    if inputs.draft is not None:
        opened = open_checkpoint(model_folder(inputs.draft), case.layers, inputs.consumer)
        case.checkpoint, case.found = opened.checkpoint, opened.findings
        _check_target(case)
    case.source = open_source_draft(inputs.source_draft, inputs.draft, case.checkpoint, case.layers)
    width = None if case.parts is None else case.parts.width
    slots = None if case.checkpoint is None else case.checkpoint.config.slots
    if width is None and case.checkpoint is not None:
        width = case.checkpoint.config.target_hidden_size
    if inputs.train is not None:
        report("reading the training states")
        case.train = _fitting(case, inputs.train, "samples", slots)
    if inputs.train_heldout is not None:
        case.heldout = _select(inputs.train_heldout, "samples", inputs, slots)
    if inputs.serve is not None:
        report("reading the capture")
        if slots is None and case.train is not None and case.train.sequences:
            slots = int(case.train.sequences[0].features.shape[1])
        case.serve = _fitting(case, inputs.serve, "traces", slots, width)
    if inputs.sweep is not None:
        _take_sweep(case, inputs.sweep)
    told = None if case.serve is None else claimed_depth(case.serve.meta) or recorded_depth(s.steps for s in case.serve.sequences)
    case.k = inputs.k or told or 3
    if inputs.k is None and case.serve is not None:
        case.tree = tree_of(case.serve.meta)
        if case.tree is not None:
            case.k = case.tree.steps
            case.notes.append(f"the engine drafted trees ({case.tree}), so trees are replayed; --k replays chains")
    return case


def _fitting(case: Case, path: Place, kind: Kind, slots: int | None, width: int | None = None) -> Selected | None:
    """A side's selection; None where no file's rows fit its tokens, which is a finding and no reason to stop."""
    side = "train" if kind == "samples" else "serve"
    try:
        selected = _select(path, kind, case.inputs, slots, width)
    except DraftscopeError:
        counted = count_rows(path, kind)
        if counted is None or len(counted.files) < counted.of:
            raise
        case.counted[side] = counted
        return None
    if any(skip.cause == "rows" for skip in selected.source.skipped) and (counted := count_rows(path, kind)) is not None:
        case.counted[side] = counted
    return selected


def _take_sweep(case: Case, folder: Place) -> None:
    """Open a recorded sweep; sequences are cut to what it covers."""
    if case.parts is None:
        raise UsageError("a recorded sweep needs the target's parts", where=str(folder),
                         remedy="Give --target: a folder with its config.json, embedding, final norm and head is enough")
    case.recorded = RecordedSweep(folder, case.parts)
    for name, selected in (("training states", case.train), ("capture", case.serve)):
        if selected is None:
            continue
        rows = {s.name: case.recorded.covered(s.token_ids[: s.rows]) for s in selected.sequences}
        if any(count > 1 for count in rows.values()):
            whole, before = selected.sequences, selected.rows_left_out
            selected.sequences = []
            for sequence in whole:
                if rows[sequence.name] > 1:
                    selected.take(sequence, rows[sequence.name])
                else:
                    selected.rows_left_out += sequence.rows
            left = selected.rows_left_out - before
            case.notes.append(f"sweep: covers {selected.rows} rows of the {name}" + (f"; {left} were left out" if left else ""))
        else:
            case.notes.append(f"sweep: covers no row of the {name}")


def _has_layers(folder: Place) -> bool:
    from draftscope.target.parts import tensor_files

    return any(".layers." in name for name in tensor_files(folder))


def _check_target(case: Case) -> None:
    if case.parts is None or case.checkpoint is None:
        return
    config = case.checkpoint.config
    for what, mine, theirs in (
        ("width", config.target_hidden_size, case.parts.width),
        ("vocabulary", config.vocab_size, case.parts.vocab),
    ):
        if mine != theirs:
            raise DraftscopeError(
                f"the draft was made for a target of {what} {mine}, this target's is {theirs}",
                where=str(case.checkpoint.folder),
                remedy=f"Give the draft's own target instead of {case.parts.folder}",
            )


def _select(path: Place, kind: Kind, inputs: Inputs, slots: int | None, width: int | None = None) -> Selected:
    named = [format for format in inputs.formats if format_kind(format) == kind]
    source = open_source(path, named[0] if named else None, kind=kind, skip_bad=inputs.skip_bad)
    if source.kind != kind:
        expected = "training data" if kind == "samples" else "a capture"
        raise DraftscopeError(
            f"holds {'a capture' if source.kind == 'traces' else 'training data'} ({source.chosen})",
            where=str(path),
            remedy=f"This option takes {expected}",
        )
    selected = Selected(source, meta=dict(source.meta))
    lengths: list[int] = []
    read = held = 0
    claims: set[str] = set()
    shape: tuple[int, int] | None = None
    for item in source:
        if isinstance(item, Sample):
            selected.labels = selected.labels or item.labels
            claims.add(item.claimed_norm or "")
            if item.loss_mask is not None:
                count = int(item.loss_mask.sum())
                selected.masked += 1
                selected.answer_tokens += count
                selected.empty += count == 0
        else:
            selected.meta = {**item.meta, **selected.meta}
        sequence = _sequence(item, slots, width, path)
        held += len(sequence.token_ids)
        if held <= TEXT_TOKENS:
            selected.texts.append(Text(sequence.name, item.index if isinstance(item, Sample) else -1,
                                       sequence.token_ids.clone(), sequence.answer))
        own = (int(sequence.features.shape[1]), int(sequence.features.shape[2]))
        shape = shape or own
        read += sequence.features.nbytes
        if read <= INTEGRITY_BYTES:
            count_nonfinite(selected, sequence)
            selected.checked += 1
        selected.longest = max(selected.longest, sequence.rows)
        usable = sequence.rows
        if own != shape:
            name = f"{own[0]}x{own[1]}"
            selected.other_shape[name] = selected.other_shape.get(name, 0) + 1
            usable = 0
        elif sequence.rows and int(sequence.positions[0]) != 0:
            selected.begins_late += 1
            usable = 0
        lengths.append(min(usable, wanted_rows(sequence, inputs.max_tokens)))
    selected.total = len(lengths)
    selected.claimed_norm = claims.pop() if len(claims) == 1 else ""
    chosen = spread(lengths, inputs.max_tokens)
    for position, item in enumerate(source):
        if position in chosen:
            sequence = _sequence(item, slots, width, path)
            taken = selected.take(sequence, lengths[position])
            if position >= selected.checked:
                count_nonfinite(selected, taken)
    if not selected.sequences:
        why = "holds no sequence of two or more rows"
        if selected.begins_late:
            why = f"holds {selected.begins_late} requests, none recorded from its first token"
        raise DraftscopeError(why, where=str(path), remedy="Capture whole requests, with the prefix cache off")
    return selected


def _sequence(item: Sample | Trace, slots: int | None, width: int | None, path: Place) -> Sequence:
    if isinstance(item, Sample):
        return from_sample(item)
    return from_trace(item, _slots_of(item, slots, width, path))


def _slots_of(trace: Trace, slots: int | None, width: int | None, path: Place) -> int:
    total = int(trace.fc_input.shape[1])
    if width is not None and total % width == 0:
        return total // width
    if slots is not None and total % slots == 0:
        return slots
    if total % 3 == 0:
        return 3
    raise DraftscopeError(
        f"rows of {total} values are no whole number of slots",
        where=f"{path}: {trace.name}: fc_input",
        remedy="Give --draft or --target, which say how wide a slot is",
    )
