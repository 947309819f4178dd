"""Speculative decoding against plain decoding by the same code: the ratio of their tokens per second.

    python bench/bench_generate.py [--target DIR --draft DIR] [--batches 1 4 8] [--pairs 3] [--max-new 64] [-k 3]

Per batch size the two run in turn (plain, speculative, plain, ...) over the same held-out prompts; a pair gives one ratio,
and the median over the pairs is the figure. Without arguments the pair is the embedded one. Writes bench/results/generate.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path

import torch
import transformers

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Generated, divergence, summarise
from draftscope.eagle3.model import Draft
from draftscope.embedded.pair import DRAFT, HERE
from draftscope.pipeline.prompts import Prompt, read_prompts
from draftscope.target.embedded import ensure_target
from draftscope.target.model import Target, load_target
from draftscope.target.packed import pack
from draftscope.target.wiring import Wiring

RESULT = Path(__file__).parent / "results" / "generate.json"


def measure(
    target: Target, draft: Draft, prompts: list[Prompt], *, rows: int, k: int, max_new: int, pairs: int,
) -> dict[str, object]:
    """Ratios and acceptance of one batch size."""
    wiring = Wiring.of(draft.config.boundaries or ())
    ids = [prompt.token_ids for prompt in prompts]

    def once(with_draft: Draft | None) -> list[Generated]:
        return generate(target, with_draft, ids, wiring=wiring, k=k, max_new=max_new, stop_ids=target.stop_ids, rows=rows)

    generate(target, draft, ids[:1], wiring=wiring, k=k, max_new=8)
    rates: list[tuple[float, float]] = []
    for number in range(pairs):
        plain, speculative = once(None), once(draft)
        slow, fast = summarise(plain, 0), summarise(speculative, k)
        rates.append((slow.tokens / slow.seconds, fast.tokens / fast.seconds))
        print(f"rows {rows}, pair {number + 1}: plain {rates[-1][0]:.1f}, with the draft {rates[-1][1]:.1f} tokens/s, "
              f"accept length {fast.accept_length:.2f}", flush=True)
    parted = [divergence(target, i, a.token_ids, b.token_ids) for i, a, b in zip(ids, plain, speculative, strict=True)]
    ratios = [fast / slow for slow, fast in rates]
    return {
        "rows": rows, "prompts": len(ids), "tokens": fast.tokens, "steps": fast.steps, "accept_length": fast.accept_length,
        "joint": fast.joint, "conditional": fast.conditional, "ratio": statistics.median(ratios), "ratios": ratios,
        "plain_tokens_per_second": [slow for slow, _ in rates], "tokens_per_second": [fast for _, fast in rates],
        "texts_that_part": sum(d is not None for d in parted),
        "widest_gap_where_texts_part": max((d.gap for d in parted if d is not None), default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--per-batch", type=int, default=8, help="prompts answered per run, at least one batch")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--unpacked", action="store_true", help="leave the target's weights as they are")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target or ensure_target(report=print))
    draft = build_draft(load_checkpoint(options.draft or DRAFT, target_layers=target.layers), target.parts)
    packed = not options.unpacked and pack(target, draft)
    prompts = read_prompts(options.prompts, target)
    every = max(1, len(prompts) // options.per_batch)
    batches = [
        measure(target, draft, prompts[::every][: max(options.per_batch, rows)], rows=rows, k=options.k, max_new=options.max_new,
                pairs=options.pairs)
        for rows in options.batches
    ]
    for batch in batches:
        print(f"batch {batch['rows']}: {batch['ratio']:.2f} times plain decoding")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({
        "schema": "draftscope.bench-generate/1", "target": target.folder.name, "k": options.k, "max_new": options.max_new,
        "pairs": options.pairs, "threads": options.threads, "packed": packed, "machine": platform.machine(),
        "torch": torch.__version__, "transformers": transformers.__version__, "batches": batches,
    }, indent=2) + "\n")


if __name__ == "__main__":
    main()
