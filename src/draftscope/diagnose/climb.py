"""The ladder climbed: trained, reference, served, as read, measured; and the gate between replay and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftscope.diagnose.beginnings import find_answers
from draftscope.diagnose.case import Selected
from draftscope.diagnose.explaining import explain_engine, explain_file
from draftscope.diagnose.ladder import Ladder, Repair, as_meant, combine, without_embedding
from draftscope.diagnose.rotary import try_thetas
from draftscope.diagnose.sampled import sampled, temperature
from draftscope.diagnose.shape import by_context, given, shape
from draftscope.diagnose.trials import reading_of, try_runtimes
from draftscope.eagle3.acceptance import Counts, summarise
from draftscope.eagle3.depth import clipped
from draftscope.eagle3.reading import D2T, Reading
from draftscope.eagle3.replayed import Replay, compare
from draftscope.eagle3.stages import stages
from draftscope.engines.counted import Counters
from draftscope.engines.counters import read_counters, told
from draftscope.errors import UsageError
from draftscope.faults.measurements import (
    CLEARLY,
    LEARNED,
    OTHER,
    SAME,
    EmbeddingFacts,
    GateFacts,
    RungFacts,
    StageFacts,
    TurnedFacts,
)
from draftscope.findings import NOT_REPLAYED, Rung
from draftscope.linting.target import same_embedding, turned_embedding
from draftscope.linting.vocabulary import rebuilt_ids
from draftscope.states.types import Sequence
from draftscope.text import reached

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

SWITCHES = ("norm_before_residual",)
"""Switches that no tensor betrays, so that a configuration may be wrong about them."""
LOW = 0.5
"""Acceptance at the first position on held-out states below which those that the draft learned from are looked at, too."""
NOTICEABLE = 0.02
"""Accept length."""
ALL_ROWS = 0.999
"""Share of equal rows from which an embedding is the target's."""
AGREE = 0.95
"""Share of drafts from which a map counts as theirs."""


def climb(examination: Examination) -> None:
    """Every rung that the inputs allow; a rung without data stays None."""
    case, m, ladder = examination.case, examination.m, examination.ladder
    if case.serve is not None:
        if (said := clipped((s.steps.accepted for s in case.serve.sequences if s.steps is not None), case.k)) is not None:
            examination.steps.append(f"measured: {said}")
            examination.next.append(f"measured: {said}")
        examination.counted = counted_steps(case.serve.sequences, case.k, trees=case.tree is not None)
        if examination.counted is not None:
            examination.rungs["measured"] = counted = examination.counted
            m.rungs["measured"] = RungFacts(counted.length, counted.joint, None, None, counted.rows)
            m.recorded_steps = counted.rounds
    if examination.live is not None:
        counters = examination.live.counters(every=case.serve is not None)
        _counters(examination, counters)
        if not counters.simulated:
            examination.rungs["measured"] = examination.live.rung(every=case.serve is not None)
    if case.inputs.metrics is not None:
        _counters(examination, read_counters(case.inputs.metrics, case.inputs.metrics_window))
    unfit = [name for name in m.missing if name != "d2t"] + list(m.poisoned)
    if ladder is None or unfit:
        if unfit:
            examination.next.append(f"{NOT_REPLAYED}: {', '.join(unfit[:3])} of its checkpoint cannot be used")
        return
    examination.report("replaying the draft")
    find_answers(examination)
    repair = as_meant(m)
    for side, run in (("train", _trained), ("serve", _served)):
        given = m.shapes.get(side)
        if (given is not None and given == m.shapes.get("draft")) or (side == "train" and case.heldout is not None):
            try:
                run(examination, ladder, repair)
            except UsageError as error:
                examination.next.append(f"{'trained' if side == 'train' else 'served'}: {error}")
    explain_file(examination, ladder, repair)


def _trained(examination: Examination, ladder: Ladder, meant: Repair) -> None:
    case, m = examination.case, examination.m
    facts = m.vocabulary
    if facts is not None and facts.stored not in ("offset", "none needed", "absolute") and not facts.rebuilt:
        examination.next.append("trained: not without the draft's vocabulary map")
        return
    trained = ladder.trained(meant)
    _rung(examination, "trained", trained, held_out=case.heldout is not None)
    if case.heldout is not None and m.shapes.get("train") == m.shapes.get("draft") and m.rungs["trained"].joint and (
            m.rungs["trained"].joint[0] < LOW):
        rung = ladder.in_sample(meant).rung(held_out=False)
        m.in_sample = RungFacts(rung.length, rung.joint, rung.nll, rung.coverage, rung.rows)
        examination.steps.append(f"the draft on the training states that it learned from: accept length {rung.length or 1:.2f}")
    _embedding(examination, "trained", trained, lambda: ladder.trained(_meant_without(meant)))
    m.unigram_nll = unigram_nll(case.heldout or case.train)
    _turn_switches(examination, ladder, meant, trained)
    try_thetas(examination, ladder, meant)
    examination.matched["trained_text"] = trained.text()


def _served(examination: Examination, ladder: Ladder, meant: Repair) -> None:
    case, m = examination.case, examination.m
    if ladder.can_remake:
        _rung(examination, "reference", ladder.remade(meant))
    _rung(examination, "served", served := ladder.served(meant))
    if m.embedding is None:
        _embedding(examination, "served", served, lambda: ladder.served(_meant_without(meant)))
    _gate(examination, ladder)
    explain_engine(examination, ladder)
    as_read = ladder.served(combine([], examination.as_read))
    examination.matched["served_text"] = as_read.text()
    assert case.serve is not None
    # Our own engine reads a checkpoint as it is meant; how an unknown one does is not known.
    if m.consumer is not None or case.serve.meta.get("engine") == "transformers" or examination.as_read != Reading():
        _rung(examination, "as_read", as_read)


def _turn_switches(examination: Examination, ladder: Ladder, meant: Repair, trained: Replay) -> None:
    """Whether a switch that no tensor betrays is configured otherwise than in training: turned, the draft does better there."""
    m, checkpoint, own = examination.m, examination.case.checkpoint, trained.rung()
    if checkpoint is None or own.nll is None:
        return
    for name in SWITCHES:
        value = not getattr(checkpoint.config, name)
        other = ladder.trained(replace(meant, reading=replace(meant.reading, settings={**meant.reading.settings, name: value})))
        turned = other.rung()
        gain, _ = compare(trained, other, trained.readout, seed=examination.case.inputs.seed)
        better = gain.interval[0] > NOTICEABLE if gain.interval is not None else own.nll - (turned.nll or own.nll) > CLEARLY
        # A draft that is poor either way may do a little better with any switch turned.
        better = better and turned.nll is not None and turned.nll < min(own.nll, LEARNED * (m.unigram_nll or own.nll / LEARNED))
        if turned.nll is not None and better:
            m.turned = TurnedFacts(name, value, own.nll, turned.nll, own.length, turned.length)
            examination.steps.append(f"on the training states the draft does better with {name} = {value}: "
                                     f"{reached(own.nll, own.length)}, then {reached(turned.nll, turned.length)}")


def _meant_without(meant: Repair) -> Repair:
    return replace(meant, reading=without_embedding(meant.reading))


def _embedding(examination: Examination, rung: str, own: Replay, other: Callable[[], Replay]) -> None:
    """The checkpoint's embedding against the target's, where the two differ: on one rung, by replay."""
    case = examination.case
    if case.checkpoint is None or case.parts is None:
        return
    same = same_embedding(case.checkpoint, case.parts)
    if same is None or same > ALL_ROWS:
        return
    with_target = other()
    mine, theirs = own.rung(), with_target.rung()
    examination.m.embedding = EmbeddingFacts(
        same, rung, mine.nll, theirs.nll, mine.length, theirs.length, turned_embedding(case.checkpoint, case.parts))
    examination.steps.append(
        f"the checkpoint's embedding: {same:.0%} of its rows are the target's; {reached(mine.nll, mine.length)} with it, "
        f"{reached(theirs.nll, theirs.length)} with the target's ({rung})")


def _rung(examination: Examination, name: str, replayed: Replay, held_out: bool | None = None) -> None:
    rung = replayed.rung(held_out=held_out, seed=examination.case.inputs.seed)
    examination.rungs[name] = rung
    examination.m.rungs[name] = RungFacts(rung.length, rung.joint, rung.nll, rung.coverage, rung.rows)


def _gate(examination: Examination, ladder: Ladder) -> None:
    """The engine's own counts reproduced as read; if not, each known runtime fault is added to the reading."""
    m, as_read = examination.m, examination.as_read
    m.stages = _stages(examination, ladder, as_read)
    assert examination.case.serve is not None
    m.given = given(examination.case.serve.sequences)
    trained = examination.case.train
    if trained is not None:
        m.lengths = by_context(examination.case.serve.sequences, trained.longest)
    replayed = ladder.served(combine([], as_read))
    gate = replayed.gate()
    if gate is None:
        return
    m.gate = GateFacts.of(gate)
    examination.steps.append(
        f"gate: replay at the engine's own starts gives the recorded accepted count in {gate.share:.1%} of {gate.steps} steps "
        f"({len(gate.near_ties)} near-ties, {gate.left_out} left out)"
    )
    if not gate.passed and _checkpoint_trials(examination, ladder):
        return
    if not gate.passed:
        m.shape = shape(replayed, examination.case.k)
    _runtime_trials(examination, ladder)
    _sampler(examination, ladder)


def _sampler(examination: Examination, ladder: Ladder) -> None:
    """By which rule the drafts of sampled requests were accepted."""
    case = examination.case
    assert case.serve is not None
    warm = temperature(case.serve.meta)
    if not warm or case.parts is None:
        return
    found = sampled(ladder.draft(examination.as_read), case.serve.sequences, case.parts, warm)
    examination.m.sampler = found
    if found is not None:
        examination.steps.append(
            f"sampled at temperature {warm:g}: {found.kept:.1%} of {found.drafts} drafts stood; speculative sampling would have "
            f"kept "
            f"{found.expected_rejection:.1%}, equality with a draw of the target's {found.expected_equality:.1%}")


def _checkpoint_trials(examination: Examination, ladder: Ladder) -> bool:
    """Whether another way to read the checkpoint gives the recorded counts, and what was recorded of the drafts speaks for it."""
    m, as_read = examination.m, examination.as_read
    tried: dict[str, Reading] = {}
    if m.vocabulary and m.vocabulary.stored not in ("none needed", "missing"):
        readings: tuple[D2T, ...] = ("zero", "absolute", "offset")
        tried |= {f"d2t={d}": replace(as_read, d2t=d) for d in readings if d != as_read.d2t}
    checkpoint = examination.case.checkpoint
    if checkpoint is not None:
        turned = not {**checkpoint.config.model_dump(), **as_read.settings}["norm_before_residual"]
        settings = {**as_read.settings, "norm_before_residual": turned}
        tried[f"norm_before_residual={turned}"] = replace(as_read, settings=settings)
    best = 0.0
    for name, reading in tried.items():
        other = ladder.served(combine([], reading)).gate()
        if other is None or not _explains(examination, ladder, name, reading):
            continue
        m.gate_with[name] = GateFacts.of(other)
        if other.passed and other.share > best:
            best, examination.as_read = other.share, reading
    return best > 0


def _runtime_trials(examination: Examination, ladder: Ladder) -> None:
    """Known wrong runtimes added to the reading, where the engine did not do what it says."""
    m, case = examination.m, examination.case
    found = try_runtimes(case, ladder, examination.as_read, m.gate is not None and m.gate.passed)
    m.runtime = found
    if found is None:
        return
    if found.drawn:
        m.gate = None
        if m.stages is not None:
            m.stages.head_agreement = {}
        alike = "none were recorded" if found.as_read.states is None else f"{found.as_read.states:.1%} of them are the engine's"
        examination.steps.append("gate: the engine sampled and drew its drafts, so that no count can come out again; the draft's "
                                 f"states run along the recorded drafts: {alike}")
    if found.tried:
        named = " or ".join(" with ".join(one.names) for one in found.explains) or "none of them"
        examination.steps.append(f"the engine's rounds run again under {found.tried} wrong runtimes: {named} gives what it "
                                 f"recorded")
    if not found.explains:
        return
    first = found.explains[0]
    m.gate_with |= {" with ".join(one.names): one.gate for one in found.explains if one.gate is not None}
    examination.as_read = reading_of(first, examination.as_read)
    if m.stages is not None and first.like.errors:
        # Under the runtime that was in effect the layer's output is the recorded one: it has no other weights.
        m.stages.layer_error = first.like.errors[0]


def _explains(examination: Examination, ladder: Ladder, name: str, reading: Reading) -> bool:
    """Whether what the engine recorded of its drafts speaks for a reading whose counts agree.

    An engine that accepts nothing agrees with every reading under which nothing is accepted: the drafts themselves must agree,
    or, where they were not recorded, something must have been accepted.
    """
    found, serve = examination.m.stages, examination.case.serve
    key, _, value = name.partition("=")
    if found is not None and key == "d2t" and found.head_agreement:
        return found.head_agreement.get(value, 0.0) > AGREE
    if found is not None and key == "norm_before_residual" and found.layer_error is not None:
        again = _stages(examination, ladder, reading)
        return again is not None and again.layer_error is not None and again.layer_error < SAME
    return serve is not None and any(bool(s.steps.accepted.any()) for s in serve.sequences if s.steps is not None)


def _stages(examination: Examination, ladder: Ladder, reading: Reading) -> StageFacts | None:
    case = examination.case
    assert case.serve is not None
    assert case.checkpoint is not None
    draft = ladder.draft(reading)
    found = stages(draft, case.serve.sequences, offsets=case.checkpoint.tensors.get("d2t"),
                   rebuilt=rebuilt_ids(case.checkpoint))
    if found is None:
        return None
    facts = StageFacts(found.fc_error, None, found.layer_error, found.head_agreement, found.feedback_error, found.steps)
    if found.fc_error is not None and found.fc_error > OTHER and ladder.can_remake:
        own = stages(draft, ladder.remade_sequences(), offsets=case.checkpoint.tensors.get("d2t"))
        facts.fc_error_reference = None if own is None else own.fc_error
    return facts


def counted_steps(sequences: Iterable[Sequence], k: int, *, trees: bool = False) -> Rung | None:
    """The engine's own accepted counts, as recorded in the capture, of chains or of trees; None without such steps."""
    counts = recorded_counts(sequences, k, trees=trees)
    return summarise(counts, k, "engine") if counts else None


def recorded_counts(sequences: Iterable[Sequence], k: int, *, trees: bool = False) -> list[Counts]:
    """The recorded accepted counts of each sequence that has some, of chains or of trees."""
    counts = []
    for sequence in sequences:
        if sequence.steps is not None and len(sequence.steps.accepted) and (sequence.steps.parents is not None) == trees:
            accepted = sequence.steps.accepted.clamp(max=k).numpy()
            counts.append(Counts.of(sequence.name, accepted, np.full(len(accepted), k), k))
    return counts


def _counters(examination: Examination, counters: Counters) -> None:
    """The rung that the engine's own counts make, and every figure it reports beside what the figure means."""
    examination.m.counters = counters
    known = "no accept length" if counters.length is None else f"accept length {counters.length:.3f}"
    steps = f"{counters.drafts} steps, " if counters.drafts else ""
    examination.steps.append(f"measured: {counters.says}: {steps}{known}")
    examination.steps += [f"measured: {figure.says()}" for figure in told(counters)]
    examination.steps += [f"measured: {caveat}" for caveat in counters.caveats]
    if counters.simulated:
        # Made-up counts are no rung; those that the capture recorded were made up with them.
        examination.rungs.pop("measured", None)
        examination.next.append("measured: acceptance is simulated; unset it, and serve again")
        return
    if counters.length is None:
        return
    if not counters.accepted:
        examination.rungs["measured"] = Rung(
            k=counters.k or examination.case.k,
            length=counters.length,
            joint=[],
            conditional=[],
            rounds=counters.drafts,
            rows=0,
            readout="engine",
        )
    else:
        reached = np.array([counters.drafts, *counters.accepted[:-1]])
        pooled = Counts("counters", reached, np.array(counters.accepted), counters.drafts)
        examination.rungs["measured"] = summarise([pooled], len(counters.accepted), "engine")
    if counters.shape.tree and examination.case.tree is None:
        examination.next.append(
            f"measured: {counters.shape.words()} accepts more than a chain, which is what the replays are of: serve with one "
            "candidate a step to compare")
    if counters.k is not None and counters.k != examination.case.k:
        examination.next.append(
            f"measured: the counters are of K = {counters.k}, the replays of K = {examination.case.k}; give --k to compare")


def unigram_nll(selected: Selected | None) -> float | None:
    """-log p of the answer tokens under their own frequencies (the entropy of the unigram distribution); None without answers."""
    if selected is None:
        return None
    tokens = [s.token_ids[s.answer[: len(s.token_ids)]] if s.answer is not None else s.token_ids for s in selected.sequences]
    joined = torch.cat(tokens)
    if len(joined) < 2:
        return None
    counts = torch.unique(joined, return_counts=True)[1].double()
    p = counts / counts.sum()
    return float(-(p * p.log()).sum())
