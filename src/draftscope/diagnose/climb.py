"""The ladder climbed: trained, reference, served, as read, measured; and the gate between replay and engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from draftscope.diagnose.case import Selected
from draftscope.diagnose.ladder import Ladder, Repair, combine
from draftscope.eagle3.acceptance import Counts, summarise
from draftscope.eagle3.reading import D2T, Reading
from draftscope.eagle3.replayed import Replay
from draftscope.eagle3.stages import stages
from draftscope.engines.counters import Counters, read_counters
from draftscope.errors import UsageError
from draftscope.faults.measurements import GateFacts, RungFacts, StageFacts
from draftscope.findings import Rung
from draftscope.states.types import Sequence

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

AGREE, SAME = 0.95, 0.03
"""Share of drafts, and relative error of states, from which a stage counts as reproduced."""


def climb(examination: Examination) -> None:
    """Every rung that the inputs allow; a rung without data stays None."""
    case, m, ladder = examination.case, examination.m, examination.ladder
    if ladder is not None and not [name for name in m.missing if name != "d2t"]:
        examination.report("replaying the draft")
        absolute = m.vocabulary is not None and m.vocabulary.stored == "absolute"
        meant = combine([], Reading(d2t="absolute") if absolute else Reading())
        try:
            _replays(examination, ladder, meant)
        except UsageError as error:
            examination.next.append(f"replay: {error}")
    if case.serve is not None and (counted := counted_steps(case.serve.sequences, case.k)) is not None:
        examination.rungs["measured"] = counted
    if case.inputs.metrics is not None:
        _counters(examination, read_counters(case.inputs.metrics))


def _replays(examination: Examination, ladder: Ladder, meant: Repair) -> None:
    case, m = examination.case, examination.m
    if case.train is not None:
        trained = ladder.trained(meant)
        _rung(examination, "trained", trained, held_out=case.heldout is not None)
        m.unigram_nll = unigram_nll(case.train)
        examination.matched["trained_text"] = trained.text()
    if case.serve is not None:
        if ladder.can_remake:
            _rung(examination, "reference", ladder.remade(meant))
        _rung(examination, "served", ladder.served(meant))
        _gate(examination, ladder)
        as_read = ladder.served(combine([], examination.as_read))
        _rung(examination, "as_read", as_read)
        examination.matched["served_text"] = as_read.text()


def _rung(examination: Examination, name: str, replayed: Replay, held_out: bool | None = None) -> None:
    rung = replayed.rung(held_out=held_out, seed=examination.case.inputs.seed)
    examination.rungs[name] = rung
    examination.m.rungs[name] = RungFacts(rung.length, rung.joint, rung.nll, rung.coverage, rung.rows)


def _gate(examination: Examination, ladder: Ladder) -> None:
    """The engine's own counts reproduced as read; if not, each known runtime fault is added to the reading."""
    m, as_read = examination.m, examination.as_read
    m.stages = _stages(examination, ladder)
    gate = ladder.served(combine([], as_read)).gate()
    if gate is None:
        return
    m.gate = GateFacts(gate.share, gate.steps, len(gate.near_ties), gate.left_out)
    examination.steps.append(
        f"gate: replay at the engine's own starts gives the recorded accepted count in {gate.share:.1%} of {gate.steps} steps "
        f"({len(gate.near_ties)} near-ties, {gate.left_out} left out)"
    )
    if gate.passed:
        return
    wrong: Literal["pre", "post"] = "post" if m.feedback == "pre" else "pre"
    tried = {f"feedback={wrong}": replace(as_read, feedback=wrong)}
    if m.vocabulary and m.vocabulary.stored not in ("none needed", "missing"):
        readings: tuple[D2T, ...] = ("zero", "absolute", "offset")
        tried |= {f"d2t={d}": replace(as_read, d2t=d) for d in readings if d != as_read.d2t}
    best = 0.0
    for name, reading in tried.items():
        other = ladder.served(combine([], reading)).gate()
        if other is None:
            continue
        m.gate_with[name] = GateFacts(other.share, other.steps, len(other.near_ties), other.left_out)
        if other.passed and other.share > best and _explains(examination, name):
            best, examination.as_read = other.share, reading


def _explains(examination: Examination, name: str) -> bool:
    """Whether what the engine recorded of its drafts speaks for a reading whose counts agree.

    An engine that accepts nothing agrees with every reading under which nothing is accepted: the drafts themselves must agree,
    or, where they were not recorded, something must have been accepted.
    """
    found, serve = examination.m.stages, examination.case.serve
    key, _, value = name.partition("=")
    if found is not None and key == "d2t" and found.head_agreement:
        return found.head_agreement.get(value, 0.0) > AGREE
    if found is not None and key == "feedback" and found.feedback_error:
        return found.feedback_error.get(value, 1.0) < SAME
    return serve is not None and any(bool(s.steps.accepted.any()) for s in serve.sequences if s.steps is not None)


def _stages(examination: Examination, ladder: Ladder) -> StageFacts | None:
    case = examination.case
    assert case.serve is not None
    assert case.checkpoint is not None
    draft = ladder.draft(examination.as_read)
    found = stages(draft, case.serve.sequences, offsets=case.checkpoint.tensors.get("d2t"))
    if found is None:
        return None
    return StageFacts(found.fc_error, found.layer_error, found.head_agreement, found.feedback_error, found.steps)


def counted_steps(sequences: Iterable[Sequence], k: int) -> Rung | None:
    """The engine's own accepted counts, as recorded in the capture; None without steps."""
    counts = []
    for sequence in sequences:
        if sequence.steps is not None and len(sequence.steps.accepted):
            accepted = sequence.steps.accepted.clamp(max=k).numpy()
            counts.append(Counts.of(sequence.name, accepted, np.full(len(accepted), k), k))
    return summarise(counts, k, "engine") if counts else None


def _counters(examination: Examination, counters: Counters) -> None:
    k = max(len(counters.accepted), 1)
    reached = np.array([counters.drafts, *counters.accepted[:-1]])
    pooled = Counts("counters", reached, np.array(counters.accepted), counters.drafts)
    examination.rungs["measured"] = summarise([pooled], k, "engine")
    length = "no steps" if counters.length is None else f"{counters.drafts} steps, accept length {counters.length:.3f}"
    examination.steps.append(f"measured: {counters.says}, {length}")


def unigram_nll(selected: Selected) -> float | None:
    """-log p of the answer tokens under their own frequencies (the entropy of the unigram distribution); None without answers."""
    tokens = [s.token_ids[s.answer[: len(s.token_ids)]] if s.answer is not None else s.token_ids for s in selected.sequences]
    joined = torch.cat(tokens)
    if len(joined) < 2:
        return None
    counts = torch.unique(joined, return_counts=True)[1].double()
    p = counts / counts.sum()
    return float(-(p * p.log()).sum())
