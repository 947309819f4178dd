"""Which other reading of the checkpoint explains what the engine recorded, or does better on the training states.

Readings are those of `readings`; figures are taken on a bounded part of the rows, since many are tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftscope.diagnose import readings
from draftscope.diagnose.ladder import Ladder, Repair, combine
from draftscope.eagle3.altered import ROUNDED
from draftscope.eagle3.checkpoint import build_draft
from draftscope.eagle3.matching import answer_rows
from draftscope.eagle3.model import Draft, StepMask
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.replay import replay
from draftscope.eagle3.replayed import compare
from draftscope.eagle3.stages import Stages, stages
from draftscope.errors import DraftscopeError
from draftscope.faults.facts_checkpoint import Explained, Learned, Otherwise, Part
from draftscope.faults.measurements import SAME, GateFacts
from draftscope.states.types import Sequence

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

ROWS = 1024
"""Feature rows on which many readings are tried."""
SOUND = 0.6
"""First-position acceptance on training states from which nothing is tried there."""
DEPARTS, BETTER = 0.003, 4.0
"""Relative error of a stage from which it is looked at, and by how much another reading has to be better."""
SLIGHT = 0.05
"""Relative error (of the head: share of drafts) up to which only rounded matrices and gains are tried."""
DRAFTS_DIFFER, DRAFTS_AGREE = 0.05, 0.03
GAIN = 0.1
"""Accepted tokens a step by which another reading of the file has to do better."""
FEWEST = 24
"""Rows of the second half on which a learned map is judged."""


def some(sequences: Iterable[Sequence], rows: int = ROWS) -> list[Sequence]:
    """Sequences from the front, up to so many rows; at least one."""
    taken: list[Sequence] = []
    count = 0
    for sequence in sequences:
        taken.append(sequence)
        count += sequence.rows
        if count >= rows:
            break
    return taken


# -- the engine ----------------------------------------------------------------------------------------------------------------


def explain_engine(examination: Examination, ladder: Ladder) -> None:
    """For each stage that departs, the other reading that reproduces it; all together become the reading in effect."""
    m, case = examination.m, examination.case
    assert case.serve is not None
    assert case.checkpoint is not None
    found, facts = m.stages, m.checkpoint
    if found is None or facts is None or any(gate.passed for gate in m.gate_with.values()):
        return
    if m.runtime is not None and m.runtime.drawn:
        return  # drawn drafts are not the head's best
    base = examination.as_read
    taken = some(s for s in case.serve.sequences if s.fc_output is not None or (s.steps and s.steps.states is not None))
    offsets = case.checkpoint.tensors.get("d2t")
    own = stages(ladder.draft(base), taken, offsets=offsets)
    if own is None:
        return
    if m.vocabulary is not None and m.vocabulary.stored != "none needed" and base.d2t == "offset":
        learned = learned_by_engine(ladder.draft(base), case.serve.sequences)
        if learned is not None:
            facts.learned["engine"] = learned
    reading = base
    own_embedding = "embed_tokens.weight" in case.checkpoint.tensors
    tied = case.parts is not None and case.parts.head is case.parts.embedding and not own_embedding
    for part, keys in readings.of_engine(case.checkpoint, base, tied=tied).items():
        before = figure(own, part)
        if before is None or before <= (DRAFTS_DIFFER if part == "head" else DEPARTS):
            continue
        if part == "fc" and m.stages is not None and (m.stages.fc_error_reference or 1.0) < SAME:
            continue  # it is the recording of its input that is wrong
        explained = _explain(examination, taken, part, keys if before > SLIGHT else readings.slight(keys), base, before)
        if explained is not None:
            facts.engine.append(explained)
            reading = readings.apply(explained.key, reading)
    reading = _rounded_alike(reading)
    if reading == base:
        return
    gate = ladder.served(combine([], reading)).gate()
    if gate is not None:
        m.gate_with["as explained"] = GateFacts.of(gate)
    examination.as_read = reading
    examination.steps += [f"stages: {one.part} departs by {one.own:.2g}, under {one.key} by {one.other:.2g}"
                          for one in facts.engine]


def figure(found: Stages, part: Part) -> float | None:
    """How far a stage departs; an `fc` that was not recorded shows in the layer behind it."""
    if part == "fc":
        return found.fc_error if found.fc_error is not None else found.layer_error
    if part == "layer":
        return found.layer_error if found.fc_error is not None else None
    return 1 - max(found.head_agreement.values()) if found.head_agreement else None


def _explain(
    examination: Examination, taken: list[Sequence], part: Part, keys: list[str], base: Reading, before: float,
) -> Explained | None:
    case = examination.case
    assert case.checkpoint is not None
    tried: list[tuple[float, str]] = []
    for key in keys:
        try:
            draft = build_draft(case.checkpoint, case.parts, readings.apply(key, base))
        except (DraftscopeError, ValueError, KeyError):
            continue  # not a reading of these tensors
        after = stages(draft, taken, offsets=case.checkpoint.tensors.get("d2t"))
        value = None if after is None else figure(after, part)
        if value is not None:
            tried.append((value, key))
    tried.sort()
    enough = DRAFTS_AGREE if part == "head" else SAME
    if not tried or tried[0][0] > min(enough, before / BETTER):
        return None
    return Explained(part, tried[0][1], before, tried[0][0], tried[1][0] if len(tried) > 1 else None, len(tried))


def _rounded_alike(reading: Reading) -> Reading:
    """An engine that rounds fc and layer alike rounds the head too, which shows in its drafts hardly ever."""
    kinds = {name.partition(" ")[0] for name in reading.altered if name.startswith(("fp8", "int8", "int4"))}
    if len(kinds) != 1 or any(name.endswith(" lm_head.") for name in reading.altered):
        return reading
    parts = {name.partition(" ")[2] for name in reading.altered if name.partition(" ")[0] in ROUNDED}
    if not {"fc.", "midlayer."} <= parts:
        return reading
    return readings.apply(f"altered {kinds.pop()} lm_head.", reading)


def learned_by_engine(draft: Draft, sequences: Iterable[Sequence]) -> Learned | None:
    """The map from the draft's own choice over each recorded first state to the token that the engine drafted there."""
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, sequence in enumerate(sequences):
        steps = sequence.steps
        if steps is None or steps.states is None or steps.drafted is None or steps.parents is not None:
            continue
        held = steps.drafted[:, 0] >= 0
        with torch.no_grad():
            best = draft.logits(steps.states[held, 0].to(draft.dtype)).argmax(-1)
        halves[i % 2].append(torch.stack([best, steps.drafted[held, 0]], 1))
    return learn("engine", halves, draft.target_ids)


def learn(where: str, halves: tuple[list[Tensor], list[Tensor]], stored: Tensor) -> Learned | None:
    """A map learned from pairs (draft id, token) [N, 2] of one half and judged on the other; None where there are too few."""
    if not halves[0] or not halves[1]:
        return None
    fit, held = torch.cat(halves[0]), torch.cat(halves[1])
    if len(held) < FEWEST:
        return None
    ids, counts = most_frequent(fit, stored)
    seen = counts > 0
    judged = held[seen[held[:, 0]]]
    if len(judged) < FEWEST:
        return None
    right = {name: float((table[judged[:, 0]] == judged[:, 1]).double().mean()) for name, table in
             (("stored", stored), ("learned", ids))}
    common = float(torch.bincount(judged[:, 1]).max()) / len(judged)
    apart = (ids - stored)[seen]
    weights = counts[seen].double()
    shift, share = _most(apart, weights)
    named = torch.isin(ids[seen], stored).double()
    return Learned(
        where, right["stored"], right["learned"], common, len(judged), shift if share > 0.95 else None,  # type: ignore[arg-type]
        float((named * weights).sum() / weights.sum()), tuple(ids.tolist()),
    )


def most_frequent(pairs: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """By draft id the token seen most with it (of equals the lowest; `stored` where none was), and how often the id was seen.

    Args:
        pairs: [N, 2] of draft id and token. A table of every draft id by every token would take gigabytes.
    """
    unique, counts = pairs.unique(dim=0, return_counts=True)
    unique = unique[counts.argsort(descending=True, stable=True)]
    which, first = np.unique(unique[:, 0].numpy(), return_index=True)
    ids = stored.clone()
    ids[torch.from_numpy(which)] = unique[torch.from_numpy(first), 1]
    return ids, torch.bincount(pairs[:, 0], minlength=len(stored))


def _most(values: Tensor, weights: Tensor) -> tuple[int, float]:
    """The value of most weight, and its share."""
    unique, inverse = values.unique(return_inverse=True)
    total = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, inverse, weights)
    best = int(total.argmax())
    return int(unique[best]), float(total[best] / total.sum())


# -- the file ------------------------------------------------------------------------------------------------------------------


def explain_file(examination: Examination, ladder: Ladder, meant: Repair) -> None:
    """Where the draft fails on its own training states: the reading of the file under which it does not."""
    m, case = examination.m, examination.case
    own = m.rungs.get("trained")
    if m.checkpoint is None or own is None or not own.joint:
        return
    # A file with which the draft does well on any states is right: those of its training are then what is wrong.
    best = max(known.joint[0] for name in ("trained", "reference", "served") if (known := m.rungs.get(name)) and known.joint)
    if best >= SOUND and m.turned is None:
        return
    chosen = case.heldout or case.train
    assert chosen is not None
    assert case.checkpoint is not None
    draft = ladder.draft(meant.reading, meant.rebuilt_map)
    if case.checkpoint.config.draft_vocab_size != case.checkpoint.config.vocab_size:
        learned = learned_on_training(draft, chosen.sequences)
        if learned is not None:
            m.checkpoint.learned["trained"] = learned
    taken = some(chosen.sequences)
    before = replay(draft, taken, parts=case.parts, k=case.k)
    gains: list[tuple[float, str]] = []
    keys = readings.of_file(case.checkpoint, meant.reading)
    for key in keys:
        try:
            other = build_draft(case.checkpoint, case.parts, readings.apply(key, meant.reading))
        except (DraftscopeError, ValueError, KeyError):
            continue
        gain, _ = compare(before, replay(other, taken, parts=case.parts, k=case.k), "all")
        gains.append((gain.value or 0.0, key))
    gains.sort(reverse=True)
    if not gains or gains[0][0] < GAIN:
        return
    better, key = gains[0]
    second = gains[1][0] / better if len(gains) > 1 else None
    if m.turned is not None and key == f"{m.turned.name}={m.turned.value}":
        m.turned = replace(m.turned, next_best=second)
        return
    # A switch may do better than what is there and yet not be what is wrong.
    m.turned = None
    whole, first = ladder.trained(Repair(reading=readings.apply(key, meant.reading))), ladder.trained(meant).rung()
    rung = whole.rung()
    if rung.nll is None or first.nll is None:
        return
    m.checkpoint.otherwise = Otherwise(key, first.nll, rung.nll, first.joint[0], rung.joint[0], first.length, rung.length, second,
                                       len(gains))
    examination.steps.append(f"on the training states the draft does better with {key}: first-position acceptance "
                             f"{first.joint[0]:.1%} to {rung.joint[0]:.1%}")


def learned_on_training(draft: Draft, sequences: Iterable[Sequence]) -> Learned | None:
    """The map from the draft's own choice at each answer row to the token that comes there."""
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, sequence in enumerate(some(sequences, 4 * ROWS)):
        usable = max(min(sequence.rows, len(sequence.token_ids) - 1), 0)
        rows = answer_rows(sequence.answer, usable, len(sequence.token_ids), 1)
        if not len(rows):
            continue
        with torch.no_grad():
            hidden = draft.project(sequence.features[:usable])
            embeds = draft.embed(sequence.draft_inputs(usable))
            output = draft(hidden[None], embeds[None], sequence.positions[None, :usable], StepMask.of(draft.config))[0]
            best = draft.logits(output[rows]).argmax(-1)
        halves[i % 2].append(torch.stack([best, sequence.token_ids[rows + 2]], 1))
    return learn("trained", halves, draft.target_ids)
