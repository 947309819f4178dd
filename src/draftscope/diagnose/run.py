"""The order of work: cheap and decisive first, each step able to end with a proven cause (design, section 3)."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from draftscope.boundaries import default_boundaries
from draftscope.compare.pairing import embedding_check, last_state_check
from draftscope.consumers import CONSUMERS, ask, effective
from draftscope.diagnose.absorb import absorb, check_folder
from draftscope.diagnose.applying import apply, check_apply
from draftscope.diagnose.case import Case, Inputs, Selected, open_case
from draftscope.diagnose.checkpoint import compare_source, covered, read_files
from draftscope.diagnose.climb import climb
from draftscope.diagnose.contradictions import Contradiction, contradict, hedge, stands
from draftscope.diagnose.cutting import beyond
from draftscope.diagnose.data import look
from draftscope.diagnose.effects import costs
from draftscope.diagnose.explain import explain
from draftscope.diagnose.ladder import Ladder
from draftscope.diagnose.linted import linted
from draftscope.diagnose.live import Live, hear, separated
from draftscope.diagnose.placing import place
from draftscope.diagnose.rows import examine_rows, integrity
from draftscope.diagnose.sides import SweptSide, judging, side_facts
from draftscope.diagnose.traininglog import Curve
from draftscope.diagnose.verdict import Judged, conclude, rank
from draftscope.eagle3.reading import Reading
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults import FAULTS
from draftscope.faults.facts_rows import RowFacts
from draftscope.faults.measurements import LiveFacts, Measurements
from draftscope.findings import Diagnosis, Placement, Rung
from draftscope.inspecting.verify import read_mark
from draftscope.linting.values import poisoned
from draftscope.linting.vocabulary import map_facts

Report = Callable[[str], None]


def diagnose(inputs: Inputs, report: Report = lambda _: None) -> Diagnosis:
    """Why the draft's tokens are rejected.

    Args:
        report: told what is being done, line by line.

    Raises:
        DraftscopeError, UsageError: inputs that can't be read, or that contradict each other.
    """
    check_folder(inputs)
    check_apply(inputs)
    if inputs.apply is not None and inputs.absorb is not None and inputs.apply.resolve() == inputs.absorb.resolve():
        raise UsageError("--apply and --absorb name the same folder", where=str(inputs.apply))
    live = hear(inputs, report) if inputs.url is not None else None
    case = open_case(inputs, report)
    if live is not None and live.k is not None and inputs.k is None and live.k != case.k:
        case.k, case.tree = live.k, None
    examination = Examination(case, report, live)
    found = examination.conclude()
    if inputs.absorb is not None:
        report("folding the repair into a copy of the draft")
        found.absorbed = absorb(examination, inputs.absorb)
    return found


@dataclass
class Examination:
    """One diagnosis while it is made."""

    case: Case
    report: Report
    live: Live | None = None
    m: Measurements = field(default_factory=Measurements)
    steps: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    swept: dict[str, SweptSide] = field(default_factory=dict)
    rungs: dict[str, Rung] = field(default_factory=dict)
    as_read: Reading = field(default_factory=Reading)
    ladder: Ladder | None = None
    counted: Rung | None = None
    matched: dict[str, Any] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)
    contradictions: list[Contradiction] = field(default_factory=list)
    tokenizer: Any = None
    curve: Curve | None = None

    def conclude(self) -> Diagnosis:
        """Run every step that the inputs allow and draw the conclusion."""
        self.read_checkpoint()
        self.check_integrity()
        self.read_target_parts()
        place(self)
        examine_rows(self)
        climb(self)
        compare_source(self, self.ladder)
        look(self)
        self.tell_live()
        self.contradictions = contradict(self)
        suspicions = [s for fault in FAULTS for s in fault.recognise(self.m)]
        suspicions += linted(self, suspicions)
        suspicions = [s for s in suspicions if stands(s, self.contradictions)]
        hedge(self, suspicions)
        found = None
        if self.ladder is not None and "served" in self.rungs:
            found = costs(self.ladder, suspicions, self.as_read, self.counted)
        self.judged = [Judged(s, found.effects[i] if found else None) for i, s in enumerate(suspicions)]
        diagnosis = conclude(self, self.judged, found)
        diagnosis.explained = {name: explain(self.m, diagnosis, name) for name in self.case.inputs.explain}
        if self.case.inputs.apply is not None:
            self.report("applying the fixes to a copy of the checkpoint")
            diagnosis.applied = apply(self, rank(self.judged), diagnosis.findings)
        return diagnosis

    # -- step 1: the checkpoint against its consumer ------------------------------------------------------------------------

    def read_checkpoint(self) -> None:
        case, m = self.case, self.m
        m.layers, m.model_type = case.layers, None if case.parts is None else case.parts.model_type
        m.consumer = case.inputs.consumer or self._claimed_consumer()
        if m.consumer is None and self.live is not None:
            m.consumer = self._known(self.live.server.engine, self.live.server.version)
        if case.checkpoint is None and case.found:
            self.next.append("the draft could not be replayed: its configuration and its weights contradict each other")
            return
        if case.checkpoint is None:
            self.next.append("give the draft (--draft): without it nothing can be replayed")
            return
        checkpoint = case.checkpoint
        # A head over the whole vocabulary that the checkpoint lacks is the target's, in every engine.
        lent = ("t2d", "lm_head.weight") if checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size else ("t2d",)
        m.missing = tuple(name for name in checkpoint.missing if name not in lent)
        m.poisoned = poisoned(checkpoint.tensors.items())
        m.vocabulary = map_facts(checkpoint)
        m.feedback = "post" if checkpoint.config.norm_output else "pre"
        m.expected = checkpoint.config.boundaries
        if m.expected is None and case.layers is not None:
            m.expected = default_boundaries(case.layers)
        text = f"the draft's checkpoint read ({checkpoint.config.dialect} dialect, slots at boundaries {_listed(m.expected)})"
        if m.consumer is not None:
            found = effective(checkpoint, m.consumer, case.layers, m.model_type)
            self.as_read, m.changed = found.reading, dict(found.changed)
            text += f", and as {m.consumer} reads it: boundaries {_listed(found.boundaries)}" + "".join(
                f"; {note}" for note in found.notes
            )
        self.steps.append(text)
        read_files(self)

    def _claimed_consumer(self) -> str | None:
        if self.case.serve is None:
            return None
        return self._known(self.case.serve.meta.get("engine"), str(self.case.serve.meta.get("engine_version", "")))

    def _known(self, engine: object, engine_version: str | None) -> str | None:
        """The consumer of that release, or the nearest with a note; None with a note where there is none."""
        known = [one.id for one in CONSUMERS.values() if one.name == engine and not one.flag]
        if known and engine_version:
            with suppress(UsageError):
                asked = ask(f"{engine}@{engine_version}")
                if not asked.note:
                    return asked.name
                self.next.append(f"as read: {asked.note}; name another with --for")
                return asked.name
        if known:
            self.next.append(
                f"as read: how {engine} {engine_version} reads a checkpoint is not among the facts here; name the nearest with "
                f"--for ({', '.join(known)})"
            )
        return None

    def tell_live(self) -> None:
        """What the running server's counts separate, once it is known what the draft does on its training states."""
        if self.live is None:
            return
        kind, said = separated(self.live, self.rungs.get("trained"))
        self.steps += [f"asked: {said}", *(f"asked: {note}" for note in self.live.notes)]
        self.matched["live"] = {"separates": kind, **self.live.told()}
        self.m.live = LiveFacts(kind, said)
        if kind == "elsewhere" or (kind == "unknown" and not self.m.serve):
            self.next.append(said)

    # -- step 2: integrity --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        case, m = self.case, self.m
        for name, selected in (("train", case.train), ("serve", case.serve)):
            if selected is None and name in case.counted:
                self.steps.append(f"{'training states' if name == 'train' else 'capture'}: in no file do rows and tokens fit")
                continue
            if selected is None:
                self.next.append(
                    "give training states (--train): what the draft was trained on is then known from data, not from its "
                    "configuration"
                    if name == "train"
                    else "give a capture of what the draft receives in service (--serve)"
                )
                continue
            facts = side_facts(name, selected, None)  # type: ignore[arg-type]
            setattr(m, name, facts)
            skipped = f", {len(selected.source.skipped)} passed over" if selected.source.skipped else ""
            self.steps.append(
                f"{'training states' if name == 'train' else 'capture'}: {selected.total} read{skipped}, "
                f"{len(selected.sequences)} taken with {selected.rows} rows; non-finite values in {len(selected.nonfinite)} "
                f"slots of {selected.checked} sequences"
            )
            reading = [f"read as {selected.source.format}: {selected.source.chosen}", *getattr(selected.source, "notes", [])]
            self.steps += [f"{'training states' if name == 'train' else 'capture'}: {note}" for note in reading]
            self.matched[name] = _matched(selected)
            if name == "serve":
                verified, said = read_mark(selected.source.path)
                self.matched[name]["verified"] = verified
                self.steps.append(said)
            m.shapes[name] = int(selected.sequences[0].features.shape[1])
            m.other_shapes[name] = dict(selected.other_shape)
            if selected.begins_late:
                self.next.append(
                    f"{selected.begins_late} requests were recorded from a later position than their first token (a cached "
                    "prefix) and left out: capture with the prefix cache off"
                )
            if selected.steps_cut:
                self.next.append(
                    f"{beyond(selected.steps_cut, selected.cut_at)} and were left out: take more rows (--max-tokens, now "
                    f"{case.inputs.max_tokens})"
                )
        if case.checkpoint is not None:
            m.shapes["draft"] = case.checkpoint.config.slots
        self._check_widths()
        self._check_tokens()
        integrity(self)
        covered(self)

    def _check_widths(self) -> None:
        case = self.case
        self._check_heldout()
        widths = {
            name: int(s.sequences[0].features.shape[2])
            for name, s in (("training states", case.train), ("capture", case.serve))
            if s
        }
        if case.parts is not None:
            widths["target"] = case.parts.width
        if case.checkpoint is not None:
            widths["draft"] = case.checkpoint.config.target_hidden_size
        meant = widths.get("draft") or widths.get("target")
        for name, what in (("train", "training states"), ("serve", "capture")):
            own = widths.get(what)
            if meant is not None and own is not None and own != meant:
                # A file of another width than both draft and target is a finding; nothing else can be measured on it.
                self.m.rows.setdefault(name, RowFacts()).width = (own, meant)  # type: ignore[arg-type]
                setattr(case, name, None)
                setattr(self.m, name, None)
                self.m.shapes.pop(name, None)
                del widths[what]
        if len(set(widths.values())) > 1:
            raise DraftscopeError(
                "inputs of different width: " + ", ".join(f"{k} {v}" for k, v in widths.items()),
                remedy="They belong to different targets; give the ones that go together",
            )

    def _check_heldout(self) -> None:
        """Held-out samples that the draft cannot be run on are left out: it is then judged on those of --train."""
        case = self.case
        if case.heldout is None or case.checkpoint is None:
            return
        config = case.checkpoint.config
        slots, width = case.heldout.sequences[0].features.shape[1:]
        if (slots, width) != (config.slots, config.target_hidden_size):
            self.next.append(
                f"--train-heldout {case.heldout.source.path}: its states have {slots} slots of width {width}, the draft takes "
                f"{config.slots} of {config.target_hidden_size}: left out; extract held-out samples as the training data was"
            )
            case.heldout = None

    def _check_tokens(self) -> None:
        vocab = (
            self.case.parts.vocab if self.case.parts else self.case.checkpoint.config.vocab_size if self.case.checkpoint else None
        )
        for selected in (self.case.train, self.case.heldout, self.case.serve):
            if selected is None or vocab is None:
                continue
            for sequence in selected.sequences:
                bad = ((sequence.token_ids < 0) | (sequence.token_ids >= vocab)).nonzero()
                if len(bad):
                    raise DraftscopeError(
                        f"token id {int(sequence.token_ids[bad[0]])} is outside the vocabulary of {vocab}",
                        where=f"{selected.source.path}: {sequence.name}, row {int(bad[0])}",
                        remedy="The states belong to another target or tokenizer",
                    )

    # -- step 3: target parts -----------------------------------------------------------------------------------------------

    def read_target_parts(self) -> None:
        case = self.case
        if case.parts is None:
            self.next.append(
                "give the target (--target), or only its embedding, final norm and head: they prove what the first and last "
                "states are"
            )
            return
        for facts, selected in ((self.m.train, case.train), (self.m.serve, case.serve)):
            if facts is None or selected is None:
                continue
            slots = int(selected.sequences[0].features.shape[1])
            pairs = [(s.features, s.token_ids[: s.rows]) for s in selected.sequences]
            facts.embedding = [
                embedding_check([(f[:, i], ids) for f, ids in pairs], case.parts).is_embedding for i in range(slots)
            ]
            lasts = [(s.last, s.token_ids, s.answer) for s in selected.sequences if s.last is not None]
            if lasts:
                check = last_state_check(lasts, case.parts)
                self.matched[f"{facts.name}_text"] = {"last_state": check.norm, "agreement": check.agreement}
            held = [facts.where(i) for i, is_embedding in enumerate(facts.embedding) if is_embedding]
            self.steps.append(
                f"{facts.name} states against the target's embedding: "
                + (f"{', '.join(held)} is the embedding" if held else "no slot is the embedding")
            )

    # -- what is said besides the findings --------------------------------------------------------------------------------

    def placement(self) -> Placement:
        train = list(self.m.train.slots) + ([self.m.train.last] if self.m.train.last else []) if self.m.train else []
        return Placement(train=train, serve=list(self.m.serve.slots) if self.m.serve else [])

    def provenance(self) -> dict[str, Any]:
        def of(name: str) -> str:
            try:
                return version(name)
            except PackageNotFoundError:
                return "unknown"

        inputs = self.case.inputs
        given = {
            k: str(v)
            for k, v in (
                ("train", inputs.train),
                ("train_heldout", inputs.train_heldout),
                ("serve", inputs.serve),
                ("draft", inputs.draft),
                ("target", inputs.target),
                ("metrics", _places(inputs)),
                ("logs", ", ".join(map(str, inputs.logs))),
                ("conversations", inputs.conversations),
            )
            if v
        }
        return {
            "inputs": given,
            "consumer": self.m.consumer,
            "k": self.case.k,
            "seed": inputs.seed,
            "max_tokens": inputs.max_tokens,
            "claims": {}
            if self.case.serve is None
            else {k: v for k, v in self.case.serve.meta.items() if not isinstance(v, dict)},
            "labels": [] if self.case.train is None else list(self.case.train.labels),
            "versions": {
                "draftscope": of("draftscope"),
                "torch": of("torch"),
                "transformers": of("transformers"),
                "python": platform.python_version(),
            },
            "judged_on": len(judging([s.name for s in self.case.serve.sequences])) if self.case.serve else 0,
        }


def _places(inputs: Inputs) -> str:
    given = inputs.metrics
    return ", ".join(map(str, given)) if isinstance(given, (list, tuple)) else "" if given is None else str(given)


def _matched(selected: Selected) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for skip in selected.source.skipped:
        reasons[skip.why] = reasons.get(skip.why, 0) + 1
    steps = sum(len(s.steps.start) for s in selected.sequences if s.steps is not None)
    return {
        "read": selected.total,
        "taken": len(selected.sequences),
        "rows": selected.rows,
        "rows_cut": selected.rows_left_out,
        "skipped": reasons,
        "steps": steps,
        "steps_cut": selected.steps_cut,
        "format": selected.source.format,
    }


def _listed(boundaries: tuple[int, ...] | None) -> str:
    return "unknown" if boundaries is None else str(list(boundaries))
