"""From the facts about a consumer and a checkpoint to what is in effect when it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftscope.boundaries import default_boundaries
from draftscope.consumers.facts import Consumer, IdRule, LayerIds, Switch, TensorFact
from draftscope.consumers.sglang import SGLANG
from draftscope.consumers.vllm import VLLM
from draftscope.eagle3.checkpoint import Checkpoint, expected_shapes
from draftscope.eagle3.reading import Reading
from draftscope.errors import UsageError

CONSUMERS = {known.id: known for known in (VLLM, SGLANG)}

_QK = ("midlayer.self_attn.q_norm.", "midlayer.self_attn.k_norm.")
_SWITCHED = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm", _QK[0]: "qk_norm", _QK[1]: "qk_norm"}


@dataclass(frozen=True, slots=True)
class Effective:
    """A checkpoint as a consumer has it.

    Attributes:
        consumer: the consumer's id.
        loads: whether it loads the checkpoint at all; if not, the rest says what would hold if it did.
        boundaries: where it takes the slots, ascending, each once; None = its default, and the target's depth is not known.
        boundaries_from: the config key that decided, or `default`.
        runners: for consumers with several model runners, the boundaries under each, the default runner first.
        reading: settings, map and lost tensors as `build_draft` takes them.
        changed: settings in effect that differ from the checkpoint's own dialect: field -> (checkpoint, consumer).
        ignored: tensors of the files that are not used.
        initial: parameters that keep their initial value.
        embedding: whose embedding is used.
        notes: what deserves saying, each with the source file in brackets.
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
    embedding: Literal["target", "own"] = "target"
    notes: tuple[str, ...] = ()


def consumer(name: str) -> tuple[Consumer, str]:
    """A consumer by `NAME[@VERSION][:RUNNER]`, and the runner asked for (empty = the default one).

    Raises:
        UsageError: not known; the message lists what is.
    """
    wanted, _, runner = name.strip().lower().partition(":")
    stack, _, version = wanted.partition("@")
    for known in CONSUMERS.values():
        runners = [entry.runner for entry in known.layer_ids if entry.runner]
        if known.name == stack and version in ("", *known.versions) and runner in ("", *runners):
            return known, runner
    listed = [f"{k.id}{''.join(f' ({k.id}:{e.runner})' for e in k.layer_ids if e.runner)}" for k in CONSUMERS.values()]
    raise UsageError(f"no facts about consumer {name!r}", remedy=f"Known: {', '.join(listed)}")


def effective(
    checkpoint: Checkpoint, name: str, target_layers: int | None = None, model_type: str | None = None,
) -> Effective:
    """What `name` makes of a checkpoint.

    Args:
        target_layers: the target's decoder layers; without it default boundaries stay unknown.
        model_type: the target's, for engines whose layer ids mean different things in different targets.
    """
    known, runner = consumer(name)
    raw, notes = checkpoint.raw, []
    dialect = checkpoint.config.dialect
    loads = True
    if dialect not in known.dialects:
        loads = False
        notes.append(f"{known.id} does not read checkpoints in the {dialect} dialect: convert it to the native one first")
    architecture = _architecture(known, raw, dialect)
    if dialect in known.dialects and architecture not in known.architectures:
        loads = False
        notes.append(f"{known.id} knows no architecture {architecture!r}; it loads {', '.join(known.architectures)}")

    settings = _settings(known, checkpoint, architecture, notes)
    changed = {
        key: (getattr(checkpoint.config, key), value)
        for key, value in settings.items() if getattr(checkpoint.config, key) != value
    }
    rule = known.rule(model_type)
    order = sorted(known.layer_ids, key=lambda entry: entry.runner != runner) if runner else list(known.layer_ids)
    found = [_boundaries(known, entry, rule, raw, target_layers, notes if entry is order[0] else []) for entry in order]
    if len({b for b, _ in found}) > 1:
        other = order[1]
        notes.append(
            f"the {other.runner} model runner takes boundaries {_listed(found[1][0])} instead, from {found[1][1]} "
            f"[{other.source}]"
        )
    tensors = _tensors(known, checkpoint, settings, notes)
    return Effective(
        consumer=known.id, loads=loads and not tensors.refused, boundaries=found[0][0], boundaries_from=found[0][1],
        runners={entry.runner: boundaries for entry, (boundaries, _) in zip(order, found, strict=True) if entry.runner},
        reading=Reading(settings=settings, d2t="zero" if tensors.no_map else "offset", lost=tuple(tensors.lost)),
        changed=changed, ignored=tuple(tensors.ignored), initial=tuple(tensors.initial), embedding=tensors.embedding,
        notes=tuple(notes),
    )


def config_for(
    name: str, boundaries: Sequence[int], layers: int | None = None, model_type: str | None = None,
) -> dict[str, Any]:
    """The configuration keys that make a consumer capture these boundaries.

    Returns:
        keys for the draft's config.json, to be merged into it; or `{"not_possible": why}`.
    """
    known, _ = consumer(name)
    rule = known.rule(model_type)
    wanted = tuple(boundaries)
    if list(wanted) != sorted(set(wanted)):
        return {"not_possible": f"{known.id} captures in ascending order, each boundary once; {list(wanted)} is not"}
    if layers is not None and (wanted[-1] > layers or (wanted[-1] == layers and not rule.last_boundary) or wanted[0] < 0):
        return {"not_possible": f"{known.id} captures boundaries 0 to {layers if rule.last_boundary else layers - 1}"}
    ids = rule.to_ids(wanted, layers)
    if ids is None or tuple(sorted(rule.to_boundaries(ids, layers))) != wanted:
        return {"not_possible": f"no layer ids of {known.id} name boundaries {list(wanted)} of this target"}
    config: dict[str, Any] = {}
    inner = config
    *outer, last = known.write_key.split(".")
    for key in outer:
        inner[key] = {}
        inner = inner[key]
    inner[last] = list(ids)
    return config


def _architecture(known: Consumer, raw: dict[str, Any], dialect: str) -> str:
    """The model class that the checkpoint asks for, as the consumer renames it."""
    if dialect == "speculators":
        qwen = (raw.get("transformer_layer_config") or {}).get("model_type", "llama") == "qwen3"
        return "Eagle3Qwen3ForCausalLM" if qwen else "Eagle3LlamaForCausalLM"
    named = str((raw.get("architectures") or ["LlamaForCausalLMEagle3"])[0])
    if known.name == "vllm" and not (named.startswith("Eagle3") or named.endswith("Eagle3")):
        return f"Eagle3{named}"
    return named


def _settings(known: Consumer, checkpoint: Checkpoint, architecture: str, notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for switch in known.switches.get(checkpoint.config.dialect, ()):
        value, place = _look_up(switch, checkpoint.raw)
        settings[switch.field] = value
        own = getattr(checkpoint.config, switch.field)
        if own == value:
            continue
        if not switch.keys:
            notes.append(f"{known.id} does not implement {switch.field}: {own} becomes {value} [{switch.source}]")
        else:
            read = f"found at {place}" if place else f"not found at {' or '.join(switch.keys)}"
            notes.append(f"{switch.field} is {value} in {known.id}, {own} in the checkpoint ({read}) [{switch.source}]")
    if known.name == "vllm":
        settings["qk_norm"] = architecture == "Eagle3Qwen3ForCausalLM"
        if settings["qk_norm"] != checkpoint.config.qk_norm:
            notes.append(
                f"vllm takes the query and key norms for {'on' if settings['qk_norm'] else 'off'} by the architecture "
                f"{architecture} [model_executor/models/registry.py]"
            )
    return settings


def _look_up(switch: Switch, raw: dict[str, Any]) -> tuple[Any, str]:
    for key in switch.keys:
        exists, value = _at(raw, key)
        if exists and (value or not switch.truthy):
            return (bool(value) if isinstance(switch.default, bool) else value), key
    return switch.default, ""


def _at(raw: dict[str, Any], key: str) -> tuple[bool, Any]:
    inner: Any = raw
    for part in key.split("."):
        if not isinstance(inner, dict) or part not in inner:
            return False, None
        inner = inner[part]
    return True, inner


def _boundaries(
    known: Consumer, entry: LayerIds, rule: IdRule, raw: dict[str, Any], layers: int | None, notes: list[str],
) -> tuple[tuple[int, ...] | None, str]:
    unread = []
    for key in ("eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_config.layer_ids"):
        ids = _at(raw, key)[1]
        if ids and key not in entry.keys:
            unread.append(key)
    for key in entry.keys:
        ids = _at(raw, key)[1]
        if not ids:
            continue
        asked = rule.to_boundaries([int(i) for i in ids], layers)
        taken = tuple(sorted({b for b in asked if b >= 0 and (layers is None or b < layers + rule.last_boundary)}))
        if taken != asked:
            lost = sorted(set(asked) - set(taken))
            why = f"; {_listed(tuple(lost))} can't be captured" if lost else ", each once and ascending"
            notes.append(f"{key} {list(ids)} comes to boundaries {_listed(taken)}{why} [{rule.source}]")
        return taken, key
    if unread:
        notes.append(f"{' and '.join(unread)} is not read: the default boundaries are taken [{entry.source}]")
    return (None if layers is None else default_boundaries(layers)), "default"


@dataclass(slots=True)
class _Tensors:
    ignored: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: bool = False
    no_map: bool = False
    embedding: Literal["target", "own"] = "target"


def _tensors(known: Consumer, checkpoint: Checkpoint, settings: dict[str, Any], notes: list[str]) -> _Tensors:
    found = _Tensors()
    config = checkpoint.config
    has_embedding = "embed_tokens.weight" in checkpoint.tensors
    foreign = config.target_hidden_size != config.hidden_size
    if has_embedding and (known.keeps_embedding or foreign):
        found.embedding = "own"
    elif has_embedding:
        found.ignored.append("embed_tokens.weight")
        found.lost.append("embed_tokens.")
        notes.append(f"the draft's own embedding is replaced by the target's [{known.embedding_source}]")
    for name in _missing(checkpoint, settings):
        fact = _fact(known, "missing", name)
        if fact.then == "initial":
            found.initial.append(name)
        found.no_map |= name == "d2t"
        notes.append(f"{name} is missing: {fact.says} [{fact.source}]")
    for name in (*checkpoint.tensors, *checkpoint.unexpected):
        if not _idle(name, checkpoint, settings):
            continue
        fact = _fact(known, "idle", name)
        found.ignored.append(name)
        if name == "t2d":
            continue
        found.refused |= fact.then == "refuses"
        verb = "refuses" if fact.then == "refuses" else "ignores"
        notes.append(f"{known.id} {verb} tensor {name}: {fact.says} [{fact.source}]")
    if known.tied_head and checkpoint.raw.get("tie_word_embeddings"):
        found.lost.append("lm_head.")
        found.initial.append("lm_head.weight")
        found.ignored.append("lm_head.weight")
        notes.append(f"tie_word_embeddings is true: the embedding is taken for the head [{known.tied_head}]")
    return found


def _missing(checkpoint: Checkpoint, settings: dict[str, Any]) -> list[str]:
    """Parameters that the settings in effect ask for and the files lack, the map included."""
    config = checkpoint.config.model_copy(update=settings)
    needed = [*expected_shapes(config), *(["d2t"] if config.draft_vocab_size != config.vocab_size else [])]
    return [name for name in needed if name not in checkpoint.tensors and name not in checkpoint.unexpected]


def _idle(name: str, checkpoint: Checkpoint, settings: dict[str, Any]) -> bool:
    """Whether a tensor has no use under the settings in effect."""
    if name in checkpoint.unexpected or name == "t2d":
        return not _wanted_after_all(name, settings)
    if name == "d2t":
        return checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size
    for prefix, switch in _SWITCHED.items():
        if name.startswith(prefix):
            return not settings.get(switch, getattr(checkpoint.config, switch))
    return False


def _wanted_after_all(name: str, settings: dict[str, Any]) -> bool:
    return any(name.startswith(prefix) and bool(settings.get(switch)) for prefix, switch in _SWITCHED.items())


def _fact(known: Consumer, when: Literal["missing", "idle"], name: str) -> TensorFact:
    return next(fact for fact in known.tensors if fact.when == when and name.startswith(fact.prefix))


def _listed(boundaries: tuple[int, ...] | None) -> str:
    return "of its own choice" if boundaries is None else "{" + ", ".join(map(str, boundaries)) + "}"
