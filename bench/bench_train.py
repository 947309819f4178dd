"""Training against speculators 0.9.0 on the CPU: the ratio of their tokens per second on the same draft, data, steps and loss.

    python bench/bench_train.py [--pairs 3] [--steps 4] [--sequences 8] [--length 256] [--threads 2]

The draft has the embedded target's proportions and its head over 8192 tokens; states are random, which speed does not depend on.
The two run in turn, each in a process of its own: the same batches, three draft steps, KL loss, frozen head, AdamW, float32. The
first step of each is left out. A pair gives one ratio, and the median over the pairs is the figure; the first step's losses must
agree. On a machine that is shared, processor seconds are the steadier measure. speculators packs a batch into one sequence, over
which its attention on the CPU is dense; `--sequences 1` takes that away (results/train-one-sequence.json). Its `Trainer` needs an
accelerator, so its model, collator and loss are run by recipes/foreign/train_speed.py, in the environment of
scripts/env-speculators. Writes bench/results/train.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint, save_native
from draftscope.eagle3.collate import Collate
from draftscope.eagle3.descent import Descent
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.loss import ttt_loss
from draftscope.eagle3.recipes import PRESETS
from draftscope.eagle3.settings import Settings
from draftscope.eagle3.start import draft_vocabulary, new_draft, shape_of
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.states.plain import read_sample, write_sample
from draftscope.states.types import Sample
from draftscope.target.embedded import cache_directory, ensure_target
from draftscope.target.parts import read_config, read_parts

HERE = Path(__file__).parent
RESULT = HERE / "results" / "train.json"
DRAFT_VOCAB = 8192


def settings() -> Settings:
    chosen = PRESETS["speculators"].chosen | {"optimizer": "adamw", "learning_rate": 1e-4, "epochs": 1}
    return Settings(**chosen)


def prepare(work: Path, target: Path, sequences: int, length: int) -> None:
    parts, raw = read_parts(target), read_config(target)
    d2t, _, _ = draft_vocabulary(torch.arange(int(raw["vocab_size"])).flip(0), DRAFT_VOCAB)
    config = shape_of(raw, DRAFT_VOCAB, **PRESETS["speculators"].shaped)
    draft = new_draft(config, parts, torch.arange(DRAFT_VOCAB) + d2t, None, near_mean=False)
    save_native(work / "native", draft, d2t, dtype=torch.float32, target_layers=parts.layers)
    convert_draft(work / "native", "speculators", work / "theirs", target=target)
    draw, data = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for i in range(sequences):
        ids = torch.randint(0, parts.vocab, (length,), generator=draw)
        states, mask = torch.randn(length, 4, parts.width, generator=draw), torch.arange(length) >= length // 8
        data |= {f"{i}.token_ids": ids, f"{i}.states": states, f"{i}.loss_mask": mask}
        write_sample(work / "states" / f"hs_{i}.safetensors", Sample("", ids, states, mask, ("",) * 4, i))
    save_file(data, work / "data.safetensors")


def own(work: Path, target: Path, threads: int) -> None:
    """Our side, in a process of its own: packing, teacher, loss, backward, clipping, AdamW."""
    torch.set_num_threads(threads)
    parts, chosen = read_parts(target), settings()
    draft = build_draft(load_checkpoint(work / "native", target_layers=parts.layers), parts).train().requires_grad_(True)
    collate, descent = Collate.of(parts, draft.target_ids, chosen), Descent(draft, chosen)
    plan: list[list[int]] = json.loads((work / "plan.json").read_text())
    files = sorted((work / "states").iterdir(), key=lambda path: int(path.stem[3:]))
    examples = load_examples((read_sample(path, []) for path in files), parts)
    seconds, cpu, losses = [], [], []
    for pack in plan:
        began, used = time.monotonic(), time.process_time()
        batch = collate([examples[i] for i in pack])
        descent.zero_grad()
        loss = ttt_loss(draft, batch, chosen.decay, kind=chosen.loss, normaliser=chosen.normaliser,
                        first_position=chosen.first_position, window_moves=chosen.window_moves)
        loss.total.backward()
        descent.step(chosen.learning_rate)
        losses.append(float(loss.total.detach()))
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
    (work / "own.json").write_text(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "losses": losses}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8, help="in a batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--own", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    target = asked.target or ensure_target(report=print)
    if asked.own is not None:
        own(asked.own, target, asked.threads)
        return
    python = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "speculators" / "bin" / "python"
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, target, asked.sequences, asked.length)
        (work / "plan.json").write_text(json.dumps([list(range(asked.sequences))] * (asked.steps + 1)))
        bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(asked.threads)}
        for number in range(asked.pairs):
            subprocess.run([sys.executable, __file__, "--own", work, "--target", target, "--threads", str(asked.threads)],
                           check=True)
            subprocess.run([python, HERE.parent / "recipes" / "foreign" / "train_speed.py", work / "theirs", target,
                            work / "data.safetensors", work / "plan.json", work / "theirs.json", "--threads", str(asked.threads)],
                           check=True, env=bare, stderr=subprocess.DEVNULL)
            ours, theirs = (json.loads((work / f"{name}.json").read_text()) for name in ("own", "theirs"))
            assert abs(ours["losses"][0] / theirs["losses"][0] - 1) < 1e-3, (ours["losses"], theirs["losses"])
            tokens = asked.sequences * asked.length
            rates, cpu = ([tokens / statistics.median(side[name][1:]) for side in (ours, theirs)]
                          for name in ("seconds", "cpu_seconds"))
            pairs.append({"own": ours, "speculators": theirs, "tokens_per_second": rates, "ratio": rates[0] / rates[1],
                          "tokens_per_cpu_second": cpu, "cpu_ratio": cpu[0] / cpu[1]})
            told = f"{rates[0]:.0f} against {rates[1]:.0f} tokens/s, ratio {rates[0] / rates[1]:.2f}"
            told += f"; {cpu[0]:.0f} against {cpu[1]:.0f} per processor second, ratio {cpu[0] / cpu[1]:.2f}"
            print(f"pair {number + 1}: {told}", flush=True)
    result = {
        "ratio": statistics.median(pair["ratio"] for pair in pairs),
        "cpu_ratio": statistics.median(pair["cpu_ratio"] for pair in pairs), "pairs": pairs, "sequences": asked.sequences,
        "length": asked.length, "steps": asked.steps, "threads": asked.threads, "load": os.getloadavg(),
        "processor": platform.processor() or platform.machine(), "torch": torch.__version__,
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"median ratio {result['ratio']:.2f}, by processor time {result['cpu_ratio']:.2f}; written to {asked.out}")


if __name__ == "__main__":
    main()
