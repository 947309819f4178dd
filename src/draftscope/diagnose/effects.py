"""What each fault costs: undone alone, left in alone, and all undone, by replay, paired by sequence."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.diagnose.ladder import Ladder, combine
from draftscope.diagnose.sides import judging
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.replayed import Replay, compare
from draftscope.faults.base import Suspicion, Undo
from draftscope.findings import Effect, Rung


@dataclass(slots=True)
class Costs:
    """Effects in the order of the suspicions; the whole repair, and the target's own states, on the same sequences."""

    effects: list[Effect | None]
    repaired: Rung | None = None
    reference: Rung | None = None


def costs(ladder: Ladder, suspicions: list[Suspicion], as_read: Reading, measured: Rung | None) -> Costs:
    """Replay the whole repair, and for each fault the repair without it and its undoing alone.

    A fault of the engine that no replay can imitate (weights that nobody knows) has the engine's own counts as its present state.
    """
    case = ladder.case
    if case.serve is None or case.checkpoint is None:
        return Costs([None] * len(suspicions))
    names = judging([s.name for s in case.serve.sequences])
    undoable = [s for s in suspicions if s.undo is not None and s.side == "serve"]
    undoable = [s for s in undoable if not (s.undo and s.undo.reference) or ladder.can_remake]
    if not undoable:
        return Costs([None] * len(suspicions))

    def run(which: list[Suspicion]) -> Replay:
        return ladder.served(combine((s.undo for s in which if s.undo is not None), as_read)).only(names)

    chosen = ladder.served(combine([], as_read)).readout
    now, fixed = run([]), run(undoable)
    effects: list[Effect | None] = []
    for suspicion in suspicions:
        if suspicion not in undoable:
            effects.append(None)
            continue
        alone, without = run([suspicion]), run([s for s in undoable if s is not suspicion])
        opaque = suspicion.undo == Undo()
        before = None if opaque else now.rung(chosen)
        gain, _ = compare(without, fixed, chosen, seed=case.inputs.seed)
        after = alone.rung(chosen, seed=case.inputs.seed)
        length_now = measured.length if opaque and measured is not None else None if before is None else before.length
        effects.append(
            Effect(
                k=case.k,
                length_now=length_now,
                length_if_fixed=after.length,
                interval=after.interval,
                nll_now=None if before is None else before.nll,
                nll_if_fixed=after.nll,
                left_in=None if opaque else without.rung(chosen).length,
                all_fixed=fixed.rung(chosen).length,
                gain=None if opaque else gain.value,
                gain_interval=None if opaque else gain.interval,
            )
        )
    own = (
        ladder.remade(combine((s.undo for s in undoable if s.undo is not None), as_read)).only(names)
        if ladder.can_remake
        else None
    )
    return Costs(
        effects, fixed.rung(chosen, seed=case.inputs.seed), None if own is None else own.rung(chosen, seed=case.inputs.seed)
    )


def loss(effect: Effect | None) -> float:
    """By what a fault is ranked: what it costs when all else is right; accept length first, -log p where that does not move."""
    if effect is None:
        return 0.0
    if effect.gain is not None:
        return effect.gain
    if effect.length_if_fixed is not None and effect.length_now is not None:
        return effect.length_if_fixed - effect.length_now
    return 0.0
