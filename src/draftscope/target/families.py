"""What differs between families of targets: the norm's weight, scales, where the MLP reads, which layers see a window.

Source: transformers 5.24 `models/*/modeling_*.py`. A family that is not listed is taken for Llama-like; `load_target` holds
that against the modules it loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of a family.

    Attributes:
        norm_offset: added to the norm's weight (1 for Gemma's `1 + w`).
        mlp_input: the decoder layer's child whose input is the stream between attention and MLP.
        sliding: `typed` = windows per `layer_types`, `all` = every layer where `sliding_window` is set, `none`.
        embed_scale: None = 1; `sqrt` = the root of the width; else the config key that holds it.
        logit_divisor: config key that divides the logits.
    """

    norm_offset: float = 0.0
    mlp_input: str = "post_attention_layernorm"
    sliding: Literal["none", "all", "typed"] = "none"
    embed_scale: str | None = None
    logit_divisor: str | None = None


_LLAMA = Family()
_WINDOW = Family(sliding="all")
_TYPED = Family(sliding="typed")
_OLMO = Family(mlp_input="mlp")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA, "deepseek_v2": _LLAMA, "deepseek_v3": _LLAMA, "kimi_k2": _LLAMA, "glm4_moe": _LLAMA,
    "mistral": _WINDOW, "mixtral": _WINDOW, "phi3": _WINDOW, "qwen3_moe": _WINDOW,
    "qwen2": _TYPED, "qwen2_moe": _TYPED, "qwen3": _TYPED, "smollm3": _TYPED, "gpt_oss": _TYPED,
    "olmo2": _OLMO, "olmo3": Family(mlp_input="mlp", sliding="typed"),
    "granite": Family(embed_scale="embedding_multiplier", logit_divisor="logits_scaling"),
    "gemma": Family(1.0, embed_scale="sqrt"),
    "gemma2": Family(1.0, "pre_feedforward_layernorm", "typed", "sqrt"),
    "gemma3_text": Family(1.0, "pre_feedforward_layernorm", "typed", "sqrt"),
    "qwen3_next": Family(1.0), "qwen3_5_text": Family(1.0), "qwen3_5_moe_text": Family(1.0),
}


def family_of(model_type: str) -> Family:
    """The family's traits; Llama-like where it is not listed."""
    return FAMILIES.get(model_type, _LLAMA)


def lacks_cache(config: Mapping[str, Any]) -> str:
    """Why a target cannot be run with keys and values of ours, empty where it can: for `Target.new_cache`."""
    kinds = set(config.get("layer_types") or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"its {', '.join(map(str, other))} layers keep more than keys and values"
    if config.get("index_topk"):
        return "its sparse attention keeps an index beside keys and values"
    if config["model_type"] not in FAMILIES and ("sliding_attention" in kinds or config.get("sliding_window")):
        return "how its windows are masked is not known"
    return ""


def embed_scale(family: Family, config: Mapping[str, Any]) -> float:
    """The factor between a row of the embedding and boundary 0."""
    if family.embed_scale is None:
        return 1.0
    if family.embed_scale == "sqrt":
        return math.sqrt(config["hidden_size"])
    return float(config.get(family.embed_scale, 1.0))
