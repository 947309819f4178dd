"""How deep an engine drafted, as its recorded steps show it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from draftscope.eagle3.tree import DEEPEST
from draftscope.states.types import Steps, Trace


def recorded_depth(recorded: Iterable[Steps | Trace | None]) -> int | None:
    """K where no file claims it: the columns in which chains were drafted, else the largest accepted count.

    Returns:
        None without steps, where nothing was accepted, or where no engine drafts so deep.
    """
    drafted = accepted = 0
    for one in recorded:
        if one is None:
            continue
        ids, parents, counts = _of(one)
        if ids is not None and parents is None and ids.numel():
            there = (ids >= 0).any(0).nonzero()
            drafted = max(drafted, int(there.max()) + 1 if len(there) else 0)
        if counts is not None and len(counts):
            accepted = max(accepted, int(counts.max()))
    found = drafted or accepted
    return found if 0 < found <= DEEPEST else None


def _of(one: Steps | Trace) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(one, Steps):
        return one.drafted, one.parents, one.accepted
    return one.draft_token_ids, one.draft_parents, one.accepted_counts


def clipped(accepted: Iterable[Tensor], k: int) -> str | None:
    """What is to be said of recorded counts beyond K, which count as K; None where there are none."""
    counts = [int(count) for each in accepted for count in each]
    over, most = sum(count > k for count in counts), max(counts, default=0)
    if not over:
        return None
    return (f"{over:,} of {len(counts):,} recorded steps accepted more than K = {k} tokens, up to {most}, and count as {k}: "
            f"give --k {most}")
