"""Inputs that do not go together: told as such, so that no fault is seen in what belongs to another target, draft or run.

Said only where the inputs exclude each other by their own figures. A capture that is merely spoilt is not of another target: the
text that it holds is still what the target given would have written, whatever became of the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from draftscope.compare.pairing import last_state_check, match_entries, pair
from draftscope.diagnose.case import Selected
from draftscope.faults.facts_rows import UNKNOWN
from draftscope.faults.measurements import OTHER, SAME, SideFacts
from draftscope.faults.rowcause import claimed
from draftscope.findings import Rung

if TYPE_CHECKING:
    from collections.abc import Sequence as Several

    from draftscope.diagnose.run import Examination
    from draftscope.faults.base import Suspicion

Pair = Literal["serve and target", "train and target", "serve and draft", "serve and metrics"]

LOST = 0.9
"""Share of a slot's rows that no state of the target explains, under any reading."""
LEAST_ROWS, LEAST_ANSWERS = 24, 12
OWN, FOREIGN = 0.9, 0.5
"""Share of a greedy text that is its target's own choice, and the most that another target's is taken to be: targets of one
tokenizer agree on many tokens, and sampled text is chosen less often than greedy text."""
MAPPED, DIVERSE = 0.9, 0.5
"""Share of rows in which one recorded id always goes with one id of the head, and of unlike ids among those."""
WORKS = 0.3
"""Acceptance at the first position from which the draft that served is a trained one."""
SLACK = 0.02
CHECKED = 2048
FILES = frozenset({"nonfinite", "schema-width", "lossmask-empty", "lossmask-span", "vocab-map", "metric"})
"""Faults that the files of one input show by themselves."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two inputs that cannot be of one run.

    Attributes:
        of: the inputs.
        says: what contradicts what, with the figures and what to give instead.
    """

    of: Pair
    says: str


def contradict(examination: Examination) -> list[Contradiction]:
    """Every contradiction between inputs, and what rests on it taken out of the ladder."""
    found = [*_targets(examination), *_drafts(examination), *_metrics(examination)]
    pairs = {one.of for one in found}
    if "serve and target" in pairs and not _reproduced(examination):
        for name in ("reference", "served", "as_read"):
            examination.rungs.pop(name, None)
    if "train and target" in pairs:
        examination.rungs.pop("trained", None)
    if "serve and metrics" in pairs:
        examination.rungs.pop("measured", None)
        if examination.counted is not None:
            examination.rungs["measured"] = examination.counted
    examination.matched["contradictions"] = [{"of": one.of, "says": one.says} for one in found]
    return found


def stands(suspicion: Suspicion, found: Several[Contradiction]) -> bool:
    """Whether a suspicion rests on nothing that the contradictions void."""
    pairs = {one.of for one in found}
    if suspicion.runtime and pairs & {"serve and target", "serve and draft"}:
        return False
    if suspicion.fault in FILES or (not suspicion.runtime and any(w.startswith("config ") for w in suspicion.where)):
        return True
    if "serve and target" in pairs and (suspicion.side == "serve" or suspicion.fault == "train-budget"):
        return False
    if "train and target" in pairs and suspicion.side == "train":
        return False
    return not ("serve and draft" in pairs and (suspicion.runtime or suspicion.fault == "train-budget"))


def hedge(examination: Examination, suspicions: Several[Suspicion]) -> None:
    """Add to a draft that seems not to have learned what else would look so: nothing here tells whom it was made for."""
    for suspicion in suspicions:
        if suspicion.fault == "train-budget" and examination.m.live is None:
            suspicion.caveats.append("a draft that was made for another target of the same shape, or another checkpoint than the "
                                     "one that was trained on these states, looks the same: compare its loss in training")


# -- states of another target ---------------------------------------------------------------------------------------------


def _targets(examination: Examination) -> list[Contradiction]:
    case, m = examination.case, examination.m
    if case.parts is None:
        return []
    serve = m.serve is not None and case.serve is not None and _lost(examination, m.serve) and _foreign(examination, case.serve)
    train = m.train is not None and case.train is not None and _lost(examination, m.train) and _last_lost(m.train) and (
        _head_share(examination, case.train) or 0.0) < FOREIGN
    found = []
    if serve:
        assert case.serve is not None
        own, head = _own_text(examination, case.serve), _head_share(examination, case.serve)
        says = (
            f"the capture is not of the target given: none of its slots holds a state of this target under any reading, and "
            f"{own:.0%} of the tokens served are this target's own choice"
        )
        if head is not None:
            says += f"; its head makes the served text of {head:.0%} of the last states recorded"
        if (renumbered := _renumbered(examination, case.serve)) is not None:
            says += (f". The ids recorded and the head's go together one by one in {renumbered:.0%} of the rows, so that it is "
                     "the tokenizer that differs: give the token ids as this target numbers them")
        elif _reproduced(examination):
            says += ". Replay gives the engine's own counts, so that capture and draft go together: give their target"
        elif _alike(examination):
            says += ". Served and training states are alike where their texts are, so that these go together: give their target"
        else:
            says += ": give the target that was served, and token ids of its own tokenizer"
        found.append(Contradiction("serve and target", says))
    if train:
        what = "" if not serve else ", like the capture"
        found.append(Contradiction(
            "train and target",
            f"the training states are not of the target given{what}: no entry of them, the last state included, is a state of "
            "this target over their tokens under any reading, nor does its head make their text of the last: give the training "
            "states of this target, or the target that they are of",
        ))
    return found


def _lost(examination: Examination, side: SideFacts) -> bool:
    """Whether no slot of a side holds anything that the target makes of its tokens, and no damage to rows explains it."""
    rows = examination.m.rows.get(side.name)
    if side.proof != "sweep" or rows is None or claimed(examination.m, side) or rows.repeats or side.tokens < LEAST_ROWS:
        return False
    known = {slot.slot: slot.share(UNKNOWN) for slot in rows.slots}
    return len(side.slots) > 0 and all(
        placed.boundary is None and known.get(placed.slot, placed.shares.get("unmatched", 0.0)) >= LOST for placed in side.slots
    )


def _last_lost(side: SideFacts) -> bool:
    return side.last is None or side.last.boundary is None


def _foreign(examination: Examination, selected: Selected) -> bool:
    """Whether the target given does not choose the tokens that were served."""
    own = _own_text(examination, selected)
    return own is not None and own < FOREIGN


def _own_text(examination: Examination, selected: Selected) -> float | None:
    """Share of the answer tokens that the target given chooses after the tokens before them; None with too few of them."""
    swept, parts = examination.swept.get("serve" if selected is examination.case.serve else "train"), examination.case.parts
    if swept is None or parts is None:
        return None
    hits = total = 0
    for sequence in selected.sequences:
        rows = min(sequence.rows, len(sequence.token_ids) - 1)
        asked = torch.ones(rows, dtype=torch.bool) if sequence.answer is None else sequence.answer[1 : rows + 1].bool()
        index = asked.nonzero().squeeze(-1)
        if not len(index) or total > CHECKED:
            continue
        chosen = parts.logits(parts.final_norm(swept.last[sequence.name][index])).argmax(-1)
        hits, total = hits + int((chosen == sequence.token_ids[index + 1]).sum()), total + len(index)
    return hits / total if total >= LEAST_ANSWERS else None


def _head_share(examination: Examination, selected: Selected) -> float | None:
    """Share of rows whose recorded last state gives the next token under the target's head; None without last states."""
    lasts = [(s.last, s.token_ids, s.answer) for s in selected.sequences if s.last is not None]
    assert examination.case.parts is not None
    return last_state_check(lasts, examination.case.parts).agreement if lasts else None


def _renumbered(examination: Examination, selected: Selected) -> float | None:
    """Share of rows in which the id recorded next and that of the head over the last state go together one by one; None where
    too few ids occur again, or they do not."""
    parts, pairs = examination.case.parts, []
    assert parts is not None
    for sequence in selected.sequences:
        if sequence.last is None:
            continue
        rows = min(sequence.rows, len(sequence.token_ids) - 1)
        asked = torch.ones(rows, dtype=torch.bool) if sequence.answer is None else sequence.answer[1 : rows + 1].bool()
        index = asked.nonzero().squeeze(-1)
        pairs.append(torch.stack([sequence.token_ids[index + 1],
                                  parts.logits(parts.final_norm(sequence.last[index].float())).argmax(-1)], 1))
    return one_by_one(torch.cat(pairs)) if pairs else None


def one_by_one(pairs: Tensor) -> float | None:
    """Of pairs of ids [N, 2] the share in which each id of the first column goes with the id it mostly goes with, over those that
    occur three times or more; None where that is below nine in ten, or unlike ids go with few."""
    most, hits, total = set(), 0, 0
    ids = pairs[:, 0].unique()
    repeated = 0
    for token in ids.tolist():
        with_it = pairs[pairs[:, 0] == token, 1]
        if len(with_it) < 3:
            continue
        values, counts = with_it.unique(return_counts=True)
        best = int(counts.argmax())
        most.add(int(values[best]))
        hits, total, repeated = hits + int(counts[best]), total + len(with_it), repeated + 1
    if total < LEAST_ANSWERS or repeated < 4 or len(most) < DIVERSE * repeated or hits < MAPPED * total:
        return None
    return hits / total


def _reproduced(examination: Examination) -> bool:
    """Whether replay gives the engine's own counts, some of them accepted."""
    gate = examination.m.gate
    return gate is not None and gate.passed and _served_well(examination)


def _served_well(examination: Examination) -> bool:
    counted = examination.counted
    return counted is not None and bool(counted.joint) and counted.joint[0] > WORKS


def _alike(examination: Examination) -> bool:
    """Whether served slots equal training entries on the rows of texts that begin alike."""
    case = examination.case
    if case.train is None or case.serve is None:
        return False
    matched = match_entries(pair(case.train.sequences, case.serve.sequences))
    return bool(matched) and all(one.entry is not None and (one.error or 0) < SAME and one.rows >= 8 for one in matched)


# -- another draft --------------------------------------------------------------------------------------------------------


def _drafts(examination: Examination) -> list[Contradiction]:
    """A draft that served well, none of whose stages is the checkpoint's."""
    m, stages = examination.m, examination.m.stages
    if stages is None or not _served_well(examination) or any(gate.passed for gate in m.gate_with.values()):
        return []
    if m.gate is not None and m.gate.passed:
        return []
    fc, layer = stages.fc_error, stages.layer_error
    head = max(stages.head_agreement.values(), default=None)
    misrecorded = stages.fc_error_reference is not None and stages.fc_error_reference < SAME
    if fc is None or layer is None or head is None or misrecorded or fc < OTHER or layer < OTHER or head > FOREIGN:
        return []
    counted: Rung | None = examination.counted
    assert counted is not None
    return [Contradiction(
        "serve and draft",
        f"the draft given is not the one that served: its fc, its layer and its head all give other outputs than were recorded "
        f"(errors {fc:.2g} and {layer:.2g}, {head:.0%} of the drafts), and yet the draft that served accepted "
        f"{counted.joint[0]:.0%} at the first position: give the checkpoint that the engine loaded",
    )]


# -- counters of another run ----------------------------------------------------------------------------------------------


def _metrics(examination: Examination) -> list[Contradiction]:
    """Counts that cannot hold the capture's own steps among them."""
    counters, counted = examination.m.counters, examination.counted
    if examination.case.inputs.metrics is None or counters is None or counted is None or counters.simulated:
        return []
    if not counters.drafts or not counters.accepted or not counted.joint or counters.shape.tree:
        return []
    requests = 0 if examination.case.serve is None else len(examination.case.serve.sequences)
    slack = SLACK * counted.rounds + requests  # an engine may leave out the step in which a request ends
    others = counters.drafts - counted.rounds
    for position, (all_, share) in enumerate(zip(counters.accepted, counted.joint, strict=False), 1):
        own = share * counted.rounds
        if others < -slack or all_ < own - slack or all_ - own > max(others, 0) + slack:
            return [Contradiction(
                "serve and metrics",
                f"the counters are not of the run that the capture is of: they count {counters.drafts} steps, {all_} of which "
                f"accepted position {position}, the capture alone holds {counted.rounds} and {own:.0f}: scrape the counters of "
                "that server, after the capture and without a restart between",
            )]
    return []
