"""speculators' own first draft step on one training file, for comparison: OUT.safetensors with `input` (what `fc` made of the
slots), `output` (what the head's norm received) and `logits`, one row for each token but the last.

    python recipes/foreign/first_step.py DRAFT FILE OUT

Needs the environment of scripts/env-speculators.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("draft", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    config = Eagle3DraftModel.config_class.from_pretrained(options.draft)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(options.draft, config=config).float().eval()

    held = load_file(options.file)
    states, rows = held["hidden_states"].float(), len(held["token_ids"])
    batch = shift_batch({
        "input_ids": held["token_ids"], "hidden_states": states[:, :-1].flatten(1), "verifier_last_hidden_states": states[:, -1],
        "loss_mask": torch.ones(rows, dtype=torch.bool), "lengths": torch.tensor([rows]), "position_ids": torch.arange(rows),
    })
    seen: dict[str, torch.Tensor] = {}
    model.fc.register_forward_hook(lambda module, args, result: seen.update(input=result[0]))
    model.norm.register_forward_pre_hook(lambda module, args: seen.update(output=args[0][0]))
    model.lm_head.register_forward_hook(lambda module, args, result: seen.update(logits=result[0]))
    with torch.no_grad():
        model(hidden_states=batch["hidden_states"][None], input_ids=batch["input_ids"][None],
              position_ids=batch["position_ids"][None], document_ids=torch.zeros(1, rows - 1, dtype=torch.long), ttt_steps=1)
    save_file({name: tensor.contiguous() for name, tensor in seen.items()}, options.out)


if __name__ == "__main__":
    main()
