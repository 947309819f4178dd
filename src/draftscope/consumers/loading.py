"""What a consumer's loader makes of the tensors: which arrive, which are dropped, what stays at its initial value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from draftscope.consumers.facts import Consumer, TensorFact
from draftscope.consumers.naming import naming_of, reaches
from draftscope.consumers.points import Point, at
from draftscope.eagle3.checkpoint import Checkpoint, expected_shapes

Owner = Literal["target", "own"]
Head = Literal["target", "own", "embedding", "initial"]

_SWITCHED = (
    (re.compile(r"^input_norm\."), "norm_before_fc"), (re.compile(r"^fc_norm\."), "fc_norm"),
    (re.compile(r"self_attn\.[qk]_norm\."), "qk_norm"), (re.compile(r"^fc\.bias$"), "fc_bias"),
    (re.compile(r"self_attn\.[qkv]_proj\.bias$"), "attention_bias"),
    (re.compile(r"self_attn\.o_proj\.bias$"), "attention_output_bias"), (re.compile(r"mlp\.\w+\.bias$"), "mlp_bias"),
    (re.compile(r"^fc\.weight$"), "use_aux_hidden_state"),
)
_LATER = re.compile(r"^layers\.(\d+)\.")


@dataclass(slots=True)
class Loaded:
    """Outcome of loading.

    Attributes:
        ignored: native names (as spelt where there is none) of tensors that are not used.
        initial: native names of parameters that keep their initial value.
        lost: name prefixes for a `Reading`.
        refused: whether loading ends in an error.
        no_map: whether the vocabulary map is not set.
    """

    ignored: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: bool = False
    no_map: bool = False
    embedding: Owner = "target"
    head: Head = "own"
    points: list[Point] = field(default_factory=list)


def load(known: Consumer, checkpoint: Checkpoint, settings: dict[str, Any], architecture: str) -> Loaded:
    """Go through the tensors as the consumer's loader does."""
    found = Loaded()
    dropped = _dropped(known, checkpoint, found)
    _embedding(known, checkpoint, found, dropped)
    _absent(known, checkpoint, settings, found, dropped)
    for name in (*checkpoint.tensors, *checkpoint.unexpected):
        if name not in dropped and _idle(name, checkpoint, settings) and name not in known.needs:
            _unused(known, checkpoint, found, fact(known, "idle", name, architecture), name)
    _head(known, checkpoint, found)
    _slots(known, checkpoint, found, architecture)
    if not known.captures:
        found.no_map, found.head = True, "target"
        found.lost.append("lm_head.")
    if known.new_map[0] and checkpoint.config.draft_vocab_size != checkpoint.config.vocab_size:
        found.points.append(Point("map of the run", "new", says=known.new_map[0], source=known.new_map[1]))
    return found


def fact(known: Consumer, when: Literal["missing", "idle"], name: str, architecture: str = "") -> TensorFact:
    """The first row that speaks of a tensor."""
    return next(row for row in known.tensors if row.when == when and name.startswith(row.prefix) and name.endswith(row.suffix)
                and (not row.architectures or architecture in row.architectures))


def _dropped(known: Consumer, checkpoint: Checkpoint, found: Loaded) -> set[str]:
    """Native names of tensors that are stored under a name without a place in this consumer."""
    naming = naming_of(known, getattr(checkpoint.config, "mla", None) is not None)
    lost = {name: own for name, own in checkpoint.spelt.items()
            if name in checkpoint.tensors and reaches(naming, own) != name}
    if not lost:
        return set()
    row = fact(known, "idle", "")
    found.refused |= row.then == "refuses"
    spelt = sorted(lost.values())
    shown = ", ".join(spelt[:3]) + (f" and {len(spelt) - 3} more" if len(spelt) > 3 else "")
    verb = "refuses" if row.then == "refuses" else "does not load"
    found.points.append(Point(
        "names", verb, "loaded", says=f"{known.id} {verb} {shown}: it has no parameter of that name", source=naming.source,
        fault="weight-missing", where=tuple(f"tensor {name}" for name in spelt[:8]),
    ))
    found.ignored += list(lost)
    return set(lost)


def _embedding(known: Consumer, checkpoint: Checkpoint, found: Loaded, dropped: set[str]) -> None:
    config = checkpoint.config
    if "embed_tokens.weight" not in checkpoint.tensors or "embed_tokens.weight" in dropped:
        return
    if known.keeps_embedding or config.target_hidden_size != config.hidden_size:
        found.embedding = "own"
        return
    found.ignored.append("embed_tokens.weight")
    found.lost.append("embed_tokens.")
    found.points.append(Point("embedding", "target", "own", says="the draft's own embedding is replaced by the target's",
                              source=known.embedding_source))


def _absent(known: Consumer, checkpoint: Checkpoint, settings: dict[str, Any], found: Loaded, dropped: set[str]) -> None:
    for name in _missing(known, checkpoint, settings, dropped):
        row = fact(known, "missing", name)
        if row.then == "initial":
            found.initial.append(name)
            if name in dropped:
                found.lost.append(name)
        found.refused |= row.then == "refuses"
        found.no_map |= name == "d2t"
        if name == "lm_head.weight":
            found.head = "target" if row.then == "target" else "initial"
        whole = checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size
        harmless = row.then == "target" and (name != "lm_head.weight" or whole or known.kind == "trainer")
        fault = "" if harmless else "vocab-map" if name in ("d2t", "t2d") else "weight-missing"
        word = "does not arrive" if name in dropped else "is missing"
        found.points.append(Point(
            f"tensor {name}", row.then, "loaded", says=f"{name} {word}: {row.says}", source=row.source, fault=fault,
            where=(f"tensor {name}",),
        ))


def _missing(known: Consumer, checkpoint: Checkpoint, settings: dict[str, Any], dropped: set[str]) -> list[str]:
    """Parameters that the settings in effect ask for and that do not arrive, the maps included."""
    config = checkpoint.config.model_copy(update=settings)
    smaller = config.draft_vocab_size != config.vocab_size
    maps = [name for name in ("d2t", "t2d")
            if (name == "d2t" and smaller) or (name in known.needs and (smaller or known.needs[name] == "always"))]
    needed = [*expected_shapes(config), *maps]
    embedding = fact(known, "missing", "embed_tokens.weight")
    if embedding.prefix and embedding.then != "target":
        needed.append("embed_tokens.weight")
    if not checkpoint.config.use_aux_hidden_state and not settings.get("use_aux_hidden_state", False):
        needed = [name for name in needed if name != "fc.weight"]
    here = {*checkpoint.tensors, *checkpoint.unexpected} - dropped
    return [name for name in needed if name not in here]


def _idle(name: str, checkpoint: Checkpoint, settings: dict[str, Any]) -> bool:
    """Whether a tensor has no use under the settings in effect."""
    if name == "t2d":
        return True
    if name == "d2t":
        return checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size
    switch = next((field for pattern, field in _SWITCHED if pattern.search(name)), "")
    if switch:
        own = getattr(checkpoint.config, switch) if name not in checkpoint.unexpected else False
        return not settings.get(switch, own)
    later = _LATER.match(name)
    if later is not None and later.group(1) != "0":
        return int(later.group(1)) >= settings.get("layers", checkpoint.config.layers)
    return name in checkpoint.unexpected


def _unused(known: Consumer, checkpoint: Checkpoint, found: Loaded, row: TensorFact, name: str) -> None:
    found.ignored.append(name)
    if name == "t2d":
        return
    found.refused |= row.then == "refuses"
    verb = "refuses" if row.then == "refuses" else "ignores"
    turned_off = name in checkpoint.tensors and name != "d2t"
    harmless = name == "d2t" and row.then != "refuses" and not bool(checkpoint.tensors[name].any())
    fault = "vocab-map" if name == "d2t" else "config-flag" if turned_off or _switch(name) else "weight-missing"
    found.points.append(Point(
        f"tensor {name}", verb, "loaded", says=f"{known.id} {verb} tensor {name}: {row.says}", source=row.source,
        fault="" if harmless else fault, where=(f"tensor {name}",),
        strength="proven" if row.then == "refuses" or turned_off else "suspected",
    ))


def _switch(name: str) -> str:
    return next((field for pattern, field in _SWITCHED if pattern.search(name)), "")


def _head(known: Consumer, checkpoint: Checkpoint, found: Loaded) -> None:
    if not known.tied_head or not checkpoint.raw.get("tie_word_embeddings"):
        return
    found.lost.append("lm_head.")
    if "lm_head.weight" not in found.initial:
        found.initial.append("lm_head.weight")
    found.ignored.append("lm_head.weight")
    found.head = "embedding"
    found.points.append(Point(
        "head", "embedding", "own", "tie_word_embeddings", "tie_word_embeddings is true: the embedding is taken for the head",
        known.tied_head, "tied-head", where=("config tie_word_embeddings", "tensor lm_head.weight"),
    ))


def _slots(known: Consumer, checkpoint: Checkpoint, found: Loaded, architecture: str) -> None:
    """How wide the consumer builds fc, against the tensor that is to fill it."""
    config, weight = checkpoint.config, checkpoint.tensors.get("fc.weight")
    if weight is None or not known.captures or not config.use_aux_hidden_state:
        return
    rule = known.slots.get(architecture, known.slots[""])
    number = next((value for key in rule.numbers if (value := at(checkpoint.raw, key)[1]) is not None), None)
    if number is None:
        number = next((len(ids) for key in rule.lists if (ids := at(checkpoint.raw, key)[1])), 3)
    width = config.hidden_size if known.own_width else config.target_hidden_size
    if int(number) * width == weight.shape[1]:
        return
    found.refused = True
    found.points.append(Point(
        "slots", int(number), config.slots, (rule.numbers + rule.lists + ("default",))[0],
        f"{known.id} builds fc for {number} slots of {width}, the tensor is {weight.shape[1]} wide: loading ends in an error",
        rule.source, "schema-width", where=("tensor fc.weight",),
    ))
