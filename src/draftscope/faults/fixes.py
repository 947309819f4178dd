"""Fixes that several faults share: which boundaries to capture, in each consumer's own convention."""

from __future__ import annotations

from draftscope.consumers import config_for
from draftscope.faults.measurements import Measurements, SideName
from draftscope.findings import Fix

CONSUMERS = ("vllm@0.32", "sglang@0.5.23")


def capture_boundaries(side: SideName, m: Measurements, says: str) -> Fix:
    """Take the slots at the reference's boundaries: the consumers' configuration, or a new extraction of training data."""
    boundaries = tuple(place.boundary for place in m.reference or () if place.boundary is not None)
    if side == "train":
        return Fix(
            says=f"{says} Write the training data again with slots at boundaries {list(boundaries)}, then retrain.",
            config={"draftscope": {"extract": {"boundaries": list(boundaries)}}},
        )
    config = {name: config_for(name, boundaries, m.layers, m.model_type) for name in CONSUMERS} if m.layers is not None else {}
    return Fix(says=f"{says} Make the engine capture boundaries {list(boundaries)}.", config=config)
