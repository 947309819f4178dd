"""Suspicions from the shape of acceptance alone, where no replay comes out or there is none: never more than `suspected`."""

from __future__ import annotations

from draftscope.faults.base import Suspicion
from draftscope.faults.facts_runtime import Part
from draftscope.faults.measurements import SAME, Measurements
from draftscope.findings import Evidence, Fix

FEWEST = 200
"""Verify steps from which a curve means something."""
LIVES, DEAD = 0.3, 0.35
"""Acceptance of the first draft from which it is alive; share of it below which the second is dead."""
AGREES, PARTS = 0.97, 0.9
"""Share of equal counts where nothing is wrong, and where something is."""
_NEXT = "Record draft_states and draft_token_ids of whole requests (`capture`), and diagnose again: the gate tells these apart."


def dead_after_first(m: Measurements, fault: str) -> list[Suspicion]:
    """The first draft is alive and the second dead, by the server's counts and nothing else."""
    counters = m.counters
    if counters is None or m.serve is not None or counters.simulated:
        return []
    if counters.drafts < FEWEST or len(counters.joint) < 2:
        return []
    first, second = counters.joint[:2]
    given = second / first if first else 0.0
    trained = m.rungs.get("trained")
    learned = None
    if trained is not None and len(trained.joint) > 1 and trained.joint[0]:
        learned = trained.joint[1] / trained.joint[0]
    if first < LIVES or given > DEAD * first or (learned is not None and learned < 2 * given):
        return []
    expected = "not known: no training states were replayed" if learned is None else f"{learned:.0%} on training states"
    return [_suspected(
        fault, ["draft steps"], "the first draft of a step is accepted, and hardly any after it: the engine's draft steps after "
        "the first are suspect (state fed back, positions, mask)",
        prediction="in health the second draft stands about as often as the first, given that this one stood",
        measurement="the server's own counts by position",
        result=f"{first:.0%} of {counters.drafts} steps accept the first draft; the second stands in {given:.0%} of them "
        f"(expected: {expected})",
        figures={"joint": counters.joint, "steps": counters.drafts},
        caveats=["a draft trained for one step only has the same curve: its replay on training states would, too"])]


def unexplained(m: Measurements) -> bool:
    """The engine's counts do not come out, the stages are the checkpoint's, and no known wrong runtime explains it."""
    if m.gate is None or m.gate.passed or any(gate.passed for gate in m.gate_with.values()):
        return False
    if m.runtime is None or not m.runtime.tried or m.runtime.explains or m.runtime.drawn or m.shape is None:
        return False
    stages = m.stages
    return stages is None or not (
        (stages.fc_error or 0.0) > SAME or (stages.head_agreement and max(stages.head_agreement.values()) < PARTS))


def later_steps(m: Measurements, fault: str) -> list[Suspicion]:
    """Replay gives the engine's first drafts and not those after them."""
    shape = m.shape
    if shape is None or not unexplained(m) or (m.stages is not None and (m.stages.layer_error or 0.0) > SAME):
        return []
    ours, engine = shape.replayed, shape.recorded
    told = m.runtime.as_read if m.runtime is not None else None
    if len(ours) < 2 or None in (ours[0], ours[1], engine[0], engine[1]):
        return []
    same_first = told is not None and told.off and told.off[0] < 1 - AGREES
    if not same_first and abs((ours[0] or 0) - (engine[0] or 0)) > 0.03:
        return []
    if (engine[1] or 0) > 0.7 * (ours[1] or 0):
        return []
    return [_suspected(
        fault, ["draft steps"], "replay gives the engine's first drafts, and its later ones not: what a draft step receives, or "
        "where it stands, is wrong in a way that is not among those tried",
        prediction="draft steps after the first come out as the first does",
        measurement=f"the engine's rounds as read, and under {m.runtime.tried if m.runtime else 0} wrong runtimes",
        result=f"acceptance given the drafts before: {_words(engine)} in the engine, {_words(ours)} by replay",
        figures={"recorded": list(engine), "replayed": list(ours)})]


def grows_stale(m: Measurements, fault: str) -> list[Suspicion]:
    """Replay gives the engine's first rounds and not the later ones, or none but the later ones."""
    if m.shape is None or not unexplained(m):
        return []
    first, later = m.shape.parts[:2]
    if not (_sound(first) and _wrong(later)):
        return []
    return [_suspected(
        fault, ["draft cache"], "a request's first round comes out in replay, later ones do not: the draft's cache is suspect",
        prediction="later rounds come out as the first does", measurement="the recorded counts replayed, by number of the round",
        result=f"{first.agreed or 0:.1%} of {first.rounds} first rounds, {later.agreed or 0:.1%} of {later.rounds} later ones",
        figures={"first": first.agreed, "later": later.agreed})]


def falls_with_context(m: Measurements, fault: str) -> list[Suspicion]:
    """Replay gives the engine's rounds at short context and not those at long one."""
    if m.shape is None or not unexplained(m):
        return []
    short, long = m.shape.parts[2:4]
    if not (_sound(short) and _wrong(long)):
        return []
    return [_suspected(
        fault, ["draft attention"], f"rounds come out in replay at a {short.name} and not beyond: a window, or a limit of "
        "positions, is suspect", prediction="rounds at long context come out as those at short context do",
        measurement="the recorded counts replayed, by context",
        result=f"{short.agreed or 0:.1%} of {short.rounds} rounds, {long.agreed or 0:.1%} of {long.rounds} beyond",
        figures={"short": short.agreed, "long": long.agreed})]


def _sound(part: Part) -> bool:
    return part.rounds >= 8 and (part.agreed or 0.0) >= AGREES


def _wrong(part: Part) -> bool:
    return part.rounds >= 8 and (part.agreed or 0.0) < PARTS


def _words(conditional: tuple[float | None, ...]) -> str:
    return ", ".join("-" if x is None else f"{x:.2f}" for x in conditional)


def _suspected(fault: str, where: list[str], says: str, *, prediction: str, measurement: str, result: str,
               figures: dict[str, object], caveats: list[str] | None = None) -> Suspicion:
    return Suspicion(
        fault=fault, side="serve", where=where, says=says, strength="suspected", runtime=True, recovery="needs-serving",
        evidence=[Evidence(hypothesis=says, prediction=prediction, measurement=measurement, result=result,
                           decides="a hint: which fault of this shape it is, draft states would tell", figures=figures)],
        fix=Fix(says=_NEXT), caveats=caveats or [])


