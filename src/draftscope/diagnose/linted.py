"""What lint knows of the checkpoint, as findings of the diagnosis: where nothing that was measured says it already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftscope.faults.base import Suspicion
from draftscope.findings import Finding
from draftscope.linting.consumed import consumed
from draftscope.linting.lint import checkpoint_findings
from draftscope.linting.target import TargetFacts, know, target_findings

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination


def linted(examination: Examination, suspicions: list[Suspicion]) -> list[Suspicion]:
    """Lint's findings that no rule has made, in its own order.

    What a consumer is said to make of the checkpoint is a finding only where no capture shows what the engine did make of it.
    """
    case, m = examination.case, examination.m
    found = list(case.found)
    if case.checkpoint is not None:
        found += checkpoint_findings(case.checkpoint)
        target = _target(examination)
        if target is not None:
            found += list(target_findings(case.checkpoint, target))
        if m.consumer is not None:
            reading = consumed(case.checkpoint, m.consumer, target)
            if m.serve is None:
                found += reading.findings
            else:
                examination.steps += [f"lint: {one.says}; the capture shows what the engine did" for one in reading.findings]
    taken = {(one.fault, place) for one in suspicions for place in one.where}
    faults = {one.fault for one in suspicions}
    added: list[Suspicion] = []
    for one in found:
        same = {(one.fault, place) for place in one.where} & taken
        # What a rule has proven or supported of the same fault is not said again by a hint.
        if same or (one.strength == "suspected" and one.fault in faults):
            continue
        added.append(_suspicion(one))
        taken |= {(one.fault, place) for place in one.where}
    return added


def _target(examination: Examination) -> TargetFacts | None:
    given = examination.case.inputs.target
    if given is None or examination.case.parts is None:
        return None
    facts = know(given, weights=False)
    facts.parts = examination.case.parts
    return facts


def _suspicion(one: Finding) -> Suspicion:
    return Suspicion(fault=one.fault, side="serve", where=list(one.where), says=one.says, strength=one.strength,
                     evidence=list(one.evidence), fix=one.fix, recovery=one.recovery, caveats=list(one.caveats))
