"""Training against speculators 0.9.0 on the CPU: the ratio of their tokens per second on the same draft, data, steps and loss.

    python bench/bench_train.py [--pairs 3] [--steps 4] [--sequences 8] [--length 256] [--threads 2] [--learn STEPS --states DIR]

The draft has the embedded target's proportions and its head over 8192 tokens; states are random, which speed does not depend on.
The two run in turn, each in a process of its own: the same batches, three draft steps, KL loss, frozen head, AdamW, float32. The
first step of each is left out. A pair gives one ratio, and the median over the pairs is the figure; the first step's losses must
agree. On a machine that is shared, processor seconds are the steadier measure. speculators packs a batch into one sequence, over
which its attention on the CPU is dense; `--sequences 1` takes that away (results/train-one-sequence.json). Its `Trainer` needs an
accelerator, so its model, collator and loss are run by recipes/foreign/train_speed.py, in the environment of
scripts/env-speculators. With `--learn` both are also trained on the same batches of real states (of the embedded target, from
`draftscope extract`), and the two drafts are replayed over samples that neither has seen: the acceptance after the same tokens.
Writes bench/results/train.json.
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
from draftscope.eagle3.replay import replay
from draftscope.eagle3.settings import Settings
from draftscope.eagle3.start import draft_vocabulary, new_draft, shape_of
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.states.opening import open_source
from draftscope.states.plain import read_sample, write_sample
from draftscope.states.types import Sample, from_sample
from draftscope.target.embedded import cache_directory, ensure_target
from draftscope.target.parts import read_config, read_parts

HERE = Path(__file__).parent
RESULT = HERE / "results" / "train.json"
DRAFT_VOCAB = 8192


def settings(rate: float) -> Settings:
    chosen = PRESETS["speculators"].chosen | {"optimizer": "adamw", "learning_rate": rate, "epochs": 1}
    return Settings(**chosen)


def prepare(work: Path, target: Path, samples: list[Sample], counts: torch.Tensor) -> None:
    """A new draft in both forms, its vocabulary by `counts` [vocab]; the same samples for both sides."""
    parts, raw = read_parts(target), read_config(target)
    d2t, _, _ = draft_vocabulary(counts, DRAFT_VOCAB)
    config = shape_of(raw, DRAFT_VOCAB, **PRESETS["speculators"].shaped)
    draft = new_draft(config, parts, torch.arange(DRAFT_VOCAB) + d2t, None, near_mean=False)
    save_native(work / "native", draft, d2t, dtype=torch.float32, target_layers=parts.layers)
    convert_draft(work / "native", "speculators", work / "theirs", target=target)
    data = dict[str, torch.Tensor]()
    for i, sample in enumerate(samples):
        assert sample.states is not None and sample.loss_mask is not None
        states, mask = sample.states.float(), sample.loss_mask.bool()
        data |= {f"{i}.token_ids": sample.token_ids, f"{i}.states": states, f"{i}.loss_mask": mask}
        write_sample(work / "states" / f"hs_{i}.safetensors", Sample("", sample.token_ids, states, mask, ("",) * 4, i))
    save_file(data, work / "data.safetensors")


def drawn(vocab: int, width: int, sequences: int, length: int) -> list[Sample]:
    """Samples of random states."""
    draw, found = torch.Generator().manual_seed(0), list[Sample]()
    for i in range(sequences):
        ids = torch.randint(0, vocab, (length,), generator=draw)
        states, mask = torch.randn(length, 4, width, generator=draw), torch.arange(length) >= length // 8
        found.append(Sample("", ids, states, mask, ("",) * 4, i))
    return found


def own(work: Path, target: Path, threads: int, rate: float) -> None:
    """Our side, in a process of its own: packing, teacher, loss, backward, clipping, AdamW."""
    torch.set_num_threads(threads)
    parts, chosen = read_parts(target), settings(rate)
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
    d2t = draft.target_ids - torch.arange(len(draft.target_ids))
    save_native(work / "learned-own", draft, d2t, dtype=torch.float32, target_layers=parts.layers)


class Sides:
    """Both sides on what lies in one folder, each in a process of its own."""

    def __init__(self, work: Path, target: Path, threads: int, rate: float) -> None:
        self.work, self.target, self.threads, self.rate = work, target, threads, rate
        self.python = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "speculators" / "bin" / "python"

    def run(self, plan: list[list[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ours, then theirs, over the batches of the plan; the first losses must agree."""
        work, threads = self.work, str(self.threads)
        (work / "plan.json").write_text(json.dumps(plan))
        bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": threads}
        subprocess.run([sys.executable, __file__, "--own", work, "--target", self.target, "--threads", threads,
                        "--rate", str(self.rate)], check=True)
        subprocess.run([self.python, HERE.parent / "recipes" / "foreign" / "train_speed.py", work / "theirs", self.target,
                        work / "data.safetensors", work / "plan.json", work / "theirs.json", "--threads", threads,
                        "--rate", str(self.rate), "--save", work / "learned-theirs"], check=True, env=bare,
                       stderr=subprocess.DEVNULL)
        ours, theirs = (json.loads((work / f"{name}.json").read_text()) for name in ("own", "theirs"))
        assert abs(ours["losses"][0] / theirs["losses"][0] - 1) < 1e-3, (ours["losses"], theirs["losses"])
        return ours, theirs


def learned(states: Path, target: Path, steps: int, batch: int, threads: int) -> dict[str, Any]:
    """Both trained so many steps on real states; every eighth sample is held out and replayed."""
    parts = read_parts(target)
    samples = [sample for sample in open_source(states, kind="samples") if sample.states is not None]
    held = [from_sample(sample) for sample in samples[7::8]][:48]
    samples = [sample for i, sample in enumerate(samples) if i % 8 != 7]
    plan: list[list[int]] = []
    used, rows = 0, 0
    while len(plan) < steps and used < len(samples):
        if not plan or rows + len(samples[used].token_ids) > batch:
            plan.append([])
            rows = 0
        plan[-1].append(used)
        rows += len(samples[used].token_ids)
        used += 1
    rate, found = 1e-3, dict[str, Any]()
    counts = torch.zeros(parts.vocab, dtype=torch.int64)
    for sample in samples[:used]:
        counts += torch.bincount(sample.token_ids, minlength=parts.vocab)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, target, samples[:used], counts)
        ours, theirs = Sides(work, target, threads, rate).run(plan)
        for name, side in (("own", ours), ("theirs", theirs)):
            draft = build_draft(load_checkpoint(work / f"learned-{name}", target_layers=parts.layers), parts)
            told = replay(draft, held, parts=parts, k=3).rung("walk", held_out=True)
            found["own" if name == "own" else "speculators"] = {
                "joint": told.joint, "accept_length": told.length, "interval": told.interval, "seconds": sum(side["seconds"]),
                "cpu_seconds": sum(side["cpu_seconds"]), "first_loss": side["losses"][0], "last_loss": side["losses"][-1]}
    tokens = sum(len(samples[i].token_ids) for pack in plan for i in pack)
    return {"steps": len(plan), "tokens": tokens, "learning_rate": rate, "held_out_samples": len(held), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8, help="in a batch")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of the rounds that measure speed")
    parser.add_argument("--learn", type=int, default=0, metavar="STEPS", help="train both so long on the states of --states")
    parser.add_argument("--states", type=Path, help="states of the embedded target, made by draftscope extract")
    parser.add_argument("--own", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    target = asked.target or ensure_target(report=print)
    if asked.own is not None:
        own(asked.own, target, asked.threads, asked.rate)
        return
    pairs: list[dict[str, Any]] = []
    parts = read_parts(target)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), target, drawn(parts.vocab, parts.width, asked.sequences, asked.length),
                torch.arange(parts.vocab).flip(0))
        sides = Sides(Path(folder), target, asked.threads, asked.rate)
        for number in range(asked.pairs):
            ours, theirs = sides.run([list(range(asked.sequences))] * (asked.steps + 1))
            tokens = asked.sequences * asked.length
            rates, cpu = ([tokens / statistics.median(side[name][1:]) for side in (ours, theirs)]
                          for name in ("seconds", "cpu_seconds"))
            pairs.append({"own": ours, "speculators": theirs, "tokens_per_second": rates, "ratio": rates[0] / rates[1],
                          "tokens_per_cpu_second": cpu, "cpu_ratio": cpu[0] / cpu[1]})
            told = f"{rates[0]:.0f} against {rates[1]:.0f} tokens/s, ratio {rates[0] / rates[1]:.2f}"
            told += f"; {cpu[0]:.0f} against {cpu[1]:.0f} per processor second, ratio {cpu[0] / cpu[1]:.2f}"
            print(f"pair {number + 1}: {told}", flush=True)
    result: dict[str, Any] = {
        "ratio": statistics.median(pair["ratio"] for pair in pairs),
        "cpu_ratio": statistics.median(pair["cpu_ratio"] for pair in pairs), "pairs": pairs, "sequences": asked.sequences,
        "length": asked.length, "steps": asked.steps, "threads": asked.threads, "load": os.getloadavg(),
        "processor": platform.processor() or platform.machine(), "torch": torch.__version__,
    }
    if asked.learn:
        if asked.states is None:
            parser.error("--learn needs --states")
        result["learned"] = learned(asked.states, target, asked.learn, asked.sequences * asked.length, asked.threads)
        for name in ("own", "speculators"):
            side = result["learned"][name]
            print(f"after {result['learned']['tokens']} tokens {name}: accept length {side['accept_length']:.3f} on held-out "
                  f"samples, {side['seconds']:.0f} s")
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"median ratio {result['ratio']:.2f}, by processor time {result['cpu_ratio']:.2f}; written to {asked.out}")


if __name__ == "__main__":
    main()
