"""What the engine's rounds show without any replay coming out: where acceptance falls, and what the draft was given.

A shape is a hint at the kind of fault and never a proof: several have the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from draftscope.eagle3.acceptance import Ints, conditional
from draftscope.eagle3.replayed import Replay
from draftscope.faults.facts_runtime import GivenFacts, LengthFacts, Part, ShapeFacts, Stretch
from draftscope.states.types import Sequence


def given(sequences: Several[Sequence]) -> GivenFacts | None:
    """The tokens that the draft was given, against the text's next ones; None where none were recorded."""
    rows = other = prompt_last = 0
    ends: list[int] = []
    seen = False
    for sequence in sequences:
        if sequence.inputs is None:
            continue
        seen = True
        following = sequence.token_ids[1 : len(sequence.inputs) + 1]
        inputs = sequence.inputs[: len(following)]
        off = (inputs != following).nonzero().flatten()
        rows, other = rows + len(following), other + len(off)
        if sequence.answer is None or not len(off) or not bool(sequence.answer.any()):
            continue
        prompt = int(sequence.answer.int().argmax()) - 1  # the first answer token is the prefill's own
        last = torch.nonzero(off < prompt).flatten()
        if 0 <= prompt < len(sequence.token_ids):
            prompt_last += int((inputs[off[last]] == sequence.token_ids[prompt]).sum())
        ends += [int(row) + 1 for row in off[last]]
    chunk = int(np.gcd.reduce(ends)) if ends else 0
    return GivenFacts(rows, other, prompt_last, chunk) if seen else None


def shape(replayed: Replay, k: int) -> ShapeFacts | None:
    """How the engine's counts depart from the replay's at the same starts: by position, by round, by context.

    Returns:
        None without recorded steps that can be compared.
    """
    found, counted, rounds, places = [], [], [], []
    for one in replayed.sequences:
        if one.steps is None:
            continue
        accepted = one.steps.outcome.accepted
        known = accepted >= 0
        found.append(accepted[known])
        counted.append(np.minimum(one.steps.recorded[known], k))
        rounds.append(np.arange(len(accepted))[known])
        places.append(one.steps.outcome.rows[known])
    if not found or not sum(map(len, found)):
        return None
    ours, engine, number, place = (np.concatenate(x) for x in (found, counted, rounds, places))
    middle = int(np.median(place))
    parts = [_part("first round", ours, engine, number == 0), _part("later rounds", ours, engine, number > 0),
             _part(f"context up to {middle}", ours, engine, place <= middle),
             _part(f"context beyond {middle}", ours, engine, place > middle)]
    return ShapeFacts(tuple(parts), _conditional(ours, k), _conditional(engine, k))


def by_context(sequences: Several[Sequence], trained: int) -> LengthFacts | None:
    """Recorded counts by the position that their round starts from; `trained`: rows of the longest training sequence.

    Returns:
        None without recorded steps.
    """
    starts, counts = [], []
    for sequence in sequences:
        if sequence.steps is not None and len(sequence.steps.start):
            starts.append(sequence.positions[sequence.steps.start].numpy())
            counts.append(sequence.steps.accepted.numpy())
    if not starts:
        return None
    place, accepted = np.concatenate(starts), np.concatenate(counts)
    last = int(place.max()) + 1
    edges = [int(place.min()), *(int(np.quantile(place, q)) for q in (0.25, 0.5, 0.75)), last]
    found = [_stretch(place, accepted, low, high) for low, high in pairwise(edges)]
    return LengthFacts(trained, _stretch(place, accepted, 0, trained), _stretch(place, accepted, trained, max(last, trained)),
                       tuple(one for one in found if one is not None))


def _stretch(place: Ints, accepted: Ints, start: int, end: int) -> Stretch | None:
    chosen = accepted[(place >= start) & (place < end)]
    if not len(chosen):
        return None
    return Stretch(start, end, len(chosen), float((chosen > 0).mean()), 1.0 + float(chosen.mean()))


def _part(name: str, ours: Ints, engine: Ints, chosen: npt.NDArray[np.bool_]) -> Part:
    """A part of the rounds: how many, in how many the counts agree, and the first draft's acceptance on either side."""
    a, b = ours[chosen], engine[chosen]
    if not len(a):
        return Part(name, 0, None, None, None)
    return Part(name, len(a), float((a == b).mean()), float((a > 0).mean()), float((b > 0).mean()))


def _conditional(accepted: Ints, k: int) -> tuple[float | None, ...]:
    reached = np.array([(accepted >= j).sum() for j in range(k)])
    passed = np.array([(accepted > j).sum() for j in range(k)])
    return tuple(None if np.isnan(x) else float(x) for x in conditional(reached, passed))
