"""Tiny random targets of every family, built from configs, saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from draftscope.target.model import Target, load_target

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 1,
}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "qwen2": WINDOWS, "qwen3": WINDOWS, "qwen3_moe": MOE, "qwen2_moe": MOE | {"shared_expert_intermediate_size": 24},
    "mistral": {"sliding_window": 5}, "mixtral": LOCAL, "olmo2": {}, "phi3": {"sliding_window": 5}, "smollm3": {},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"}, "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "deepseek_v2": MLA | {"topk_method": "greedy"}, "deepseek_v3": MLA, "gpt_oss": LOCAL | {"sliding_window": 5},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
                 "first_k_dense_replace": 1},
}
LINEAR: dict[str, Any] = MOE | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1,
}
CACHELESS: dict[str, dict[str, Any]] = {"qwen3_next": LINEAR, "minimax": LOCAL, "deepseek_v32": MLA}
"""Families whose states can be had but that keep more than keys and values."""
FOREIGN: dict[str, dict[str, Any]] = {
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 32}, "cohere": {}, "phi": {},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4}, "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48}, "mamba": {},
}
"""Families that are not built like Llama."""


def build(name: str, **changes: Any) -> Any:
    """A model with random weights, norms included: fresh ones are all 0 or 1, which would hide a wrong offset."""
    torch.manual_seed(len(name))
    known = FAMILIES | CACHELESS | FOREIGN
    config = transformers.AutoConfig.for_model(name, **(COMMON | known[name] | changes))
    return randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def randomised(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
        elif not parameter.isfinite().all() or not parameter.any():
            parameter.data = torch.randn_like(parameter) * 0.2
    return model


def family_target(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    build(name, **changes).save_pretrained(folder)
    return load_target(folder, dtype)
