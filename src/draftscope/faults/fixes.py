"""Fixes that several faults share: which boundaries to capture, in each consumer's own convention."""

from __future__ import annotations

from collections.abc import Sequence

from draftscope.consumers import config_for
from draftscope.faults.measurements import SideName
from draftscope.findings import Fix, Placed

CONSUMERS = ("vllm@0.32", "sglang@0.5.23")


def capture_boundaries(side: SideName, reference: Sequence[Placed], layers: int | None, says: str) -> Fix:
    """Take the slots at the reference's boundaries: the consumers' configuration, or a new extraction of training data."""
    boundaries = tuple(place.boundary for place in reference if place.boundary is not None)
    if side == "train":
        return Fix(
            says=f"{says} Write the training data again with slots at boundaries {list(boundaries)}, then retrain.",
            config={"draftscope": {"extract": {"boundaries": list(boundaries)}}},
        )
    config = {name: config_for(name, boundaries, layers) for name in CONSUMERS} if layers is not None else {}
    return Fix(says=f"{says} Make the engine capture boundaries {list(boundaries)}.", config=config)
