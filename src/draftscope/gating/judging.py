"""A build held against its baseline."""

from __future__ import annotations

from draftscope.errors import DraftscopeError
from draftscope.findings import Evidence, Finding, Fix
from draftscope.gating.report import Gate, Observed, Slot, Tested
from draftscope.gating.slots import compare_slots
from draftscope.gating.testing import adjust, rung_tests

FIX = Fix(says="Find what changed since the baseline: `draftscope diagnose` on the same inputs names the cause where it is "
               "known. Where the change is meant, write a new baseline.")


def judge(baseline: Observed, current: Observed, *, level: float = 0.05, margin: float = 0.0) -> Gate:
    """Whether acceptance fell or a slot is not what it was.

    Args:
        level: chance of a false alarm, of all tests of acceptance together.
        margin: a fall of accept length that is allowed.

    Raises:
        DraftscopeError: the two measure different things, or the current one lacks what the baseline has.
    """
    _comparable(baseline, current)
    found: list[Tested] = []
    for name, before in baseline.rungs.items():
        found += rung_tests(name, before.sequences, current.rungs[name].sequences, baseline.k, margin)
    tested = adjust(found, level)
    serve, served = compare_slots("serve", baseline.placement.serve, current.placement.serve)
    train, trained = compare_slots("train", baseline.placement.train, current.placement.train)
    slots = [*serve, *train]
    findings = [*(_slot(slot) for slot in slots), *(_fell(test, level) for test in tested if test.fell)]
    notes = [f"{name}: in the current build only, not compared" for name in current.rungs if name not in baseline.rungs]
    notes += [
        f"{test.rung}: counts are pooled, and steps of one text are not independent: the level holds only roughly"
        for test in tested[:1] if test.how == "pooled"
    ]
    return Gate(
        schema="draftscope.gate/1", verdict="failed" if findings else "passed", level=level, margin=margin, tests=tested,
        slots=slots, compared_slots=served + trained, findings=findings, notes=notes,
    )


def _comparable(baseline: Observed, current: Observed) -> None:
    def refuse(what: str, remedy: str) -> None:
        raise DraftscopeError(what, where="baseline and current build", remedy=remedy)

    if baseline.k != current.k:
        refuse(f"are of different K: {baseline.k} and {current.k} drafted tokens a step",
               "Measure both with the same K (-k), or write a new baseline")
    if baseline.tree != current.tree:
        refuse(f"draft in different shapes: {baseline.tree or 'chains'} and {current.tree or 'chains'}", "Serve both alike")
    for name, before in baseline.rungs.items():
        now = current.rungs.get(name)
        if now is None:
            refuse(f"cannot be compared: the baseline has acceptance `{name}` ({before.says}), the current build has none",
                   "Give the same inputs as for the baseline")
        elif now.readout != before.readout:
            refuse(f"define acceptance `{name}` differently: over {before.readout} rows and over {now.readout} rows",
                   "Give the same kind of states: `walk` takes text that the target wrote, `engine` recorded steps")
    for side in ("train", "serve"):
        if any(p.boundary is not None for p in getattr(baseline.placement, side)) and not getattr(current.placement, side):
            refuse(f"cannot be compared: the baseline has places of the {side} slots, the current build has none",
                   "Give the same inputs as for the baseline, the target's weights among them")


def _slot(slot: Slot) -> Finding:
    where = f"slot {slot.slot}" if slot.slot >= 0 else "last"
    where = where if slot.side == "serve" else f"train:{where}"
    return Finding(
        fault="placement", where=[where], says=f"{where} {slot.what}: {slot.says}", strength="proven", recovery="bounded",
        fix=FIX, evidence=[Evidence(
            hypothesis="the slot holds another state than in the baseline", prediction="the same place, factor and error",
            measurement="the slot held against every boundary of the target, as in the baseline", result=slot.says,
            decides="moved or lost: another state; worse: the same, less exactly or in fewer rows",
        )],
    )


def _fell(test: Tested, level: float) -> Finding:
    return Finding(
        fault="acceptance", where=[test.of], strength="supported", recovery="bounded", fix=FIX,
        says=f"{test.rung}: {test.of} fell from {test.baseline:.3f} to {test.current:.3f}",
        evidence=[Evidence(
            hypothesis="the draft's tokens are accepted less often than in the baseline",
            prediction=f"a fall like this comes with a chance of {level:g} at most where nothing changed",
            measurement={"paired": "differences by sequence", "two samples": "two samples of sequences",
                         "pooled": "counts of steps"}[test.how] + ", one-sided, all tests at one level together (Holm)",
            result=f"p = {test.p:.2g}, adjusted {test.adjusted:.2g}", decides=f"fell if the adjusted p is at most {level:g}",
            figures=test.model_dump(exclude={"rung", "of", "how", "fell"}),
        )],
    )


def markdown(gate: Gate) -> str:
    """The gate for a pull request's page."""
    parts = [f"## draftscope gate: {gate.verdict}"]
    parts += ["\n".join(f"- {f.says}" for f in gate.findings)] if gate.findings else []
    if gate.tests:
        rows = [
            f"| {t.rung} | {t.of} | {t.baseline:.3f} | {t.current:.3f} | {t.adjusted:.3g} | "
            f"{'–' if t.least is None else f'{t.least:.3f}'} | {'fell' if t.fell else 'ok'} |"
            for t in gate.tests
        ]
        head = ["| rung | of | baseline | current | p (all tests) | least fall to show | |", "|---|---|---|---|---|---|---|"]
        parts.append("\n".join([*head, *rows]))
    parts.append(f"{gate.compared_slots} slots compared, {len(gate.slots)} changed. One-sided tests at a level of {gate.level:g} "
                 f"together" + (f", a fall of {gate.margin:g} of accept length allowed." if gate.margin else "."))
    parts += ["\n".join(f"- {note}" for note in (*gate.notes, *gate.next))] if gate.notes or gate.next else []
    return "\n\n".join(parts) + "\n"
