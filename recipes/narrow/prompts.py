"""The prompts of the strong narrow pair, as JSON lines {"id", "kind", "messages", "temperature"}: two kinds, answered greedily.

    python recipes/narrow/prompts.py OUT.jsonl

Sums to be explained, and one-line problems of speed and price. The embedded target answers either in a few set phrases (often
wrongly), so a draft of one layer learns them well. Every 10th prompt, by id, is for serving and never for training.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT_EVERY = 10
SUMS = ("What is {a} plus {b}? Explain each step.", "What is {a} minus {b}? Explain each step.")
PROBLEMS = (
    "A train travels {a} miles per hour for {c} hours. How far does it go?",
    "A shop sells {thing} at ${c} each. How much do {a} {thing} cost?",
)
THINGS = ("pens", "books", "apples", "lamps", "chairs", "shirts", "cups", "hats")


def prompts(count: int = 1600) -> list[dict[str, object]]:
    """Distinct prompts in a fixed order, the two kinds in turn."""
    draw = random.Random(0)
    seen: set[str] = set()
    found: list[dict[str, object]] = []
    while len(found) < count:
        kind, templates = (("sum", SUMS), ("problem", PROBLEMS))[len(found) % 2]
        a, b = sorted((draw.randrange(11, 99), draw.randrange(3, 60)), reverse=True)
        text = draw.choice(templates).format(a=a, b=b, c=draw.randrange(2, 13), thing=draw.choice(THINGS))
        if text not in seen:
            seen.add(text)
            found.append({"id": len(found), "kind": kind, "messages": [{"role": "user", "content": text}], "temperature": 0.0})
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(p) + "\n" for p in prompts()))
