"""The tiny pair (`tests/data/tiny`, made by `recipes/tiny`), and a rig that runs it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from draftscope.faults.rig import Conversation, Rig
from draftscope.target.model import Target, load_target

TINY = Path(__file__).parent / "data" / "tiny"
TARGET, DRAFT = TINY / "target", TINY / "draft"


@cache
def tiny_target() -> Target:
    return load_target(TARGET)


@cache
def tiny_prompts() -> dict[str, list[list[int]]]:
    """Rendered prompts as token ids: those whose answers the draft was trained on (`train`), and others (`heldout`)."""
    return json.loads((TINY / "prompts.json").read_text())


@cache
def tiny_conversations(count: int = 24, max_new: int = 64) -> tuple[Conversation, ...]:
    """Training prompts with the target's own greedy answers."""
    from draftscope.eagle3.generate import generate
    from draftscope.target.wiring import Wiring

    target = tiny_target()
    prompts = tiny_prompts()["train"][:count]
    answers = generate(target, None, prompts, wiring=Wiring.of((2, 4, 5)), max_new=max_new, stop_ids=target.stop_ids, rows=12)
    return tuple(Conversation(p + a.token_ids, len(p)) for p, a in zip(prompts, answers, strict=True))


def tiny_rig(count: int = 16, max_new: int = 48) -> Rig:
    target = tiny_target()
    prompts = tiny_prompts()["heldout"][:count]
    return Rig(target, DRAFT, prompts, tiny_conversations(), max_new=max_new, rows=8, stop_ids=target.stop_ids)
