"""Attention of the draft's layers, Llama's kind, and the rotation of its queries and keys.

B sequences, T rows, d head width, R channels that are rotated.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftscope.eagle3.config import DraftConfig
from draftscope.errors import DraftscopeError


class Attend(Protocol):
    """Where queries look: the serving cache, or the training-time-test mask."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        """q [B, heads, T, d], k [B, kv_heads, T, d], rotated, and v [B, kv_heads, T, dv], of one decoder layer, to attended
        values [B, heads, T, dv]. Scores are scaled by d^-1/2."""
        ...


def rotary(config: DraftConfig) -> LlamaRotaryEmbedding:
    """Cosines and sines of positions, R wide: the whole head, the part that MLA rotates, or `partial_rotary_factor` of it.

    Raises:
        DraftscopeError: rope parameters that lack something or contradict themselves.
    """
    width = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
    parameters: dict[str, Any] = dict(config.rope_parameters)
    try:
        if parameters.get("rope_type") != "proportional":
            # transformers' default rope of Llama ignores the factor, the scaled ones honour it.
            width = int(width * float(parameters.pop("partial_rotary_factor", None) or 1.0))
        if width < 2 or width % 2:
            raise ValueError(f"{width} rotated channels per head are not an even number")
        # Only the width of a head counts here.
        return LlamaRotaryEmbedding(LlamaConfig(
            hidden_size=width, num_attention_heads=1, num_key_value_heads=1, head_dim=width,
            max_position_embeddings=config.max_position_embeddings, rope_parameters=parameters,
        ))
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DraftscopeError(f"rope_parameters {parameters} can't be used: {what}") from None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of queries and keys [B, heads, T, d]; the others pass, as speculators and vLLM have it."""
    width = cos.shape[-1]
    if width == q.shape[-1]:
        return apply_rotary_pos_emb(q, k, cos, sin)
    turned = apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin)
    return torch.cat([turned[0], q[..., width:]], -1), torch.cat([turned[1], k[..., width:]], -1)


class Attention(nn.Module):
    """Grouped-query attention. The first layer's input is 2H wide (normed embedding, then normed feature), the others' H."""

    def __init__(self, config: DraftConfig, layer: int = 0) -> None:
        super().__init__()
        self.layer, self.head_dim, self.qk_norm = layer, config.head_dim, config.qk_norm
        width, bias = config.hidden_size * (1 if layer else 2), config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.attention_output_bias,
        )
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = rotate(q, k, cos, sin)
        return self.o_proj(attend(q, k, v, self.layer).transpose(1, 2).flatten(2))
