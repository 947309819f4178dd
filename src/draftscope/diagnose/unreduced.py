"""Slots that were taken before the tensor-parallel ranks' outputs were summed: what one rank gave to a layer's MLP alone.

Engines that fuse the sum with the next layer's norm hand a layer's output on unsummed, and what is taken there is the stream
between attention and MLP plus one rank's part of the MLP. The MLP's output is cut into the parts of up to `FINEST` ranks, and the
factor of each part in what the slot holds beyond that stream is fitted by least squares: 1 where the part is there, 0 where not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftscope.compare.evidence import SINK
from draftscope.compare.maps import BETTER, FEWEST, MAPPED, error_of, median_error
from draftscope.diagnose.case import Case, Selected
from draftscope.diagnose.sides import choosing
from draftscope.faults.facts_rows import Share
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.states.types import Sequence
from draftscope.target.model import Target

FINEST = 8
RANKS = (2, 4, 8)
ROWS = 1024
"""Rows looked at, at most; fewer of wide targets, whose parts take up to BYTES a slot."""
BYTES = 1 << 28
NOTICEABLE = 0.02
"""Error of a slot from which it may be short of a part of a sum."""
WHOLE = 0.25
"""How far from 0 or 1 a fitted factor may be."""

Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one slot, float64: x, the whole stream and the partial one [N, Ht], and the parts of the MLP's output [N, FINEST, Ht]."""


def unreduced(case: Case, m: Measurements) -> list[str]:
    """Fill `shares` of both sides, for slots that are not what they should be; what was found, in words."""
    steps = []
    for facts, selected in ((m.train, case.train), (m.serve, case.serve)):
        if facts is None or selected is None or case.target is None or facts.proof != "sweep" or not case.target.partials:
            continue
        wanted = {slot: b for slot, b in _wanted(m, facts).items() if _off(facts, slot)}
        if not wanted:
            continue
        found = _look(case.target, selected, wanted)
        m.rows[facts.name].shares = found
        steps += [f"{facts.where(one.slot)}: boundary {one.wanted} with rank {one.rank}'s of {one.ranks} parts of its MLP alone "
                  f"(error {one.error:.2g}, the whole {one.plain:.2g})" for one in found]
    return steps


def _wanted(m: Measurements, facts: SideFacts) -> dict[int, int]:
    """Whole streams behind a layer that a side's slots should hold; of a training side that is its own reference, by the
    configuration."""
    if facts.name == "train" and m.departed != "train":
        return dict(enumerate(m.expected or ())) if len(m.expected or ()) == len(facts.slots) else {}
    return {slot: p.boundary for slot, p in enumerate(m.reference or ())
            if p.boundary and p.kind == "stream" and p.norm == "pre" and slot < len(facts.slots)}


def _off(facts: SideFacts, slot: int) -> bool:
    placed = facts.slots[slot]
    return placed.boundary is None or placed.kind != "stream" or (placed.error or 0.0) > NOTICEABLE


def _look(target: Target, selected: Selected, wanted: dict[int, int]) -> list[Share]:
    names, rows = set(choosing([s.name for s in selected.sequences])), 0
    most = max(FEWEST, min(ROWS, BYTES // (8 * FINEST * target.width)))
    parts: dict[int, list[Rows]] = {slot: [] for slot in wanted}
    boundaries = {b for b in wanted.values() if 1 <= b <= target.layers}
    for sequence in selected.sequences:
        count = min(sequence.rows, most - rows)
        if sequence.name not in names or count < 2:
            continue
        rows += count
        run = target.run(sequence.token_ids[None, :count], boundaries, boundaries)
        for slot, b in wanted.items():
            if b in boundaries and (each := target.shares(b, run.partials[b], FINEST)) is not None:
                parts[slot].append(_usable(sequence, slot, run.streams[b][0], run.partials[b][0], each[0]))
    found = [_share(slot, wanted[slot], several) for slot, several in parts.items() if several]
    return [one for one in found if one is not None]


def _usable(sequence: Sequence, slot: int, stream: Tensor, partial: Tensor, each: Tensor) -> Rows:
    x, stream = sequence.features[: len(stream), slot].double(), stream.double().cpu()
    norms = stream.norm(dim=-1)
    rows = x.isfinite().all(-1) & (norms <= SINK * norms.median())
    rows[0] = False
    return x[rows], stream[rows], partial.double().cpu()[rows], each.double().cpu()[rows]


def _share(slot: int, boundary: int, several: list[Rows]) -> Share | None:
    """One rank's part in rows x [N, Ht] of a slot, fitted on every other row and judged on the rest; None where it is none.

    Args:
        several: by sequence.
    """
    x, stream, partial, each = (torch.cat(column) for column in zip(*several, strict=True))
    if len(x) < FEWEST or median_error(partial + each.sum(1), stream) > MAPPED * median_error(partial, stream):
        return None  # the MLP's output is not just added here (a norm or a factor comes behind it)
    beyond = x - partial
    fit = each[::2]
    gram = torch.einsum("njh,nkh->jk", fit, fit)
    factors = torch.linalg.lstsq(gram, torch.einsum("njh,nh->j", fit, beyond[::2])[:, None]).solution[:, 0]
    there = factors.round()
    if bool(((factors - there).abs() > WHOLE).any()):
        return None
    plain = float(error_of(x[1::2], stream[1::2]).median())
    for ranks in RANKS:
        size = FINEST // ranks
        for rank in range(ranks):
            one = torch.zeros_like(there)
            one[rank * size : (rank + 1) * size] = 1
            if torch.equal(there, one):
                left = x[1::2] - (partial + torch.einsum("j,njh->nh", one, each))[1::2]
                error = float((left.norm(dim=-1) / stream[1::2].norm(dim=-1)).median())
                return Share(slot, boundary, ranks, rank, len(x), plain, error) if error < BETTER * plain else None
    return None
