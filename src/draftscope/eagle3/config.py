"""What an EAGLE-3 draft is: one configuration that keeps every switch of the dialects it was read from."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dialect = Literal["native", "speculators"]
LaterNorm = Literal["input_layernorm", "hidden_norm"]
Residual = Literal["kept", "branch", "entry"]

# Far beyond any draft; what a file asks for beyond them is a mistake, or a trap for the memory.
_WIDEST, _MOST, _MOST_LAYERS, _VOCABULARY = 2**20, 2**14, 256, 2**24


class LatentAttention(BaseModel):
    """Shapes of multi-head latent attention (DeepSeek-V2 and V3, Kimi-K2); keys are config.json's.

    Attributes:
        q_lora_rank: width of the queries' bottleneck; None = queries come straight from the input (`q_proj`).
        kv_lora_rank: width of the latent that keys and values are read from.
        qk_nope_head_dim: per head, the part of queries and keys that is not rotated; qk_rope_head_dim: the part that is.
        v_head_dim: per head, width of the values.
        rope_interleave: neighbouring channels are rotated together, as in every engine; False = halves, as in Llama.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: int | None = Field(default=None, ge=1, le=_WIDEST)
    kv_lora_rank: int = Field(ge=1, le=_WIDEST)
    qk_nope_head_dim: int = Field(ge=1, le=_MOST)
    qk_rope_head_dim: int = Field(ge=2, le=_MOST)
    v_head_dim: int = Field(ge=1, le=_MOST)
    rope_interleave: bool = True


class DraftConfig(BaseModel):
    """Shape and switches of an EAGLE-3 draft (conventions as in SafeAILab/EAGLE `eagle/model/cnets.py`).

    Attributes:
        slots: target states concatenated at the draft's input, low to high.
        boundaries: where the checkpoint's own dialect says they come from; None = not said.
        norm_before_residual: the residual takes the normed feature.
        norm_before_fc: one RMSNorm over the concatenation (`input_norm`).
        fc_norm: one RMSNorm per slot (`fc_norm.0..`).
        norm_output: the state fed back to the next step is the post-norm one (speculators', vLLM's, SGLang's meaning).
        norm_before_head: the final norm is applied before the head. False is what SpecForge means by `norm_output: false`
            (its feedback is always the state before the norm).
        qk_norm: RMSNorm on each head's queries and keys (Qwen3-style draft).
        sliding_window: keys further back than this are not seen; None = all.
        sliding_layers: the layers that have the window; None = every layer.
        layers: decoder layers. Those after the first take the stream alone, without the embedding.
        later_norm: the norm before attention in layers after the first: `input_layernorm` in speculators and vLLM,
            `hidden_norm` in SGLang. Ids are the parameter's name.
        use_aux_hidden_state: False = no `fc`: the one slot is the target's final state, after its norm, and goes in as it is.
        attention_bias: biases on q, k and v; attention_output_bias: on o; mlp_bias: in the feed-forward block; fc_bias: on fc.
        double_norm: in the first layer the feature passes `input_layernorm` before `hidden_norm`, as ModelOpt 0.47 trains
            (`speculative/plugins/modeling_eagle.py`: transformers' layer norms it, the attention's hook norms it again). No
            file says so and no engine does it.
        residual: what an engine makes of the stream: `branch` hands out what the last layer adds and not the sum, `entry` loses
            what the first layer was given. No file says so.
        tie_word_embeddings: what the file says; the draft here has a head of its own either way (SGLang takes the embedding).
        mla: multi-head latent attention in place of Llama's; the fields of key heads and head width are not used then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dialect: Dialect = "native"
    hidden_size: int = Field(ge=1, le=_WIDEST)
    target_hidden_size: int = Field(ge=1, le=_WIDEST)
    intermediate_size: int = Field(ge=1, le=_WIDEST)
    num_attention_heads: int = Field(ge=1, le=_MOST)
    num_key_value_heads: int = Field(ge=1, le=_MOST)
    head_dim: int = Field(ge=1, le=_MOST)
    vocab_size: int = Field(ge=1, le=_VOCABULARY)
    draft_vocab_size: int = Field(ge=1, le=_VOCABULARY)
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    max_position_embeddings: int = 2048
    slots: int = Field(default=3, ge=1, le=_MOST_LAYERS)
    boundaries: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_head: bool = True
    qk_norm: bool = False
    sliding_window: int | None = Field(default=None, ge=1)
    sliding_layers: tuple[int, ...] | None = None
    layers: int = Field(default=1, ge=1, le=_MOST_LAYERS)
    later_norm: LaterNorm = "input_layernorm"
    use_aux_hidden_state: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    double_norm: bool = False
    residual: Residual = "kept"
    tie_word_embeddings: bool = False
    mla: LatentAttention | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.mla is None and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} attention heads can't share {self.num_key_value_heads} key heads")
        if not self.use_aux_hidden_state and (self.slots != 1 or self.target_hidden_size != self.hidden_size):
            raise ValueError("without aux states there is one slot, as wide as the draft")
        return self

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None = it sees all."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None
