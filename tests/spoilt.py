"""Draft checkpoints whose files were meddled with, and one that looks as if it had been trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support import random_draft
from torch import Tensor

from draftscope.eagle3.checkpoint import save_native

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = 30
WIDTH, VOCAB, DRAFT_VOCAB = 64, 300, 120


def trained_looking(tensors: dict[str, Tensor], seed: int = 5) -> dict[str, Tensor]:
    """Rows and columns of unlike size and norms off 1, as training leaves them."""
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            made[name] = tensor
        elif tensor.ndim == 1:
            made[name] = (1 + 0.2 * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)
        else:
            rows = torch.exp(0.5 * torch.randn(len(tensor), 1, generator=draw))
            columns = torch.exp(0.5 * torch.randn(1, tensor.shape[1], generator=draw))
            made[name] = (tensor.float() * rows * columns).to(tensor.dtype)
    return made


def chosen_ids(size: int = DRAFT_VOCAB, vocab: int = VOCAB) -> Tensor:
    """Target ids of the draft's vocabulary, ascending and spread out."""
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(9))[:size].sort().values


def healthy(folder: Path, *, width: int = WIDTH, vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB, **switches: Any) -> Path:
    """A draft checkpoint that nothing is wrong with, for a target of 30 layers, in the native dialect."""
    draft = random_draft(3, width=width, vocab=vocab, draft_vocab=draft_vocab, **switches)
    d2t = None if draft_vocab == vocab else chosen_ids(draft_vocab, vocab) - torch.arange(draft_vocab)
    save_native(folder, draft, d2t, target_layers=LAYERS)
    change(folder, {"eagle_config": None})
    save_file(trained_looking(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def change(folder: Path, keys: dict[str, Any] | None = None, *, drop: tuple[str, ...] = (), put: dict[str, Tensor] | None = None,
           rename: dict[str, str] | None = None, prefix: str = "") -> Path:
    """Merge keys into config.json (None removes one); drop, put, rename or prefix tensors."""
    raw = json.loads((folder / "config.json").read_text()) | (keys or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    if drop or put or rename or prefix:
        tensors = load_file(folder / "model.safetensors")
        tensors = {k: v for k, v in tensors.items() if not (drop and k.startswith(drop))} | (put or {})
        for old, new in (rename or {}).items():
            tensors = {k.replace(old, new): v for k, v in tensors.items()}
        save_file({prefix + k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def speculators(folder: Path, model_type: str = "llama", verifier: str | None = "target", **keys: Any) -> Path:
    """The same draft as speculators saves it."""
    healthy(folder)
    raw = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act", "attention_bias", "mlp_bias")
    layer = {key: raw[key] for key in kept} | {"model_type": model_type, "num_hidden_layers": 1}
    new = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
           "norm_before_residual": False, "transformer_layer_config": layer,
           "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy",
                                  "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                                  "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]}}} | keys
    (folder / "config.json").write_text(json.dumps(new))
    embedding = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(7))
    return change(folder, rename={"midlayer.": "layers.0."}, put={"embed_tokens.weight": embedding.bfloat16()})


def target_config(folder: Path, **keys: Any) -> Path:
    """A target's config.json without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": WIDTH,
           "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 2048,
           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} | keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder
