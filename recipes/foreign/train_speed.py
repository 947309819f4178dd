"""How fast speculators' model, collator and loss train on the CPU: seconds, processor seconds and loss of every step.

    python recipes/foreign/train_speed.py DRAFT TARGET DATA PLAN.json OUT.json [--threads 2] [--rate 1e-4] [--save DIR]

DRAFT, TARGET and DATA are those of train_loss.py; PLAN is a list of batches, each a list of sequence numbers. Its `Trainer` needs
an accelerator, so the loop is written out here: forward, backward, clipping, AdamW. Needs the environment of
scripts/env-speculators.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("draft", "target", "data", "plan", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    config = Eagle3DraftModel.config_class.from_pretrained(asked.draft)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(asked.target)
    model = Eagle3DraftModel.from_pretrained(asked.draft, config=config).float().train()
    model.load_verifier_weights()
    call, _ = model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", ttt_steps=3, ttt_step_loss_decay=1.0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=asked.rate, weight_decay=0.01)
    held = load_file(asked.data)
    seconds, cpu, losses = [], [], []
    for pack in json.loads(asked.plan.read_text()):
        began, used = time.monotonic(), time.process_time()
        items = [{
            "hidden_states": held[f"{i}.states"][:, :-1].flatten(1), "input_ids": held[f"{i}.token_ids"],
            "verifier_last_hidden_states": held[f"{i}.states"][:, -1], "loss_mask": held[f"{i}.loss_mask"],
            "lengths": torch.tensor([len(held[f"{i}.token_ids"])]), "position_ids": torch.arange(len(held[f"{i}.token_ids"])),
        } for i in pack]
        rows = sum(len(item["input_ids"]) - 1 for item in items)
        collate = CollateFn(rows, config.transformer_layer_config.hidden_size, dtype=torch.float32, preprocess=shift_batch)
        batch = collate(items)
        batch.pop("error_records")
        _, loss, _ = model(**batch, **call)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
    asked.out.write_text(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "losses": losses}))
    if asked.save is not None:
        model.save_pretrained(asked.save)


if __name__ == "__main__":
    main()
