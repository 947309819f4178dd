"""What the package carries of the embedded pair: the draft, held-out prompts, some of the conversations it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

HERE = Path(__file__).parent
DRAFT = HERE / "draft"
BOUNDARIES = (2, 15, 27)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A held-out prompt of one of eight kinds."""

    id: str
    kind: str
    messages: list[dict[str, Any]]


def heldout() -> list[Prompt]:
    """The 64 held-out prompts, eight of each kind; the draft has seen none of them."""
    return [Prompt(**json.loads(line)) for line in (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def spread(count: int) -> list[Prompt]:
    """The first `count` held-out prompts, taken in turn from all kinds."""
    prompts = heldout()
    kinds = list(dict.fromkeys(p.kind for p in prompts))
    by_kind = {kind: [p for p in prompts if p.kind == kind] for kind in kinds}
    ordered = [by_kind[kind][i] for i in range(8) for kind in kinds]
    return ordered[:count]


def training_sample() -> list[tuple[list[int], int]]:
    """Conversations of the training set as (token ids, tokens before the answer); the target wrote the answers greedily."""
    with safe_open(HERE / "training_sample.safetensors", "pt") as file:
        ids = file.get_tensor("token_ids").tolist()
        lengths, prompts = file.get_tensor("lengths").tolist(), file.get_tensor("prompt_lengths").tolist()
    found, start = [], 0
    for length, prompt in zip(lengths, prompts, strict=True):
        found.append((ids[start : start + length], prompt))
        start += length
    return found
