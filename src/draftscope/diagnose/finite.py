"""NaN and Inf counted in states, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from draftscope.states.types import Sequence

if TYPE_CHECKING:
    from draftscope.diagnose.case import Selected


def count_nonfinite(selected: Selected, sequence: Sequence) -> None:
    for slot, states in states_of(sequence):
        bad = ~torch.isfinite(states).all(-1)
        if not bad.any():
            continue
        rows, first = int(bad.sum()), int(bad.nonzero()[0])
        for i, (known, count, of, name, row) in enumerate(selected.nonfinite):
            if known == slot:
                selected.nonfinite[i] = (known, count + rows, of + len(bad), name, row)
                break
        else:
            selected.nonfinite.append((slot, rows, len(bad), sequence.name, first))


def states_of(sequence: Sequence) -> Iterator[tuple[int, torch.Tensor]]:
    """By slot its rows [T, Ht]; the last state is slot -1."""
    for slot in range(sequence.features.shape[1]):
        yield slot, sequence.features[:, slot]
    if sequence.last is not None:
        yield -1, sequence.last
