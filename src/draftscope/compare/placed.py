"""The answer to where a slot was taken. The rules behind it are in `compare.placement`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from draftscope import findings
from draftscope.boundaries import Boundary, Kind, Norm
from draftscope.compare.transforms import Rotation

Transform = Literal["none", "lag", "scale", "lag and scale", "direction", "rows", "rotation", "permutation"]


@dataclass(frozen=True, slots=True)
class Moved:
    """Rows that hold the state of another row.

    Attributes:
        same: share of the slot's rows found at another row of the same sequence.
        other: share found in another sequence.
        offset: most common distance found - own within the same sequence, and `offset_share` its share among those.
        examples: (sequence, row, found in sequence, at row), a few.
    """

    same: float
    other: float
    offset: int | None
    offset_share: float
    examples: tuple[tuple[str, int, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """What a slot holds. All errors are medians of relative errors over rows that are no sinks and no first tokens.

    Attributes:
        slot: its number.
        place: boundary, norm and kind; None = nothing explains it.
        margin: 1 - err(best) / err(next best other place), under the reading adopted; None when unplaced.
        error: under the reading adopted; when unplaced the least plain error.
        transform: the reading adopted.
        lag: d of row t = state of token t + d; None when unplaced or rows moved.
        scale: the constant factor, where one is needed.
        share: rows that match within `tolerance` under the reading adopted.
        tolerance: four times the error of the rows that match, at least 0.03, at most 0.3.
        shares: what all rows match, by name (`matched`, `lag +1`, `boundary 4`, `rescaled`, `zero`, `same sequence`,
            `other sequence`, `unmatched`); sums to 1.
        candidates: places that cannot be told apart; the best is first.
        errors: by stream boundary 0..n, under the reading adopted; `plain_errors` as they stand.
        post_error: plain error of boundary n after the final norm.
        first_error, sink_error: of those rows alone, under the reading adopted; None without such rows.
        rows: ordinary rows in the sample; `seen` counts over all rows (ordinary, first, sink, nonfinite, zero).
        mlp: the place is a branch, of the MLP alone.
        moved, rotation: details of those readings; None when not tried.
        lag_errors: at the place found, by lag -2..+2, as `compare.lagging` reads them; empty when unplaced.
        channels: share of channels that agree with the nearest boundary, where the slot is unplaced.
    """

    slot: int
    place: Boundary | None
    margin: float | None
    error: float | None
    transform: Transform = "none"
    lag: int | None = None
    scale: float | None = None
    share: float = 0.0
    tolerance: float = 0.03
    shares: dict[str, float] = field(default_factory=dict)
    candidates: tuple[Boundary, ...] = ()
    errors: tuple[float, ...] = ()
    plain_errors: tuple[float, ...] = ()
    post_error: float | None = None
    first_error: float | None = None
    sink_error: float | None = None
    rows: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    mlp: bool = False
    moved: Moved | None = None
    rotation: Rotation | None = None
    channels: float | None = None
    lag_errors: tuple[float | None, ...] = ()

    @property
    def boundary(self) -> int | None:
        return None if self.place is None else self.place.index

    @property
    def norm(self) -> Norm | None:
        return None if self.place is None else self.place.norm

    @property
    def kind(self) -> Kind | None:
        return None if self.place is None else self.place.kind

    @property
    def certain(self) -> bool:
        """Placed, and no other place would do."""
        return self.place is not None and len(self.candidates) == 1


def as_finding(placed: Placed, label: str) -> findings.Placed:
    """Placement's own record as reports write it."""
    return findings.Placed(
        slot=placed.slot, label=label, boundary=placed.boundary, norm=placed.norm, kind=placed.kind, margin=placed.margin,
        error=_finite(placed.error), lag=placed.lag, scale=placed.scale, transform=placed.transform, share=placed.share,
        candidates=sorted({c.index for c in placed.candidates if c.kind == placed.kind}),
        errors=list(map(_finite, placed.plain_errors)),
        shares=dict(placed.shares), mlp=placed.mlp, lag_errors=list(placed.lag_errors),
    )


def _finite(error: float | None) -> float | None:
    """None for an error without bound (no rows, or a place that holds zeros): JSON has no number for it."""
    return error if error is not None and math.isfinite(error) else None
