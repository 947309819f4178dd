"""From the evidence on one slot to what it holds. The rules are in `compare.placement`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from scipy.stats import binomtest
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.compare.evidence import FAILED, LAGS, Candidate, Evidence
from draftscope.compare.placed import Moved, Placed, Transform
from draftscope.compare.transforms import Rotation, fit_rotation, gram_error, matched_channels, sketched_errors

UNPLACED = 0.3
GAIN = 0.5  # a more elaborate reading has to halve the error
VANISHED = 1e-4
NOTICEABLE = 0.02  # factors closer to 1 are not reported
MATCHED = 0.1  # row-level match where the median fails
FEW = 0.1  # least share of rows that may place a slot whose other rows fail
APART = 0.1  # least relative distance of errors at which two places are told apart


@dataclass(frozen=True)
class Reading:
    """One way to read a slot: for every place an error per row.

    Attributes:
        errors: [N, C] by row and place.
        scales: [C] the constant factors used.
    """

    transform: Transform
    lag: int
    errors: Tensor
    scales: Tensor

    @property
    def medians(self) -> Tensor:
        """[C]; infinite where there are no rows."""
        if len(self.errors) == 0:
            return torch.full(self.errors.shape[1:], torch.inf)
        return self.errors.median(0).values

    @property
    def best(self) -> int:
        return int(self.medians.argmin())

    @property
    def error(self) -> float:
        return float(self.medians.min())

    def improves(self, simpler: Reading) -> bool:
        """Half the error, and twice the rows that match as closely as they do here."""
        tolerance = max(4 * self.error, 0.01)
        here, there = ((r.errors < tolerance).sum(0).max() for r in (self, simpler))
        return self.error < GAIN * simpler.error and bool(here >= 2 * there)


class Readings:
    """Offsets and rests of some rows of one slot, read as plain, lagged, scaled."""

    def __init__(self, offset: Tensor, rest: Tensor) -> None:
        self.offset, self.rest = offset, rest.nan_to_num(torch.inf, posinf=torch.inf)

    def plain(self, lag: int = 0) -> Reading:
        d = LAGS.index(lag)
        errors = torch.hypot(self.offset[..., d].nan_to_num(0.0), self.rest[..., d])
        return Reading("lag" if lag else "none", lag, errors, torch.ones(errors.shape[1]))

    def scaled(self, lag: int = 0, scales: Tensor | None = None) -> Reading:
        d = LAGS.index(lag)
        factor = 1 + self.offset[..., d]
        if scales is None:
            scales = factor.nanmedian(0).values.nan_to_num(1.0)
        errors = torch.hypot(factor.nan_to_num(0.0) - scales, self.rest[..., d]) / scales.abs().clamp_min(1e-12)
        return Reading("lag and scale" if lag else "scale", lag, errors, scales)

    def direction(self) -> Reading:
        factor = 1 + self.offset[..., 0]
        errors = torch.where(factor > 0, self.rest[..., 0] / factor.clamp_min(1e-12), torch.inf)
        return Reading("direction", 0, errors, torch.ones(errors.shape[1]))

    def again(self, like: Reading) -> Reading:
        """The same reading, factors included, of these rows."""
        if like.transform in ("scale", "lag and scale"):
            return self.scaled(like.lag, like.scales)
        return self.direction() if like.transform == "direction" else self.plain(like.lag)

    def best(self) -> Reading:
        """The simplest reading that no more elaborate one clearly improves on."""
        chosen = self.plain()
        lagged = min((self.plain(lag) for lag in LAGS if lag), key=lambda r: r.error)
        if lagged.improves(chosen):
            chosen = lagged
        scaled = min((self.scaled(lag) for lag in LAGS), key=lambda r: r.error)
        factor = float(scaled.scales[scaled.best])
        # A slot that was never written is every place times zero.
        if abs(factor) > VANISHED and abs(factor - 1) > NOTICEABLE and scaled.improves(chosen):
            chosen = scaled
        direction = self.direction()
        if chosen.error > NOTICEABLE and direction.improves(chosen):
            chosen = direction
        return chosen


def judge(evidence: Evidence, slot: int, verify: bool | None = None) -> Placed:
    """What slot number `slot` holds: in rows of verify steps alone, or in the others alone, or in all."""
    seen = {name: int(counts[slot]) for name, counts in evidence.seen.items()}
    held = evidence.rows.columns()
    if not held:
        return Placed(slot, None, None, None, seen=seen)
    finite, sink, first = held["finite"][:, slot], held["sink"][:, slot], held["first"]
    ordinary = finite & ~first & ~sink
    if verify is not None:
        ordinary = ordinary & (held["verify"] == verify)
    offset, rest = held["offset"][:, slot], held["rest"][:, slot]
    every = Readings(offset, rest)
    usual = Readings(offset[ordinary], rest[ordinary])
    plain = usual.plain()
    count, layers = int(ordinary.sum()), evidence.layers
    base = Placed(
        slot, None, None, None, rows=count, seen=seen, plain_errors=tuple(plain.medians[: layers + 1].tolist()),
        post_error=float(plain.medians[layers + 1]),
    )
    if count == 0:
        return base
    reading = usual.best()
    rows = torch.ones(count, dtype=torch.bool)
    minority = _minority(usual, reading) if reading.error > MATCHED else None
    if minority is not None:
        reading, rows = minority
    elif reading.error > UNPLACED:
        return _elsewhere(evidence, slot, replace(base, error=plain.error), ordinary, held["zero"][:, slot], verify)
    best = int(reading.errors[rows].median(0).values.argmin())
    matching = reading.errors[:, best][reading.errors[:, best] < UNPLACED]
    tolerance = min(max(4 * float(matching.median()), 0.03), UNPLACED) if len(matching) else 0.03
    medians = reading.errors[rows].median(0).values
    candidates = _candidates(evidence.candidates, reading.errors[rows], best)
    other = [c for c, candidate in enumerate(evidence.candidates) if candidate.place != evidence.candidates[best].place]
    second = float(medians[other].min())
    moved, shares = _shares(evidence, slot, usual, reading, best, tolerance, held["zero"][:, slot][ordinary], ordinary)
    errors = every.again(reading).errors[:, best]
    return replace(
        base, place=evidence.candidates[best].place, mlp=evidence.candidates[best].mlp,
        margin=1 - float(medians[best]) / second if second > 0 else 0.0, error=float(medians[best]),
        transform=reading.transform, lag=reading.lag, share=shares["matched"], tolerance=tolerance, shares=shares,
        scale=float(reading.scales[best]) if reading.transform in ("scale", "lag and scale") else None,
        candidates=candidates, errors=tuple(medians[: layers + 1].tolist()), moved=moved,
        first_error=_median(errors[finite & first]), sink_error=_median(errors[finite & sink & ~first]),
    )


def _median(errors: Tensor) -> float | None:
    return float(errors.median()) if len(errors) else None


def _minority(usual: Readings, median: Reading) -> tuple[Reading, Tensor] | None:
    """The plain or lagged reading that holds for some rows only, and those rows [N].

    Rows that are merely the better part of a noisy slot (more than half of its median error) are none.
    """
    by_lag = torch.stack([usual.plain(lag).errors for lag in LAGS], -1).flatten(1)
    least, where = by_lag.min(1)
    matched = least < MATCHED
    if int(matched.sum()) < max(3, FEW * len(matched)):
        return None
    winner, votes = Counter(where[matched].tolist()).most_common(1)[0]
    rows = by_lag[:, winner] < MATCHED
    if votes < 0.5 * int(matched.sum()) or int(rows.sum()) < FEW * len(rows):
        return None
    if float(by_lag[rows, winner].median()) > GAIN * median.error:
        return None
    return usual.plain(LAGS[winner % len(LAGS)]), rows


def _candidates(candidates: list[Candidate], errors: Tensor, best: int) -> tuple[Boundary, ...]:
    """Places not told apart from the best by size of error or by number of rows, the best first."""
    medians = errors.median(0).values
    found = [candidates[best].place]
    for c in medians.argsort().tolist():
        if candidates[c].place in found or medians[c] > 2 * max(float(medians[best]), 0.01):
            continue
        near = float(medians[c]) * (1 - APART) <= float(medians[best])
        won = int((errors[:, best] < errors[:, c]).sum())
        untold = binomtest(won, len(errors), 0.5, alternative="greater").pvalue > 0.01
        if near or untold:
            found.append(candidates[c].place)
    return tuple(found)


def _shares(
    evidence: Evidence, slot: int, usual: Readings, reading: Reading, best: int, tolerance: float, zero: Tensor, ordinary: Tensor
) -> tuple[Moved | None, dict[str, float]]:
    """What each ordinary row matches, tried from the likely to the far-fetched; sums to 1."""
    count = len(reading.errors)
    left = torch.ones(count, dtype=torch.bool)
    shares: dict[str, float] = {}

    def take(name: str, rows: Tensor) -> None:
        nonlocal left
        new = rows & left
        if name == "matched" or bool(new.any()):
            shares[name] = shares.get(name, 0.0) + float(new.sum()) / count
        left = left & ~rows

    take("matched", reading.errors[:, best] < tolerance)
    take("zero", zero)
    for lag in LAGS:
        if lag != reading.lag:
            take(f"lag {lag:+d}" if lag else "lag 0", usual.plain(lag).errors[:, best] < tolerance)
    elsewhere = usual.plain(reading.lag).errors
    nearest = elsewhere.argmin(1)
    fits = elsewhere.amin(1) < tolerance
    for c, _ in Counter(nearest[fits & left].tolist()).most_common():
        take(str(evidence.candidates[c].place), fits & (nearest == c))
    own = usual.direction().errors[:, best]
    take("rescaled", own < tolerance)
    rest = float(left.sum()) / count
    if rest == 0:
        return None, shares
    where = evidence.candidates[best].place
    moved = None
    if where.kind == "stream":
        column = evidence.layers + 1 if where.norm == "post" else where.index
        ids = torch.stack([evidence.rows.columns()[name][ordinary][left] for name in ("sequence", "row")], 1)
        found = _look_up(evidence, slot, ids)
        if found is not None:
            moved = found.moved(evidence, column, max(tolerance, MATCHED), rest)
    if moved is not None and moved.same + moved.other > 0:
        for name, share in (("same sequence", moved.same), ("other sequence", moved.other)):
            if share:
                shares[name] = share
        rest -= moved.same + moved.other
    if rest > 1e-9:
        shares["unmatched"] = rest
    return moved, shares


@dataclass(frozen=True)
class Found:
    """Nearest rows of the target, for rows of one slot that nothing explains where they stand.

    Attributes:
        own: [M, 2] sequence and row.
        error: [M, n+2] least estimated error at each boundary (the last is n after the norm); `at` [M, n+2, 2] where.
    """

    own: Tensor
    error: Tensor
    at: Tensor

    def moved(self, evidence: Evidence, column: int, tolerance: float, share: float) -> Moved:
        """Rows found at boundary `column`, as shares of a slot of which `share` is unexplained."""
        hit = (self.error[:, column] < tolerance).nonzero().squeeze(-1)
        own, at = self.own[hit], self.at[hit, column]
        same = own[:, 0] == at[:, 0]
        scale = share / max(len(self.own), 1)
        offsets = Counter((at[same, 1] - own[same, 1]).tolist())
        offset, votes = offsets.most_common(1)[0] if offsets else (None, 0)
        names = evidence.names
        examples = [(names[a], b, names[c], d) for a, b, c, d in torch.cat([own, at], 1)[:5].tolist()]
        return Moved(
            same=float(same.sum()) * scale, other=float((~same).sum()) * scale, offset=offset,
            offset_share=votes / max(int(same.sum()), 1), examples=tuple(examples),
        )


def _look_up(evidence: Evidence, slot: int, ids: Tensor | None = None, verify: bool | None = None) -> Found | None:
    """Look rows kept whole up among all rows of the target: those of `ids` [N, 2] (sequence, row), else all that failed."""
    whole, references = evidence.whole.columns(), evidence.references.columns()
    if not whole or evidence.sketch is None:
        return None
    failed = _failed(evidence, slot, verify)
    if ids is not None:
        chosen = {tuple(pair) for pair in ids.tolist()}
        pairs = zip(whole["sequence"].tolist(), whole["row"].tolist(), strict=True)
        failed = failed & torch.tensor([pair in chosen for pair in pairs])
    if not bool(failed.any()):
        return None
    own = torch.stack([whole["sequence"][failed], whole["row"][failed]], 1)
    unit, norm = evidence.sketch(whole["x"][failed, slot])
    errors, where = [], []
    for column in range(references["unit"].shape[1]):
        parts = []
        for start in range(0, len(unit), 256):
            part = slice(start, start + 256)
            distance = sketched_errors(unit[part], norm[part], references["unit"][:, column], references["norm"][:, column])
            same = own[part, :1] == references["sequence"]
            distance[same & (own[part, 1:] == references["row"])] = torch.inf
            # Rows of shared prefixes are equal in several sequences: prefer one's own.
            parts.append((distance + 1e-6 * ~same).min(1))
        errors.append(torch.cat([p.values for p in parts]))
        where.append(torch.cat([p.indices for p in parts]))
    at = torch.stack(where, 1)
    return Found(own, torch.stack(errors, 1), torch.stack([references["sequence"][at], references["row"][at]], -1))


def _failed(evidence: Evidence, slot: int, verify: bool | None) -> Tensor:
    """[W] bool: rows kept whole because nothing explains this slot of them."""
    whole = evidence.whole.columns()
    failed = whole["failed"][:, slot]
    return failed if verify is None else failed & (whole["verify"] == verify)


def _elsewhere(
    evidence: Evidence, slot: int, base: Placed, ordinary: Tensor, zero: Tensor, verify: bool | None
) -> Placed:
    """A slot that matches nothing where its rows stand: rows moved, or turned by an orthogonal map, or unplaced."""
    zeros = float((zero & ordinary).sum()) / int(ordinary.sum())
    base = replace(base, shares=_named(matched=0.0, zero=zeros, unmatched=1 - zeros))
    found = _look_up(evidence, slot, verify=verify)
    if found is None:
        return base
    hits = (found.error < MATCHED).double().mean(0)
    column = int(hits.argmax())
    if hits[column] >= 0.5 * (1 - zeros):
        return _placed_by(
            evidence, base, "rows", found.error[found.error[:, column] < MATCHED].median(0).values, column,
            moved=(moved := found.moved(evidence, column, MATCHED, 1 - zeros)), share=moved.same + moved.other,
            shares=_named(
                matched=0.0, zero=zeros, same_sequence=moved.same, other_sequence=moved.other,
                unmatched=1 - zeros - moved.same - moved.other,
            ),
        )
    return _turned(evidence, slot, base, verify)


def _named(**shares: float) -> dict[str, float]:
    return {name.replace("_", " "): share for name, share in shares.items() if share > 1e-9 or name == "matched"}


def _turned(evidence: Evidence, slot: int, base: Placed, verify: bool | None) -> Placed:
    whole = evidence.whole.columns()
    failed = _failed(evidence, slot, verify)
    x, r = whole["x"][failed, slot], whole["r"][failed]
    if len(x) < 8:
        return base
    some = slice(0, 512)
    grams = torch.tensor([gram_error(x[some], r[some, b]) for b in range(r.shape[1])])
    column = int(grams.argmin())
    ratio = (x.norm(dim=-1) / r[:, column].norm(dim=-1).clamp_min(1e-12)).double()
    steady = float((ratio - ratio.median()).abs().median() / ratio.median().clamp_min(1e-12)) < 0.1
    if float(grams[column]) < UNPLACED and steady:
        factor = float(ratio.median())
        rotation: Rotation = fit_rotation(x / factor, r[:, column])
        transform: Transform = "permutation" if rotation.permutation else "rotation"
        return _placed_by(
            evidence, base, transform, grams, column, rotation=rotation, lag=0,
            scale=factor if abs(factor - 1) > NOTICEABLE else None, share=1.0 - base.shares.get("zero", 0.0),
            error=rotation.error if rotation.determined else float(grams[column]),
        )
    return replace(base, channels=max(float(matched_channels(x, r[:, b]).double().mean()) for b in range(r.shape[1])))


def _placed_by(
    evidence: Evidence, base: Placed, transform: Transform, errors: Tensor, column: int, **fields: object
) -> Placed:
    """Placed by a table of errors over boundaries (and, in last place, n after the norm)."""
    layers = evidence.layers
    places = [candidate.place for candidate in evidence.candidates[: len(errors)]]
    second = float(errors[[i for i in range(len(errors)) if i != column]].min())
    near = [places[i] for i in errors.argsort().tolist() if i != column and errors[i] * (1 - APART) <= errors[column]]
    values: dict[str, object] = {
        "place": places[column], "margin": 1 - float(errors[column]) / second if second > 0 else 0.0,
        "error": float(errors[column]), "transform": transform, "tolerance": MATCHED,
        "candidates": (places[column], *near), "errors": tuple(errors[: layers + 1].tolist()),
    }
    return replace(base, **(values | fields))  # type: ignore[arg-type]


assert FAILED >= MATCHED, "rows kept whole must include all that may have moved"
