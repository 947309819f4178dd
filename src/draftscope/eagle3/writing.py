"""config.json of a draft, written in each dialect, and what a dialect can't say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftscope.boundaries import boundaries_to_ids, default_boundaries
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.dialects import LATENT_SIZES, LAYER_IDS

_SHAPES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
           "hidden_act", "attention_bias", "attention_output_bias", "mlp_bias", "rms_norm_eps", "rope_theta", "rope_parameters",
           "rope_scaling", "partial_rotary_factor", "max_position_embeddings", "tie_word_embeddings", "sliding_window",
           "use_sliding_window", "layer_types", "max_window_layers", "vocab_size")
_SWITCHES = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm",
             "use_aux_norm", "norm_output", "return_hidden_post_norm", "norm_before_head", LAYER_IDS)

NATIVE_KEYS = frozenset({*_SHAPES, *_SWITCHES, *LATENT_SIZES, "model_type", "bias", "later_norm", "num_aux_hidden_states"})
"""Top-level keys that `native_config` speaks for; others pass through a conversion."""
NESTED_KEYS = frozenset({LAYER_IDS, "use_aux_hidden_state", "use_last_layernorm", "num_aux_hidden_states", "norm_before_residual",
                         "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "return_hidden_post_norm"})
"""Keys of `eagle_config` that it speaks for."""
SPECULATORS_KEYS = frozenset({*_SWITCHES, "transformer_layer_config", "speculators_model_type"})
LAYER_KEYS = frozenset({*_SHAPES, "model_type"})


def native_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16, target_layers: int | None = None) -> dict[str, Any]:
    """config.json of the native dialect. Rope stands there in the old and the new spelling, which must not disagree."""
    if config.mla is not None:
        # vLLM turns a draft of type deepseek_v3 into an MTP head (`config/speculative.py` hf_config_override).
        kinds = ("kimi_k2", "Eagle3DeepseekV2ForCausalLM")
    else:
        kinds = ("qwen3", "Eagle3Qwen3ForCausalLM") if config.qk_norm else ("llama", "LlamaForCausalLMEagle3")
    raw: dict[str, Any] = {
        "architectures": [kinds[1]], "model_type": kinds[0], **_layer(config),
        "draft_vocab_size": config.draft_vocab_size, "torch_dtype": str(dtype).removeprefix("torch."),
    }
    scaling = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    raw["rope_theta"] = config.rope_parameters.get("rope_theta", 10000.0)
    raw["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if config.mla is not None:
        raw |= config.mla.model_dump()
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.slots != 3 and config.use_aux_hidden_state:
        raw["num_aux_hidden_states"] = config.slots
    raw |= {name: True for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)}
    if config.fc_bias:
        raw["bias"] = True
    if not config.norm_before_head:
        raw["norm_before_head"] = False
        if not config.norm_output:
            raw["norm_output"] = False  # SpecForge's word for it
    if config.layers > 1 and config.later_norm != "input_layernorm":
        raw["later_norm"] = config.later_norm
    default = None if target_layers is None else default_boundaries(target_layers)
    if not config.use_aux_hidden_state:
        raw["eagle_config"] = {"use_aux_hidden_state": False}
    elif config.boundaries is not None and config.boundaries != default:
        raw["eagle_config"] = {LAYER_IDS: list(boundaries_to_ids("sglang", config.boundaries)), "use_aux_hidden_state": True}
    return raw


def speculators_config(config: DraftConfig, verifier: str | None = None, architectures: Sequence[str] = ()) -> dict[str, Any]:
    """config.json as speculators 0.9.0 saves it (`config.py` SpeculatorsConfig, `models/eagle3/config.py`).

    Args:
        verifier: the target's name or folder; architectures: the target's.
    """
    raw: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        "transformer_layer_config": {"model_type": "qwen3" if config.qk_norm else "llama", **_layer(config)},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
    }
    if config.boundaries is not None:
        raw[LAYER_IDS] = list(boundaries_to_ids("speculators", config.boundaries))
    return raw


def beyond_speculators(config: DraftConfig) -> list[str]:
    """What a draft has that speculators 0.9.0 has no place for, by the switch's name (its `models/eagle3/core.py`)."""
    found = {
        "mla: latent attention": config.mla is not None,
        "use_aux_hidden_state: false": not config.use_aux_hidden_state,
        f"target_hidden_size: {config.target_hidden_size} (its fc takes states as wide as the draft)":
            config.target_hidden_size != config.hidden_size,
        "norm_before_fc and fc_norm at once": config.norm_before_fc and config.fc_norm,
        "norm_before_head: false": not config.norm_before_head,
        "fc_bias: true": config.fc_bias,
        "later_norm: hidden_norm": config.layers > 1 and config.later_norm == "hidden_norm",
        "attention_bias without attention_output_bias, or the other way round":
            config.attention_bias != config.attention_output_bias,
        "mlp_bias and qk_norm at once (its layers are Llama's or Qwen3's)": config.mlp_bias and config.qk_norm,
        f"slots: {config.slots} without layer ids": config.slots != 3 and config.boundaries is None,
    }
    return [name for name, there in found.items() if there]


def _layer(config: DraftConfig) -> dict[str, Any]:
    """The keys that a decoder layer's configuration has in every dialect."""
    keys: dict[str, Any] = {
        "num_hidden_layers": config.layers, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "hidden_act": "silu", "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias,
        "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps, "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.attention_bias != config.attention_output_bias:
        keys["attention_output_bias"] = config.attention_output_bias
    if config.sliding_window is not None:
        kinds = ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(config.layers)]
        keys |= {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    return keys
