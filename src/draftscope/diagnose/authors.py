"""Who wrote the training answers, and whether what is served is of their kind: by the target, and by the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from draftscope.diagnose.case import Text
from draftscope.faults.facts_data import DomainFacts, PolicyFacts
from draftscope.states.types import Sequence as Rows
from draftscope.target.parts import TargetParts

ROWS, CHUNK = 1024, 128
"""Answer tokens looked at, and logits held at once."""
TEMPERATURES = (0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.8, 2.2, 3.0)
RARE = 1e-3
LEAST_SEQUENCES = 8
LAGS = (0, -1, 1, -2, 2)
BETTER = 1.5
"""By what factor another row's state has to predict a token better for the states to stand beside others."""
PAIRS = 8
"""Pairs of tokens from which a text is compared."""


@dataclass(slots=True)
class _Sums:
    """Per sequence, and per temperature: what is counted over answer tokens."""

    rows: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    nll: float = 0.0
    entropy: float = 0.0
    fit: Tensor = field(default_factory=lambda: torch.zeros(len(TEMPERATURES), dtype=torch.float64))
    tail: Tensor = field(default_factory=lambda: torch.zeros(len(TEMPERATURES), dtype=torch.float64))
    expected: Tensor = field(default_factory=lambda: torch.zeros(len(TEMPERATURES), dtype=torch.float64))
    surest: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    turns: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])


def policy_facts(sequences: Sequence[Rows], parts: TargetParts, *, normed: bool,
                 again: dict[str, Tensor] | None) -> tuple[PolicyFacts, tuple[float | None, float | None]] | None:
    """The target's distribution over the training answers; None without answers or states.

    Args:
        normed: the recorded last states are after the final norm.
        again: by name, last states [T, Ht] before the norm, of the target run over the same tokens.

    Returns:
        The facts, and the agreement on answers before the last of a sample and on the last.
    """
    recorded = _sums(sequences, parts, None, normed)
    run = None if again is None else _sums(sequences, parts, again, False)
    chosen = run or recorded
    if chosen is None:
        return None
    rows = sum(chosen.rows)
    at = _fitting(chosen.fit)
    facts = PolicyFacts(
        by="recorded" if run is None else "again", tokens=rows, sequences=len(chosen.rows), agreement=sum(chosen.hits) / rows,
        nll=chosen.nll / rows, entropy=chosen.entropy / rows, interval=_interval(chosen),
        temperature=float(np.exp(np.interp(at, range(len(TEMPERATURES)), np.log(TEMPERATURES)))),
        tail=_at(chosen.tail, at) / rows, tail_expected=_at(chosen.expected, at) / rows,
        sureness=_sureness(chosen, at), lag=_lag(chosen),
        recorded=None if recorded is None else sum(recorded.hits) / sum(recorded.rows),
        again=None if run is None else sum(run.hits) / sum(run.rows))
    earlier, last = ((hit / of if of else None) for hit, of in chosen.turns)
    return facts, (earlier, last)


def _sums(sequences: Sequence[Rows], parts: TargetParts, again: dict[str, Tensor] | None, normed: bool) -> _Sums | None:
    sums, each = _Sums(), max(1, ROWS // max(len(sequences), 1))
    for sequence in sequences:
        last = sequence.last if again is None else again.get(sequence.name)
        if last is None or sequence.answer is None:
            continue
        limit = min(len(last), len(sequence.token_ids) - 1)
        rows = sequence.answer[1 : limit + 1].nonzero().squeeze(-1)
        if not len(rows):
            continue
        rows = rows[torch.linspace(0, len(rows) - 1, min(each, len(rows))).long()]
        rows = rows[last[rows].float().isfinite().all(-1)]
        if len(rows):
            _add(sums, sequence, last, rows, parts, normed)
    return sums if sums.rows else None


def _add(sums: _Sums, sequence: Rows, last: Tensor, rows: Tensor, parts: TargetParts, normed: bool) -> None:
    hits, excess = 0, 0.0
    assert sequence.answer is not None
    breaks = (sequence.answer[:-1] & ~sequence.answer[1:]).nonzero().squeeze(-1)
    final = int(breaks[-2]) if len(breaks) > 1 and sequence.answer[-1].logical_not() else (
        int(breaks[-1]) if len(breaks) and bool(sequence.answer[-1]) else -1)
    for some in rows.split(CHUNK):
        state = last[some].float()
        logits = parts.logits(state if normed else parts.final_norm(state)).float()
        wanted = sequence.token_ids[some + 1]
        best = logits.argmax(-1)
        right = best == wanted
        hits += int(right.sum())
        surest = torch.zeros(len(TEMPERATURES), len(some), dtype=torch.float64)
        for d in LAGS:
            at = some + 1 + d
            inside = (at >= 0) & (at < len(sequence.token_ids))
            sums.lags[d] += int((best[inside] == sequence.token_ids[at[inside]]).sum())
        late = some + 1 > final
        for which, part in ((0, ~late), (1, late)):
            sums.turns[which][0] += int(right[part].sum())
            sums.turns[which][1] += int(part.sum())
        for i, temperature in enumerate(TEMPERATURES):
            log_p = (logits / temperature).log_softmax(-1)
            p, own = log_p.exp(), log_p.gather(1, wanted[:, None]).squeeze(1)
            sums.fit[i] -= own.double().sum()
            sums.tail[i] += float((own < np.log(RARE)).sum())
            surest[i] = p.amax(-1).double()
            sums.expected[i] += float(p[p < RARE].double().sum())
            if temperature == 1:
                nll, entropy = -float(own.double().sum()), -float((p * log_p).double().nansum())
                sums.nll, sums.entropy, excess = sums.nll + nll, sums.entropy + entropy, excess + nll - entropy
        sums.surest.append(surest)
        sums.right.append(right)
    sums.rows.append(len(rows))
    sums.hits.append(hits)
    sums.excess.append(excess)


def _fitting(fit: Tensor) -> float:
    """Where on the scale of temperatures the text is likeliest: the vertex of the parabola through the best and its "
    "neighbours."""
    best = int(fit.argmin())
    if best in (0, len(fit) - 1):
        return float(best)
    below, here, above = fit[best - 1 : best + 2].tolist()
    bend = below - 2 * here + above
    return best + (0.5 * (below - above) / bend if bend > 0 else 0.0)


def _sureness(sums: _Sums, at: float) -> float:
    """In standard errors, how much more, or less, often the first choice is taken where the target is sure than where it is not,
    against text drawn from it at that temperature."""
    surest, right = torch.cat(sums.surest, 1), torch.cat(sums.right).double()
    low = min(int(at), len(surest) - 2)
    p = surest[low] + (at - low) * (surest[low + 1] - surest[low])
    weight = p - p.mean()
    spread = float((weight.square() * p * (1 - p)).sum().sqrt())
    return float((weight * (right - p)).sum()) / spread if spread > 0 else 0.0


def _at(values: Tensor, at: float) -> float:
    return float(np.interp(at, range(len(values)), values.numpy()))


def _lag(sums: _Sums) -> int:
    """The lag under which the states predict the text clearly better than where they stand."""
    best, times = sums.lags.most_common(1)[0]
    return best if times > BETTER * max(sums.lags[0], 1) else 0


def _interval(sums: _Sums, seed: int = 0) -> tuple[float, float] | None:
    if len(sums.rows) < LEAST_SEQUENCES:
        return None
    rows, excess = np.array(sums.rows), np.array(sums.excess)
    drawn = np.random.default_rng(seed).integers(0, len(rows), (500, len(rows)))
    found = excess[drawn].sum(1) / rows[drawn].sum(1)
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


def domain_facts(train: Sequence[Text], serve: Sequence[Text], sequences: Sequence[Rows]) -> DomainFacts | None:
    """How much of the served texts the training texts hold; None for few of either."""
    trained = [_pairs(text) for text in train]
    trained = [pairs for pairs in trained if len(pairs) >= PAIRS]
    served = {text.name: _pairs(text) for text in serve}
    served = {name: pairs for name, pairs in served.items() if len(pairs) >= PAIRS}
    if len(trained) < LEAST_SEQUENCES or len(served) < LEAST_SEQUENCES:
        return None
    holds = Counter(pair for pairs in trained for pair in pairs)
    own = [float(np.mean([holds[pair] > 1 for pair in pairs])) for pairs in trained]
    covered = {name: float(np.mean([holds[pair] > 0 for pair in pairs])) for name, pairs in served.items()}
    low, middle = float(np.quantile(own, 0.05)), float(np.median(own))
    shares = list(covered.values())
    half = float(np.median(shares))
    accepted: dict[bool, list[int]] = {True: [], False: []}
    for sequence in sequences:
        if sequence.steps is not None and sequence.name in covered:
            accepted[covered[sequence.name] >= half] += sequence.steps.accepted.tolist()
    return DomainFacts((low, middle), half, float(np.mean([share < low for share in shares])), len(shares),
                       float(np.mean(accepted[True])) if accepted[True] else None,
                       float(np.mean(accepted[False])) if accepted[False] else None)


def _pairs(text: Text) -> set[tuple[int, int]]:
    """Pairs of neighbouring tokens."""
    return set(pairwise(text.token_ids.tolist()))
