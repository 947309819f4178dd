"""Fixes that several faults share, in each consumer's own convention: which boundaries to capture, a switch, plain keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftscope.consumers import CONSUMERS, ask, config_for, setting_for
from draftscope.faults.measurements import Measurements, SideName
from draftscope.findings import Fix


def readers(consumer: str | None) -> tuple[str, ...]:
    """Whose keys a fix names: the one that reads the checkpoint first, then the newest release known of each engine."""
    engines = dict.fromkeys(known.name for known in CONSUMERS.values() if known.kind == "engine")
    asked = [] if consumer is None else [ask(consumer).known.id]
    return tuple(dict.fromkeys([*asked, *(ask(name).known.id for name in engines)]))


def setting_keys(consumer: str | None, name: str, value: Any) -> dict[str, dict[str, Any]]:
    """A switch in each reader's own place; why not, where it has none."""
    return {reader: setting_for(reader, "native", name, value) for reader in readers(consumer)}


def plain_keys(consumer: str | None, keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Keys that every reader has in the same place."""
    return {reader: dict(keys) for reader in readers(consumer)}


def capture_boundaries(side: SideName, m: Measurements, says: str) -> Fix:
    """Take the slots at the reference's boundaries: the consumers' configuration, or a new extraction of training data."""
    boundaries = tuple(place.boundary for place in m.reference or () if place.boundary is not None)
    if side == "train":
        return Fix(
            says=f"{says} Write the training data again with slots at boundaries {list(boundaries)}, then retrain.",
            config={"draftscope": {"extract": {"boundaries": list(boundaries)}}},
        )
    config = {} if m.layers is None else {
        reader: config_for(reader, boundaries, m.layers, m.model_type) for reader in readers(m.consumer)}
    return Fix(says=f"{says} Make the engine capture boundaries {list(boundaries)}.", config=config)
