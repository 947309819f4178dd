"""The form in which it is written down what a consumer makes of a draft checkpoint. The tables are beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftscope.boundaries import default_boundaries
from draftscope.eagle3.config import DraftConfig

LAYER = "transformer_layer_config."
"""Where speculators' dialect keeps the keys of the decoder layers."""


def _anything(ids: Sequence[int], layers: int | None) -> str:
    return ""


def always(config: DraftConfig) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Switch:
    """Where a consumer looks a setting up.

    Attributes:
        field: the `DraftConfig` field.
        keys: places in config.json, dotted, in order; () = the consumer does not implement it.
        default: in effect where no place has it.
        source: file (and name in it) of the release.
        truthy: the first place that holds a true value wins, rather than the first that exists.
        matters: the drafts for which the setting makes a difference.
    """

    field: str
    keys: tuple[str, ...]
    default: Any
    source: str
    truthy: bool = False
    matters: Callable[[DraftConfig], bool] = always


@dataclass(frozen=True, slots=True)
class IdRule:
    """How layer ids come to boundaries for some target architectures.

    Attributes:
        to_ids: the way back, in an order that works; None where these boundaries can't be named.
        model_types: of the targets; () = all others.
        last_boundary: whether boundary n, after the last layer, is ever captured.
        beyond_raises: whether an id past the last layer ends the start, rather than losing its slot.
        default: boundaries of a target of n layers where no ids are configured.
        refuses: why these ids end in an error; empty = they don't.
    """

    says: str
    to_boundaries: Callable[[Sequence[int], int | None], tuple[int, ...]]
    to_ids: Callable[[Sequence[int], int | None], tuple[int, ...] | None]
    source: str
    model_types: tuple[str, ...] = ()
    last_boundary: bool = False
    beyond_raises: bool = False
    default: Callable[[int], tuple[int, ...]] = default_boundaries
    refuses: Callable[[Sequence[int], int | None], str] = _anything


@dataclass(frozen=True, slots=True)
class LayerIds:
    """Where a consumer looks the layer ids up; `runner` names the one of its model runners that does."""

    keys: tuple[str, ...]
    source: str
    runner: str = ""


@dataclass(frozen=True, slots=True)
class SlotCount:
    """How many slots `fc` is built for: the first of `numbers`, else the length of the first list of `lists`, else 3."""

    numbers: tuple[str, ...]
    lists: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What a consumer does about tensors whose native name starts with `prefix`.

    Attributes:
        when: `missing` from the checkpoint, or `idle`: present, but without use under the settings in effect, or under a name
            that the consumer has no place for.
        then: `initial` (keeps its initial value), `refuses` (raises), `ignores` (skips it without a word), `target`
            (takes the target's).
        suffix: what the name ends in too; architectures: where this holds, empty = in all.
    """

    prefix: str
    when: Literal["missing", "idle"]
    then: Literal["initial", "refuses", "ignores", "target"]
    says: str
    source: str
    suffix: str = ""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Naming:
    """Which stored names reach a parameter.

    Attributes:
        renames: substrings replaced, in order, before the look-up.
        prefix: one that may stand before a name (`model.`); empty = none may. `everywhere`: before lm_head and the maps too.
        layer: the decoder layers' parameters are called `{layer}N.` here, or `midlayer.` where it is empty.
        exact: whether the maps d2t and t2d have to be called just so; else the letters anywhere in a name do.
        source: of the look-up.
    """

    renames: tuple[tuple[str, str], ...]
    prefix: str
    layer: str
    exact: bool
    source: str
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Where rotary positions come from.

    Attributes:
        new: whether `rope_parameters` is read; `legacy`: whether `rope_theta` and `rope_scaling` are.
        first: the spelling that wins where the file has both.
        theta: base frequency where no key says it.
        needs: by rope type, the keys without which the start ends in an error.
    """

    new: bool
    legacy: bool
    first: Literal["rope_parameters", "rope_scaling"]
    source: str
    theta: float = 10000.0
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Where the draft's quantisation comes from, besides its own `quantization_config`."""

    inherits: bool
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class Positions:
    """What becomes of a `max_position_embeddings` below the target's: `then` in one word, `says` in words."""

    then: Literal["refuses", "stops", "ignores"]
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class Required:
    """A config key without which the start ends in an error; `null` too if it is not enough that the key is there."""

    key: str
    source: str
    null: bool = False


@dataclass(frozen=True, slots=True)
class Consumer:
    """An engine or trainer at a version, started with one of its algorithm flags.

    Attributes:
        kind: `engine` serves; `trainer` goes on training from the checkpoint.
        flag: the algorithm asked for where the name has to say it (`eagle`); empty = the right one.
        architectures: what it loads as an EAGLE-3 draft.
        dialects: dialects of checkpoint that it reads.
        sets: settings that follow from the architecture alone; "" = of all others.
        switches: by dialect.
        layer_ids: one entry per model runner, the default one first.
        slots: by architecture; "" = of all others.
        most_layers: decoder layers that it takes at most, by architecture; one without an entry takes any number.
        keeps_embedding: whether a draft's own embedding stays in use where the widths agree.
        tied_head: where it takes the embedding for the head if `tie_word_embeddings` is true; empty = it does not.
        needs: maps that it cannot do without: always, or where the draft's vocabulary is the smaller one.
        own_width: where it refuses a target of another width than the draft's; empty = it does not.
        query_latent: where it refuses latent attention without `q_lora_rank`; empty = it does not.
        new_map: what replaces the checkpoint's map, and where; empty = nothing does.
        write_key: the place that every runner of it reads layer ids from, dotted.
        graph_defaults: where the target's CUDA graphs are captured with the default ids, whatever is configured; empty = they are
            captured with the configured ones.
        late_positions: where drafted tokens after the first run at a position one too high; empty = they do not.
        captures: False where no aux states reach the draft at all; `flag_source` says where that is decided.
    """

    name: str
    versions: tuple[str, ...]
    kind: Literal["engine", "trainer"]
    architectures: tuple[str, ...]
    dialects: tuple[str, ...]
    switches: Mapping[str, tuple[Switch, ...]]
    layer_ids: tuple[LayerIds, ...]
    id_rules: tuple[IdRule, ...]
    tensors: tuple[TensorFact, ...]
    naming: Naming
    slots: Mapping[str, SlotCount]
    rope: Rope
    quantisation: Quantisation
    positions: Positions
    keeps_embedding: bool
    embedding_source: str
    write_key: str
    architecture_source: str
    tied_head: str = ""
    latent_naming: Naming | None = None
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: tuple[Required, ...] = ()
    needs: Mapping[str, Literal["always", "smaller"]] = field(default_factory=dict)
    own_width: str = ""
    query_latent: str = ""
    new_map: tuple[str, str] = ("", "")
    most_layers: Mapping[str, int] = field(default_factory=dict)
    layers_source: str = ""
    graph_defaults: str = ""
    late_positions: str = ""
    flag: str = ""
    captures: bool = True
    flag_source: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}@{self.versions[0]}" + (f":{self.flag}" if self.flag else "")

    def rule(self, model_type: str | None) -> IdRule:
        """The rule for a target of this model type; the general one where it is not known."""
        for rule in self.id_rules:
            if model_type is not None and model_type in rule.model_types:
                return rule
        return next(rule for rule in self.id_rules if not rule.model_types)

    def switch(self, dialect: str, name: str) -> Switch | None:
        """Where a setting is looked up in a dialect; None = there is no row for it."""
        return next((s for s in self.switches.get(dialect, ()) if s.field == name), None)


def raw_ids(ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
    """Id i is boundary i."""
    return tuple(ids)


def plus_one(ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
    """Id i is the output of layer i."""
    return tuple(i + 1 for i in ids)


def minus_one(boundaries: Sequence[int], layers: int | None) -> tuple[int, ...] | None:
    return tuple(b - 1 for b in boundaries)


def several_layers(config: DraftConfig) -> bool:
    return config.layers > 1
