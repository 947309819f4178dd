"""The target's own answers to the training prompts, kept as token ids: answers/part-NNN.safetensors.

    python recipes/embedded/answer.py TARGET PROMPTS.jsonl OUT_DIR [--tokens 320000]

Each part holds `token_ids` uint16 [N] (conversations end to end), `lengths` int32 [S], `prompt_lengths` int32 [S] (tokens
before the answer), `prompt_index` int32 [S] and `greedy` uint8 [S]. Stops once that many answer tokens exist; a rerun goes
on with the prompts that no part answers yet, in an order of its own. bfloat16 is the faster on processors that have it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftscope.eagle3.sampling import Sampling
from draftscope.pipeline.answering import Asked, own_loop
from draftscope.target.model import Target, load_target

PART = 128
BLOCK = 1024
"""Prompts answered, those of one temperature after those of another, before the next."""


class Request(NamedTuple):
    """A prompt to answer, greedily where the temperature is 0."""

    key: int
    prompt_ids: list[int]
    temperature: float


class Answer(NamedTuple):
    key: int
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float


def save_part(folder: Path, number: int, finished: list[Answer]) -> None:
    sequences = [r.prompt_ids + r.answer_ids for r in finished]
    tensors = {
        "token_ids": torch.tensor([t for s in sequences for t in s]).to(torch.uint16),
        "lengths": torch.tensor([len(s) for s in sequences], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(r.prompt_ids) for r in finished], dtype=torch.int32),
        "prompt_index": torch.tensor([r.key for r in finished], dtype=torch.int32),
        "greedy": torch.tensor([r.temperature == 0 for r in finished]).to(torch.uint8),
    }
    temporary = folder / f".part-{number:03d}"
    save_file(tensors, temporary)
    temporary.rename(folder / f"part-{number:03d}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=320_000)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target, getattr(torch, options.dtype))
    tokenizer = target.tokenizer

    parts = sorted(options.out.glob("part-*.safetensors"))
    done: set[int] = set()
    have = 0
    for part in parts:
        with safe_open(part, "pt") as f:
            done |= set(f.get_tensor("prompt_index").tolist())
            have += int((f.get_tensor("lengths") - f.get_tensor("prompt_lengths")).sum())
    number = len(parts)
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    random.Random(number).shuffle(rows)

    # An empty user turn is filled by the target itself first: the text up to the user header, sampled at temperature 1.
    header = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False).split("@@")[0]
    empty = [r for r in rows if r["kind"] == "self" and r["id"] not in done]
    opening = tokenizer.encode(header)
    turns: dict[int, str] = {}

    def turn(done: Answer) -> None:
        turns[done.key] = tokenizer.decode(done.answer_ids, skip_special_tokens=True).strip()

    answer(target, [Request(r["id"], list(opening), 1.0) for r in empty], turn, max_new=96, rows=options.rows, longest=256,
           seed=number)

    def requests(block: list[dict[str, Any]], temperature: float) -> Iterable[Request]:
        for r in block:
            if r["temperature"] != temperature or written[0] + have >= options.tokens:
                continue
            text = turns.get(r["id"], "") if r["kind"] == "self" else r["messages"][0]["content"]
            if r["id"] in done or not text:
                continue
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(rendered)
            if len(ids) <= 256:
                yield Request(r["id"], ids, temperature)

    finished: list[Answer] = []
    start, written = time.time(), [0]

    def keep(done: Answer) -> None:
        nonlocal number
        finished.append(done)
        written[0] += len(done.answer_ids)
        if len(finished) == PART:
            save_part(options.out, number, finished)
            number += 1
            finished.clear()
            print(f"part {number}: {have + written[0]} answer tokens, {written[0] / (time.time() - start):.0f} tok/s", flush=True)

    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        for temperature in sorted({r["temperature"] for r in block}):
            answer(target, requests(block, temperature), keep, max_new=256, rows=options.rows, longest=512, seed=1000 + number)
    if finished:
        save_part(options.out, number, finished)


def answer(target: Target, asked: Iterable[Request], on_done: Callable[[Answer], None], *, max_new: int, rows: int, longest: int,
           seed: int) -> None:
    """Answer requests of one temperature, in the order in which they finish."""
    held: dict[int, Request] = {}
    waiting = iter(asked)
    first = next(waiting, None)
    if first is None:
        return

    def prompts() -> Iterable[tuple[int, list[int]]]:
        for one in chain([first], waiting):
            held[one.key] = one
            yield one.key, one.prompt_ids

    sampling = Sampling(first.temperature, 0.95, seed=seed) if first.temperature else None

    def done(key: int, ids: list[int]) -> None:
        one = held.pop(key)
        on_done(Answer(key, one.prompt_ids, ids, one.temperature))

    own_loop(target, Asked(max_new, sampling), rows=rows, longest=longest)(prompts(), done)


if __name__ == "__main__":
    main()
