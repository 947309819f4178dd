"""How far each slot is from its own entry, by class of token and by range of positions, and which of them carry the difference.

The difference of two mean rows is the sum of what each kind of row contributes: with shares w of the rows and mean rows m,

    m_b - m_a = sum_k (w_ka + w_kb) / 2 x (m_kb - m_ka)  +  sum_k (w_kb - w_ka) x (m_ka + m_kb) / 2

The first sum is what differs within kinds, the second what other shares of the kinds make of it (Kitagawa 1955, Journal of the
American Statistical Association 50; in economics Oaxaca and Blinder). Each term is projected onto the whole difference, so that
the shares add up to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from draftscope.compare.distances import Model, distance
from draftscope.compare.yardstick import FAR, Yardstick, yardsticks
from draftscope.scan.fingerprint import ORDINARY, Fingerprint, RowClass, Statistics

FEWEST_ROWS = 8

By = Literal["class", "position"]


class Effect(Model):
    """One slot against its own entry, over some of the rows; `effect` in units of the reference's groups.

    `name` is a class (`first`, `sink`, `prompt`, `answer`; `other` where answers are unknown) or a range of positions.
    """

    slot: int
    by: By
    name: str
    rows_a: int
    rows_b: int
    distance: float
    effect: float | None
    smallest: float | None = Field(None, description="the distance that would have been seen in so many rows")
    yardstick: Literal["groups", "all rows", "halves"] = Field(
        "all rows", description="what the unit rests on: the groups' rows of this kind, all their rows, or A's halves alone")
    share: float | None = Field(
        None, description="of the squared difference of the mean rows, carried within this kind of row: by position of the rows "
                          "compared, by class of the ordinary rows")


class Mix(Model):
    """What is left of a slot's difference: other shares of the kinds of row. With the shares of the effects it adds up to 1."""

    slot: int
    by: By
    share: float


@dataclass
class _Rows:
    """One slot's rows by kind, on both sides; `shared` are the kinds among which its difference is divided."""

    by: By
    kinds: dict[str, tuple[Statistics, Statistics]]
    shared: frozenset[str]


def effects(
    a: Fingerprint, b: Fingerprint, classes: tuple[RowClass, ...], yards: Sequence[Yardstick]
) -> tuple[list[Effect], list[Mix]]:
    """Every slot that both have, by class of token and by range of positions."""
    told = all(any(c == "answer" for _, c, _ in f.cells) for f in (a, b))
    names: dict[RowClass, str] = {"first": "first", "sink": "sink", "other": "prompt" if told else "other", "answer": "answer"}
    of_class = {names[c]: yards if classes == (c,) else yardsticks(a, (c,)) for c in ORDINARY}
    places = sorted({*a.of_kind("position"), *b.of_kind("position")}, key=lambda n: int(n.split()[0]))
    found: list[Effect] = []
    mixed: list[Mix] = []
    for slot in range(min(a.slots, b.slots)):
        for rows in (
            _Rows("class", {name: (a.statistics(slot, (c,)), b.statistics(slot, (c,))) for c, name in names.items()},
                  frozenset(names[c] for c in ORDINARY)),
            _Rows("position", {name: (_at(a, name, slot, classes), _at(b, name, slot, classes)) for name in places},
                  frozenset(places)),
        ):
            seen = {name: pair for name, pair in rows.kinds.items() if _count(pair) >= FEWEST_ROWS}
            shares = divided({name: rows.kinds[name] for name in rows.shared}, among=frozenset(seen))
            found += [_effect(slot, rows.by, name, pair, yards[slot], of_class[name][slot] if name in of_class else None,
                              (shares or {}).get(name)) for name, pair in seen.items()]
            if shares is not None:
                mixed.append(Mix(slot=slot, by=rows.by, share=1 - sum(shares.values())))
    return found, mixed


def _at(fingerprint: Fingerprint, name: str, slot: int, classes: tuple[RowClass, ...]) -> Statistics:
    part = fingerprint.parts.get(("position", name))
    return Statistics() if part is None else part.statistics(slot, classes)


def _count(pair: tuple[Statistics, Statistics]) -> int:
    return min(one.dimensions.count for one in pair)


def _effect(slot: int, by: By, name: str, pair: tuple[Statistics, Statistics], yard: Yardstick, own: Yardstick | None,
            share: float | None) -> Effect:
    one, other = (held.dimensions.count for held in pair)
    kind: Literal["groups", "all rows", "halves"] = "all rows" if yard.natural else "halves"
    if own is not None and own.natural:
        kind, yard = "groups", own
    unit, found = yard.unit(other, against=one), distance(*pair)
    assert found.total is not None
    return Effect(
        slot=slot, by=by, name=name, rows_a=one, rows_b=other, distance=found.total, yardstick=kind, share=share,
        effect=None if unit is None else found.total / unit, smallest=None if unit is None else FAR * unit,
    )


def divided(kinds: Mapping[str, tuple[Statistics, Statistics]], among: frozenset[str]) -> dict[str, float] | None:
    """The share of the squared difference of the mean rows that is carried within each kind of `among`; the rest is the mix.

    None where a side has no rows, or there is no difference.
    """
    totals = [sum(pair[side].dimensions.count for pair in kinds.values()) for side in (0, 1)]
    if min(totals) == 0:
        return None
    weights = {name: [pair[side].dimensions.count / totals[side] for side in (0, 1)] for name, pair in kinds.items()}
    means = {name: [_mean(pair[side]) for side in (0, 1)] for name, pair in kinds.items()}
    whole = [sum((weights[name][side] * mean for name in kinds if (mean := means[name][side]) is not None),
                 start=torch.zeros((), dtype=torch.float64)) for side in (0, 1)]
    difference = whole[1] - whole[0]
    squared = float(difference.square().sum())
    if squared == 0:
        return None
    result = {}
    for name in among & kinds.keys():
        one, other = means[name]
        if one is not None and other is not None:
            result[name] = float(sum(weights[name]) / 2 * ((other - one) @ difference)) / squared
    return result


def _mean(held: Statistics) -> Tensor | None:
    return held.dimensions.mean if held.dimensions.count else None
