"""What many tests share: a random Llama target and a random draft for it, seeded, made in milliseconds; an end to hangs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.model import Draft

LAYERS, WIDTH, VOCAB = 8, 64, 300


def random_target(
    seed: int = 0, *, layers: int = LAYERS, width: int = WIDTH, vocab: int = VOCAB, tied: bool = True
) -> LlamaForCausalLM:
    """A Llama with random weights, large enough in scale that its boundaries differ clearly."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def save_target(folder: Path, seed: int = 0, **shape: int) -> Path:
    random_target(seed, **shape).save_pretrained(folder)
    return folder


def random_draft(
    seed: int = 1, *, width: int = WIDTH, vocab: int = VOCAB, draft_vocab: int | None = None, **switches: object
) -> Draft:
    """A draft with random weights, its embedding random too (replace it with the target's where that matters)."""
    torch.manual_seed(seed)
    shape: dict[str, object] = {
        "hidden_size": width, "target_hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": width // 4, "vocab_size": vocab, "draft_vocab_size": draft_vocab or vocab,
        "boundaries": (2, 4, 5),
    }
    config = DraftConfig(**(shape | switches))
    draft = Draft(config).eval()
    draft.embedding = torch.randn(vocab, width)
    return draft


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """What takes longer is an error, and no hang."""
    def stop(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
