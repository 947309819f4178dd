"""What each fault costs, by replay, paired by sequence: undone alone, left in alone, all undone; and the order to mend them."""

from __future__ import annotations

from dataclasses import dataclass

from draftscope.diagnose.ladder import Ladder, combine
from draftscope.diagnose.sides import judging
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.replayed import Replay, compare
from draftscope.faults.base import Suspicion, Undo
from draftscope.faults.changes import Own, TurnBack
from draftscope.findings import STRONGEST_FIRST, Effect, Mended, Rung

MOST = 5
"""Faults whose undoing is replayed, the strongest first: two or three replays each, about 20 for a diagnosis in all."""


@dataclass(slots=True)
class Costs:
    """Effects in the order of the suspicions; the whole repair, and the target's own states, on the same sequences.

    Attributes:
        left_out: suspicions that replay could undo, beyond MOST.
    """

    effects: list[Effect | None]
    repaired: Rung | None = None
    reference: Rung | None = None
    left_out: int = 0


def left_out(found: Costs | None) -> list[str]:
    """Why some of many faults have no figures."""
    if found is None or not found.left_out:
        return []
    which = "1 fault that replay could undo was" if found.left_out == 1 else (
        f"{found.left_out} faults that replay could undo were")
    return [f"{which} not replayed: of many, the {MOST} strongest are; mend these, then diagnose again"]


def undoable(ladder: Ladder, suspicions: list[Suspicion]) -> list[Suspicion]:
    """Those of the serving side that a replay can undo."""
    found = [s for s in suspicions if s.undo is not None and s.side == "serve"]
    return [s for s in found if s.undo is None or not _needs_target(s.undo) or ladder.can_remake]


def _needs_target(undo: Undo) -> bool:
    """Whether states of the target's own are put in, or looked at; factors and shifts go by what was recorded."""
    return bool(undo.reference) or any(isinstance(change, Own | TurnBack) for change in undo.states)


def costs(ladder: Ladder, suspicions: list[Suspicion], as_read: Reading, measured: Rung | None) -> Costs:
    """Replay the whole repair, and for each fault the repair without it and its undoing alone.

    A fault of the engine that no replay can imitate (weights that nobody knows) has the engine's own counts as its present state.
    """
    case = ladder.case
    every = undoable(ladder, suspicions)
    if case.serve is None or case.checkpoint is None or not every:
        return Costs([None] * len(suspicions))
    names = judging([s.name for s in case.serve.sequences])
    chosen_ones = sorted(every, key=lambda s: STRONGEST_FIRST[s.strength])[:MOST]
    repair = [s for s in every if s in chosen_ones]

    def run(which: list[Suspicion]) -> Replay:
        return _run(ladder, which, as_read).only(names)

    chosen = ladder.served(combine([], as_read)).readout
    now, fixed = run([]), run(repair)
    effects: list[Effect | None] = []
    for suspicion in suspicions:
        if suspicion not in repair:
            effects.append(None)
            continue
        alone, without = run([suspicion]), run([s for s in repair if s is not suspicion])
        opaque = suspicion.undo == Undo()
        before = None if opaque else now.rung(chosen)
        gain, unlikelier = compare(fixed, without, chosen, seed=case.inputs.seed)
        gained, interval = _turned(gain.value, gain.interval)
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
                gain=None if opaque else gained,
                gain_interval=None if opaque else interval,
                nll_gain=None if opaque else unlikelier.value,
                nll_gain_interval=None if opaque else unlikelier.interval,
            )
        )
    own = (
        ladder.remade(combine((s.undo for s in repair if s.undo is not None), as_read)).only(names)
        if ladder.can_remake
        else None
    )
    return Costs(
        effects, fixed.rung(chosen, seed=case.inputs.seed), None if own is None else own.rung(chosen, seed=case.inputs.seed),
        len(every) - len(repair),
    )


def mending(ladder: Ladder, ranked: list[Suspicion], as_read: Reading) -> list[Mended]:
    """What acceptance comes to as the faults are mended one after the other, in the order of their rank."""
    case = ladder.case
    if case.serve is None or case.checkpoint is None:
        return []
    names = judging([s.name for s in case.serve.sequences])
    chosen = ladder.served(combine([], as_read)).readout
    repair = undoable(ladder, ranked)[:MOST]
    steps = []
    for count, suspicion in enumerate(repair, 1):
        rung = _run(ladder, repair[:count], as_read).only(names).rung(chosen)
        steps.append(Mended(fault=suspicion.fault, where=suspicion.where, length=rung.length, nll=rung.nll))
    return steps


def loss(effect: Effect | None) -> tuple[float, float]:
    """By what a fault is ranked: what it costs when all else is right, in accept length beyond chance, then in -log p."""
    if effect is None:
        return 0.0, 0.0
    likelihood = effect.nll_gain or 0.0
    if effect.gain is not None:
        beyond = effect.gain_interval is None or effect.gain_interval[0] > 0 or effect.gain_interval[1] < 0
        return (effect.gain if beyond else 0.0), likelihood
    if effect.length_if_fixed is not None and effect.length_now is not None:
        return effect.length_if_fixed - effect.length_now, likelihood
    return 0.0, likelihood


def trained_so(ladder: Ladder, undo: Undo, as_read: Reading, seed: int) -> bool | None:
    """Whether on training states, too, the draft does better with what would be undone: it was then trained with it.

    None where that was not measured.
    """
    case = ladder.case
    if case.train is None and case.heldout is None:
        return None
    with_it, without = ladder.trained(combine([], as_read)), ladder.trained(combine([undo], as_read))
    gain, _ = compare(without, with_it, without.readout, seed=seed)
    return None if gain.interval is None else gain.interval[0] > 0


def _run(ladder: Ladder, which: list[Suspicion], as_read: Reading) -> Replay:
    return ladder.served(combine((s.undo for s in which if s.undo is not None), as_read))


def _turned(value: float | None, interval: tuple[float, float] | None) -> tuple[float | None, tuple[float, float] | None]:
    """A difference the other way round."""
    return None if value is None else -value, None if interval is None else (-interval[1], -interval[0])
