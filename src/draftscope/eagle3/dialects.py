"""What a draft's config.json says, in whichever dialect it is written.

*Native*: `LlamaForCausalLMEagle3` and, with latent attention, `Eagle3DeepseekV2ForCausalLM`, as SafeAILab/EAGLE, SpecForge,
TorchSpec, AngelSlim and ModelOpt write them, with switches at top level or nested in `eagle_config`. *speculators*:
`speculators_model_type: eagle3` with a `transformer_layer_config` (speculators 0.9.0 `models/eagle3/config.py`). Where the
file is silent the tensors' names speak. What the draft model here can't honour is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftscope.boundaries import default_boundaries, ids_to_boundaries
from draftscope.eagle3.config import Dialect, DraftConfig, LatentAttention, LaterNorm
from draftscope.errors import DraftscopeError

Writer = Literal["specforge"]

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LATENT = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
_NATIVE = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM"} | LATENT
_SPECULATORS = {"Eagle3Speculator", "Eagle3DraftModel"}
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
# What of a layer's configuration counts here; only this is given to transformers, which builds lists by other numbers.
_LAYER_KEYS = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
    "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "max_position_embeddings", "attention_bias",
    "mlp_bias", "hidden_act", "num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
    "tie_word_embeddings",
}
# ModelOpt's eagle_config says these of every draft; other values ask for another draft model.
_EXPECTED = {
    "next_layer_regular": (True, "later layers that take the embedding too"),
    "use_input_layernorm_in_first_layer": (True, "a first layer without its norms"),
    "use_mtp_layernorm": (False, "MTP's norms"), "eh_proj_before_attn": (False, "a projection before attention"),
    "eh_proj_bias": (False, "a bias on that projection"),
}


@dataclass(frozen=True, slots=True)
class Described:
    """A configuration as read.

    Attributes:
        layer_ids: the ids as the file spells them; None = it names none.
        layer_ids_key: where they stood, `eagle_config.NAME` or `NAME`; empty without ids.
        notes: readings that were chosen, and why.
    """

    config: DraftConfig
    layer_ids: tuple[int, ...] | None
    layer_ids_key: str
    notes: tuple[str, ...] = ()


def describe(raw: dict[str, Any], where: str, *, names: Collection[str] | None = None, plain_norm: bool = False,
             target_layers: int | None = None, writer: Writer | None = None) -> Described:
    """A config.json's contents as a `DraftConfig`.

    Args:
        raw: the parsed file.
        where: the file, for messages.
        names: native names of the checkpoint's tensors; None = not known.
        plain_norm: the final norm is absent or holds nothing but ones.
        target_layers: the target's decoder layers, so that a file without layer ids gets the default boundaries.
        writer: whose trainer wrote it, where one key means different things to different ones.

    Raises:
        DraftscopeError: a key is missing or contradicts another, or asks for something that the draft model here can't do.
    """
    dialect: Dialect = "speculators" if raw.get("speculators_model_type") or "transformer_layer_config" in raw else "native"
    layer = _speculators_layer(raw, where) if dialect == "speculators" else raw
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise DraftscopeError("eagle_config is not an object", where=where)
    _refuse(raw, layer, nested, dialect, where)
    notes: list[str] = []
    held = frozenset(names or ())
    aux = bool(nested.get("use_aux_hidden_state", True) is not False)
    ids, key = _layer_ids(raw, nested, where)
    boundaries = None
    if ids is not None and aux:
        boundaries = ids_to_boundaries("specforge" if key.startswith("eagle_config.") else "speculators", ids)
    elif target_layers is not None and aux:
        boundaries = default_boundaries(target_layers)
    numbers = {}
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        value = layer.get(name) or (raw.get(name) if name == "vocab_size" else None)
        if type(value) is not int or value <= 0:
            raise DraftscopeError(f"config key {name} is not a number of at least 1: {value!r}", where=where)
        numbers[name] = value
    hidden, heads, vocab = numbers["hidden_size"], numbers["num_attention_heads"], numbers["vocab_size"]
    layers = 1 if layer.get("num_hidden_layers") is None else layer["num_hidden_layers"]
    mla = _latent(raw, layer, names, where)
    usual = hidden // heads if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    kv_heads, head_dim = layer.get("num_key_value_heads") or heads, layer.get("head_dim") or usual
    slots = raw.get("num_aux_hidden_states") or nested.get("num_aux_hidden_states") or len(ids or ()) or 3
    if ids and slots != len(ids):
        # Engines size fc by the one and capture the other.
        raise DraftscopeError(f"{len(ids)} layer ids, but num_aux_hidden_states: {slots!r}", where=where)
    window, sliding = _windows(layer, layers, where)
    try:
        config = DraftConfig(
            dialect=dialect, hidden_size=hidden, target_hidden_size=raw.get("target_hidden_size") or hidden,
            intermediate_size=numbers["intermediate_size"], num_attention_heads=heads, num_key_value_heads=kv_heads,
            head_dim=head_dim, vocab_size=vocab, draft_vocab_size=raw.get("draft_vocab_size") or vocab,
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6), rope_parameters=rope_of(layer, where),
            max_position_embeddings=layer.get("max_position_embeddings") or 2048, slots=slots if aux else 1,
            boundaries=boundaries, norm_before_residual=_switch(raw, nested, "norm_before_residual"),
            norm_before_fc=_switch(raw, nested, "norm_before_fc"), fc_norm=_switch(raw, nested, "fc_norm", "use_aux_norm"),
            qk_norm=layer.get("model_type") == "qwen3" if names is None else "midlayer.self_attn.q_norm.weight" in held,
            sliding_window=window, sliding_layers=sliding, layers=layers, use_aux_hidden_state=aux, mla=mla,
            later_norm=_later_norm(raw, held, where),
            fc_bias=bool(raw.get("bias")) or "fc.bias" in held, tie_word_embeddings=bool(layer.get("tie_word_embeddings")),
            **_biases(layer, held), **_final_norm(raw, nested, dialect, plain_norm, writer, notes),
        )
    except ValidationError as error:
        raise invalid("config key", error, where) from None
    return Described(config, ids, key, tuple(notes))


def invalid(what: str, error: ValidationError, where: str) -> DraftscopeError:
    """The first thing that a `DraftConfig` has against its values."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    name = {"layers": "num_hidden_layers", "slots": "num_aux_hidden_states"}.get(name, name) if what == "config key" else name
    says = first["msg"].removeprefix("Value error, ")
    return DraftscopeError(f"{what} {name}: {says}" if name else says, where=where)


def _switch(raw: dict[str, Any], nested: dict[str, Any], *names: str) -> bool:
    return any(bool(nested.get(name) or raw.get(name)) for name in names)


def _final_norm(raw: dict[str, Any], nested: dict[str, Any], dialect: Dialect, plain: bool, writer: Writer | None,
                notes: list[str]) -> dict[str, Any]:
    """Both meanings of `norm_output`: whether the head's norm is there at all (SpecForge), or what is fed back (all others)."""
    if writer == "specforge":
        return {"norm_before_head": raw.get("norm_output") is not False, "norm_output": False}
    fed_back = _switch(raw, nested, "norm_output", "return_hidden_post_norm")
    before_head = raw.get("norm_before_head") is not False and nested.get("use_last_layernorm") is not False
    if before_head and dialect == "native" and raw.get("norm_output") is False and plain and "norm_before_head" not in raw:
        # Elsewhere false is the default and says nothing, so it is believed only where the norm shows no training.
        before_head = False
        notes.append("norm_output: false and a final norm of ones: read as SpecForge's, a head on states that no norm touched")
    return {"norm_before_head": before_head, "norm_output": fed_back}


def _biases(layer: dict[str, Any], held: frozenset[str]) -> dict[str, Any]:
    """`attention_bias` is a bias on q, k, v and o; tensors that are there tell more."""
    said = bool(layer.get("attention_bias"))
    prefix = "midlayer.self_attn."
    inner = any(f"{prefix}{name}.bias" in held for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"))
    outer = f"{prefix}o_proj.bias" in held
    told = layer.get("attention_output_bias")
    output = bool(told) if isinstance(told, bool) else outer if inner else said
    mlp = any(f"midlayer.mlp.{name}_proj.bias" in held for name in ("gate", "up", "down"))
    return {"attention_bias": said or inner, "attention_output_bias": output or outer,
            "mlp_bias": bool(layer.get("mlp_bias")) or mlp}


def _later_norm(raw: dict[str, Any], held: frozenset[str], where: str) -> LaterNorm:
    said = raw.get("later_norm")
    if said == "hidden_norm":
        return "hidden_norm"
    if said not in (None, "input_layernorm"):
        raise DraftscopeError(f"config key later_norm: {said!r} is neither input_layernorm nor hidden_norm", where=where)
    hidden, usual = (f"layers.1.{name}.weight" in held for name in ("hidden_norm", "input_layernorm"))
    return "hidden_norm" if said is None and hidden and not usual else "input_layernorm"


def _latent(raw: dict[str, Any], layer: dict[str, Any], names: Collection[str] | None,
            where: str) -> LatentAttention | None:
    """The sizes of latent attention, where the draft has it: by architecture, or by its tensors."""
    named = any(architecture in LATENT for architecture in raw.get("architectures") or [])
    if names is not None:
        named = named or "midlayer.self_attn.kv_a_proj_with_mqa.weight" in names
    elif not named:
        named = bool(layer.get("kv_lora_rank")) and not raw.get("architectures")
    if not named:
        return None
    sizes: dict[str, Any] = {key: layer[key] for key in LATENT_SIZES if layer.get(key) is not None}
    for key in LATENT_SIZES[1:5]:
        if type(sizes.get(key)) is not int:
            raise DraftscopeError(f"a draft with multi-head latent attention (MLA) needs {key}: {sizes.get(key)!r}", where=where)
    try:
        return LatentAttention(**sizes)
    except ValidationError as error:
        raise invalid("config key", error, where) from None


def _windows(layer: dict[str, Any], layers: Any, where: str) -> tuple[Any, tuple[int, ...] | None]:
    kinds = layer.get("layer_types")
    if kinds is None:
        return None, None
    if not isinstance(kinds, list):
        raise DraftscopeError(f"layer_types is not a list: {kinds!r}", where=where)
    count = layers if type(layers) is int else len(kinds)
    sliding = tuple(i for i, kind in enumerate(kinds[:count]) if kind == "sliding_attention")
    if not sliding or layer.get("sliding_window") is None:
        return None, None
    return layer["sliding_window"], None if len(sliding) == count else sliding


def _layer_ids(raw: dict[str, Any], nested: dict[str, Any], where: str) -> tuple[tuple[int, ...] | None, str]:
    for key, ids in ((f"eagle_config.{LAYER_IDS}", nested.get(LAYER_IDS)), (LAYER_IDS, raw.get(LAYER_IDS))):
        if ids is None or ids == []:
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise DraftscopeError(f"{key} is not a list of integers: {ids!r}", where=where)
        return tuple(ids), key
    return None, ""


def _speculators_layer(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """`transformer_layer_config` with its class defaults filled in: speculators stores only what differs from them."""
    kind = raw.get("speculators_model_type")
    if kind != "eagle3":
        raise DraftscopeError(f"speculators_model_type {kind!r} is not eagle3", where=where,
                              remedy="Only EAGLE-3 drafts can be read")
    given = raw.get("transformer_layer_config")
    if not isinstance(given, dict):
        raise DraftscopeError("transformer_layer_config is missing", where=where)
    model_type = given.get("model_type", "qwen3")
    if model_type not in ("llama", "qwen3"):
        raise DraftscopeError(f"draft layers of model type {model_type!r} are not supported", where=where,
                              remedy="Supported: llama, qwen3")
    layers = given.get("num_hidden_layers")
    if layers is not None and (type(layers) is not int or not 1 <= layers <= 256):
        raise DraftscopeError(f"config key num_hidden_layers is not between 1 and 256: {layers!r}", where=where)
    try:
        filled = AutoConfig.for_model(model_type, **{k: v for k, v in given.items() if k in _LAYER_KEYS}).to_dict()
    except Exception as error:  # transformers validates with exception classes of its own
        said = " ".join(str(error).split())[:300]
        raise DraftscopeError(f"transformer_layer_config is not a {model_type} configuration: {said}", where=where) from None
    return filled | {"attention_output_bias": given.get("attention_output_bias")}


def _refuse(raw: dict[str, Any], layer: dict[str, Any], nested: dict[str, Any], dialect: Dialect, where: str) -> None:
    def refuse(what: str, remedy: str = "") -> None:
        raise DraftscopeError(f"{what} is not supported", where=where, remedy=remedy)

    known = _SPECULATORS if dialect == "speculators" else _NATIVE
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise DraftscopeError(f"architectures is not a list: {architectures!r}", where=where)
    for architecture in architectures:
        if not isinstance(architecture, str) or architecture not in known:
            refuse(f"architecture {architecture!r}", f"Supported: {', '.join(sorted(known))}")
    if (activation := layer.get("hidden_act") or "silu") not in ("silu", "swish"):
        refuse(f"activation {activation!r} (hidden_act)")
    for key, (expected, what) in _EXPECTED.items():
        if nested.get(key) is not None and bool(nested[key]) is not expected:
            if key == "next_layer_regular" and layer.get("num_hidden_layers") in (1, None):
                continue
            refuse(f"eagle_config.{key}: {str(nested[key]).lower()} ({what})")
    if nested.get("use_last_layernorm") is False and raw.get("norm_before_head") is True:
        raise DraftscopeError("eagle_config.use_last_layernorm and norm_before_head contradict each other", where=where)
    if (steps := nested.get("parallel_draft_step")) not in (None, 0, 1):
        refuse(f"eagle_config.parallel_draft_step: {steps!r} (several tokens from one step)")
    if raw.get("quantization_config"):
        refuse("a quantised draft (quantization_config)", "Save it in bfloat16 or float32")


def rope_of(layer: dict[str, Any], where: str) -> dict[str, Any]:
    """New-style `rope_parameters`, else legacy `rope_theta` and `rope_scaling`; theta 10000 where nothing is said."""
    parameters = layer.get("rope_parameters")
    if isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()):
        # One set per layer type: speculators takes that of the sliding window for its draft.
        chosen = parameters.get("sliding_attention", parameters.get("full_attention"))
        if not isinstance(chosen, dict):
            raise DraftscopeError("rope_parameters names neither sliding_attention nor full_attention", where=where)
        parameters = chosen
    found = parameters or layer.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise DraftscopeError(f"rope parameters are not an object: {found!r}", where=where)
    merged = dict(found)
    if "mrope_section" in merged:
        raise DraftscopeError("rope with mrope_section (multimodal positions) is not supported", where=where)
    kind = merged.pop("type", None)
    kind = merged.setdefault("rope_type", kind or "default")
    if not isinstance(kind, str) or (kind != "default" and kind not in ROPE_INIT_FUNCTIONS):
        raise DraftscopeError(f"rope type {kind!r} is not known", where=where,
                              remedy=f"Known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    theta = merged.get("rope_theta") or layer.get("rope_theta") or 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise DraftscopeError(f"rope_theta is not a positive number: {theta!r}", where=where)
    merged["rope_theta"] = float(theta)
    partial = layer.get("partial_rotary_factor")
    if partial is not None and partial != 1:
        merged.setdefault("partial_rotary_factor", partial)
    return merged
