"""NaN and Inf counted in states, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from draftscope.states.types import Sequence

if TYPE_CHECKING:
    from draftscope.diagnose.case import Selected


def count_nonfinite(selected: Selected, sequence: Sequence) -> None:
    """Add a sequence's rows to those looked at in each slot, and note those that are not finite."""
    found = {slot: (rows, name, first) for slot, rows, _, name, first in selected.nonfinite}
    for slot, states in states_of(sequence):
        bad = ~torch.isfinite(states).all(-1)
        selected.looked[slot] = selected.looked.get(slot, 0) + len(bad)
        if bad.any():
            rows, name, first = found.get(slot, (0, sequence.name, int(bad.nonzero()[0])))
            found[slot] = rows + int(bad.sum()), name, first
    selected.nonfinite = [(slot, rows, selected.looked[slot], name, first) for slot, (rows, name, first) in found.items()]


def states_of(sequence: Sequence) -> Iterator[tuple[int, torch.Tensor]]:
    """By slot its rows [T, Ht]; the last state is slot -1."""
    for slot in range(sequence.features.shape[1]):
        yield slot, sequence.features[:, slot]
    if sequence.last is not None:
        yield -1, sequence.last
