"""Accept length against training tokens, for drafts of the embedded one's shape: what is normal for so much data.

    python recipes/embedded/curve.py [--sizes N ...] [--work DIR] [--out FILE]

Every draft starts anew and is trained on nested parts of the same answers, as long as its accept length on held-out answers
grows; that of the best evaluation counts, replayed over the held-out samples with K = 3, and over as many of those trained on.
More passes are allowed where there is less data. The draft in the package, trained on all but the same held-out samples,
is measured on them, too. States are extracted of what the sizes need. A run that was interrupted goes on; finished sizes stay.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.corpus import FileCorpus, Part, token_counts
from draftscope.eagle3.examples import Fitting
from draftscope.eagle3.replay import replay
from draftscope.eagle3.start import draft_vocabulary, shape_of
from draftscope.eagle3.train import Settings, Watch, train
from draftscope.embedded.pair import DRAFT
from draftscope.pipeline.conversations import Conversation, read_answers
from draftscope.pipeline.extract import extract
from draftscope.states.opening import open_source
from draftscope.states.types import Sequence as States
from draftscope.states.types import from_sample
from draftscope.target.embedded import ensure_target
from draftscope.target.model import load_target
from draftscope.target.parts import read_config, read_parts

SIZES = {10_000: 10, 30_000: 8, 100_000: 4, 300_000: 2}
"""Answer tokens, and passes over them at most."""
SCHEMA = "draftscope.budget/1"
ANSWERS = Path(__file__).parent / "answers"
EVERY = 48
"""Of so many samples one is held out, as recipes/embedded/train.py has it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "draftscope" / "curve")
    parser.add_argument("--out", type=Path, default=Path("bench/results/budget.json"))
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = ensure_target(report=print)
    parts, raw = read_parts(folder), read_config(folder)
    # In the order of the files that train.py splits.
    answers = sorted((one for one in read_answers(ANSWERS) if isinstance(one, Conversation)), key=lambda one: one.index)
    held, rest = answers[EVERY - 1 :: EVERY], [one for i, one in enumerate(answers) if i % EVERY != EVERY - 1]
    random.Random(0).shuffle(rest)
    extract(load_target(folder, torch.bfloat16), held + nested(rest, max(options.sizes, default=0)), options.work / "states",
            max_length=512, on_tokens=lambda count: print(f"{count} tokens extracted", flush=True))
    source = open_source(options.work / "states", kind="samples")
    corpus = FileCorpus.of(source, Fitting(parts, max_length=512), options.work / "choices")
    at = {corpus.name(number): number for number in range(len(corpus.lengths))}

    def part_of(some: Sequence[Conversation]) -> Part:
        return Part(corpus, sorted(at[f"hs_{one.index}.safetensors"] for one in some))

    heldout, names = part_of(held), {f"hs_{one.index}.safetensors" for one in held}
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

    def measured(checkpoint: Path, learnt: Sequence[Conversation]) -> dict[str, Any]:
        draft = build_draft(load_checkpoint(checkpoint, target_layers=parts.layers), parts)

        def over(some: set[str], held_out: bool) -> dict[str, Any]:
            found = replay(draft, sequences(source, some), parts=parts, k=3).rung("walk", held_out=held_out)
            return {"length": found.length, "interval": found.interval, "joint": found.joint, "nll": found.nll,
                    "rounds": found.rounds}

        known = {f"hs_{one.index}.safetensors" for one in learnt[: len(names)]}
        return over(names, True) | {"in_sample": {"samples": len(known), **over(known, False)}}

    add({"draft": "embedded", "answer_tokens": tokens_of(rest), "passes": 2, **measured(DRAFT, rest)})
    for size, passes in ((size, SIZES.get(size, 2)) for size in options.sizes):
        name = f"{size}"
        if any(p["draft"] == name for p in points):
            continue
        some = nested(rest, size)
        part = part_of(some)
        d2t, _, coverage = draft_vocabulary(token_counts(part, int(raw["vocab_size"])), 8192)
        settings = Settings(epochs=passes, batch_tokens=1024, learning_rate=4e-3, head_rate=0.1, weight_decay=0.05,
                            optimizer="muon", precision="bfloat16")
        steps = max(10, sum(part.lengths) // 1024)
        began = time.time()
        result = train(part, parts, shape_of(raw, 8192), d2t, options.work / f"budget-{name}", settings=settings, heldout=heldout,
                       watch=Watch(evaluate_every=min(150, max(20, steps // 2)), patience=4, save_minutes=3),
                       on_event=lambda e: print(e.get("step"), e["heldout"], flush=True) if "heldout" in e else None)
        if not result.finished:
            return
        add({"draft": name, "answer_tokens": tokens_of(some), "samples": len(some), "passes": passes, "steps": result.steps,
             "coverage": coverage, "seconds": round(time.time() - began),
             **measured(options.work / f"budget-{name}" / "best", some)})


def tokens_of(answers: Sequence[Conversation]) -> int:
    return sum(int(one.loss_mask.sum()) for one in answers)


def nested(answers: Sequence[Conversation], size: int) -> list[Conversation]:
    """The first that hold `size` answer tokens: a smaller part lies in every larger one."""
    chosen, held = [], 0
    for one in answers:
        if held >= size:
            break
        chosen.append(one)
        held += int(one.loss_mask.sum())
    return chosen


def sequences(source: Any, names: set[str]) -> Iterator[States]:
    for sample in source:
        if sample.name in names:
            yield from_sample(sample)


if __name__ == "__main__":
    main()
