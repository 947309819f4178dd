"""What a draft's config.json says, in whichever dialect it is written.

*Native*: `LlamaForCausalLMEagle3` as SafeAILab/EAGLE, SpecForge, TorchSpec, AngelSlim and ModelOpt write it, with switches at
top level or nested in `eagle_config`. *speculators*: `speculators_model_type: eagle3` with a `transformer_layer_config`
(speculators 0.9.0 `models/eagle3/config.py`). What one layer with Llama's parts can't honour is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftscope.boundaries import boundaries_to_ids, default_boundaries, ids_to_boundaries
from draftscope.eagle3.config import Dialect, DraftConfig
from draftscope.errors import DraftscopeError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NATIVE = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM"}
_SPECULATORS = {"Eagle3Speculator", "Eagle3DraftModel"}


@dataclass(frozen=True, slots=True)
class Described:
    """A configuration as read.

    Attributes:
        layer_ids: the ids as the file spells them; None = it names none.
        layer_ids_key: where they stood, `eagle_config.NAME` or `NAME`; empty without ids.
    """

    config: DraftConfig
    layer_ids: tuple[int, ...] | None
    layer_ids_key: str


def describe(raw: dict[str, Any], where: str, *, qk_norm: bool | None = None, target_layers: int | None = None) -> Described:
    """A config.json's contents as a `DraftConfig`.

    Args:
        raw: the parsed file.
        where: the file, for messages.
        qk_norm: whether the checkpoint has `q_norm` tensors; None = not known, decided from the model type.
        target_layers: the target's decoder layers, so that a file without layer ids gets the default boundaries.

    Raises:
        DraftscopeError: a key is missing or contradicts another, or asks for something that the draft model here can't do.
    """
    dialect: Dialect = "speculators" if raw.get("speculators_model_type") or "transformer_layer_config" in raw else "native"
    layer = _speculators_layer(raw, where) if dialect == "speculators" else raw
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise DraftscopeError("eagle_config is not an object", where=where)
    _refuse(raw, layer, nested, dialect, where)

    ids, key = _layer_ids(raw, nested, where)
    boundaries = None
    if ids is not None:
        boundaries = ids_to_boundaries("specforge" if key.startswith("eagle_config.") else "speculators", ids)
    elif target_layers is not None:
        boundaries = default_boundaries(target_layers)
    numbers = {}
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        value = layer.get(name) or (raw.get(name) if name == "vocab_size" else None)
        if type(value) is not int or value <= 0:
            raise DraftscopeError(f"config key {name} is not a number of at least 1: {value!r}", where=where)
        numbers[name] = value
    hidden, heads, vocab = numbers["hidden_size"], numbers["num_attention_heads"], numbers["vocab_size"]
    window = layer.get("sliding_window") if (layer.get("layer_types") or [""])[0] == "sliding_attention" else None
    slots = len(ids) if ids else raw.get("num_aux_hidden_states") or nested.get("num_aux_hidden_states") or 3
    try:
        config = DraftConfig(
            dialect=dialect, hidden_size=hidden, target_hidden_size=raw.get("target_hidden_size") or hidden,
            intermediate_size=numbers["intermediate_size"], num_attention_heads=heads,
            num_key_value_heads=layer.get("num_key_value_heads") or heads, head_dim=layer.get("head_dim") or hidden // heads,
            vocab_size=vocab, draft_vocab_size=raw.get("draft_vocab_size") or vocab,
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6), rope_parameters=_rope(layer, where),
            max_position_embeddings=layer.get("max_position_embeddings") or 2048, slots=slots, boundaries=boundaries,
            norm_before_residual=_switch(raw, nested, "norm_before_residual"),
            norm_before_fc=_switch(raw, nested, "norm_before_fc"), fc_norm=_switch(raw, nested, "fc_norm", "use_aux_norm"),
            norm_output=_switch(raw, nested, "norm_output", "return_hidden_post_norm"),
            qk_norm=layer.get("model_type") == "qwen3" if qk_norm is None else qk_norm, sliding_window=window,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise DraftscopeError(f"config key {'.'.join(map(str, first['loc']))}: {first['msg']}", where=where) from None
    return Described(config, ids, key)


def native_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16, target_layers: int | None = None) -> dict[str, Any]:
    """config.json of the native dialect. Rope stands there in the old and the new spelling, which must not disagree."""
    scaling = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    kind = "qwen3" if config.qk_norm else "llama"
    raw: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"], "model_type": kind,
        "num_hidden_layers": 1, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0), "rope_parameters": dict(config.rope_parameters),
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.slots != 3:
        raw["num_aux_hidden_states"] = config.slots
    if config.sliding_window is not None:
        raw |= {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
    raw |= {name: True for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)}
    default = None if target_layers is None else default_boundaries(target_layers)
    if config.boundaries is not None and config.boundaries != default:
        raw["eagle_config"] = {LAYER_IDS: list(boundaries_to_ids("sglang", config.boundaries)), "use_aux_hidden_state": True}
    return raw


def _switch(raw: dict[str, Any], nested: dict[str, Any], *names: str) -> bool:
    return any(bool(nested.get(name) or raw.get(name)) for name in names)


def _layer_ids(raw: dict[str, Any], nested: dict[str, Any], where: str) -> tuple[tuple[int, ...] | None, str]:
    for key, ids in ((f"eagle_config.{LAYER_IDS}", nested.get(LAYER_IDS)), (LAYER_IDS, raw.get(LAYER_IDS))):
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
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
    try:
        return AutoConfig.for_model(model_type, **{k: v for k, v in given.items() if k != "model_type"}).to_dict()
    except Exception as error:  # transformers validates with exception classes of its own
        raise DraftscopeError(f"transformer_layer_config is not a {model_type} configuration: {error}", where=where) from None


def _refuse(raw: dict[str, Any], layer: dict[str, Any], nested: dict[str, Any], dialect: Dialect, where: str) -> None:
    def refuse(what: str, remedy: str = "") -> None:
        raise DraftscopeError(f"{what} is not supported", where=where, remedy=remedy)

    known = _SPECULATORS if dialect == "speculators" else _NATIVE
    for architecture in raw.get("architectures") or []:
        if architecture not in known:
            refuse(f"architecture {architecture!r}", f"Supported: {', '.join(sorted(known))}")
    if any(layer.get(key) for key in ("kv_lora_rank", "q_lora_rank")):
        refuse("a draft with multi-head latent attention (MLA)")
    if (layers := layer.get("num_hidden_layers", 1)) not in (1, None):
        refuse(f"a draft of {layers} layers (num_hidden_layers)")
    if layer.get("attention_bias"):
        refuse("attention_bias: true (bias on q, k and v)")
    if layer.get("mlp_bias"):
        refuse("mlp_bias: true")
    if raw.get("bias"):
        refuse("bias: true (a bias on fc)")
    if (activation := layer.get("hidden_act", "silu")) not in ("silu", "swish"):
        refuse(f"activation {activation!r} (hidden_act)")
    if nested.get("use_aux_hidden_state", True) is False:
        refuse("use_aux_hidden_state: false (a draft without fc)")
    for key in ("next_layer_regular", "eh_proj_before_attn", "eh_proj_bias"):
        if nested.get(key):
            refuse(f"eagle_config.{key}")
    if raw.get("quantization_config"):
        refuse("a quantised draft (quantization_config)", "Save it in bfloat16 or float32")


def _rope(layer: dict[str, Any], where: str) -> dict[str, Any]:
    """New-style `rope_parameters`, else legacy `rope_theta` and `rope_scaling`; theta 10000 where nothing is said."""
    parameters = layer.get("rope_parameters")
    if isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()):
        # One set per layer type: speculators takes that of the sliding window for its draft.
        chosen = parameters.get("sliding_attention", parameters.get("full_attention"))
        if not isinstance(chosen, dict):
            raise DraftscopeError("rope_parameters names neither sliding_attention nor full_attention", where=where)
        parameters = chosen
    merged = dict(parameters or layer.get("rope_scaling") or {})
    if "mrope_section" in merged:
        raise DraftscopeError("rope with mrope_section (multimodal positions) is not supported", where=where)
    kind = merged.setdefault("rope_type", merged.pop("type", None) or "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise DraftscopeError(f"rope type {kind!r} is not known", where=where,
                              remedy=f"Known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    merged.pop("type", None)
    merged["rope_theta"] = float(merged.get("rope_theta") or layer.get("rope_theta") or 10000.0)
    return merged
