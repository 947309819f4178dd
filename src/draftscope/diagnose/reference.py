"""What the draft's slots have to hold, and which side departs from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftscope.faults.measurements import CONFIGURED, TRAINED, SideName
from draftscope.findings import Placed

SAME_SCALE = 0.02


def equal(a: Placed, b: Placed) -> bool:
    """Whether two slots hold the same state; places that cannot be told apart count as the same."""
    if a.boundary is None or b.boundary is None or not (explained(a) and explained(b)):
        return False
    place = a.boundary == b.boundary or b.boundary in a.candidates or a.boundary in b.candidates
    scale = abs((a.scale or 1.0) / (b.scale or 1.0) - 1) <= SAME_SCALE
    return place and a.norm == b.norm and a.kind == b.kind and (a.lag or 0) == (b.lag or 0) and scale


def explained(placed: Placed) -> bool:
    """Whether a slot's rows are states at their own rows, up to a lag and one factor: no other map, nothing moved about."""
    return placed.transform in ("none", "lag", "scale", "lag and scale")


def same(a: Sequence[Placed], b: Sequence[Placed]) -> bool:
    """Whether two sides hold the same states, slot by slot."""
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def from_boundaries(boundaries: Sequence[int]) -> tuple[Placed, ...]:
    """Whole streams at these boundaries."""
    return tuple(
        Placed(slot=i, label="", boundary=b, norm="pre", kind="stream", margin=None, lag=0, scale=1.0, candidates=[b])
        for i, b in enumerate(boundaries)
    )


def decide(
    train: Sequence[Placed],
    serve: Sequence[Placed],
    expected: tuple[int, ...] | None,
    prefers_served: Callable[[], bool | None],
) -> tuple[tuple[Placed, ...] | None, str, SideName]:
    """The reference, where it comes from, and the side that may depart from it.

    The draft needs what it was trained on, whatever its configuration says. Only where the training files contradict the
    configuration, the served states agree with it, and the draft itself does better on the served ones, the files given are
    not what it was trained on.

    Args:
        prefers_served: asked only then; None = can't be told.
    """
    wanted = None if expected is None else from_boundaries(expected)
    placed = len(train) > 0 and all(p.boundary is not None for p in train)
    if not placed:
        if train and wanted is not None and not serve:
            return wanted, CONFIGURED, "train"
        return wanted, CONFIGURED, "serve"
    if serve and same(train, serve):
        return tuple(train), TRAINED, "serve"
    if wanted is not None and len(train) != len(wanted):  # the draft can't have been given these
        return wanted, CONFIGURED, "train" if not serve or same(serve, wanted) else "serve"
    if wanted is not None and not same(train, wanted) and (not serve or same(serve, wanted)):
        prefers = prefers_served()
        if prefers or (prefers is None and not serve):
            return wanted, CONFIGURED, "train"
    return tuple(train), TRAINED, "serve"
