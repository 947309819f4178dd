"""Step 4: what the statistics of both sides say where no row could be paired. Candidates, never a proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftscope.compare.statistics import compare_fingerprints
from draftscope.compare.unpaired import UNTOLD
from draftscope.diagnose.case import Selected
from draftscope.faults.facts_unpaired import UnpairedFacts
from draftscope.inspecting.depth import TokenTest
from draftscope.inspecting.rows import row_figures
from draftscope.scan.fingerprint import Fingerprint
from draftscope.scan.scan import group_of
from draftscope.scan.tally import add_sequence

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

FEWEST_PAIRS = 8
"""Repeated tokens from which a slot is said to depend on them alone."""


def by_statistics(examination: Examination) -> None:
    """Take the served slots' looks against the training entries, where both sides are there and no pair has placed a slot."""
    case, m = examination.case, examination.m
    if case.train is None or case.serve is None or (m.serve is not None and m.serve.proof == "pairs"):
        return
    train, serve = fingerprint_of(case.train), fingerprint_of(case.serve)
    alone = _token_alone(case.serve) - _token_alone(case.train)
    compared = compare_fingerprints(train, serve, token_alone=alone)
    groups = max((yard.groups for yard in compared.yardsticks), default=0)
    natural = all(yard.natural for yard in compared.yardsticks)
    words = f"{groups} groups of the training data ({', '.join(train.grouped)})" if natural else "the training data's halves"
    m.unpaired = UnpairedFacts(tuple(compared.looks), tuple(compared.couplings), words)
    examination.steps.append(
        f"statistics alone, unpaired, over {compared.rows_compared} rows (candidates, no proof; unit: what {words} differ by): "
        + "; ".join(f"slot {look.slot}: {look.says}" for look in compared.looks)
    )
    told = [look for look in compared.looks if look.smallest is not None]
    if told:
        examination.steps.append("statistics alone: the smallest distance that would have been seen is " + ", ".join(
            f"{look.smallest:.2g} in slot {look.slot} (it is {look.distance:.2g})" for look in told))
    lost = [f"slot {look.slot}" for look in compared.looks if look.kind == "none"]
    if lost:
        examination.next.append(
            f"{', '.join(lost)} look like no training entry, by statistics alone: other states, or text of another kind than was "
            "trained on; capture prompts of the training data to tell which"
        )
    examination.next.append(UNTOLD)


def fingerprint_of(selected: Selected) -> Fingerprint:
    """The fingerprint of the sequences taken from a source."""
    first = selected.sequences[0]
    last = first.last is not None
    names = [*(f"slot {i}" for i in range(first.features.shape[1])), *(["last"] if last else [])]
    fingerprint = Fingerprint(entries=tuple(names), last=last, width=int(first.features.shape[2]))
    grouped = set()
    for number, sequence in enumerate(selected.sequences):
        states = sequence.features
        if last and sequence.last is not None:
            states = torch.cat([states, sequence.last.to(states.dtype)[:, None]], 1)
        answer = None if sequence.answer is None else sequence.answer[: sequence.rows]
        kind, group = group_of(sequence.name, number, len(selected.sequences), str(selected.source.path))
        grouped.add(kind)
        add_sequence(fingerprint, sequence.name, states, answer, group)
    fingerprint.grouped = tuple(sorted(grouped))
    return fingerprint


def _token_alone(selected: Selected) -> set[int]:
    """Slots in which the same token has the same vector wherever it stands."""
    slots = int(selected.sequences[0].features.shape[1])
    test = TokenTest(slots, selected.sequences[0].features.dtype)
    for sequence in selected.sequences:
        test.update(sequence.token_ids[: sequence.rows], sequence.features, row_figures(sequence.features))
    return {slot for slot in range(slots) if test.alone(slot) and int(test.pairs[slot]) >= FEWEST_PAIRS}
