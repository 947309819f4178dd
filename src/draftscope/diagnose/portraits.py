"""Both sides' slots as figures to look at: channel by channel, and along the directions in which they vary most.

Texts that differ have states that differ, so that this is a hint and never a proof; a slot from another boundary shows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.diagnose.case import Case, Selected
from draftscope.diagnose.finite import states_of
from draftscope.scan.accumulators import Dimensions, Outliers, finite_rows
from draftscope.scan.tally import classes_of
from draftscope.views import SlotChannels, SlotComponents

ROWS = 1024
"""Ordinary rows of each slot and side that are looked at, evenly spread."""
POINTS = 120
"""Rows of each side that are drawn."""
KEPT = 256
"""Channels kept of a slot, the outliers and the furthest among them."""
FURTHEST = 24
ALIKE = 1.25


def portraits(case: Case) -> tuple[list[SlotChannels], list[SlotComponents]]:
    """Of every slot that both sides have in the same width."""
    channels, components = [], []
    train, serve = _rows(case.train), _rows(case.serve)
    for slot in sorted(train.keys() & serve.keys(), key=lambda slot: (slot < 0, slot)):
        a, b = train[slot], serve[slot]
        if a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
            continue
        channels.append(_channels(slot, a, b))
        found = _components(slot, a, b)
        if found is not None:
            components.append(found)
    return channels, components


def _rows(selected: Selected | None) -> dict[int, Tensor]:
    """By slot some ordinary, finite rows [R, H] float32."""
    found: dict[int, list[Tensor]] = {}
    every = 1 if selected is None else max(1, selected.rows // ROWS)
    for sequence in () if selected is None else selected.sequences:
        for slot, rows in states_of(sequence):
            _, _, answer, other = classes_of(rows, None if sequence.answer is None else sequence.answer[: len(rows)])
            chosen = ((answer | other) & finite_rows(rows)).nonzero().flatten()[::every]
            found.setdefault(slot, []).append(rows[chosen].float())
    return {slot: torch.cat(parts)[:ROWS] for slot, parts in found.items()}


def _channels(slot: int, train: Tensor, serve: Tensor) -> SlotChannels:
    sizes, outliers = [], set()
    for rows in (train, serve):
        moments, standing = Dimensions(), Outliers()
        moments.update(rows)
        standing.update(rows)
        held = moments.result()
        assert held.mean is not None and held.variance is not None
        sizes.append((held.variance + held.mean.square()).sqrt())
        outliers |= set(standing.result().channels)
    a, b = sizes
    ratio = (a.clamp_min(1e-30) / b.clamp_min(1e-30)).log().abs()
    furthest = ratio.argsort(descending=True, stable=True)[:FURTHEST].tolist()
    ahead = [*sorted(outliers)[: KEPT // 2], *furthest]
    width = len(a)
    even = range(0, width, max(1, -(-width // max(KEPT - len(set(ahead)), 1))))
    kept = sorted({*ahead, *(range(width) if width <= KEPT else even)})
    logs = torch.stack([a.clamp_min(1e-30).log(), b.clamp_min(1e-30).log()])
    varies = bool((logs.std(1) > 1e-12).all()) if width > 1 else False
    return SlotChannels(
        slot=slot, width=width, train_rows=len(train), serve_rows=len(serve), channel=kept,
        train=[short(a[c]) for c in kept], serve=[short(b[c]) for c in kept], outliers=[c for c in kept if c in outliers],
        alike=float((ratio <= torch.tensor(ALIKE).log()).double().mean()),
        correlation=short(torch.corrcoef(logs)[0, 1]) if varies else None,
    )


def _components(slot: int, train: Tensor, serve: Tensor) -> SlotComponents | None:
    """None where the rows do not vary."""
    count = min(len(train), len(serve), POINTS)
    a, b = (rows[torch.linspace(0, len(rows) - 1, count).long()].double() for rows in (train, serve))
    both = torch.cat([a, b])
    both = both - both.mean(0)
    total = float(both.square().sum())
    if not total:
        return None
    # Of fewer rows than channels, the matrix of their products is the smaller way to the same directions.
    values, vectors = torch.linalg.eigh(both @ both.T)
    values, vectors = values.flip(0)[:2].clamp_min(0), vectors.flip(1)[:, :2]
    # A direction has no sign of its own: the largest entry decides.
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    points = [(short(x), short(y)) for x, y in (vectors * values.sqrt()).tolist()]
    first, second = (float(v) / total for v in values)
    return SlotComponents(slot=slot, explained=(short(first), short(second)), train=points[:count], serve=points[count:])


def short(value: Tensor | float) -> float:
    """To four digits."""
    return float(f"{float(value):.4g}")
