"""A checkpoint and one consumer: the rows of the table, and what of them is a finding, with its fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftscope.boundaries import default_boundaries
from draftscope.consumers import Asked, Effective, Point, ask, config_for, effective, setting_for
from draftscope.consumers.facts import Consumer
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.eagle3.config import DraftConfig
from draftscope.findings import Finding
from draftscope.linting.finding import finding, ranked
from draftscope.linting.report import ConsumerReading, Row, State
from draftscope.linting.target import TargetFacts, same_embedding

_DEEPSEEK = "ids may mean other boundaries in targets of DeepSeek's, gpt-oss's and some other kinds"


def consumed(checkpoint: Checkpoint, name: str, target: TargetFacts | None) -> ConsumerReading:
    """The checkpoint as a consumer has it."""
    asked = ask(name)
    layers, model_type = (None, None) if target is None else (target.layers, target.model_type)
    found = effective(checkpoint, name, layers, model_type)
    points = [*found.points, *_more(asked, checkpoint, found, target)]
    rows = [_row(point) for point in points]
    foreign = [point for point in points if point.question == "dialect"]
    findings = [_finding(point, asked, checkpoint, target) for point in foreign or points if point.fault]
    return ConsumerReading(
        consumer=found.consumer, asked=name, kind=asked.known.kind, loads=found.loads, architecture=found.architecture,
        boundaries=_list(found.boundaries), boundaries_from=found.boundaries_from,
        runners={runner: _list(boundaries) for runner, boundaries in found.runners.items()}, embedding=found.embedding,
        head=found.head, rope=found.rope, settings=dict(found.reading.settings), ignored=list(found.ignored),
        initial=list(found.initial), rows=rows, findings=ranked(findings), config=_config(asked, checkpoint, found, target),
        unknown=list(_unknown(asked, checkpoint, found, target)),
    )


def _list(boundaries: tuple[int, ...] | None) -> list[int] | None:
    return None if boundaries is None else list(boundaries)


def _row(point: Point) -> Row:
    state: State = "as trained"
    if point.effect in ("refused", "refuses", "error"):
        state = "refused"
    elif point.fault or (point.meant is not None and _plain(point.effect) != _plain(point.meant)):
        state = "differs"
    elif point.meant is None:
        state = "not said"
    return Row(question=point.question, effect=_plain(point.effect), meant=_plain(point.meant), key=point.key, state=state,
               says=point.says, source=point.source)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _more(asked: Asked, checkpoint: Checkpoint, found: Effective, target: TargetFacts | None) -> Iterator[Point]:
    """Points that need the target, or more than one other point."""
    known, config = asked.known, checkpoint.config
    yield Point("map", _map_words(found, config), "offset" if config.draft_vocab_size != config.vocab_size else "none needed",
                source=known.naming.source)
    yield Point("head", found.head, None)
    yield from _in_graphs(known, found, target)
    if known.late_positions:
        yield Point("positions of drafted tokens", "one too high after the first",
                    says="drafted tokens after the first run at a rotary position one too high, whatever the checkpoint says; "
                    "0.5.12 has it mended", source=known.late_positions)
    own = "embed_tokens.weight" in checkpoint.tensors
    share = None if target is None or target.parts is None else same_embedding(checkpoint, target.parts)
    if own and found.embedding == "target" and share is not None and share < 0.999:
        yield Point(
            "embedding", "target", "own", says=f"{1 - share:.0%} of the draft's embedding rows are not the target's, and "
            f"{known.id} puts the target's in their place", source=known.embedding_source, fault="weight-missing",
            where=("tensor embed_tokens.weight",),
        )
    elif not (own and found.embedding == "target"):
        yield Point("embedding", found.embedding, "own" if own else "target", source=known.embedding_source)
    width = checkpoint.tensors.get("fc.weight")
    captured = None if found.boundaries is None else len(found.boundaries)
    slots = None if width is None else width.shape[1] // config.target_hidden_size
    if known.captures and captured is not None and slots is not None and captured != slots and config.use_aux_hidden_state:
        yield Point(
            "slots captured", captured, slots, found.boundaries_from,
            f"{captured} states are captured, fc takes {slots}: the widths do not match when the first request comes",
            known.rule(None if target is None else target.model_type).source, "schema-width", where=("tensor fc.weight",),
        )
    limit, longest = config.max_position_embeddings, None if target is None else target.positions
    if longest is not None and limit < longest and known.positions.then != "ignores":
        yield Point(
            "positions", limit, None, "max_position_embeddings",
            f"max_position_embeddings is {limit:,}, the target's {longest:,}: {known.positions.says}", known.positions.source,
            "ctx-limit", "proven" if known.positions.then == "refuses" else "supported",
            where=("config max_position_embeddings",),
        )
    else:
        yield Point("positions", limit, None, "max_position_embeddings", source=known.positions.source)
    quantised = "" if target is None else target.quantised
    says = known.quantisation.says if quantised and known.quantisation.inherits else ""
    yield Point("quantisation", "own" if not known.quantisation.inherits else "own, or --quantization of the target", None,
                "quantization_config", says, known.quantisation.source)


def _in_graphs(known: Consumer, found: Effective, target: TargetFacts | None) -> Iterator[Point]:
    """Layer ids that hold outside of CUDA graphs only."""
    if not known.graph_defaults or not known.captures or found.boundaries is None or target is None:
        return
    captured = known.rule(target.model_type).default(target.layers)
    if captured != found.boundaries:
        yield Point(
            "boundaries in CUDA graphs", captured, found.boundaries, key=found.boundaries_from,
            says=f"the target's CUDA graphs are captured with the default boundaries {list(captured)}, so that verify steps "
            f"deliver those and only prefill delivers {list(found.boundaries)}",
            source=known.graph_defaults, fault="graph-capture", strength="supported", where=("config layer ids",),
        )


def _map_words(found: Effective, config: DraftConfig) -> str:
    if config.draft_vocab_size == config.vocab_size:
        return "none needed"
    return "offset" if found.reading.d2t == "offset" else "none"


def _finding(point: Point, asked: Asked, checkpoint: Checkpoint, target: TargetFacts | None) -> Finding:
    fix, config = _fix(point, asked, checkpoint, target)
    strength = "supported" if asked.note and point.strength == "proven" else point.strength
    caveats = [asked.note] if asked.note else []
    if point.fault in ("layer-offset", "layer-set") and point.question == "boundaries":
        caveats.append("what the draft was trained on is the writer's claim; its training states prove it (diagnose --train)")
        if strength == "suspected":
            caveats.append("these ids read as another convention's default: the writer may have meant boundaries")
    return finding(
        point.fault, point.where or (f"config {point.key or point.question}",), f"{asked.known.id}: {point.says}", strength,
        "needs-serving", fix, measured=f"config.json and tensors, as {point.source or asked.known.id} reads them",
        result=f"{point.question} in effect: {_words(point.effect)}"
        + (f" (from {point.key})" if point.key else "") + (f"; the checkpoint means {_words(point.meant)}"
                                                           if point.meant is not None else ""),
        healthy="what is in effect is what the draft was trained with", caveats=caveats, config={asked.known.id: config} if config
        else None, figures={"in effect": _plain(point.effect), "meant": _plain(point.meant), "key": point.key},
    )


def _words(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _fix(point: Point, asked: Asked, checkpoint: Checkpoint, target: TargetFacts | None) -> tuple[str, dict[str, Any]]:
    name, dialect = asked.known.id, checkpoint.config.dialect
    if not asked.known.captures:
        return "Start the server with --speculative-algorithm EAGLE3", {}
    if point.question == "boundaries in CUDA graphs":
        return "Start the server with --disable-cuda-graph, or serve with 0.5.11 or newer", {}
    if point.question in ("boundaries", "slots captured"):
        keys = _boundary_keys(asked, checkpoint, target)
        if "not_possible" in keys:
            return f"This consumer cannot capture what the draft takes: {keys['not_possible']}", keys
        return "Write the layer ids at the place and in the convention that this consumer reads", keys
    said = {
        "rope": ("Write rope in both spellings, with the same numbers", _rope_keys(checkpoint)),
        "names": ("Save the tensors under the names that this consumer knows (`draftscope convert`)", {}),
        "dialect": ("Convert the checkpoint to a dialect that this consumer reads (`draftscope convert`)", {}),
        "architecture": (f"Write one of these: {', '.join(asked.known.architectures)}",
                         {"architectures": [asked.known.architectures[0]]}),
        "head": ("Set tie_word_embeddings to false: the draft has a head of its own", {"tie_word_embeddings": False}),
        "embedding": ("Serve with a consumer that keeps the draft's embedding (vllm), or train with the target's", {}),
        "slots": (f"Say how many slots there are: num_aux_hidden_states = {checkpoint.config.slots}",
                  {"num_aux_hidden_states": checkpoint.config.slots}),
        "positions": ("Raise max_position_embeddings to the target's if the draft was trained for such lengths; otherwise limit "
                      "the server's context", {}),
        "key": (f"Write the key {point.key}", _missing_key(point.key, checkpoint)),
    }
    if point.question in said:
        return said[point.question]
    if point.question in DraftConfig.model_fields and point.meant is not None:
        keys = setting_for(name, dialect, point.question, _plain(point.meant))
        if "not_possible" in keys:
            return (f"Serve with a consumer that implements {point.question}, or train without it: {keys['not_possible']}"), keys
        return "Write the setting where this consumer looks for it", keys
    if point.question.startswith("tensor "):
        return "Export the checkpoint again with the tensors that this consumer needs, and without those it refuses", {}
    return "Serve with a consumer and version that read it as it was trained", {}


def _missing_key(key: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {key: getattr(checkpoint.config, key)} if key in DraftConfig.model_fields else {}


def _rope_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    meant = dict(checkpoint.config.rope_parameters)
    scaling = {k: v for k, v in meant.items() if k != "rope_theta"}
    keys: dict[str, Any] = {"rope_theta": meant.get("rope_theta", 10000.0), "rope_parameters": meant}
    keys["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else meant
    return keys if checkpoint.config.dialect == "native" else {"transformer_layer_config": keys}


def _boundary_keys(asked: Asked, checkpoint: Checkpoint, target: TargetFacts | None) -> dict[str, Any]:
    meant = checkpoint.config.boundaries
    if meant is None and target is not None:
        meant = default_boundaries(target.layers)
    if meant is None:
        return {}
    layers, model_type = (None, None) if target is None else (target.layers, target.model_type)
    return config_for(asked.known.id, meant, layers, model_type)


def _config(asked: Asked, checkpoint: Checkpoint, found: Effective, target: TargetFacts | None) -> dict[str, Any]:
    """All keys together that put the checkpoint's own meaning into effect."""
    if not asked.known.captures:
        return {}
    merged: dict[str, Any] = {}
    impossible: list[str] = []
    parts = [_boundary_keys(asked, checkpoint, target)]
    parts += [setting_for(asked.known.id, checkpoint.config.dialect, field, own) for field, (own, _) in found.changed.items()
              if field != "rope_parameters"]
    if "rope_parameters" in found.changed:
        parts.append(_rope_keys(checkpoint))
    for keys in parts:
        if "not_possible" in keys:
            impossible.append(str(keys["not_possible"]))
        else:
            _merge(merged, keys)
    return merged | ({"not_possible": "; ".join(impossible)} if impossible else {})


def _merge(into: dict[str, Any], keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _unknown(asked: Asked, checkpoint: Checkpoint, found: Effective, target: TargetFacts | None) -> Iterator[str]:
    known = asked.known
    if not found.loads:
        return
    if target is None and known.captures:
        if found.boundaries is None:
            yield "which boundaries its default is, without the target's depth (--target-config)"
        elif len(known.id_rules) > 1:
            yield f"{_DEEPSEEK} (--target-config)"
    own = "embed_tokens.weight" in checkpoint.tensors
    if own and found.embedding == "target" and (target is None or target.parts is None):
        yield "whether the draft's own embedding, which it replaces, is the target's anyway (--target)"
    if found.reading.settings.get("norm_output") and checkpoint.config.dialect == "native":
        yield ("norm_output is true, which feeds back the normed state; SpecForge means a norm before the head by "
               "it and feeds back the state before it: who trained the draft decides")
