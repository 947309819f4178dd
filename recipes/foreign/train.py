"""A small EAGLE-3 draft by speculators, from states that vLLM extracted.

    python recipes/foreign/train.py TARGET STATES OUT [--epochs 8]

Needs the environment of scripts/env-speculators. Writes OUT/data, the data set as speculators' own loader takes it (an arrow
table with `input_ids` and `loss_mask`, states in hidden_states/hs_{i}.safetensors; the mask is put into these files too,
where speculators doesn't look for it), and OUT/draft, saved as speculators saves it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

DRAFT_VOCAB, STEPS, ROWS, LAYER_IDS = 4096, 3, 512, [2, 15, 27]


def write_data(states: Path, out: Path) -> Counter[int]:
    """vLLM's files under the names that speculators' loader wants; the answer tokens' counts."""
    rows: list[dict[str, object]] = []
    counts: Counter[int] = Counter()
    (out / "hidden_states").mkdir(parents=True, exist_ok=True)
    for i, (name, prompt) in enumerate(json.loads((states / "requests.json").read_text()).items()):
        held = load_file(states / name)
        mask = torch.arange(len(held["token_ids"])) >= prompt
        save_file(held | {"loss_mask": mask.to(torch.uint8)}, out / "hidden_states" / f"hs_{i}.safetensors")
        ids = held["token_ids"].tolist()
        rows.append({"input_ids": ids, "loss_mask": mask.long().tolist(), "seq_len": len(ids)})
        counts.update(ids[prompt:])
    table = Dataset.from_list(rows)
    table.set_format("torch")
    table.save_to_disk(str(out))
    return counts


def packs(lengths: list[int], draw: random.Random) -> Iterator[list[int]]:
    """Samples in random order, as many at a time as ROWS hold."""
    order = draw.sample(range(len(lengths)), len(lengths))
    pack: list[int] = []
    for i in order:
        if pack and sum(lengths[j] for j in pack) + lengths[i] > ROWS:
            yield pack
            pack = []
        pack.append(i)
    yield pack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("states", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)

    counts = write_data(options.states, options.out / "data")
    layer = create_transformer_layer_config(str(options.target), num_layers=1, draft_arch="llama", hidden_act=None,
                                            sliding_window=2048, full_attention_indices=[0])
    d2t, t2d = build_vocab_mappings_from_distribution(dict(counts), DRAFT_VOCAB, layer.vocab_size)
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=DRAFT_VOCAB, norm_before_residual=True, ttt_steps=STEPS,
        target_layer_ids=LAYER_IDS, verifier_name_or_path=str(options.target), draft_attn_impl="eager",
    ).float()
    call, _ = model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", ttt_steps=STEPS, ttt_step_loss_decay=1.0)

    data = ArrowDataset(ROWS, options.out / "data", on_missing="raise", hidden_states_dtype=torch.float32)
    collate = CollateFn(ROWS, layer.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    plan = [pack for _ in range(options.epochs) for pack in packs(data.approx_lengths, draw)]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=len(plan), pct_start=0.05)
    print(f"{sum(p.numel() for p in trainable) / 1e6:.1f} M trainable, {len(plan)} steps of {ROWS} rows")
    began = time.monotonic()
    model.train()
    for number, pack in enumerate(plan, 1):
        batch = collate([data[i] for i in pack])
        batch.pop("error_records")
        _, loss, metrics = model(**batch, **call)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
        if number % 20 == 0 or number == len(plan):
            right = [float(metrics[f"full_acc_{k}_sum"] / metrics[f"full_acc_{k}_total"]) for k in range(STEPS)]
            print(f"step {number}: loss {loss:.3f}, right {[round(r, 3) for r in right]}, {time.monotonic() - began:.0f} s",
                  flush=True)
    model.save_pretrained(options.out / "draft")


if __name__ == "__main__":
    main()
