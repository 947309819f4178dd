"""What came out of speculative decoding: texts with their verify steps, acceptance over all of them, where texts part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from draftscope.eagle3.counting import Acceptance
from draftscope.eagle3.stopping import StopStrings

if TYPE_CHECKING:
    from draftscope.target.model import Target

NEAR_TIE = 1e-4


@dataclass(slots=True)
class Generated:
    """What became of one prompt.

    Attributes:
        request: its number in the list of prompts.
        token_ids: the new tokens, the stop token included.
        accepted_counts: per verify step, drafted tokens that the verifier accepted (bonus excluded), as counted before
            the text was cut.
        drafted_ids: per verify step, the K target ids that were verified; -1 where a tree has fewer nodes.
        draft_parents: of trees, per verify step, the column of the drafted token that each goes on from, -1 = the root.
        finish: what ended it; stopped_by: the stop string, where it was one.
        cut: the last step's tokens go on beyond the end of the text.
        started, first_token, ended: `time.perf_counter` before its prefill, after it, and at its end.
    """

    request: int
    token_ids: list[int] = field(default_factory=list)
    accepted_counts: list[int] = field(default_factory=list)
    drafted_ids: list[list[int]] = field(default_factory=list)
    draft_parents: list[list[int]] = field(default_factory=list)
    finish: Literal["stop", "length", "context"] | None = None
    stopped_by: str | None = None
    cut: bool = False
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0

    def append(self, tokens: Sequence[int], stop_ids: frozenset[int], max_new: int, room: int,
               stop: StopStrings | None = None) -> None:
        """Add what a pass yielded, up to the end of the text."""
        seek = stop is not None and stop.found([*self.token_ids, *tokens]) is not None
        for taken, token in enumerate(tokens, 1):
            self.token_ids.append(token)
            if token in stop_ids:
                self.finish = "stop"
            elif seek and stop is not None and (found := stop.found(self.token_ids)) is not None:
                self.finish, self.stopped_by = "stop", found
            elif len(self.token_ids) >= max_new:
                self.finish = "length"
            elif len(self.token_ids) >= room:
                self.finish = "context"
            if self.finish is not None:
                self.cut = taken < len(tokens)
                self.ended = time.perf_counter()
                return


@dataclass(frozen=True, slots=True)
class Summary:
    """Acceptance and speed over all verify steps of some requests.

    Attributes:
        k: length of the drafted chains or depth of the trees, 0 for plain decoding.
        steps: verify steps; cut_steps of them go beyond the end of their text, and are counted as the verifier counted.
        accepted: per draft position, steps that accepted it (K numbers).
        accept_length: mean tokens per verify step, bonus included; None without steps.
        joint: share of the steps that accepted position 1..k; conditional: of those that accepted the one before.
        tokens, seconds: new tokens, and the time from the first prefill to the last token.
    """

    k: int
    requests: int
    steps: int
    cut_steps: int
    accepted: list[int]
    accept_length: float | None
    joint: list[float]
    conditional: list[float | None]
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


def summarise(results: Sequence[Generated], k: int) -> Summary:
    """Pooled over all steps of all requests, so that the accept length is 1 + the sum of `joint`."""
    found = Acceptance.of((count for generated in results for count in generated.accepted_counts), k)
    return Summary(
        k=k, requests=len(results), steps=found.steps, cut_steps=sum(g.cut and bool(g.accepted_counts) for g in results),
        accepted=list(found.accepted), accept_length=found.length, joint=found.joint, conditional=found.conditional,
        tokens=sum(len(g.token_ids) for g in results),
        seconds=max((g.ended for g in results), default=0.0) - min((g.started for g in results), default=0.0),
    )


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two texts for one prompt part: at new token `index`, with the gap between the target's two best logits there."""

    index: int
    ids: tuple[int | None, int | None]
    gap: float

    @property
    def near_tie(self) -> bool:
        """The two tokens are closer than float32 keeps apart over different batch shapes."""
        return self.gap < NEAR_TIE


def divergence(target: Target, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """The first place where two greedy texts for a prompt differ, or None; the target is run once over what they share."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if shared == len(one) == len(other):
        return None
    with torch.inference_mode():
        seen = target.forward(torch.tensor([[*prompt, *one[:shared]]]), ())
        best = target.logits(seen.post[0, -1]).topk(2).values
    ids = (one[shared] if shared < len(one) else None, other[shared] if shared < len(other) else None)
    return Divergence(shared, ids, float(best[0] - best[1]))
