"""Rotary positions in effect: the same numbers stand in two spellings, and a consumer reads one, the other, or both."""

from __future__ import annotations

from typing import Any

from draftscope.consumers.facts import Consumer
from draftscope.consumers.points import Point
from draftscope.eagle3.checkpoint import Checkpoint


def rotary(known: Consumer, checkpoint: Checkpoint) -> tuple[dict[str, Any], Point]:
    """The rope parameters (`rope_type`, `rope_theta` and the type's own) that a consumer takes from a checkpoint."""
    layer = checkpoint.raw
    if checkpoint.config.dialect == "speculators":
        layer = layer.get("transformer_layer_config") or {}
    rule = known.rope
    parameters = _flat(layer.get("rope_parameters")) if rule.new else None
    scaling = layer.get("rope_scaling") if rule.legacy else None
    pair = [("rope_parameters", parameters), ("rope_scaling", scaling)]
    key, chosen = next(((k, dict(v)) for k, v in sorted(pair, key=lambda p: p[0] != rule.first) if v), ("", {}))
    if chosen.get("rope_theta") is not None:
        theta, theta_key = chosen["rope_theta"], f"{key}.rope_theta"
    elif rule.legacy and layer.get("rope_theta") is not None:
        theta, theta_key = layer["rope_theta"], "rope_theta"
    else:
        theta, theta_key = rule.theta, ""
    kind = chosen.pop("rope_type", None) or chosen.pop("type", None) or "default"
    chosen.pop("type", None)
    taken = {**chosen, "rope_type": kind, "rope_theta": float(theta)}
    meant = dict(checkpoint.config.rope_parameters)
    where = theta_key + (f", {key}" if kind != "default" and not theta_key.startswith(key) else "")
    if _same(taken, meant):
        return meant, Point("rope", _words(meant), _words(meant), where or "default", source=rule.source)
    unread = [name for name, value in (("rope_parameters", layer.get("rope_parameters")), ("rope_theta", layer.get("rope_theta")),
                                       ("rope_scaling", layer.get("rope_scaling")))
              if value and name not in where]
    says = f"rope is {_words(taken)} in {known.id} (from {where or 'its default'}), {_words(meant)} in the checkpoint"
    if unread:
        says += f"; {' and '.join(unread)} is not what it reads"
    return taken, Point("rope", _words(taken), _words(meant), where or "default", says, rule.source, "pos-id",
                        where=tuple(f"config {name}" for name in unread) or ("config rope_theta",))


def _flat(parameters: Any) -> dict[str, Any] | None:
    """One set, that of the sliding window where there is one per layer type."""
    if not isinstance(parameters, dict):
        return None
    if any(isinstance(value, dict) for value in parameters.values()):
        chosen = parameters.get("sliding_attention", parameters.get("full_attention"))
        return chosen if isinstance(chosen, dict) else None
    return parameters


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    kind = one.get("rope_type", "default")
    keys = {"rope_theta"} if kind == other.get("rope_type", "default") == "default" else one.keys() | other.keys()
    return all(one.get(key) == other.get(key) for key in keys)


def _words(parameters: dict[str, Any]) -> str:
    kind = parameters.get("rope_type", "default")
    extra = "".join(f", {k} {v:g}" if isinstance(v, int | float) else f", {k} {v}" for k, v in sorted(parameters.items())
                    if k not in ("rope_type", "rope_theta") and kind != "default")
    return f"theta {parameters.get('rope_theta', 10000.0):g}" + ("" if kind == "default" else f", {kind}{extra}")
