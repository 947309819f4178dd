"""A build measured: the counts and places that a gate compares, from the inputs of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version

from draftscope.diagnose.case import Inputs, open_case
from draftscope.diagnose.climb import recorded_counts
from draftscope.diagnose.ladder import as_meant, combine
from draftscope.diagnose.run import Examination
from draftscope.eagle3 import acceptance
from draftscope.errors import DraftscopeError
from draftscope.findings import Readout
from draftscope.gating.report import Counted, Counts, Observed


def observe(inputs: Inputs, report: Callable[[str], None] = lambda _: None) -> Observed:
    """Acceptance on every rung that the inputs allow, sequence by sequence, and what the slots hold.

    Raises:
        DraftscopeError: inputs that can't be read, that are not of one run, or from which neither follows.
    """
    case = open_case(inputs, report)
    examination = Examination(case, report)
    examination.conclude()
    if examination.contradictions:
        found = examination.contradictions[0]
        raise DraftscopeError(found.says, where=" and ".join(f"--{name}" for name in found.of.split(" and ")),
                              remedy="A build is measured from inputs of one run")
    rungs: dict[str, Counts] = {}
    ladder = examination.ladder
    if ladder is not None and "trained" in examination.rungs:
        trained = ladder.trained(as_meant(examination.m))
        rungs["trained"] = _counts(trained.readout, "the draft replayed on training states", trained.counts())
    if ladder is not None and "served" in examination.rungs:
        served = ladder.served(combine([], examination.as_read))
        rungs["served"] = _counts(served.readout, "the draft replayed on served states, as read", served.counts())
    counters = examination.m.counters
    if counters is not None:
        if counters.accepted and not counters.simulated:
            reached = [counters.drafts, *counters.accepted[:-1]]
            one = Counted(name="counters", rounds=counters.drafts, reached=reached, passed=list(counters.accepted))
            rungs["measured"] = Counts(readout="engine", says=counters.says, sequences=[one])
    elif case.serve is not None:
        recorded = recorded_counts(case.serve.sequences, case.k, trees=case.tree is not None)
        if recorded:
            rungs["measured"] = _counts("engine", "the capture's own verify steps", recorded)
    placement = examination.placement()
    if not rungs and not any(p.boundary is not None for p in (*placement.train, *placement.serve)):
        raise DraftscopeError("neither acceptance nor a slot's place could be measured", where="these inputs",
                              remedy="; ".join(examination.next[:2]))
    given = {"train": inputs.train, "serve": inputs.serve, "draft": inputs.draft, "target": inputs.target}
    return Observed(
        schema="draftscope.baseline/1", k=case.k, tree="" if case.tree is None else str(case.tree), rungs=rungs,
        placement=placement, version=version("draftscope"), inputs={name: str(path) for name, path in given.items() if path},
    )


def _counts(readout: Readout, says: str, counts: Iterable[acceptance.Counts]) -> Counts:
    sequences = [Counted(name=c.name, rounds=c.rounds, reached=c.reached.tolist(), passed=c.passed.tolist()) for c in counts]
    return Counts(readout=readout, says=says, sequences=sequences)
