"""The EAGLE-3 draft: three target states and the next token's embedding in, a guess at the token after it out.

Shapes: B sequences, T rows, S slots, Ht target width, H draft width, D draft vocabulary. Row t holds the target's states at
token t and the embedding of token t+1; its output predicts token t+2. Structure after SafeAILab/EAGLE `cnets.py`; switches
after speculators 0.9.0 `models/eagle3/model_definitions.py` and vLLM 0.32 `models/llama_eagle3.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftscope.eagle3.config import DraftConfig


class Attend(Protocol):
    """Where queries look: the serving cache, or the training-time-test mask."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, T, d], k and v [B, kv_heads, T, d], all rotated, to attended values [B, heads, T, d]."""
        ...


class Attention(nn.Module):
    """Attention over the concatenation of normed embedding and normed feature (2H wide)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The draft's decoder layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        # The embedding comes first in the concatenation, in every stack.
        x = residual + self.self_attn(torch.cat([self.input_layernorm(embeds), normed], -1), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """A draft model. Parameter names are the native dialect's (`fc`, `midlayer.*`, `norm`, `lm_head`).

    The embedding is the target's unless the checkpoint brings its own: set `embedding` to a [V, H] tensor either way.
    `target_ids` [D] int64 maps draft ids to target ids (identity when the vocabularies are equal).
    """

    target_ids: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.slots * config.target_hidden_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.slots * config.target_hidden_size, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(config.slots)
            )
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)
        self.embedding: Tensor | None = None
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings, rope_parameters=dict(config.rope_parameters),
            )
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target token ids [...] to embeddings [..., H], in the draft's dtype."""
        if self.embedding is None:
            raise ValueError("the draft has no embedding of its own and was lent none")
        return F.embedding(token_ids, self.embedding).to(self.norm.weight.dtype)

    def project(self, features: Tensor) -> Tensor:
        """Slots [..., S, Ht] to the draft's input state [..., H]; the switches before `fc` apply here."""
        x = features.to(self.norm.weight.dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x.flatten(-2)).unflatten(-1, features.shape[-2:])
        if self.config.fc_norm:
            x = torch.stack([norm(x[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        return self.fc(x.flatten(-2))

    def forward(self, hidden: Tensor, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step: hidden and embeds [B, T, H], positions [B, T], to the layer's output [B, T, H] before any norm."""
        cos, sin = self.rotary(hidden, positions)
        return self.midlayer(hidden, embeds, cos, sin, attend)

    def logits(self, output: Tensor) -> Tensor:
        """The layer's output [..., H] to logits over the draft vocabulary [..., D]."""
        return self.lm_head(self.norm(output))

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step receives in place of the feature: pre-norm unless `norm_output` is set."""
        return self.norm(output) if self.config.norm_output else output


class StepMask:
    """Training-time-test attention: every row t at every step sees the step-0 keys up to t and its own later keys.

    At step 0 it is causal. At step k row t also sees the keys that row t itself produced at steps 1..k, which stand for
    the positions t+1..t+k. Rows padded on the right are never seen by real ones. Make one per batch and call it once per
    step, in order. With `window`, keys further back than `window` - 1 positions are hidden.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._base: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []
        self._rows: Tensor | None = None

    def on(self, rows: Tensor) -> StepMask:
        """The later steps of some rows alone: rows [B, R] int64. Step 0 must have been run on all of them."""
        later = StepMask(self.window)
        later._base, later._rows = self._base, rows
        return later

    def narrow(self, chosen: Tensor) -> None:
        """Go on with some of those rows: indices [B, R'] into the R of `on` (or of the last `narrow`)."""
        assert self._rows is not None
        self._rows = self._rows.gather(1, chosen)
        index = chosen[:, None, :, None]
        self._own = [(k.take_along_dim(index, 2), v.take_along_dim(index, 2)) for k, v in self._own]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        rows = torch.arange(q.shape[2], device=q.device) if self._rows is None else self._rows
        if self._base is None:
            self._base = (k, v)
            if self.window is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
            mask = self._mask(rows, 0, k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)
        self._own.append((k, v))
        step = len(self._own)
        base_k, base_v = self._base
        grouped = q.unflatten(1, (-1, groups)) * q.shape[-1] ** -0.5
        mask = self._mask(rows, step, base_k.shape[2])
        if mask.dim() == 3:
            mask = mask[:, None, None]
        scores = [(grouped @ base_k[:, :, None].transpose(-1, -2)).masked_fill(~mask, -torch.inf)]
        scores += [(grouped * own_k[:, :, None]).sum(-1, keepdim=True) for own_k, _ in self._own]
        if self.window is not None:
            for j in range(step):
                if step - (j + 1) >= self.window:
                    scores[j + 1] = torch.full_like(scores[j + 1], -torch.inf)
        joined = torch.cat(scores, -1)
        weights = joined.to(torch.promote_types(joined.dtype, torch.float32)).softmax(-1).to(v.dtype)
        width = base_k.shape[2]
        out = weights[..., :width] @ base_v[:, :, None]
        for j, (_, own_v) in enumerate(self._own):
            out = out + weights[..., width + j : width + j + 1] * own_v[:, :, None]
        return out.flatten(1, 2)

    def _mask(self, rows: Tensor, step: int, width: int) -> Tensor:
        distance = rows[..., None] - torch.arange(width, device=rows.device)
        mask = distance >= 0
        if self.window is not None:
            mask &= distance + step < self.window
        return mask
