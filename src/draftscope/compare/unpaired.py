"""What each slot looks like against the training entries, where no token is shared: coarse departures, and texts that differ.

Means and spreads of a slot follow the text; the cosines between the slots of a row hardly do, since each stream carries on the
one before. A permuted slot, a factor, another basis, a state of the token alone, or a state that lacks the stream shows in them.
Neighbouring boundaries, rows of neighbouring tokens and rows of other requests do not: their statistics are those of health.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from draftscope.compare.distances import Distance, Model, distance
from draftscope.compare.yardstick import FAR, Yardstick
from draftscope.scan.fingerprint import Fingerprint, RowClass, Statistics

Kind = Literal["own", "entry", "scaled", "turned", "token alone", "less", "none", "unknown"]

FEWEST_ROWS = 32
FACTOR = 0.2
"""Least difference of log norms that is called a factor: below it texts may differ as much."""
ACROSS, MEAN_SHARE = 0.3, 0.2
"""Cosine of the mean rows up to which the bases differ; share of the mean in a row from which that is told."""
COMPONENTS_ALIKE = 0.35
"""Mean |log ratio| of the largest principal components up to which these are the same."""
SHORT = 0.67
"""Norm, as a share of the training entry's, below which something of the stream is missing."""
COUPLED, UNCOUPLED = 0.1, 0.2
"""Loss of cosine with every other slot of the row up to which a slot carries the stream on, and from which it does not."""
STEADY = 0.01
"""Least unit of such cosines: they move by more than sampling with the domain."""
UNTOLD = (
    "statistics of other texts do not tell a boundary from its neighbour (layer-offset), nor rows that hold the states of the "
    "tokens before or after (token-shift), nor rows of other requests: the same tokens on both sides, the target's weights "
    "(--target) or at least its embedding, final norm and head would"
)


class Coupling(Model):
    """Mean cosine between two slots of one row, on both sides; `effect` in units of its spread between the reference's groups."""

    slots: tuple[int, int]
    a: float
    b: float
    unit: float
    effect: float


class Look(Model):
    """What a slot of B looks like.

    Attributes:
        kind: `own` = nothing that the texts would not make; `entry` = another training entry; `scaled` = its own entry by a
            factor; `turned` = norms and components of its own entry in another basis; `token alone` = the same vector for the
            same token; `less` = short, and without what the other slots of the row hold; `none` = like no training entry;
            `unknown` = too few rows.
        distance: to its own entry; effect: in units; smallest: the distance that would have been seen.
        other: distance to `entry`, for `entry`.
        norm_ratio: median norm over the own entry's; mean_cosine: of the mean rows; uncoupled: least loss of mean cosine with
            another slot.
    """

    slot: int
    kind: Kind
    entry: int | None = None
    distance: float | None = None
    unit: float | None = None
    effect: float | None = None
    smallest: float | None = None
    other: float | None = None
    norm_ratio: float | None = None
    mean_cosine: float | None = None
    uncoupled: float | None = None
    says: str


def couplings(a: Fingerprint, b: Fingerprint) -> list[Coupling]:
    """Cosines between the slots that both have."""
    slots = min(a.slots, b.slots)
    whole, found = a.cosines.result(), b.cosines.result()
    if whole.mean is None or whole.std is None or found.mean is None or slots < 2:
        return []
    groups = [part.cosines.result().mean for part in a.of_kind("group").values()]
    result = []
    for i in range(slots):
        for j in range(i + 1, slots):
            apart = [float(g[i, j] - whole.mean[i, j]) for g in groups if g is not None]
            between = math.sqrt(sum(x * x for x in apart) / len(apart)) if apart else 0.0
            # Rows of one text are alike: a quarter of them counts.
            sampled = 2 * float(whole.std[i, j]) / math.sqrt(found.count)
            unit = max(math.hypot(between, sampled), STEADY)
            one, other = float(whole.mean[i, j]), float(found.mean[i, j])
            result.append(Coupling(slots=(i, j), a=one, b=other, unit=unit, effect=abs(other - one) / unit))
    return result


def looks(
    a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...], table: list[list[Distance]], yards: list[Yardstick],
    token_alone: Collection[int] = (),
) -> list[Look]:
    """A look at every slot of B.

    Args:
        table: distances [slot of B][entry of A]; yards: of A's entries.
        token_alone: slots of B whose rows are the same for the same token, where the training entry's are not.
    """
    coupled = couplings(a, b)

    def look(slot: int, taken: Collection[int] = ()) -> Look:
        return _look(slot, a, b, classes, table[slot], yards, coupled, slot in token_alone, slot in taken)

    found = [look(slot) for slot in range(b.slots)]
    taken = {one.entry for one in found if one.kind == "entry" and one.entry is not None}
    return [look(slot, taken) if one.kind == "own" else one for slot, one in enumerate(found)]


def _look(
    slot: int, a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...], distances: list[Distance], yards: list[Yardstick],
    coupled: list[Coupling], token_alone: bool, taken: bool,
) -> Look:
    """One slot; `taken`: another slot looks like its training entry, so that less is needed to look like another."""
    mine = b.statistics(slot, classes)
    rows = mine.dimensions.count
    if slot >= a.slots:
        return Look(slot=slot, kind="unknown", says="the training data has no entry of this number")
    own, yard = distances[slot], yards[slot]
    unit = yard.unit(rows)
    if own.total is None or unit is None or rows < FEWEST_ROWS:
        return Look(slot=slot, kind="unknown", distance=own.total, says=f"too few rows to tell ({rows} here, {yard.rows} there)")
    ratio, across, share = _against(a.statistics(slot, classes), mine)
    lost = [c.a - c.b for c in coupled if slot in c.slots]
    uncoupled = min(lost) if lost else None
    effect = own.total / unit

    def look(kind: Kind, says: str, entry: int | None = slot, other: float | None = None) -> Look:
        return Look(
            slot=slot, kind=kind, entry=entry, distance=own.total, unit=unit, effect=effect, smallest=FAR * unit, other=other,
            norm_ratio=ratio, mean_cosine=across, uncoupled=uncoupled, says=says,
        )

    if token_alone:
        return look("token alone", "the same token has the same vector wherever it stands: the embedding, up to a factor", None)
    totals = {e: d.total for e, d in enumerate(distances[: a.slots]) if d.total is not None}
    nearest = min(totals, key=lambda e: totals[e])
    near_unit = yards[nearest].unit(rows)
    if nearest != slot and near_unit is not None and totals[nearest] <= 2 * near_unit and effect > (1 if taken else 2) and (
            totals[nearest] < own.total / 2):
        return look("entry", f"training entry {nearest} rather than {slot}: distance {totals[nearest]:.2g} against "
                    f"{own.total:.2g}", nearest, totals[nearest])
    if effect <= FAR:
        return look("own", f"nothing that the texts would not make ({effect:.1f} units from its training entry)")
    shape_unit, norm_unit = yard.unit(rows, "shape"), yard.unit(rows, "norms")
    assert shape_unit is not None and norm_unit is not None and own.shape is not None and own.norms is not None
    if ratio is not None and abs(math.log(ratio)) > max(FACTOR, FAR * norm_unit) and own.shape <= FAR * shape_unit and (
            uncoupled is None or abs(uncoupled) <= COUPLED):
        return look("scaled", f"its training entry times {ratio:.3g}: the profile over dimensions is the same up to that factor")
    if own.norms <= max(FAR * norm_unit, 0.05) and across is not None and abs(across) < ACROSS and share >= MEAN_SHARE and (
            _components_alike(a, b, slot)):
        return look("turned", f"norms and principal components are those of its training entry, dimensions are not (mean rows at "
                    f"cosine {across:+.2f}): another basis")
    if ratio is not None and ratio < SHORT and uncoupled is not None and uncoupled > UNCOUPLED:
        return look("less", f"norms are {ratio:.0%} of its training entry's, and its cosine with every other slot of the row is "
                    f"at least {uncoupled:.2f} less than in training: what the stream holds is missing")
    return look("none", f"{effect:.1f} units from its training entry, and like no other: another state, or text of another kind",
                None)


def _against(a: Statistics, b: Statistics) -> tuple[float | None, float | None, float]:
    """Median norm of b over a's; cosine of the mean rows; how much of a row of a its mean is, by length."""
    one, other = a.dimensions.result(), b.dimensions.result()
    first, second = a.norms.result().median, b.norms.result().median
    ratio = second / first if first and second else None
    if one.mean is None or other.mean is None or one.variance is None:
        return ratio, None, 0.0
    sizes = float(one.mean.norm()) * float(other.mean.norm())
    share = float(one.mean.norm() / (one.mean.square() + one.variance).sum().sqrt().clamp_min(1e-300))
    return ratio, float(one.mean @ other.mean) / sizes if sizes > 0 else None, share


def _components_alike(a: Fingerprint, b: Fingerprint, slot: int) -> bool:
    """Whether the largest components have the same share of the variance; true where no sample says otherwise."""
    found = [f.samples[slot].result().shares for f in (a, b) if slot in f.samples]
    if len(found) < 2 or found[0] is None or found[1] is None:
        return True
    count = min(8, len(found[0]), len(found[1]))
    first, second = (shares[:count].clamp_min(1e-12).log() for shares in (found[0], found[1]))
    return float((first - second).abs().mean()) <= COMPONENTS_ALIKE


def between(a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...]) -> list[list[Distance]]:
    """Distances [entry of B][entry of A]."""
    whole_a, whole_b = ([f.statistics(e, classes) for e in range(len(f.entries))] for f in (a, b))
    return [[distance(one, other) for one in whole_a] for other in whole_b]
