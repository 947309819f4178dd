"""Recorded states changed as a repair says: by slot, by rows of a phase, by channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from draftscope.faults.changes import Change, Own, Scale, Shift, TurnBack
from draftscope.states.types import Sequence
from draftscope.target.spoiling import Phase

Map = tuple[Tensor, float]
"""An orthogonal matrix [H, H] and a factor: the recorded rows are the right ones @ matrix * factor."""

PHASES: tuple[Phase, ...] = ("prefill", "verify")


def rows_of(sequence: Sequence, phase: Phase | None) -> Tensor:
    """[T] bool: the feature rows of a phase. Where the capture does not tell the phases apart, every row is of both."""
    every = torch.ones(sequence.rows, dtype=torch.bool)
    if phase is None or sequence.answer is None:
        return every
    verify = sequence.answer[: sequence.rows]
    return verify if phase == "verify" else ~verify


def shifted(states: Tensor, by: int) -> Tensor:
    """Row t takes row t + by; rows at the edge keep their own."""
    rows = torch.arange(len(states))
    source = rows + by
    return states[torch.where((source >= 0) & (source < len(states)), source, rows)]


def _owned(sequence: Sequence, owns: list[Own]) -> Iterator[tuple[Tensor, Own]]:
    """Which rows of which slot take own states, and with what left in: only what each of several leaves in."""
    for slot in dict.fromkeys(change.slot for change in owns):
        for phase in PHASES:
            mine = [change for change in owns if change.slot == slot and change.phase in (None, phase)]
            if mine:
                yield rows_of(sequence, phase), Own(
                    slot, 1.0 if any(one.scale == 1 for one in mine) else mine[0].scale,
                    0 if any(one.lag == 0 for one in mine) else mine[0].lag, mine[0].phase,
                    None if any(one.turned is None for one in mine) else mine[0].turned)


def changed(
    sequence: Sequence, changes: Iterable[Change], own: Callable[[], Tensor], turn: Callable[[TurnBack], Map | None],
) -> Tensor:
    """The features [T, S, H] float32 with changes applied: own states first, then maps, factors and shifts.

    In that order each undoes what it is named for, also in states of the target's own into which the rest was left.

    Args:
        own: the target's own states at the reference boundaries [T, S, H].
        turn: the map to take back; None = none was found.
    """
    features = sequence.features.float().clone()
    every, kinds = tuple(changes), (TurnBack, Scale, Shift)
    for rows, chosen in _owned(sequence, [change for change in every if isinstance(change, Own)]):
        states = own()[:, chosen.slot] * chosen.scale
        if chosen.turned is not None and (found := turn(TurnBack(chosen.slot, chosen.phase, chosen.turned))) is not None:
            states = (states @ found[0].float()) * found[1]
        features[rows, chosen.slot] = shifted(states, chosen.lag)[rows]
    others = [change for change in every if not isinstance(change, Own)]
    for change in sorted(others, key=lambda one: kinds.index(type(one))):
        rows, slot = rows_of(sequence, change.phase), change.slot
        states = features[:, slot]
        if isinstance(change, TurnBack):
            found = turn(change)
            states = states if found is None else ((states / found[1]) @ found[0].T.float())
        elif isinstance(change, Scale):
            first, last = change.channels or (0, states.shape[1])
            states = states.clone()
            states[:, first:last] *= change.factor
        else:
            states = shifted(states, change.by)
        features[rows, slot] = states[rows]
    return features
