"""Accept length against training tokens, for drafts of the embedded one's shape: what is normal for so much data.

    python recipes/embedded/curve.py [--states DIR] [--work DIR] [--out FILE]

Every draft starts anew and is trained on nested parts of the same answers, as long as its accept length on held-out answers
grows; that of the best evaluation counts, replayed over the held-out samples with K = 3. More passes are allowed where there is
less data. The draft in the package is measured on the same samples. A run that was interrupted goes on; finished sizes stay.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.corpus import Corpus, FileCorpus, Part, split, token_counts
from draftscope.eagle3.examples import Fitting
from draftscope.eagle3.replay import replay
from draftscope.eagle3.start import draft_vocabulary, shape_of
from draftscope.eagle3.train import Settings, Watch, train
from draftscope.embedded.pair import DRAFT
from draftscope.states.opening import open_source
from draftscope.states.types import Sequence, from_sample
from draftscope.target.embedded import ensure_target
from draftscope.target.parts import read_config, read_parts

SIZES = {10_000: 10, 30_000: 8, 100_000: 4, 300_000: 2}
"""Answer tokens, and passes over them at most."""
SCHEMA = "draftscope.budget/1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "draftscope" / "embedded-train")
    parser.add_argument("--states", type=Path, default=None, help="default WORK")
    parser.add_argument("--out", type=Path, default=Path("bench/results/budget.json"))
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--whole", type=int, default=0, metavar="PASSES", help="also on all answers, this often")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = ensure_target(report=print)
    parts, raw = read_parts(folder), read_config(folder)
    source = open_source(options.states or options.work, kind="samples")
    whole = FileCorpus.of(source, Fitting(parts, max_length=512), options.work / "choices")
    corpus, held = split(whole, 48)
    names = {whole.name(i) for i in range(len(whole.lengths)) if i % 48 == 47}
    every = answers(corpus, len(corpus.lengths))
    points: list[dict[str, Any]] = json.loads(options.out.read_text())["points"] if options.out.exists() else []

    def add(point: dict[str, Any]) -> None:
        points[:] = sorted([p for p in points if p["draft"] != point["draft"]] + [point], key=lambda p: p["answer_tokens"])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({
            "schema": SCHEMA, "target": "SmolLM2-135M-Instruct", "k": 3, "held_out_samples": len(names),
            "about": "one decoder layer, three slots; the target's own answers to mixed prompts, half of them greedy",
            "points": points,
        }, indent=1) + "\n")
        print(json.dumps(point), flush=True)

    def measured(checkpoint: Path) -> dict[str, Any]:
        draft = build_draft(load_checkpoint(checkpoint, target_layers=parts.layers), parts)
        found = replay(draft, heldout(source, names), parts=parts, k=3).rung("walk", held_out=True)
        return {"length": found.length, "interval": found.interval, "joint": found.joint, "nll": found.nll,
                "rounds": found.rounds}

    add({"draft": "embedded", "answer_tokens": 987_716, "passes": 2, **measured(DRAFT)})
    sizes = {size: SIZES.get(size, 2) for size in options.sizes} | ({every: options.whole} if options.whole else {})
    for size, passes in sizes.items():
        name = f"{size}"
        if any(p["draft"] == name for p in points):
            continue
        part = nested(corpus, size)
        d2t, _, coverage = draft_vocabulary(token_counts(part, int(raw["vocab_size"])), 8192)
        settings = Settings(epochs=passes, batch_tokens=1024, learning_rate=4e-3, head_rate=0.1, weight_decay=0.05,
                            optimizer="muon", precision="bfloat16")
        steps = max(10, sum(part.lengths) // 1024)
        began = time.time()
        result = train(part, parts, shape_of(raw, 8192), d2t, options.work / f"budget-{name}", settings=settings, heldout=held,
                       watch=Watch(evaluate_every=min(150, max(20, steps // 2)), patience=4, save_minutes=3),
                       on_event=lambda e: print(e.get("step"), e["heldout"], flush=True) if "heldout" in e else None)
        if not result.finished:
            return
        add({"draft": name, "answer_tokens": answers(part, len(part.lengths)), "samples": len(part.lengths), "passes": passes,
             "steps": result.steps, "coverage": coverage, "seconds": round(time.time() - began),
             **measured(options.work / f"budget-{name}" / "best")})


def answers(corpus: Corpus, count: int) -> int:
    """Answer tokens of the first `count` examples."""
    return sum(int(corpus.tokens(i)[1].sum()) for i in range(count))


def nested(corpus: Corpus, size: int) -> Part:
    """Examples in a fixed order until they hold `size` answer tokens: a smaller part lies in every larger one."""
    order = list(range(len(corpus.lengths)))
    random.Random(0).shuffle(order)
    chosen, held = [], 0
    for number in order:
        if held >= size:
            break
        chosen.append(number)
        held += int(corpus.tokens(number)[1].sum())
    return Part(corpus, sorted(chosen))


def heldout(source: Any, names: set[str]) -> Iterator[Sequence]:
    for sample in source:
        if sample.name in names:
            yield from_sample(sample)


if __name__ == "__main__":
    main()
