"""Single requests token by token: what was drafted and kept, what the target wrote instead, and how true each slot was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.diagnose.ladder import Ladder, combine
from draftscope.diagnose.portraits import short
from draftscope.eagle3.acceptance import Ints
from draftscope.eagle3.replayed import Replay
from draftscope.findings import Placed
from draftscope.states.types import Sequence
from draftscope.views import Request, Status

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

TOKENS = 144
"""Tokens shown of a request."""
BEFORE = 16
"""Tokens of the prompt shown before the answer."""
FEWEST = 4
"""Rounds from which a request is chosen."""
LETTERS = 48
"""Of a token's text."""


def requests(examination: Examination, tokenizer: Any, replayed: Replay | None) -> list[Request]:
    """The served request whose accept length is nearest to that of all, the one with the least, and the one with the most.

    Args:
        replayed: of the served states as read, for captures without the engine's own counts.
    """
    case = examination.case
    if case.serve is None:
        return []
    by_name = {s.name: s for s in case.serve.sequences}
    rounds = {name: held for name, s in by_name.items() if (held := _recorded(s, case.k)) is not None}
    recorded = bool(rounds)
    if not recorded and replayed is not None:
        rounds = {one.name: held for one in replayed.sequences if one.name in by_name and (held := _walked(one.walk))}
    usable = {name: held for name, held in rounds.items() if len(held[0]) >= FEWEST} or rounds
    if not usable:
        return []
    length = {name: 1 + float(held[1].mean()) for name, held in usable.items()}
    overall = 1 + float(np.concatenate([held[1] for held in usable.values()]).mean())
    chosen = {
        "the request nearest to the accept length of all": min(length, key=lambda n: (abs(length[n] - overall), n)),
        "the request with the least": min(length, key=lambda n: (length[n], n)),
        "the request with the most": max(length, key=lambda n: (length[n], n)),
    }
    once = {name: why for why, name in reversed(chosen.items())}
    return [_request(by_name[name], why, recorded, usable[name], case.k, tokenizer, examination.ladder)
            for name, why in reversed(once.items())]


Rounds = tuple[Ints, Ints, Tensor | None]
"""Starts, accepted counts, and the drafted ids [N, K] where they were recorded."""


def _recorded(sequence: Sequence, k: int) -> Rounds | None:
    steps = sequence.steps
    if steps is None or not len(steps.start):
        return None
    accepted = steps.accepted.clamp(max=k).numpy()
    return steps.start.numpy(), accepted, None if steps.parents is not None else steps.drafted


def _walked(walk: Any) -> Rounds | None:
    if walk is None:
        return None
    known = walk.accepted >= 0
    return (walk.rows[known], walk.accepted[known], None) if known.any() else None


def _request(sequence: Sequence, why: str, recorded: bool, rounds: Rounds, k: int, tokenizer: Any, ladder: Ladder | None,
             ) -> Request:
    ids = sequence.token_ids.tolist()
    status, drafted = told(len(ids), rounds, k)
    begin = next((i for i, s in enumerate(status) if s != "prompt"), 0)
    first = max(0, begin - BEFORE)
    shown = slice(first, min(first + TOKENS, len(ids)))
    texts = _texts(tokenizer, ids[shown])
    others = _texts(tokenizer, [d for d in drafted[shown] if d >= 0])
    other = iter(others)
    cosines, places = _cosines(sequence, ladder, shown)
    return Request(
        name=sequence.name, why=why, recorded=recorded, first=first, cut=len(ids) - shown.stop, rounds=len(rounds[0]),
        length=1 + float(rounds[1].mean()), ids=ids[shown], text=texts, status=status[shown], drafted=drafted[shown],
        drafted_text=[next(other) if d >= 0 else "" for d in drafted[shown]] if others else [], cosines=cosines, places=places,
    )


def told(count: int, rounds: Rounds, k: int) -> tuple[list[Status], list[int]]:
    """Of each token where it came from, and the drafted token that it stands in place of (-1 = none known).

    A round that starts at row t and keeps A drafts: tokens t+2 to t+1+A were drafted, and t+2+A is the target's own.
    """
    starts, accepted, drafted = rounds
    begin = int(starts.min()) + 1
    status: list[Status] = ["prompt" if i < begin else "unknown" for i in range(count)]
    instead = [-1] * count
    if begin < count:
        status[begin] = "own"
    for number, (start, kept) in enumerate(zip(starts.tolist(), accepted.tolist(), strict=True)):
        depth = k if drafted is None else min(int((drafted[number] >= 0).sum()), k)
        for i in range(start + 2, min(start + 2 + kept, count)):
            status[i] = "accepted"
        own = start + 2 + kept
        if own < count:
            status[own] = "instead" if kept < depth else "bonus"
            if drafted is not None and kept < depth:
                instead[own] = int(drafted[number, kept])
    return status, instead


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    if tokenizer is None:
        return []
    return [str(tokenizer.decode([i]))[:LETTERS] for i in ids]


def _cosines(sequence: Sequence, ladder: Ladder | None, shown: slice) -> tuple[list[list[float | None]], list[str]]:
    """By slot; empty where the target's own states are not at hand, or the rows hold another number of slots."""
    if ladder is None or ladder.reference is None or not ladder.can_remake:
        return [], []
    if sequence.features.shape[1] != len(ladder.reference):
        return [], []
    rows = slice(shown.start, min(shown.stop, sequence.rows))
    own, got = ladder.own(sequence)[rows].float(), sequence.features[rows].float()
    found = torch.nn.functional.cosine_similarity(own, got, dim=-1)  # [T, S]
    missing: list[float | None] = [None] * (shown.stop - rows.stop)
    return [[short(v) if np.isfinite(v) else None for v in column] + missing for column in found.T.tolist()], [
        _place(placed) for placed in ladder.reference]


def _place(placed: Placed) -> str:
    return str(Boundary(placed.boundary or 0, placed.norm or "pre", placed.kind or "stream"))


def as_read(examination: Examination) -> Replay | None:
    """The replay of the served states as the engine reads the draft; None where there was none."""
    if examination.ladder is None or "served" not in examination.rungs:
        return None
    return examination.ladder.served(combine([], examination.as_read))
