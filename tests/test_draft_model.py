"""The draft model, every switch of it, against a forward pass written row by row from the definition, and MLA against
transformers' DeepSeek-V3; in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_draft
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from draftscope.eagle3.config import DraftConfig, LatentAttention
from draftscope.eagle3.latent import LatentAttention as Latent
from draftscope.eagle3.model import Draft, StepMask
from draftscope.errors import DraftscopeError

WIDTH, ROWS = 16, 9
MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {}, "residual normed": {"norm_before_residual": True}, "norm before fc": {"norm_before_fc": True},
    "norm per slot": {"fc_norm": True}, "both": {"norm_before_fc": True, "fc_norm": True},
    "head bare": {"norm_before_head": False},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "fc_bias": True},
    "inner bias": {"attention_bias": True}, "outer bias": {"attention_output_bias": True}, "head norms": {"qk_norm": True},
    "three layers": {"layers": 3}, "named otherwise": {"layers": 2, "later_norm": "hidden_norm", "attention_bias": True},
    "window": {"sliding_window": 3}, "one window": {"layers": 3, "sliding_window": 2, "sliding_layers": (1,)},
    "another width": {"target_hidden_size": 10}, "five slots": {"slots": 5, "boundaries": (1, 2, 3, 4, 5)},
    "no fc": {"use_aux_hidden_state": False, "slots": 1, "boundaries": None}, "normed twice": {"double_norm": True},
    "part rotated": {
        "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "all at once": {"layers": 2, "norm_before_residual": True, "fc_norm": True, "qk_norm": True, "attention_bias": True,
                    "mlp_bias": True, "sliding_window": 4, "sliding_layers": (0,), "norm_output": True},
}


def a_draft(seed: int = 0, **switches: Any) -> Draft:
    """In float64, with no parameter at a value that hides a mistake."""
    draft = random_draft(seed, width=WIDTH, vocab=11, **switches).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.5 + (parameter.ndim == 1))
    return draft


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turned(x: Tensor, position: int, theta: float, width: int) -> Tensor:
    """Llama's rotation of the first `width` channels: channel i goes with i + width/2."""
    out, half = x.clone(), width // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / width)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def by_rows(draft: Draft, features: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
    """features [T, S, Ht], embeds [T, H] to the last layer's outputs [T, H] and logits [T, D]."""
    config, w = draft.config, {name: p.detach() for name, p in draft.named_parameters()}
    eps, rope = config.rms_norm_eps, config.rope_parameters
    rotated = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))

    def linear(x: Tensor, name: str) -> Tensor:
        out = w[f"{name}.weight"] @ x
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def attention(inputs: list[Tensor], prefix: str, window: int | None) -> list[Tensor]:
        heads, shared = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
        found = []
        q, k, v = ([linear(x, f"{prefix}.{n}_proj").unflatten(0, (-1, config.head_dim)) for x in inputs] for n in "qkv")
        if config.qk_norm:
            q = [torch.stack([rms(h, w[f"{prefix}.q_norm.weight"], eps) for h in x]) for x in q]
            k = [torch.stack([rms(h, w[f"{prefix}.k_norm.weight"], eps) for h in x]) for x in k]
        q, k = ([torch.stack([turned(h, t, rope["rope_theta"], rotated) for h in x]) for t, x in enumerate(y)] for y in (q, k))
        for t in range(len(inputs)):
            first = 0 if window is None else max(0, t - window + 1)
            mixed = []
            for head in range(heads):
                keys = torch.stack([k[s][head // shared] for s in range(first, t + 1)])
                scores = keys @ q[t][head] / math.sqrt(config.head_dim)
                weights = (scores - scores.max()).exp()
                weights = weights / weights.sum()
                mixed.append(sum(weights[i] * v[first + i][head // shared] for i in range(len(weights))))
            found.append(linear(torch.cat(mixed), f"{prefix}.o_proj"))
        return found

    def block(residual: list[Tensor], inputs: list[Tensor], prefix: str, layer: int) -> list[Tensor]:
        attended = attention(inputs, f"{prefix}.self_attn", config.window(layer))
        out = []
        for r, a in zip(residual, attended, strict=True):
            x = r + a
            y = rms(x, w[f"{prefix}.post_attention_layernorm.weight"], eps)
            gate = linear(y, f"{prefix}.mlp.gate_proj")
            out.append(x + linear(gate / (1 + (-gate).exp()) * linear(y, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"))
        return out

    residual, inputs = [], []
    for row, embed in zip(features, embeds, strict=True):
        hidden = row.flatten()
        if config.use_aux_hidden_state:
            if config.norm_before_fc:
                hidden = rms(hidden, w["input_norm.weight"], eps)
            if config.fc_norm:
                parts = hidden.unflatten(0, (config.slots, -1))
                hidden = torch.cat([rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)])
            hidden = linear(hidden, "fc")
        embedding_norm = w["midlayer.input_layernorm.weight"]
        once = rms(hidden, embedding_norm, eps) if config.double_norm else hidden
        normed = rms(once, w["midlayer.hidden_norm.weight"], eps)
        residual.append(normed if config.norm_before_residual else hidden)
        inputs.append(torch.cat([rms(embed, embedding_norm, eps), normed]))
    x = block(residual, inputs, "midlayer", 0)
    for layer in range(1, config.layers):
        weight = w[f"layers.{layer}.{config.later_norm}.weight"]
        x = block(x, [rms(row, weight, eps) for row in x], f"layers.{layer}", layer)
    output = torch.stack(x)
    before = [rms(row, w["norm.weight"], eps) for row in x] if config.norm_before_head else x
    return output, torch.stack([w["lm_head.weight"] @ row for row in before])


@pytest.mark.parametrize("name", SWITCHES)
def test_forward_is_the_definition(name: str) -> None:
    draft = a_draft(3, **SWITCHES[name])
    config = draft.config
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, config.slots, config.target_hidden_size, generator=draw, dtype=torch.float64)
    embeds = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        output = draft(draft.project(features[None]), embeds[None], torch.arange(ROWS)[None], StepMask.of(config))
        expected, logits = by_rows(draft, features, embeds)
    # The angles come out of float32 in transformers' rotary embedding.
    assert (output[0] - expected).norm() < 1e-5 * expected.norm()
    assert (draft.logits(output)[0] - logits).norm() < 1e-5 * logits.norm()
    fed = draft.feedback(output)
    norm = draft.norm(output) if config.norm_output else output
    assert torch.equal(fed, norm)


def test_every_switch_is_in_the_table_and_changes_the_output() -> None:
    covered = {key for switches in SWITCHES.values() for key in switches} | {"residual"}
    shapes = {"dialect", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
              "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "mla"}
    assert set(DraftConfig.model_fields) == covered | shapes
    for switch in ("norm_before_residual", "double_norm", "norm_before_head"):
        one, two = a_draft(5), a_draft(5, **{switch: switch != "norm_before_head"})
        two.load_state_dict(one.state_dict())
        hidden, embeds = torch.randn(2, 1, 4, WIDTH, dtype=torch.float64)
        outputs = [d.logits(d(hidden, embeds, torch.arange(4)[None], StepMask())) for d in (one, two)]
        assert not torch.allclose(*outputs), switch


@pytest.mark.parametrize(("changes", "rope"), [
    ({}, {}), ({"q_lora_rank": None}, {}), ({"rope_interleave": False}, {}),
    ({}, {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
          "beta_fast": 32.0, "beta_slow": 1.0}),
    ({}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
])
def test_latent_attention_is_that_of_transformers(changes: dict[str, Any], rope: dict[str, Any]) -> None:
    mla = LatentAttention(**(MLA | changes))
    parameters = {"rope_type": "default", "rope_theta": 50.0} | rope
    draft = a_draft(2, mla=mla, rms_norm_eps=1e-6, rope_parameters=parameters, max_position_embeddings=128)
    own = draft.midlayer.self_attn
    assert isinstance(own, Latent)
    config = DeepseekV3Config(
        hidden_size=2 * WIDTH, num_attention_heads=4, num_key_value_heads=4, rope_parameters=dict(parameters),
        max_position_embeddings=128, attn_implementation="eager", **mla.model_dump(),
    )
    theirs = DeepseekV3Attention(config, 0)
    theirs.o_proj = nn.Linear(4 * mla.v_head_dim, WIDTH, bias=False)
    theirs.double().load_state_dict(own.state_dict())
    x = torch.randn(2, ROWS, 2 * WIDTH, dtype=torch.float64)
    positions = torch.arange(ROWS).expand(2, ROWS) + 3
    causal = torch.full((ROWS, ROWS), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    rotary = DeepseekV3RotaryEmbedding(config)
    with torch.no_grad():
        expected, _ = theirs(x, rotary(x, positions), causal)
        found = own(x, *draft.rotary(x, positions), StepMask())
    # Its norms and angles are computed in float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(layers=st.integers(1, 3), window=st.one_of(st.none(), st.integers(1, 6)), latent=st.booleans(), seed=st.integers(0, 99),
       only=st.integers(0, 2))
def test_steps_of_chosen_rows_are_those_of_all_rows(layers: int, window: int | None, latent: bool, seed: int, only: int) -> None:
    draft = a_draft(seed, layers=layers, sliding_window=window, sliding_layers=(only,) if seed % 2 else None,
                    mla=LatentAttention(**MLA) if latent else None)
    draw = torch.Generator().manual_seed(seed)
    states = [torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(6)]
    positions = torch.arange(ROWS).expand(2, ROWS)
    rows = torch.randint(ROWS, (2, 4), generator=draw)
    chosen = torch.tensor([[0, 2], [3, 1]])
    with torch.no_grad():
        whole = StepMask.of(draft.config)
        full = [draft(states[2 * k], states[2 * k + 1], positions + k, whole) for k in range(3)]
        base = StepMask.of(draft.config)
        draft(states[0], states[1], positions, base)
        later = base.on(rows)
        at = rows[..., None].expand(-1, -1, WIDTH)
        one = draft(states[2].gather(1, at), states[3].gather(1, at), rows + 1, later)
        later.narrow(chosen)
        rows = rows.gather(1, chosen)
        at = rows[..., None].expand(-1, -1, WIDTH)
        two = draft(states[4].gather(1, at), states[5].gather(1, at), rows + 2, later)
    torch.testing.assert_close(two, full[2].gather(1, at), rtol=1e-8, atol=1e-8)
    assert one.shape == (2, 4, WIDTH)


def test_rope_that_cannot_be_used_is_refused() -> None:
    for rope in ({"rope_type": "yarn"}, {"rope_type": "linear", "factor": "much"}, {"rope_type": "longrope"}):
        with pytest.raises(DraftscopeError, match="rope_parameters"):
            random_draft(rope_parameters={"rope_theta": 1e4} | rope)
