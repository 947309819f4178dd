"""From the facts about a consumer and a checkpoint to what is in effect when it serves, or trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftscope.consumers.facts import Consumer, Switch
from draftscope.consumers.known import ask
from draftscope.consumers.loading import Head, Owner, load
from draftscope.consumers.placing import place
from draftscope.consumers.points import Point, at, nested
from draftscope.consumers.rotary import rotary
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.eagle3.reading import Reading


@dataclass(frozen=True, slots=True)
class Effective:
    """A checkpoint as a consumer has it.

    Attributes:
        consumer: the consumer's id.
        loads: whether it loads the checkpoint at all; if not, the rest says what would hold if it did.
        boundaries: where it takes the slots, ascending, each once; None = its default, and the target's depth is not known;
            () = it captures none.
        boundaries_from: the config key that decided, `default` or `flag`.
        runners: for consumers with several model runners, the boundaries under each, the one asked for first.
        reading: settings, map and lost tensors as `build_draft` takes them.
        changed: settings in effect that differ from the checkpoint's own dialect: field -> (checkpoint, consumer).
        ignored: tensors of the files that are not used.
        initial: parameters that keep their initial value.
        embedding, head: whose is used.
        rope: parameters of the rotary positions in effect.
        architecture: the model class that it builds.
        points: every answer, in order, with the key that decided it and its source.
        notes: what deserves saying of them, each with the source file in brackets.
    """

    consumer: str
    loads: bool
    boundaries: tuple[int, ...] | None
    boundaries_from: str
    reading: Reading
    runners: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    initial: tuple[str, ...] = ()
    embedding: Owner = "target"
    head: Head = "own"
    rope: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    points: tuple[Point, ...] = ()
    notes: tuple[str, ...] = ()


def effective(
    checkpoint: Checkpoint, name: str, target_layers: int | None = None, model_type: str | None = None,
) -> Effective:
    """What `name` makes of a checkpoint.

    Args:
        name: `NAME[@VERSION][:VARIANT]` (see `known.ask`).
        target_layers: the target's decoder layers; without it default boundaries stay unknown.
        model_type: the target's, for engines whose layer ids mean different things in different targets.

    Raises:
        UsageError: no such consumer.
    """
    asked = ask(name)
    known = asked.known
    points = [Point("version", known.id, None, says=asked.note)] if asked.note else []
    architecture, refused = _architecture(known, checkpoint, points)
    settings, changed = _settings(known, checkpoint, architecture, points)
    rope, point = rotary(known, checkpoint)
    points.append(point)
    if point.fault:
        settings["rope_parameters"] = rope
        changed["rope_parameters"] = (dict(checkpoint.config.rope_parameters), rope)
    kind = rope.get("rope_type", "default")
    if lacking := [key for key in known.rope.needs.get(kind, ()) if rope.get(key) is None]:
        refused = True
        points.append(Point("rope keys", "error", None, "rope_parameters",
                            f"{known.id} does not start with {kind} rope without {' and '.join(lacking)}", known.rope.source,
                            "pos-id", where=("config rope_parameters",)))
    placed = place(known, asked.runner, checkpoint, target_layers, model_type)
    points += placed.points
    loaded = load(known, checkpoint, settings, architecture)
    points += loaded.points
    return Effective(
        consumer=known.id, loads=not (refused or placed.refused or loaded.refused), boundaries=placed.taken,
        boundaries_from=placed.key, runners=placed.runners,
        reading=Reading(settings=settings, d2t="zero" if loaded.no_map else "offset", lost=tuple(loaded.lost)),
        changed=changed, ignored=tuple(loaded.ignored), initial=tuple(loaded.initial), embedding=loaded.embedding,
        head=loaded.head, rope=rope, architecture=architecture, points=tuple(points),
        notes=tuple(point.note for point in points if point.says),
    )


def config_for(
    name: str, boundaries: Sequence[int], layers: int | None = None, model_type: str | None = None,
) -> dict[str, Any]:
    """The configuration keys that make a consumer capture these boundaries.

    Returns:
        keys for the draft's config.json, to be merged into it; or `{"not_possible": why}`.
    """
    known = ask(name).known
    rule = known.rule(model_type)
    wanted = tuple(boundaries)
    if not known.captures:
        return {"not_possible": f"{known.id} captures nothing: start it with EAGLE3"}
    if list(wanted) != sorted(set(wanted)):
        return {"not_possible": f"{known.id} captures in ascending order, each boundary once; {list(wanted)} is not"}
    if layers is not None and (wanted[-1] > layers or (wanted[-1] == layers and not rule.last_boundary) or wanted[0] < 0):
        return {"not_possible": f"{known.id} captures boundaries 0 to {layers if rule.last_boundary else layers - 1}"}
    ids = rule.to_ids(wanted, layers)
    if ids is None or tuple(sorted(rule.to_boundaries(ids, layers))) != wanted:
        return {"not_possible": f"no layer ids of {known.id} name boundaries {list(wanted)} of this target"}
    if why := rule.refuses(ids, layers):
        return {"not_possible": f"{known.id} refuses layer ids {list(ids)}: {why}"}
    return nested(known.write_key, list(ids))


def setting_for(name: str, dialect: str, setting: str, value: Any) -> dict[str, Any]:
    """The configuration keys that put a `DraftConfig` setting into effect.

    Returns:
        keys for config.json; or `{"not_possible": why}` where the consumer implements only its own value.
    """
    known = ask(name).known
    row = known.switch(dialect, setting)
    if row is None or (not row.keys and row.default != value):
        fixed = "it follows from the architecture" if row is None else f"always {row.default}"
        return {"not_possible": f"{known.id} does not implement {setting} = {value} ({fixed})"}
    return nested(row.keys[0], value) if row.keys else {}


def _architecture(known: Consumer, checkpoint: Checkpoint, points: list[Point]) -> tuple[str, bool]:
    """The model class that the checkpoint asks for, as the consumer renames it; and whether it is refused."""
    dialect, raw = checkpoint.config.dialect, checkpoint.raw
    if dialect not in known.dialects:
        points.append(Point(
            "dialect", "refused", dialect, "speculators_model_type" if dialect == "speculators" else "",
            f"{known.id} does not read checkpoints in the {dialect} dialect: convert it to the {known.dialects[0]} one first",
            known.architecture_source, "config-flag",
            where=("config speculators_model_type",) if dialect == "speculators" else ("config architectures",),
        ))
    architecture = _named(known, raw, dialect)
    refused = dialect not in known.dialects
    if not refused and architecture not in known.architectures:
        refused = True
        points.append(Point(
            "architecture", architecture, None, "architectures",
            f"{known.id} knows no architecture {architecture!r}; it loads {', '.join(known.architectures)}",
            known.architecture_source, "config-flag", where=("config architectures",),
        ))
    elif not refused:
        points.append(Point("architecture", architecture, architecture, "architectures", source=known.architecture_source))
    most = known.most_layers.get(architecture, known.most_layers.get(""))
    if not refused and most is not None and checkpoint.config.layers > most:
        refused = True
        points.append(Point(
            "layers", most, checkpoint.config.layers, "num_hidden_layers",
            f"{known.id} refuses a draft of {checkpoint.config.layers} layers; it takes {most}", known.layers_source,
            "config-flag", where=("config num_hidden_layers",),
        ))
    for row in known.required:
        there, value = at(raw, row.key)
        if dialect in known.dialects and (not there or (row.null and value is None)):
            refused = True
            points.append(Point("key", "error", None, row.key, f"{known.id} does not start without the key {row.key}", row.source,
                                "config-flag", where=(f"config {row.key}",)))
    if known.own_width and checkpoint.config.target_hidden_size != checkpoint.config.hidden_size:
        refused = True
        points.append(Point("target width", "error", checkpoint.config.target_hidden_size, "target_hidden_size",
                            f"{known.id} takes no target of another width than the draft's", known.own_width, "config-flag",
                            where=("config target_hidden_size",)))
    if known.query_latent and checkpoint.config.mla is not None and checkpoint.config.mla.q_lora_rank is None:
        refused = True
        points.append(Point("query latent", "error", None, "q_lora_rank",
                            f"{known.id} does not load latent attention without q_lora_rank", known.query_latent, "config-flag",
                            where=("config q_lora_rank",)))
    return architecture, refused


def _named(known: Consumer, raw: dict[str, Any], dialect: str) -> str:
    if dialect == "speculators":
        layer = raw.get("transformer_layer_config") or {}
        default = "qwen3" if known.name == "speculators" else "llama"
        qwen = layer.get("model_type", default) == "qwen3" and "Eagle3Qwen3ForCausalLM" in known.architectures
        return "Eagle3Qwen3ForCausalLM" if qwen else "Eagle3LlamaForCausalLM"
    named = str((raw.get("architectures") or ["LlamaForCausalLMEagle3"])[0])
    if known.name == "vllm" and not (named.startswith("Eagle3") or named.endswith("Eagle3")):
        return f"Eagle3{named}"
    return named


def _settings(
    known: Consumer, checkpoint: Checkpoint, architecture: str, points: list[Point],
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    config, settings, changed = checkpoint.config, {}, {}
    fixed = known.sets.get(architecture, known.sets.get("", {}))
    for row in known.switches.get(config.dialect, ()):
        if row.field in fixed or not row.matters(config):
            continue
        value, place = _look_up(row, checkpoint.raw)
        settings[row.field] = value
        own = getattr(config, row.field)
        says, fault = "", ""
        if own != value:
            changed[row.field] = (own, value)
            fault = "config-flag"
            if not row.keys:
                says = f"{known.id} does not implement {row.field}: {own} becomes {value}"
            else:
                read = f"found at {place}" if place else f"not found at {' or '.join(row.keys)}"
                says = f"{row.field} is {value} in {known.id}, {own} in the checkpoint ({read})"
        points.append(Point(row.field, value, own, place or "default", says, row.source, fault,
                            "proven" if own not in (None, False, True) or own else "supported", _where(row)))
    for name, value in fixed.items():
        settings[name] = value
        own = getattr(config, name)
        says = ""
        if own != value:
            changed[name] = (own, value)
            what = "the query and key norms" if name == "qk_norm" else name
            says = f"{known.name} takes {what} for {'on' if value else 'off'} by the architecture {architecture}"
        points.append(Point(name, value, own, "architectures", says, known.architecture_source,
                            "config-flag" if own != value else "", where=("config architectures",)))
    return settings, changed


def _where(row: Switch) -> tuple[str, ...]:
    return (f"config {row.keys[0] if row.keys else row.field}",)


def _look_up(row: Switch, raw: dict[str, Any]) -> tuple[Any, str]:
    for key in row.keys:
        exists, value = at(raw, key)
        if exists and (value or not row.truthy):
            return (bool(value) if isinstance(row.default, bool) else row.default if value is None else value), key
    return row.default, ""
