"""The embedded target's own answers as plain lists of token ids; needs torch and safetensors, nothing of draftscope."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

ANSWERS = Path(__file__).parents[1] / "embedded" / "answers"
TRAINING, SERVED = "part-000.safetensors", "part-012.safetensors"


class Conversation(NamedTuple):
    token_ids: list[int]
    prompt_length: int


def greedy(part: str, number: int) -> list[Conversation]:
    """The first greedy answers of a part, prompt and answer."""
    held = load_file(ANSWERS / part)
    rows = zip(held["token_ids"].long().split(held["lengths"].tolist()), held["prompt_lengths"].tolist(), held["greedy"].tolist(),
               strict=True)
    return [Conversation(ids.tolist(), length) for ids, length, chosen in rows if chosen][:number]
