"""Speculative decoding against plain decoding by the same code: the ratio of their tokens per second; others beside both.

    python bench/bench_generate.py [--target DIR --draft DIR] [--batches 1 4 8] [--pairs 3] [--max-new 64] [-k 3] [--vllm]
                                   [--tree TOPK STEPS NODES]

Per batch size all run in turn (plain, speculative, ..., plain, ...) over the same held-out prompts; a round gives one ratio each,
and the median over the rounds is the figure. At batch 1 there are also trees, transformers' own `generate` without a draft, and
with `--vllm` (scripts/env-vllm) vLLM with and without the same draft. Without arguments the pair is the embedded one. Writes
bench/results/generate.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from vllm_worker import Engine

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Generated, divergence, summarise
from draftscope.eagle3.model import Draft
from draftscope.eagle3.tree import TreeShape
from draftscope.embedded.pair import DRAFT, HERE
from draftscope.pipeline.prompts import Prompt, read_prompts
from draftscope.target.embedded import ensure_target
from draftscope.target.model import Target, load_target
from draftscope.target.packed import pack
from draftscope.target.wiring import Wiring

RESULT = Path(__file__).parent / "results" / "generate.json"


class Contest:
    """Who answers, in turn: name -> one round over all prompts, as (tokens, seconds)."""

    def __init__(self) -> None:
        self.runners: dict[str, Callable[[], tuple[int, float]]] = {}
        self.rates: dict[str, list[float]] = {}

    def run(self, rounds: int, rows: int) -> None:
        for number in range(rounds):
            for name, runner in self.runners.items():
                tokens, seconds = runner()
                self.rates.setdefault(name, []).append(tokens / seconds)
            shown = ", ".join(f"{name} {rates[-1]:.1f}" for name, rates in self.rates.items())
            print(f"rows {rows}, round {number + 1}: {shown} tokens/s", flush=True)

    def against(self, name: str, other: str) -> dict[str, object]:
        """Ratios of the rates, round by round."""
        ratios = [a / b for a, b in zip(self.rates[name], self.rates[other], strict=True)]
        return {"ratio": statistics.median(ratios), "ratios": ratios}


def measure(
    target: Target, draft: Draft, prompts: list[Prompt], *, rows: int, k: int, max_new: int, pairs: int, tree: TreeShape | None,
    others: Mapping[str, Callable[[list[list[int]]], tuple[int, float]]],
) -> dict[str, object]:
    """Ratios and acceptance of one batch size."""
    wiring = Wiring.of(draft.config.boundaries or ())
    ids = [prompt.token_ids for prompt in prompts]
    last: dict[str, list[Generated]] = {}

    def ours(name: str, with_draft: Draft | None, shape: TreeShape | None = None) -> tuple[int, float]:
        last[name] = generate(target, with_draft, ids, wiring=wiring, k=k, tree=shape, max_new=max_new, stop_ids=target.stop_ids,
                              rows=rows)
        told = summarise(last[name], 0 if with_draft is None else k if shape is None else shape.steps)
        return told.tokens, told.seconds

    generate(target, draft, ids[:1], wiring=wiring, k=k, max_new=8)
    contest = Contest()
    contest.runners = {"plain": lambda: ours("plain", None), "draft": lambda: ours("draft", draft)}
    if tree is not None:
        contest.runners["tree"] = lambda: ours("tree", draft, tree)
    contest.runners |= {name: (lambda runner=runner: runner(ids)) for name, runner in others.items()}  # type: ignore[misc]
    contest.run(pairs, rows)
    fast = summarise(last["draft"], k)
    parted = [divergence(target, i, a.token_ids, b.token_ids) for i, a, b in zip(ids, last["plain"], last["draft"], strict=True)]
    found: dict[str, object] = {
        "rows": rows, "prompts": len(ids), "tokens": fast.tokens, "steps": fast.steps, "accept_length": fast.accept_length,
        "joint": fast.joint, "conditional": fast.conditional, **contest.against("draft", "plain"),
        "tokens_per_second": contest.rates, "texts_that_part": sum(d is not None for d in parted),
        "widest_gap_where_texts_part": max((d.gap for d in parted if d is not None), default=None),
        "against_our_plain_decoding": {name: contest.against(name, "plain") for name in contest.rates if name != "plain"},
    }
    if tree is not None:
        found["tree"] = {"shape": str(tree), "accept_length": summarise(last["tree"], tree.steps).accept_length,
                         **contest.against("tree", "plain")}
    return found


def transformers_plain(folder: Path, stop_ids: frozenset[int], max_new: int) -> Callable[[list[list[int]]], tuple[int, float]]:
    """transformers' own greedy `generate` on the same weights, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        tokens, begun = 0, time.perf_counter()
        with torch.inference_mode():
            for ids in prompts:
                given = torch.tensor([ids])
                found = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=max_new,
                                       eos_token_id=sorted(stop_ids), pad_token_id=0)
                tokens += found.shape[1] - len(ids)
        return tokens, time.perf_counter() - begun

    return run


def served(engine: Engine, stop_ids: frozenset[int], max_new: int) -> Callable[[list[list[int]]], tuple[int, float]]:
    """A vLLM's answers."""

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        told = engine.run(prompts, max_new, sorted(stop_ids))
        return told["tokens"], told["seconds"]

    return run


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
    parser.add_argument("--tree", type=int, nargs=3, metavar=("TOPK", "STEPS", "NODES"), default=(2, 3, 6))
    parser.add_argument("--vllm", action="store_true", help="vLLM, with and without the draft, beside it at batch 1")
    parser.add_argument("--unpacked", action="store_true", help="leave the target's weights as they are")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.target or ensure_target(report=print)
    target = load_target(folder)
    draft = build_draft(load_checkpoint(options.draft or DRAFT, target_layers=target.layers), target.parts)
    packed = not options.unpacked and pack(target, draft)
    prompts = read_prompts(options.prompts, target)
    every = max(1, len(prompts) // options.per_batch)
    engines = [Engine(folder, options.draft or DRAFT, 1, k) for k in (0, options.k)] if options.vllm else []
    others = {"transformers": transformers_plain(folder, target.stop_ids, options.max_new)}
    for name, engine in zip(("vLLM", "vLLM with the draft"), engines, strict=False):
        others[name] = served(engine, target.stop_ids, options.max_new)
        others[name]([prompts[0].token_ids])  # its first pass is slower
    batches = [
        measure(target, draft, prompts[::every][: max(options.per_batch, rows)], rows=rows, k=options.k, max_new=options.max_new,
                pairs=options.pairs, tree=TreeShape(*options.tree) if rows == 1 else None, others=others if rows == 1 else {})
        for rows in options.batches
    ]
    for engine in engines:
        engine.close()
    for batch in batches:
        for name, told in batch["against_our_plain_decoding"].items():  # type: ignore[attr-defined]
            print(f"batch {batch['rows']}: {name} {told['ratio']:.2f} times our plain decoding")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({
        "schema": "draftscope.bench-generate/2", "target": target.folder.name, "k": options.k, "max_new": options.max_new,
        "pairs": options.pairs, "threads": options.threads, "packed": packed, "machine": platform.machine(),
        "torch": torch.__version__, "transformers": transformers.__version__, "batches": batches,
    }, indent=2) + "\n")


if __name__ == "__main__":
    main()
