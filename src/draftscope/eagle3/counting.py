"""Acceptance over some verify steps, and the steps told apart: by request, by kind of prompt, by length of context.

K is the number of positions: the chain's length, or the depth of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftscope.eagle3.generated import Generated

SHORTEST = 64
"""Contexts shorter than this are one bucket; from there each bucket ends at twice its beginning."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Verify steps, and of them those that accepted position 1..K."""

    steps: int
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, counts: Iterable[int], k: int) -> Acceptance:
        """Of accepted counts, one a step, bonus excluded."""
        held = list(counts)
        return cls(len(held), tuple(sum(count > position for count in held) for position in range(k)))

    @property
    def length(self) -> float | None:
        """Mean tokens per verify step, bonus included; None without steps."""
        return 1 + sum(self.accepted) / self.steps if self.steps else None

    @property
    def joint(self) -> list[float]:
        """Share of the steps that accepted each position."""
        return [n / self.steps for n in self.accepted] if self.steps else []

    @property
    def conditional(self) -> list[float | None]:
        """Of the steps that accepted the position before, the share that accepted this one."""
        reached = (self.steps, *self.accepted)
        return [n / before if before else None for n, before in zip(self.accepted, reached, strict=False)]

    def as_json(self) -> dict[str, Any]:
        return {"drafts": self.steps, "accepted_per_position": list(self.accepted), "accept_length": self.length,
                "joint": self.joint, "conditional": self.conditional}


@dataclass(frozen=True, slots=True)
class Bucket:
    """Steps that began with `low` <= context < `high` tokens that the target had read."""

    low: int
    high: int
    acceptance: Acceptance

    def as_json(self) -> dict[str, Any]:
        return {"from": self.low, "below": self.high, **self.acceptance.as_json()}


def contexts(generated: Generated, prompt_tokens: int) -> list[int]:
    """Per verify step, tokens that the target had read before it: prompt and text without the last token."""
    return list(accumulate((count + 1 for count in generated.accepted_counts[:-1]), initial=prompt_tokens))[
        : len(generated.accepted_counts)]


def by_context(results: Sequence[Generated], prompt_tokens: Sequence[int], k: int) -> list[Bucket]:
    """Buckets that hold a step, ascending."""
    held: dict[int, list[int]] = {}
    for generated in results:
        before = contexts(generated, prompt_tokens[generated.request])
        for context, count in zip(before, generated.accepted_counts, strict=True):
            low = 0 if context < SHORTEST else 1 << (context.bit_length() - 1)
            held.setdefault(low, []).append(count)
    return [Bucket(low, 2 * low or SHORTEST, Acceptance.of(counts, k)) for low, counts in sorted(held.items())]


def by_kind(results: Sequence[Generated], kinds: Sequence[str | None], k: int) -> dict[str, Acceptance]:
    """By the prompts' own `kind`, in order of appearance; prompts without one are left out."""
    held: dict[str, list[int]] = {}
    for generated in results:
        kind = kinds[generated.request]
        if kind is not None:
            held.setdefault(kind, []).extend(generated.accepted_counts)
    return {kind: Acceptance.of(counts, k) for kind, counts in held.items()}
