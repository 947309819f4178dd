"""Acceptance as an engine counted it: Prometheus text with vLLM's spec_decode counters, or `generate`'s JSON.

vLLM's counters are sums over chains of K drafts, the per-position one unconditional (vllm 0.32 `v1/spec_decode/metrics.py`):
accept length = 1 + accepted / drafts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from draftscope.errors import DraftscopeError

_LINE = re.compile(
    r"^vllm:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens_per_pos|num_accepted_tokens)(?:_total)?"
    r"(\{.*\})?\s+([0-9.eE+-]+)\s*$"
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Verify steps and accepted drafts.

    Attributes:
        drafts: verify steps.
        accepted: [K], steps in which position k was accepted (unconditional counts); empty where only the total is known.
        total: accepted drafts in all.
        says: where the figures come from.
    """

    drafts: int
    accepted: tuple[int, ...]
    total: int
    says: str

    @property
    def length(self) -> float | None:
        """Mean tokens per verify step, bonus included; None without steps."""
        return 1 + self.total / self.drafts if self.drafts else None


def read_counters(path: Path) -> Counters:
    """Read a scrape or `generate`'s JSON.

    Raises:
        DraftscopeError: neither, or counters that contradict each other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DraftscopeError(f"can't be read as text ({error})", where=str(path)) from None
    counters = _from_json(text, path) if text.lstrip().startswith("{") else _from_prometheus(text, path)
    falling = all(a >= b for a, b in zip(counters.accepted, counters.accepted[1:], strict=False))
    if counters.accepted and (counters.accepted[0] > counters.drafts or not falling):
        raise DraftscopeError(
            f"{counters.drafts} steps with {list(counters.accepted)} accepted per position contradict each other",
            where=str(path),
            remedy="Accepted counts can't exceed the steps, nor rise with the position: scrape once, at rest",
        )
    return counters


def _from_json(text: str, path: Path) -> Counters:
    try:
        found = json.loads(text)
        steps, per_position = int(found["drafts"]), tuple(int(n) for n in found["accepted_per_position"])
    except (ValueError, KeyError, TypeError) as error:
        raise DraftscopeError(
            f"is no JSON of `generate` ({error})",
            where=str(path),
            remedy="Give the file that `draftscope generate --json` wrote, or Prometheus text",
        ) from None
    return Counters(steps, per_position, sum(per_position), "counts of `draftscope generate`")


def _from_prometheus(text: str, path: Path) -> Counters:
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        name, labels, value = match[1], match[2] or "", float(match[3])
        place = _POSITION.search(labels)
        if name == "num_accepted_tokens_per_pos" and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0) + value
        else:
            sums[name] = sums.get(name, 0) + value
    if "num_drafts" not in sums:
        raise DraftscopeError(
            "holds no vllm:spec_decode_num_drafts counter",
            where=str(path),
            remedy="Scrape /metrics of the server while speculative decoding is on",
        )
    accepted = tuple(int(positions[k]) for k in sorted(positions))
    total = int(sums.get("num_accepted_tokens", sum(accepted)))
    return Counters(int(sums["num_drafts"]), accepted, total, "vLLM's spec_decode counters")
