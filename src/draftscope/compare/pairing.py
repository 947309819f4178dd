"""Match first: which rows of two sources are the same state if everything is right, and why the others are not.

A state depends on the tokens up to its own and on nothing else, so rows 0 .. p-1 of two sequences that share a token prefix of
length p are the same states. Every distinct prefix is paired once: a prompt template that opens all sequences counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from scipy.stats import binomtest
from torch import Tensor

from draftscope.compare.evidence import LAGS
from draftscope.compare.transforms import decompose
from draftscope.states.types import Sequence
from draftscope.target.parts import TargetParts

EMBEDDING_TOLERANCE = 0.02
NOTICEABLE = 0.02  # factors closer to 1 are not reported
_MULTIPLIER, _MODULUS = 6364136223846793005, 2**61 - 1


def prefix_keys(token_ids: Tensor) -> list[int]:
    """One hash for every prefix of the tokens, the first for that of length 1."""
    key, keys = 1, []
    for token in token_ids.tolist():
        key = (key * _MULTIPLIER + token + 1) % _MODULUS
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class Pair:
    """Rows `start` .. `stop`-1 of both sequences hold the states of the same token prefixes."""

    train: Sequence
    serve: Sequence
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass
class Pairing:
    """Pairs, and where the served rows went.

    Attributes:
        pairs: at most one per served sequence.
        counts: served rows by fate: `paired`; `same prefix paired before`; `text differs from here on`; `training rows end
            here`; `no training sequence begins so`; `does not begin at position 0`. They sum to `served`.
        served, trained: rows looked at.
    """

    pairs: list[Pair] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    served: int = 0
    trained: int = 0

    @property
    def paired(self) -> int:
        return self.counts.get("paired", 0)


def pair(train: Iterable[Sequence], serve: Iterable[Sequence]) -> Pairing:
    """Pair every served row with a training row of the same token prefix.

    The served sequences are held; the training sequences are read once and only those that pair are kept.
    """
    result = Pairing()
    held = list(serve)
    result.served = sum(s.rows for s in held)
    keys_of = [
        prefix_keys(s.token_ids[: s.rows]) if len(s.positions) == 0 or int(s.positions[0]) == 0 else [] for s in held
    ]
    wanted = {key for keys in keys_of for key in keys}
    written: set[int] = set()  # prefixes that the training text has, with or without states
    holders: dict[int, Sequence] = {}
    for candidate in train:
        result.trained += candidate.rows
        if len(candidate.positions) and int(candidate.positions[0]) != 0:
            continue
        for length, key in enumerate(prefix_keys(candidate.token_ids), 1):
            if key not in wanted:
                break
            written.add(key)
            if length <= candidate.rows:
                holders.setdefault(key, candidate)
    seen: set[int] = set()
    counts: Counter[str] = Counter({"paired": 0})
    for number, sequence in enumerate(held):
        keys = keys_of[number]
        if not keys:
            counts["does not begin at position 0"] += sequence.rows
            continue
        length, covered = (sum(key in some for key in keys) for some in (holders, written))
        if length == 0:
            counts["no training sequence begins so"] += sequence.rows
            continue
        start = next((i for i in range(length) if keys[i] not in seen), length)
        seen.update(keys[:length])
        counts["same prefix paired before"] += start
        counts["paired"] += length - start
        counts["training rows end here"] += covered - length
        counts["text differs from here on"] += sequence.rows - covered
        if start < length:
            result.pairs.append(Pair(holders[keys[length - 1]], sequence, start, length))
    result.counts = {reason: rows for reason, rows in counts.items() if rows or reason == "paired"}
    return result


@dataclass(frozen=True, slots=True)
class Matched:
    """Which training entry a served slot equals, on paired rows; no target is needed.

    Attributes:
        entry: 0 .. L-1, the last one being the last state; None where nothing is within 0.3.
        error: median relative error under the lag and scale adopted; `margin` 1 - err(best) / err(next best entry).
        errors: [L] plain medians. None of the figures without paired rows.
        differs: slot 's own share of rows further away than `tolerance` from the entry.
    """

    slot: int
    entry: int | None
    margin: float | None
    error: float | None
    lag: int = 0
    scale: float | None = None
    errors: tuple[float, ...] = ()
    differs: float | None = None
    rows: int = 0


def match_entries(pairing: Pairing) -> list[Matched]:
    """Each served slot held against every training entry (slots, then the last state) on the paired rows.

    First tokens are left out, and medians taken, so that sinks do not count.
    """
    if not pairing.pairs:
        return []
    slots = pairing.pairs[0].serve.features.shape[1]
    offsets, rests = [], []
    for found in pairing.pairs:
        entries = found.train.features.float()
        if found.train.last is not None:
            entries = torch.cat([entries, found.train.last.float()[:, None]], 1)
        rows = torch.arange(max(found.start, 1), found.stop)
        x = found.serve.features[rows].float()
        shape = (len(rows), slots, entries.shape[1], len(LAGS))
        offset, rest = torch.zeros(shape), torch.full(shape, torch.inf)
        for d, lag in enumerate(LAGS):
            inside = (rows + lag >= 0) & (rows + lag < len(entries))
            for e in range(entries.shape[1]):
                offset[inside, :, e, d], rest[inside, :, e, d] = decompose(x[inside], entries[rows[inside] + lag, e][:, None])
        offsets.append(offset)
        rests.append(rest)
    return [_matched(slot, torch.cat(offsets)[:, slot], torch.cat(rests)[:, slot]) for slot in range(slots)]


def _matched(slot: int, offset: Tensor, rest: Tensor) -> Matched:
    usable = offset.isfinite().flatten(1).all(1) & ~rest.isnan().flatten(1).any(1)
    offset, rest = offset[usable], rest[usable]
    if len(offset) == 0:
        return Matched(slot, None, None, None)
    plain = torch.hypot(offset, rest).median(0).values  # [L, lags]
    best, lag = int(plain[:, 0].argmin()), 0
    error = float(plain[best, 0])
    if float(plain.min()) < 0.5 * error:
        best, lag = divmod(int(plain.argmin()), len(LAGS))
        error = float(plain.min())
    column = plain[:, lag]
    # A factor may make another entry the nearest, so that each is tried with its own.
    factors = (1 + offset[..., lag]).median(0).values
    scaled = torch.hypot(1 + offset[..., lag] - factors, rest[..., lag]) / factors.abs().clamp_min(1e-12)
    likely = scaled.median(0).values
    nearest = int(likely.argmin())
    used = None
    if abs(float(factors[nearest]) - 1) > NOTICEABLE and float(likely[nearest]) < 0.5 * error:
        best, column, used = nearest, likely, float(factors[nearest])
        error = float(column[best])
    others = [float(column[e]) for e in range(len(column)) if e != best]
    rows = scaled[:, best] if used is not None else torch.hypot(offset, rest)[:, best, lag]
    placed = error <= 0.3
    return Matched(
        slot, best if placed else None, (1 - error / min(others) if others and min(others) > 0 else None) if placed else None,
        error, LAGS[lag], used, tuple(plain[:, 0].tolist()), float((rows > max(4 * error, 0.03)).float().mean()), len(rows),
    )


@dataclass(frozen=True, slots=True)
class EmbeddingCheck:
    """Whether a slot is boundary 0: each row the embedding of its token, up to one constant factor.

    Attributes:
        is_embedding: nine rows in ten match within `EMBEDDING_TOLERANCE`.
        share: rows that match.
        factor: from the target's boundary 0 to the slot.
        error: median relative error after the factor.
        rows: rows looked at (finite, token inside the vocabulary).
    """

    is_embedding: bool
    share: float
    factor: float | None
    error: float | None
    rows: int


def embedding_check(items: Iterable[tuple[Tensor, Tensor]], parts: TargetParts, *, rows: int = 4096) -> EmbeddingCheck:
    """Test one slot against the target's embedding.

    Args:
        items: (states [T, Ht], token_ids [T]) by sequence.
        parts: the target's parts.
        rows: most rows looked at.
    """
    offsets, rests, left = [], [], rows
    for states, token_ids in items:
        usable = states.isfinite().all(-1) & (token_ids >= 0) & (token_ids < len(parts.embedding))
        chosen = usable.nonzero().squeeze(-1)[:left]
        left -= len(chosen)
        offset, rest = decompose(states[chosen].float(), parts.embed(token_ids[chosen]))
        offsets.append(offset)
        rests.append(rest)
        if left <= 0:
            break
    count = sum(map(len, offsets))
    if count == 0:
        return EmbeddingCheck(False, 0.0, None, None, 0)
    factors = 1 + torch.cat(offsets)
    factor = float(factors.median())
    errors = torch.hypot(factors - factor, torch.cat(rests)) / max(abs(factor), 1e-12)
    share = float((errors < EMBEDDING_TOLERANCE).float().mean())
    return EmbeddingCheck(share >= 0.9 and factor != 0, share, factor, float(errors.median()), count)


@dataclass(frozen=True, slots=True)
class LastStateCheck:
    """What the head makes of a last state. Agreements are shares of rows t whose argmax is the text's token t+1.

    Attributes:
        norm: `post` where row / norm weight has an RMS of 1 (within 5 %) in nine rows of ten, else `pre`; None without rows.
        agreement: under that norm. `pre`, `post`: under either (with the final norm applied; as it stands).
        nll: mean -log p(token t+1) under that norm, and `entropy` the mean entropy of p. They are close where the state is
            a final one and the text is such as this target writes.
        consistent: True: agreement 0.9 or more, the target's own greedy text; False: no better than guessing the most
            frequent token; None: text of others, or another boundary: not decided by the head alone.
        offset: d for which argmax at row t best agrees with token t+1+d, where it does so clearly better than with d = 0;
            else 0.
        rms: median RMS of row / norm weight.
        rows: rows looked at: those before an answer token where answers are known, else all.
    """

    norm: str | None
    agreement: float | None
    pre: float | None
    post: float | None
    nll: float | None
    entropy: float | None
    consistent: bool | None
    offset: int
    rms: float | None
    rows: int


def last_state_check(
    items: Iterable[tuple[Tensor, Tensor, Tensor | None]], parts: TargetParts, *, rows: int = 1024
) -> LastStateCheck:
    """Test a last state against the target's head.

    Args:
        items: (last [T, Ht], token_ids [T'] with T' >= T, answer [T'] bool or None) by sequence.
        parts: the target's parts.
        rows: most rows looked at, evenly spread over each sequence and over the sequences.
    """
    hits = {"pre": 0, "post": 0}
    shifted: Counter[int] = Counter()
    tried: Counter[int] = Counter()
    following: Counter[int] = Counter()
    sums: dict[str, list[float]] = {"pre": [0.0, 0.0], "post": [0.0, 0.0]}
    squares: list[Tensor] = []
    shifts: dict[str, Counter[int]] = {"pre": Counter(), "post": Counter()}
    scale = parts.norm_weight.float() + parts.norm_offset
    scale = torch.where(scale.abs() < 1e-6, torch.nan, scale)
    for states, token_ids, index in _spread(list(items), rows, parts.head.shape[0]):
        for start in range(0, len(index), 64):
            some = index[start : start + 64]
            x = states[some].float()
            squares.append((x / scale).square().nanmean(-1).sqrt())
            wanted = token_ids[some + 1]
            following.update(wanted.tolist())
            for d in range(-2, 3):
                tried[d] += int(((some + 1 + d >= 0) & (some + 1 + d < len(token_ids))).sum())
            for norm, state in (("pre", parts.final_norm(x)), ("post", x)):
                log_p = parts.logits(state).log_softmax(-1)
                best = log_p.argmax(-1)
                hits[norm] += int((best == wanted).sum())
                sums[norm][0] -= float(log_p.gather(1, wanted[:, None]).sum())
                sums[norm][1] -= float((log_p.exp() * log_p).sum())
                for d in range(-2, 3):
                    inside = (some + 1 + d >= 0) & (some + 1 + d < len(token_ids))
                    shifts[norm][d] += int((best[inside] == token_ids[some[inside] + 1 + d]).sum())
    count = sum(map(len, squares))
    if count == 0:
        return LastStateCheck(None, None, None, None, None, None, None, 0, None, 0)
    rms = torch.cat(squares)
    norm = "post" if float(((rms - 1).abs() < 0.05).float().mean()) >= 0.9 else "pre"
    agreement = hits[norm] / count
    shifted = shifts[norm]
    frequent = max(following.values())
    consistent = None
    if agreement >= 0.9:
        consistent = True
    elif binomtest(hits[norm], count, min(frequent / count, 1.0), alternative="greater").pvalue > 0.01:
        consistent = False
    offset = max(shifted, key=lambda d: shifted[d] / max(tried[d], 1))
    if shifted[offset] / max(tried[offset], 1) < 1.5 * shifted[0] / max(tried[0], 1) + 0.1:
        offset = 0
    return LastStateCheck(
        norm, agreement, hits["pre"] / count, hits["post"] / count, sums[norm][0] / count, sums[norm][1] / count, consistent,
        offset, float(rms.median()), count,
    )


def _spread(
    items: list[tuple[Tensor, Tensor, Tensor | None]], rows: int, vocab: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows with a next token, by sequence: (states, token_ids, row numbers)."""
    usable = []
    for states, token_ids, answer in items:
        ok = states.isfinite().all(-1)[: len(token_ids) - 1]
        following = token_ids[1 : len(ok) + 1]
        ok = ok[: len(following)] & (following >= 0) & (following < vocab)
        if answer is not None and bool(answer.any()):
            ok &= answer[1 : len(ok) + 1]
        usable.append(ok.nonzero().squeeze(-1))
    total = sum(map(len, usable))
    kept = 0
    seen = 0
    for (states, token_ids, _), index in zip(items, usable, strict=True):
        seen += len(index)
        share = min(seen * rows // total if total > rows else seen, rows) - kept
        if share > 0:
            kept += share
            yield states, token_ids, index[torch.linspace(0, len(index) - 1, share).long()]
