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
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftscope.pipeline.answers import Request, answers

PART = 128


def save_part(folder: Path, number: int, finished: list[Request]) -> None:
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
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype)).eval()
    stop = frozenset({tokenizer.eos_token_id})

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
    wanted = [Request(r["id"], list(opening), 1.0, stop, 96) for r in empty]
    turns = {
        r.key: tokenizer.decode(r.answer_ids, skip_special_tokens=True).strip()
        for r in answers(model, wanted, rows=options.rows, capacity=256, seed=number)
    }

    def requests():
        for r in rows:
            text = turns.get(r["id"], "") if r["kind"] == "self" else r["messages"][0]["content"]
            if r["id"] in done or not text:
                continue
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(rendered)
            if len(ids) <= 256:
                yield Request(r["id"], ids, r["temperature"], stop, 256)

    finished: list[Request] = []
    start, written = time.time(), 0
    for request in answers(model, requests(), rows=options.rows, capacity=512, seed=1000 + number):
        finished.append(request)
        written += len(request.answer_ids)
        if len(finished) == PART:
            save_part(options.out, number, finished)
            number, finished = number + 1, []
            print(f"part {number}: {have + written} answer tokens, {written / (time.time() - start):.0f} tok/s", flush=True)
            if have + written >= options.tokens:
                return
    if finished:
        save_part(options.out, number, finished)


if __name__ == "__main__":
    main()
