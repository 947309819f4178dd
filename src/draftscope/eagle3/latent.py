"""Multi-head latent attention, as drafts for DeepSeek and Kimi targets have it (`Eagle3DeepseekV2ForCausalLM`).

Queries, and keys with values, each come from a narrow latent; a few channels of every key are rotated and shared by all
heads. Names and order of the projections: vLLM 0.32 `models/deepseek_eagle3.py` and `models/deepseek_v2.py`
DeepseekV2MLAAttention, SGLang 0.5.23 `models/kimi_k25_eagle3.py`. Both give the latents' norms the configuration's
`rms_norm_eps` (transformers' DeepseekV3 leaves them at 1e-6) and rotate neighbouring channels together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from draftscope.eagle3.attention import Attend
from draftscope.eagle3.config import DraftConfig


class LatentAttention(nn.Module):
    """The attention of one decoder layer; the first layer's input is 2H wide, the others' H.

    Keys and values are expanded before they are attended to, which is what every engine's absorbed form comes to.
    """

    def __init__(self, config: DraftConfig, layer: int = 0) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None
        self.layer, self.mla, self.heads = layer, mla, config.num_attention_heads
        self.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        width, bias = config.hidden_size * (1 if layer else 2), config.attention_bias
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        else:
            self.q_a_proj = nn.Linear(width, mla.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(mla.q_lora_rank, eps=config.rms_norm_eps)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(mla.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(mla.kv_lora_rank, self.heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * mla.v_head_dim, config.hidden_size, bias=config.attention_output_bias)
        self.sharpness = sharpness(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        mla = self.mla
        q = self.q_proj(x) if mla.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        q_plain, q_turned = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        latent, k_turned = self.kv_a_proj_with_mqa(x).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_plain, v = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        turn = interleaved if mla.rope_interleave else apply_rotary_pos_emb
        q_turned, k_turned = turn(q_turned, k_turned[:, None], cos, sin)
        q = torch.cat([q_plain, q_turned], -1) * self.sharpness
        k = torch.cat([k_plain, k_turned.expand(-1, self.heads, -1, -1)], -1)
        return self.o_proj(attend(q, k, v, self.layer).transpose(1, 2).flatten(2))


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate channels 2i and 2i+1 of q and k [B, heads, T, R] together; cos and sin [B, T, R] hold each angle twice, in halves.

    The result has all first channels, then all second ones, which no product of queries and keys can tell.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]

    def turned(x: Tensor) -> Tensor:
        one, two = x[..., 0::2], x[..., 1::2]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    return turned(q), turned(k)


def sharpness(config: DraftConfig) -> float:
    """The factor on scores that comes with scaled rope: (0.1 x mscale_all_dim x ln factor + 1) squared, else 1."""
    rope = config.rope_parameters
    every, factor = float(rope.get("mscale_all_dim") or 0.0), float(rope.get("factor") or 1.0)
    if rope.get("rope_type", "default") == "default" or not every or factor <= 1:
        return 1.0
    return (0.1 * every * math.log(factor) + 1.0) ** 2
