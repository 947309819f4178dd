"""The form in which it is written down what a consumer makes of a draft checkpoint. The tables are beside this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Switch:
    """Where a consumer looks a setting up.

    Attributes:
        field: the `DraftConfig` field.
        keys: places in config.json, dotted, in order; () = the consumer does not implement it.
        default: in effect where no place has it.
        source: file (and name in it) of the release.
        truthy: the first place that holds a true value wins, rather than the first that exists.
    """

    field: str
    keys: tuple[str, ...]
    default: Any
    source: str
    truthy: bool = False


@dataclass(frozen=True, slots=True)
class IdRule:
    """How layer ids come to boundaries for some target architectures.

    Attributes:
        to_ids: the way back, in an order that works; None where these boundaries can't be named.
        model_types: of the targets; () = all others.
        last_boundary: whether boundary n, after the last layer, is ever captured.
    """

    says: str
    to_boundaries: Callable[[Sequence[int], int | None], tuple[int, ...]]
    to_ids: Callable[[Sequence[int], int | None], tuple[int, ...] | None]
    source: str
    model_types: tuple[str, ...] = ()
    last_boundary: bool = False


@dataclass(frozen=True, slots=True)
class LayerIds:
    """Where a consumer looks the layer ids up; `runner` names the one of its model runners that does."""

    keys: tuple[str, ...]
    source: str
    runner: str = ""


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What a consumer does about tensors whose native name starts with `prefix`.

    Attributes:
        when: `missing` from the checkpoint, or `idle`: present, but without use under the settings in effect.
        then: `initial` (keeps its initial value), `refuses` (raises), `ignores` (skips it without a word), `target`
            (takes the target's).
    """

    prefix: str
    when: Literal["missing", "idle"]
    then: Literal["initial", "refuses", "ignores", "target"]
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """An engine at a version.

    Attributes:
        architectures: what it loads as an EAGLE-3 draft with this draft model's structure.
        dialects: dialects of checkpoint that it reads.
        switches: by dialect.
        layer_ids: one entry per model runner, the default one first.
        keeps_embedding: whether a draft's own embedding stays in use where the widths agree.
        tied_head: where it takes the embedding for the head if `tie_word_embeddings` is true; empty = it does not.
        write_key: the place that every runner of it reads layer ids from, dotted.
    """

    name: str
    versions: tuple[str, ...]
    architectures: tuple[str, ...]
    dialects: tuple[str, ...]
    switches: dict[str, tuple[Switch, ...]]
    layer_ids: tuple[LayerIds, ...]
    id_rules: tuple[IdRule, ...]
    tensors: tuple[TensorFact, ...]
    keeps_embedding: bool
    embedding_source: str
    tied_head: str
    write_key: str

    @property
    def id(self) -> str:
        return f"{self.name}@{self.versions[0]}"

    def rule(self, model_type: str | None) -> IdRule:
        """The rule for a target of this model type; the general one where it is not known."""
        for rule in self.id_rules:
            if model_type is not None and model_type in rule.model_types:
                return rule
        return next(rule for rule in self.id_rules if not rule.model_types)


def raw_ids(ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
    """Id i is boundary i."""
    return tuple(ids)


def plus_one(ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
    """Id i is the output of layer i."""
    return tuple(i + 1 for i in ids)


def minus_one(boundaries: Sequence[int], layers: int | None) -> tuple[int, ...] | None:
    return tuple(b - 1 for b in boundaries)
