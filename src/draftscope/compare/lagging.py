"""The lag curve: how far a slot is, at the place found, from the states of the tokens around its own.

A healthy slot's error is least at lag 0; one that holds the next token's states at +1. The curve is taken from a few rows
that are tried with every lag whatever their error (`evidence.CURVE`), by the reading that placed the slot: with its
constant factor, or with a factor for each row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from draftscope.compare.evidence import LAGS, Candidate, Evidence
from draftscope.compare.placed import Placed

CURVE_LAGS = tuple(sorted(LAGS))
FEW = 0.5
"""Share of matching rows below which the curve is over those rows alone."""


def with_lags(placed: Placed, evidence: Evidence, verify: bool | None = None) -> Placed:
    """The same with its lag curve, where it was placed.

    Medians over rows that are neither sinks nor first tokens; where fewer than half of a slot's rows match at their place,
    over the rows that do. `verify`: of rows of verify steps alone, or of the others alone.
    """
    held = evidence.curve.columns()
    if placed.place is None or not held:
        return placed
    column = evidence.candidates.index(Candidate(placed.place, placed.mlp))
    rows = held["finite"][:, placed.slot] & ~held["sink"][:, placed.slot] & ~held["first"]
    if verify is not None:
        rows = rows & (held["verify"] == verify)
    offset, rest = (held[name][rows, placed.slot, column].double() for name in ("offset", "rest"))
    factor = 1 + offset
    if placed.transform == "direction":
        errors = torch.where(factor > 0, rest / factor.clamp_min(1e-12), torch.inf)
    else:
        scale = 1.0 if placed.scale is None else placed.scale
        errors = torch.hypot(offset + (1 - scale), rest) / max(abs(scale), 1e-12)
    # Off the ends of a sequence nothing was measured; an endless error (a place that holds zeros) was.
    errors = torch.where(rest.isnan(), torch.nan, errors)
    if placed.lag is not None and placed.share < FEW:
        errors = errors[errors[:, LAGS.index(placed.lag)] < placed.tolerance]
    curve = []
    for lag in CURVE_LAGS:
        measured = errors[:, LAGS.index(lag)]
        measured = measured[~measured.isnan()]
        median = float(measured.median()) if len(measured) else torch.inf
        curve.append(median if median < torch.inf else None)
    return replace(placed, lag_errors=tuple(curve))
