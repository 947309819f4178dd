"""Text that can be learnt within seconds, with states that say where in it they are; ends of a target to go with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support import VOCAB, WIDTH

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.start import shape_of
from draftscope.eagle3.train import Settings
from draftscope.states.types import Sample
from draftscope.target.parts import TargetParts


def parts_of(seed: int = 0, vocab: int = VOCAB, width: int = WIDTH) -> TargetParts:
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, width, generator=draw)
    return TargetParts(
        embedding=table, norm_weight=1 + 0.1 * torch.randn(width, generator=draw), norm_eps=1e-5, norm_offset=0.0, head=table,
        layers=8, embed_scale=1.0, model_type="llama", folder=Path(),
    )


def shape(draft_vocab: int, vocab: int = VOCAB, **changes: Any) -> DraftConfig:
    target = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": vocab,
              "intermediate_size": 128, "rms_norm_eps": 1e-5, "num_hidden_layers": 8, "max_position_embeddings": 512}
    return shape_of(target, draft_vocab, **changes)


def learnable(count: int, seed: int = 0, vocab: int = 24) -> tuple[TargetParts, list[Sample]]:
    """Text that a permutation writes, with states that say where in it they are."""
    parts = parts_of(1, vocab)
    draw = torch.Generator().manual_seed(seed)
    follow = torch.randperm(vocab, generator=torch.Generator().manual_seed(9))
    samples = []
    for i in range(count):
        tokens = [int(torch.randint(0, vocab, (1,), generator=draw))]
        while len(tokens) < 24:
            tokens.append(int(follow[tokens[-1]]))
        ids = torch.tensor(tokens)
        last = parts.head[follow[ids]] * 2
        slots = torch.stack([parts.embedding[ids], parts.embedding[ids] * 3, last * 0.5], 1)
        slots = slots + 0.3 * torch.randn(slots.shape, generator=draw)
        samples.append(Sample(f"text {i}", ids, torch.cat([slots, last[:, None]], 1), torch.arange(24) >= 6, ("",) * 4, i))
    return parts, samples


QUICK = Settings(epochs=6, batch_tokens=96, learning_rate=3e-3, warmup=4)


