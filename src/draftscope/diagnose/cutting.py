"""How much of long sequences is looked at: their first rows, as far as the tokens reach that drafting begins from."""

from __future__ import annotations

from dataclasses import replace

from draftscope.states.types import Sequence

LONGEST = 1024
"""Rows of a sequence that are taken, where more would leave few sequences: or a quarter of all rows asked for."""
BEHIND = 512
"""Rows behind the first verify step, or the first answer token, that are taken however late it comes."""


def wanted_rows(sequence: Sequence, most: int) -> int:
    """Rows to take of a sequence where `most` are taken in all: a long prompt does not cut away what was drafted after it."""
    first = 0
    if sequence.steps is not None and len(sequence.steps.start):
        first = int(sequence.steps.start.min())
    elif sequence.answer is not None and bool(sequence.answer.any()):
        first = int(sequence.answer.int().argmax())
    return min(sequence.rows, max(LONGEST, most // 4, min(first + 1 + BEHIND, most)))


def spread(lengths: list[int], rows: int) -> set[int]:
    """Positions of sequences, evenly spread, that together hold about `rows` rows; at least one.

    Args:
        lengths: rows to take of each; 0 = it cannot be used.
    """
    usable = [i for i, length in enumerate(lengths) if length > 1]
    total = sum(lengths[i] for i in usable)
    if total <= rows:
        return set(usable)
    count = max(1, round(len(usable) * rows / total))
    return {usable[int(i * len(usable) / count)] for i in range(count)}


def head(sequence: Sequence, rows: int) -> Sequence:
    """The first rows of a long sequence, its steps cut with it."""
    if sequence.rows <= rows:
        return sequence
    steps = sequence.steps
    if steps is not None:
        kept = steps.start < rows - 1
        steps = replace(steps, **{
            name: values[kept] for name in ("start", "drafted", "accepted", "states", "parents")
            if (values := getattr(steps, name)) is not None
        })
    by_row = {name: values[:rows] for name in ("token_ids", "features", "last", "answer", "positions", "fc_output", "inputs")
              if (values := getattr(sequence, name)) is not None}
    return replace(sequence, steps=steps, **by_row)


def steps_of(sequence: Sequence) -> int:
    """Verify steps that stand in a sequence."""
    return 0 if sequence.steps is None else len(sequence.steps.start)


def beyond(steps: int, row: int) -> str:
    """Which of a capture's steps were cut away, in words."""
    one = steps == 1
    return (f"{steps:,} verify step{'' if one else 's'} of the capture lie{'s' if one else ''} beyond row {row:,} of "
            f"{'its request' if one else 'their requests'}")
