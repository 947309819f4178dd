"""Training-time test restated: the draft row by row in float64, and each trainer's loss in its own formulation.

Nothing here comes from the package. Losses follow the trainers' way of shifting whole tensors (SafeAILab/EAGLE
`traineagle3/cnets.py`, SpecForge 0.2.0 `algorithms/eagle3/model.py`, speculators 0.9.0 `models/eagle3/{core,data,metrics}.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Plain:
    """A one-layer draft by its weights (native names, float64) and switches."""

    weights: Mapping[str, Tensor]
    embedding: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    window: int | None = None

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]

    def rope(self, x: Tensor, position: int) -> Tensor:
        half = self.head_dim // 2
        angle = position * self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    def row(self, hidden: Tensor, token: int, position: int, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, ...]:
        """One row of the layer; its own key and value come last in what it sees. Output, key, value."""
        w = self.weights
        normed = self.rms(hidden, "midlayer.hidden_norm")
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.rms(self.embedding[token], "midlayer.input_layernorm"), normed])
        q, k, v = (w[f"midlayer.self_attn.{n}_proj.weight"] @ x for n in "qkv")
        q = self.rope(q.view(self.heads, -1), position)
        k, v = self.rope(k.view(self.kv_heads, -1), position), v.view(self.kv_heads, -1)
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            seen = torch.stack([key[group] for key in [*keys, k]])
            weights = (seen @ q[head] / math.sqrt(self.head_dim)).softmax(0)
            out.append(weights @ torch.stack([value[group] for value in [*values, v]]))
        x = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        y = self.rms(x, "midlayer.post_attention_layernorm")
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ y, w["midlayer.mlp.up_proj.weight"] @ y
        return x + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up), k, v

    def logits(self, features: Tensor, ids: Tensor, steps: int, first_position: int = 0) -> list[Tensor]:
        """[T, D] of each step, from features [T, 3 H] and shifted ids [T] (row t holds the token after its feature's)."""
        length = len(ids)
        if self.norm_before_fc:
            features = self.rms(features, "input_norm")
        hidden = list(features @ self.weights["fc.weight"].T)
        base: list[tuple[Tensor, Tensor]] = []
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(length)]
        found = []
        for step in range(steps):
            outputs = []
            for t in range(length):
                low = 0 if self.window is None else max(0, t - self.window + 1)
                seen = base[low : t + 1] + own[t] if step else base[low:t]
                token = int(ids[t + step]) if t + step < length else 0
                out, k, v = self.row(hidden[t], token, first_position + t + step, [k for k, _ in seen], [v for _, v in seen])
                outputs.append(out)
                (own[t] if step else base).append((k, v))
            normed = [self.rms(x, "norm") for x in outputs]
            found.append(torch.stack(normed) @ self.weights["lm_head.weight"].T)
            hidden = normed if self.norm_output else outputs
        return found


def left(x: Tensor) -> Tensor:
    """Shifted by one row to the left, the end filled with zeros."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def safeai(draft: Plain, features: Tensor, ids: Tensor, mask: Tensor, target: Tensor, t2d: Tensor, steps: int = 7) -> list[float]:
    """Each step's loss of one sequence: features [T, 3 H], ids and mask [T], target logits [T, V]."""
    target, mask, losses = left(target), mask.double(), []
    for logits in draft.logits(features, left(ids), steps):
        position_mask = t2d[target.argmax(-1)].double() * mask
        p = target[:, t2d].softmax(-1)
        losses.append(float(-(position_mask[:, None] * p * logits.log_softmax(-1)).sum(1).mean()))
        target, mask = left(target), left(mask)
    return losses


def specforge(draft: Plain, sequences: list[tuple[Tensor, Tensor, Tensor, Tensor]], t2d: Tensor, steps: int = 7) -> list[float]:
    """Each step's loss of a batch padded on the right; of each sequence features, ids, mask and target logits."""
    longest = max(len(ids) for _, ids, _, _ in sequences)
    totals = [0.0] * steps
    for features, ids, mask, target in sequences:
        own, mask = len(ids), mask.double().clone()
        mask[-1] = 0
        target = left(torch.cat([target, torch.zeros(longest - own, target.shape[1], dtype=target.dtype)]))
        mask = torch.cat([mask, torch.zeros(longest - own, dtype=mask.dtype)])
        position_mask = t2d[target.argmax(-1)].double() * mask
        p = target[:, t2d].softmax(-1)
        p = torch.cat([p, torch.full((steps, p.shape[1]), 1 / p.shape[1], dtype=p.dtype)])
        for k, logits in enumerate(draft.logits(features, left(ids), steps)):
            log_q = torch.cat([logits.log_softmax(-1), torch.zeros(longest - own, logits.shape[1], dtype=logits.dtype)])
            totals[k] += float(-(position_mask[:, None] * p[k : k + longest] * log_q).sum())
            position_mask = left(position_mask)
    return [total / (len(sequences) * longest) for total in totals]


def speculators(draft: Plain, sequences: list[tuple[Tensor, Tensor, Tensor, Tensor]], t2d: Tensor, steps: int = 3) -> list[float]:
    """Each step's loss of sequences packed into one, each of which stays within itself."""
    totals, counts = [0.0] * steps, [0.0] * steps
    for features, ids, mask, target in sequences:
        features, ids, mask, target = features[:-1], ids[1:], mask[1:].double(), target[1:, t2d]
        for k, logits in enumerate(draft.logits(features, ids, steps, first_position=1)):
            rows = len(ids) - k
            log_q, log_p, kept = logits[:rows].log_softmax(-1), target[k:].log_softmax(-1), mask[k:]
            totals[k] += float(((log_p.exp() * (log_p - log_q)).sum(-1) * kept).sum())
            counts[k] += float(kept.sum())
    return [total / (count + 1e-5) for total, count in zip(totals, counts, strict=True)]
