"""Which serving slot is which training entry, as an assignment of least total distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Assignment:
    """The best one-to-one assignment of slots to entries.

    Attributes:
        entries: by slot; None where there are more slots than entries, or the distances are unknown.
        nearest: by slot, the nearest entry whether or not another slot has it too.
        margins: by slot, 1 - least total / least total with this slot not on its entry: 0 where another assignment is as
            good, None where there is no other, or nothing to assign.
        total: sum of distances.
    """

    entries: tuple[int | None, ...]
    nearest: tuple[int | None, ...]
    margins: tuple[float | None, ...]
    total: float | None


def assign(distances: Tensor) -> Assignment:
    """Assign slots to entries.

    Args:
        distances: [S, L], at least 0; NaN or infinite where unknown. An unknown pair is never assigned.
    """
    cost = distances.double().numpy().copy()
    slots = cost.shape[0]
    known = np.isfinite(cost)
    nearest = tuple(int(np.where(known[s], cost[s], np.inf).argmin()) if known[s].any() else None for s in range(slots))
    if not known.any():
        return Assignment((None,) * slots, nearest, (None,) * slots, None)
    # Large enough that an unknown pair is taken only where nothing else is left.
    unknown = 1 + 2 * float(cost[known].sum())
    cost[~known] = unknown
    best = _solve(cost)
    entries = tuple(e if (e := best.get(s)) is not None and known[s, e] else None for s in range(slots))
    total = _total(cost, best)
    margins: list[float | None] = []
    for s, entry in enumerate(entries):
        if entry is None:
            margins.append(None)
            continue
        without = cost.copy()
        without[s, entry] = unknown
        other = _solve(without)
        alternative = _total(without, other)
        if alternative >= total + unknown / 2 or s not in other:
            margins.append(None)
        else:
            margins.append(1 - total / alternative if alternative > 0 else 0.0)
    return Assignment(entries, nearest, tuple(margins), float(sum(cost[s, e] for s, e in enumerate(entries) if e is not None)))


def _solve(cost: np.ndarray) -> dict[int, int]:
    rows, columns = linear_sum_assignment(cost)
    return dict(zip(rows.tolist(), columns.tolist(), strict=True))


def _total(cost: np.ndarray, chosen: dict[int, int]) -> float:
    return float(sum(cost[s, e] for s, e in chosen.items()))
