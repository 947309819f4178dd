"""Sampled requests: by which rule drafts were accepted, and what the rule and the way of drafting cost, from recorded states.

For every draft that the target was asked about, p is the target's distribution there (its head over the last state) and q the
draft's (its head over the draft state). A drawn draft x stands with chance min(1, p(x)/q(x)) under speculative sampling, and
with p(x) where it has to equal a draw of the target's, as one that is no draw has to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftscope.eagle3.matching import finite_rows
from draftscope.eagle3.model import Draft
from draftscope.eagle3.sampling import Sampling
from draftscope.faults.facts_runtime import DECIDED, SamplerFacts
from draftscope.states.types import Sequence
from draftscope.target.parts import TargetParts

TEMPERATURES = tuple(round(0.3 * 1.1**n, 3) for n in range(26))
"""At which tokens are tried for the temperature that they were drawn at: 0.3 to 3.3."""
SURE, ROUGHLY = 1.05, 1.3
"""p/q from which a rejection is not left to chance under speculative sampling: at the temperature claimed, at one fitted."""
PLAUSIBLE, SHARP = 1.0, 0.7
"""By how much less likely than draws drafts may be; entropy, of that of all tokens alike, below which this tells anything."""
_FLOOR = 1e-6


def temperature(claims: Mapping[str, Any]) -> float | None:
    """The temperature that a capture claims; None = none, or greedy."""
    warm = claims.get("temperature")
    if isinstance(warm, bool) or not isinstance(warm, int | float) or not 0 < warm < float("inf"):
        return None
    return float(warm)


def drawn(draft: Draft, sequences: Several[Sequence], claimed: float) -> bool:
    """Whether recorded drafts are as likely as draws from the draft's distribution at some temperature, and no argmax."""
    states, ids = [], []
    for sequence in sequences:
        steps = sequence.steps
        if steps is None or steps.drafted is None or steps.states is None or steps.parents is not None:
            continue
        held = steps.drafted[:, 0] >= 0
        states.append(steps.states[held, 0])
        ids.append(steps.drafted[held, 0])
    if not states:
        return False
    with torch.no_grad():
        logits = draft.logits(torch.cat(states).to(draft.dtype)).double()
    tokens = torch.cat(ids)
    columns, inside = _columns(draft, tokens)
    if float((draft.target_ids[logits.argmax(-1)] == tokens).double().mean()) > 0.97 or float(inside.double().mean()) < 0.97:
        return False
    for warm in (claimed, *TEMPERATURES):
        log_q = (logits / warm).log_softmax(-1)
        entropy = float(-(log_q.exp() * log_q).sum(-1).mean())
        likely = float(log_q.gather(1, columns[:, None]).mean())
        if entropy < SHARP * np.log(logits.shape[-1]) and likely > -entropy - PLAUSIBLE:
            return True
    return False


def sampled(draft: Draft, sequences: Several[Sequence], parts: TargetParts, claimed: float) -> SamplerFacts | None:
    """What the recorded steps of requests sampled at a temperature say; None where too little was recorded.

    Args:
        draft: as the engine reads it; sequences: with the last states, drafts and draft states of their steps.
    """
    with torch.no_grad():
        normed = _normed(sequences, parts, Sampling(claimed))
        text, drafts = np.zeros(len(TEMPERATURES)), np.zeros(len(TEMPERATURES))
        asked = list(_asked(sequences))
        for sequence, n, ids, _, rows in asked:
            assert sequence.last is not None
            target = _logits(parts, sequence.last[rows], normed).double()
            # Every token of the text is a draw of the target's, whichever drafts stood.
            text += _log_likely(target[:1], sequence.token_ids[rows[:1] + 1])
            columns, _ = _columns(draft, ids)
            drafts += _log_likely(_draft_logits(draft, sequence, n, len(ids)), columns)
        if not asked:
            return None
        own = int(np.argmin([abs(t - claimed) for t in TEMPERATURES]))
        doubted = TEMPERATURES[int(text.argmax())] if text.max() - text[own] > DECIDED else None
        gain = float(drafts.max() - drafts[own])
        warm = TEMPERATURES[int(drafts.argmax())] if gain > DECIDED else claimed
        at_claimed, at_drafts = Sampling(claimed), Sampling(warm)
        found: dict[str, list[Tensor]] = {name: [] for name in ("p", "q", "overlap", "stood", "position", "best")}
        for sequence, n, ids, stood, rows in asked:
            assert sequence.last is not None
            p = at_claimed.distribution(_logits(parts, sequence.last[rows], normed))
            logits = _draft_logits(draft, sequence, n, len(ids))
            q = torch.zeros_like(p).index_add_(1, draft.target_ids, at_drafts.distribution(logits))
            right = torch.zeros_like(p).index_add_(1, draft.target_ids, at_claimed.distribution(logits))
            at = torch.arange(len(ids))
            for name, values in (("p", p[at, ids]), ("q", q[at, ids]), ("overlap", torch.minimum(p, right).sum(-1)),
                                 ("stood", stood), ("position", at), ("best", draft.target_ids[logits.argmax(-1)] == ids)):
                found[name].append(values)
    p_x, q_x, overlap, kept, places, best = (torch.cat(found[name]).numpy() for name in found)
    chance = np.minimum(1.0, p_x / np.maximum(q_x, _FLOOR))
    sure = SURE if warm == claimed else ROUGHLY
    return SamplerFacts(
        temperature=claimed, doubted=doubted, drafts=len(kept), best=float(best.mean()), kept=float(kept.mean()),
        expected_rejection=float(chance.mean()), expected_equality=float(p_x.mean()), overlap=float(overlap.mean()),
        for_rejection=_likelihood(chance, kept), for_equality=_likelihood(p_x, kept),
        impossible=int((~kept & (p_x > sure * q_x) & (q_x > _FLOOR)).sum()), draft_temperature=warm, temperature_gain=gain,
        over_chance=float(drafts.max()) + len(kept) * float(np.log(len(draft.target_ids))),
        length=_length(kept, places), length_rejection=_length(chance, places), length_overlap=_length(overlap, places),
    )


def _asked(sequences: Several[Sequence]) -> Iterator[tuple[Sequence, int, Tensor, Tensor, Tensor]]:
    """Per step: its number, the drafts that the target was asked about [n], which stood, and the rows whose states decided."""
    for sequence in sequences:
        steps = sequence.steps
        if steps is None or steps.drafted is None or steps.states is None or sequence.last is None or steps.parents is not None:
            continue
        usable = min(finite_rows(sequence.features), len(sequence.last), len(sequence.token_ids) - 1)
        for n, start in enumerate(steps.start.tolist()):
            accepted = int(steps.accepted[n])
            count = min(accepted + 1, int((steps.drafted[n] >= 0).sum()), usable - 1 - start)
            if start >= 0 and count > 0:
                at = torch.arange(count)
                yield sequence, n, steps.drafted[n, :count], at < accepted, at + start + 1


def _draft_logits(draft: Draft, sequence: Sequence, n: int, count: int) -> Tensor:
    assert sequence.steps is not None and sequence.steps.states is not None
    return draft.logits(sequence.steps.states[n, :count].to(draft.dtype)).double()


def _columns(draft: Draft, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Draft ids of target ids [n], and which of these the draft knows."""
    equal = draft.target_ids == ids[:, None]
    return equal.int().argmax(-1), equal.any(-1)


def _log_likely(logits: Tensor, columns: Tensor) -> npt.NDArray[np.float64]:
    """Log-likelihood of tokens [n] under logits [n, V] at each of `TEMPERATURES`."""
    return np.array([float((logits / t).log_softmax(-1).gather(1, columns[:, None]).sum()) for t in TEMPERATURES])


def _normed(sequences: Several[Sequence], parts: TargetParts, sampling: Sampling) -> bool:
    """Whether last states are recorded after the final norm: the text that was drawn is likelier that way."""
    found = []
    for normed in (False, True):
        total = 0.0
        for sequence in sequences[:4]:
            if sequence.last is not None:
                last = sequence.last[: len(sequence.token_ids) - 1]
                log_p = sampling.distribution(_logits(parts, last, normed)).clamp(min=_FLOOR).log()
                total += float(log_p.gather(1, sequence.token_ids[1 : len(last) + 1, None]).sum())
        found.append(total)
    return found[1] > found[0]


def _logits(parts: TargetParts, last: Tensor, normed: bool) -> Tensor:
    return parts.logits(last.float() if normed else parts.final_norm(last))


def _likelihood(chance: npt.NDArray[np.float64], kept: npt.NDArray[np.bool_]) -> float:
    """Log-likelihood of what stood and what did not, by the chances of standing."""
    clipped = np.clip(chance, _FLOOR, 1 - _FLOOR)
    return float(np.where(kept, np.log(clipped), np.log1p(-clipped)).sum())


def _length(chance: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> float:
    """Accept length of the mean chances by position, each given that all before it stood."""
    return 1.0 + float(np.cumprod([chance[places == j].mean() for j in range(int(places.max()) + 1)]).sum())
