"""What the faults of a draft's runtime share: the suspicion that a trial of the gate makes, and how such a runtime is planted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftscope.faults.base import Suspicion, Undo
from draftscope.faults.facts_runtime import Likeness, Tried
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Strength

CLEAR_COUNTS = 0.95
"""Share of recorded counts below which counts alone tell one runtime from another."""
SETTINGS = frozenset({"rope_parameters", "sliding_window", "norm_output"})


def runs_otherwise(plant: Plant, **habits: Any) -> Plant:
    """The set-up with the engine running the draft so (fields of `eagle3.reading.Runtime`)."""
    return replace(plant, engine=replace(plant.engine, runtime=replace(plant.engine.runtime, **habits)))


def reads_otherwise(plant: Plant, **settings: Any) -> Plant:
    """The set-up with other settings of the draft in effect."""
    return replace(plant, engine=replace(plant.engine, settings={**plant.engine.settings, **settings}))


def explained(m: Measurements, fault: str) -> Tried | None:
    """The plainest trial of this fault under which the engine's rounds come out."""
    if m.runtime is None:
        return None
    return next((one for one in m.runtime.explains if fault in one.faults), None)


def from_trials(m: Measurements, fault: str, where: Mapping[str, str], fixes: Mapping[str, str],
                config: Mapping[str, dict[str, Any]] | None = None) -> list[Suspicion]:
    """What the gate says for a fault: nothing where no trial of its own explains the engine.

    Args:
        where, fixes: by the part of a trial's name before `=`, `""` for any other.
        config: the change to the configuration of each consumer, where that is all it takes.
    """
    one = explained(m, fault)
    if one is None or m.runtime is None:
        return []
    i = one.faults.index(fault)
    name, key = one.names[i], one.names[i].partition("=")[0].partition(" ")[0]
    rivals = [other for other in m.runtime.explains if fault not in other.faults]
    same = [" with ".join(other.names) for other in m.runtime.explains if other is not one and fault in other.faults]
    before, after, gate = m.runtime.as_read, one.like, one.gate
    by_counts = after.states is None and after.ids is None
    strength: Strength = "proven"
    if rivals or (by_counts and (before.counts or 0.0) > CLEAR_COUNTS):
        strength = "supported"
    caveats = []
    if rivals:
        words = "; ".join(f"the engine {' and '.join(other.says)} ({', '.join(other.faults)})" for other in rivals[:4])
        caveats.append(f"what was recorded comes out as well if {words}: record draft_states and draft_token_ids over more and "
                       "longer requests to tell them apart")
    elif strength == "supported":
        caveats.append("only counts were recorded, and few of them differ: record draft_states to prove it")
    if same:
        caveats.append(f"of the same kind, and as good: {', '.join(same[:6])}")
    if len(one.faults) > 1:
        caveats.append(f"only together with the other: the engine {' and '.join(one.says)}")
    undone = one.undone[i]
    counts = f"{gate.share:.1%} of {gate.steps} steps" if gate is not None else "no step"
    return [Suspicion(
        fault=fault, side="serve", where=[where.get(key, where[""])], says=f"the engine {one.says[i]}", strength=strength,
        evidence=[Evidence(
            hypothesis=f"the engine {one.says[i]}",
            prediction="run so, the draft gives in every recorded round what the engine recorded",
            measurement=f"the engine's own rounds run offline as the checkpoint is read, and under {m.runtime.tried} wrong "
            f"runtimes, from the states that it received; told by {after.told_by}",
            result=f"as read: {told(before)}; with {' and '.join(one.names)}: {told(after)}, accepted counts in {counts}",
            decides=f"{fault} if this runtime alone gives what was recorded; whatever else gives it is listed",
            figures={"trial": list(one.names), "as_read": _figures(before), "with_it": _figures(after),
                     "gate": None if gate is None else gate.share, "rivals": [list(other.names) for other in rivals]},
        )],
        fix=Fix(says=fixes.get(name, fixes.get(key, fixes[""])), config=dict(config or {})),
        recovery="replayed", runtime=True, caveats=caveats,
        undo=Undo(habits=tuple(n for n in undone if n not in SETTINGS), unset=tuple(n for n in undone if n in SETTINGS)),
    )]


def told(like: Likeness) -> str:
    """A likeness in words."""
    said = []
    if like.states is not None:
        by_position = ", ".join(f"{e:.2g}" for e in like.errors)
        said.append(f"{like.states:.1%} of the draft states alike (error by position {by_position})")
    if like.ids is not None:
        said.append(f"{like.ids:.1%} of the drafted ids")
    if like.counts is not None:
        said.append(f"{like.counts:.1%} of the counts")
    return ", ".join(said) or "nothing to compare"


def tried_in_vain(m: Measurements, shows: str) -> str:
    """`why_not` of a fault of the runtime: what would have shown it, against what was measured."""
    if m.runtime is None:
        return ("no verify steps were recorded, or the draft could not be replayed: give a capture with its steps (--serve), and "
                "the draft (--draft)")
    before = told(m.runtime.as_read)
    if not m.runtime.tried:
        return f"as read the replay gives the engine's own rounds ({before}); {shows}"
    return f"as read: {before}; none of {m.runtime.tried} wrong runtimes of this kind gives what the engine recorded; {shows}"


def _figures(like: Likeness) -> dict[str, object]:
    return {"rounds": like.rounds, "counts": like.counts, "ids": like.ids, "states": like.states, "errors": list(like.errors)}
