"""The EAGLE-3 draft: target states and the next token's embedding in, a guess at the token after it out.

Shapes: B sequences, T rows, S slots, Ht target width, H draft width, D draft vocabulary. Row t holds the target's states at
token t and the embedding of token t+1; its output predicts token t+2. Structure after SafeAILab/EAGLE `cnets.py`; switches
after speculators 0.9.0 `models/eagle3/model_definitions.py`, SpecForge 0.2.0 `modeling/draft/llama3_eagle.py`, and vLLM 0.32
`models/{llama,qwen3,deepseek}_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftscope.eagle3.attention import Attend as Attend
from draftscope.eagle3.attention import Attention, rotary
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.latent import LatentAttention
from draftscope.eagle3.reading import Runtime
from draftscope.eagle3.stepmask import StepMask as StepMask


class MLP(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The draft's first decoder layer, which sees the embedding beside the feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm_before_residual, self.double_norm = config.norm_before_residual, config.double_norm
        self.keeps_entry, self.keeps_stream = config.residual != "entry", config.residual != "branch" or config.layers > 1
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _attention(config, 0)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        stream, branch = self.halves(hidden, embeds, cos, sin, attend)
        return stream + branch

    def halves(self, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The stream before the MLP, and what the MLP adds to it."""
        normed = self.hidden_norm(self.input_layernorm(hidden) if self.double_norm else hidden)
        residual = normed if self.norm_before_residual else hidden
        # The embedding comes first in the concatenation, in every stack.
        x = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], -1), cos, sin, attend)
        if self.keeps_entry:
            x = residual + x
        return x if self.keeps_stream else torch.zeros_like(x), self.mlp(self.post_attention_layernorm(x))


class LaterLayer(nn.Module):
    """A further decoder layer: on the stream alone. Stacks differ in what they call the norm before its attention."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.norm_name = config.later_norm
        self.keeps_stream = config.residual != "branch" or layer + 1 < config.layers
        self.add_module(self.norm_name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.self_attn = _attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        stream, branch = self.halves(hidden, cos, sin, attend)
        return stream + branch

    def halves(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The stream before the MLP, and what the MLP adds to it."""
        x = hidden + self.self_attn(self.get_submodule(self.norm_name)(hidden), cos, sin, attend)
        return x if self.keeps_stream else torch.zeros_like(x), self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """A draft model. Parameter names are the native dialect's: `fc`, `midlayer.*`, `layers.1.*` and on, `norm`, `lm_head`.

    The embedding is the target's unless the checkpoint brings its own: set `embedding` to a [V, H] tensor either way.
    `target_ids` [D] int64 maps draft ids to target ids (identity when the vocabularies are equal). `runtime` is how an engine
    runs it, where it serves and is replayed.

    Raises:
        DraftscopeError: rope parameters that can't be used.
    """

    target_ids: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        if config.use_aux_hidden_state:
            width = config.slots * config.target_hidden_size
            self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(
                    nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(config.slots)
                )
        self.midlayer = Layer(config)
        self.layers = nn.ModuleDict({str(i): LaterLayer(config, i) for i in range(1, config.layers)})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)
        self.embedding: Tensor | None = None
        self.runtime = Runtime()
        self.rotary = rotary(config)

    @property
    def dtype(self) -> torch.dtype:
        """The weights'."""
        return self.norm.weight.dtype

    def view(self, runtime: Runtime, settings: Mapping[str, Any]) -> Draft:
        """The draft with the same weights, run otherwise; settings are those that change no weight's use (`sliding_window`).

        Raises:
            DraftscopeError: rope parameters that can't be used.
        """
        other = copy(self)
        other.runtime = runtime
        if settings:
            other.config = self.config.model_copy(update=dict(settings))
            other._modules = dict(self._modules)
            if "rope_parameters" in settings:
                other.rotary = rotary(other.config)
        return other

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target token ids [...] to embeddings [..., H], in the draft's dtype."""
        if self.embedding is None:
            raise ValueError("the draft has no embedding of its own and was lent none")
        return F.embedding(token_ids, self.embedding).to(self.dtype)

    def project(self, features: Tensor) -> Tensor:
        """Slots [..., S, Ht] to the draft's input state [..., H]; the switches before `fc` apply here.

        Without aux states there is one slot, and it is the input state.
        """
        x = self.fc_input(features)
        return self.fc(x) if self.config.use_aux_hidden_state else x

    def fc_input(self, features: Tensor) -> Tensor:
        """Slots [..., S, Ht] to what `fc` itself takes [..., S x Ht]: behind the norms that stand before it."""
        x = features.to(self.dtype)
        if not self.config.use_aux_hidden_state:
            return x.flatten(-2)
        if self.config.norm_before_fc:
            x = self.input_norm(x.flatten(-2)).unflatten(-1, features.shape[-2:])
        if self.config.fc_norm:
            x = torch.stack([norm(x[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        return x.flatten(-2)

    def forward(self, hidden: Tensor, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step: hidden and embeds [B, T, H], positions [B, T], to the last layer's output [B, T, H] before any norm."""
        cos, sin = self.rotary(hidden, positions)
        x = self.midlayer(hidden, embeds, cos, sin, attend)
        for layer in self.layers.values():
            x = layer(x, cos, sin, attend)
        return x

    def halves(self, hidden: Tensor, embeds: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """`forward` as the last layer's two halves [B, T, H]: the stream before its MLP, and what that adds."""
        cos, sin = self.rotary(hidden, positions)
        found: tuple[Tensor, Tensor] = self.midlayer.halves(hidden, embeds, cos, sin, attend)
        for layer in self.layers.values():
            found = layer.halves(found[0] + found[1], cos, sin, attend)  # type: ignore[operator]
        return found

    def head_input(self, output: Tensor) -> Tensor:
        """The last layer's output [..., H] as the head takes it: normed unless `norm_before_head` is off."""
        return self.norm(output) if self.config.norm_before_head else output

    def logits(self, output: Tensor) -> Tensor:
        """The last layer's output [..., H] to logits over the draft vocabulary [..., D]."""
        return self.lm_head(self.head_input(output))

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step receives in place of the feature: pre-norm unless `norm_output` is set."""
        return self.norm(output) if self.config.norm_output else output


def _attention(config: DraftConfig, layer: int) -> nn.Module:
    return Attention(config, layer) if config.mla is None else LatentAttention(config, layer)
