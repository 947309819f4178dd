"""What an EAGLE-3 draft is: one configuration that keeps every switch of the dialects it was read from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Dialect = Literal["native", "speculators"]


class DraftConfig(BaseModel):
    """Shape and switches of a one-layer EAGLE-3 draft (conventions as in SafeAILab/EAGLE `eagle/model/cnets.py`).

    Attributes:
        slots: target states concatenated at the draft's input, low to high.
        boundaries: where the checkpoint's own dialect says they come from; None = not said.
        norm_before_residual: the residual takes the normed feature.
        norm_before_fc: one RMSNorm over the concatenation (`input_norm`).
        fc_norm: one RMSNorm per slot (`fc_norm.0..`).
        norm_output: the state fed back to the next step is the post-norm one (speculators', vLLM's, SGLang's meaning).
        qk_norm: RMSNorm on each head's queries and keys (Qwen3-style draft).
        sliding_window: keys further back than this are not seen; None = all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dialect: Dialect = "native"
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    max_position_embeddings: int = 2048
    slots: int = 3
    boundaries: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
