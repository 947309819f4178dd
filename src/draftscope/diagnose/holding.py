"""Slots and last states held against what they should be, whole and by phase, with the maps that explain a difference."""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from draftscope.compare.evidence import SINK
from draftscope.compare.maps import FEWEST, error_of, norm_errors, partial_factor, turn_of
from draftscope.diagnose.case import Case, Selected
from draftscope.diagnose.changing import rows_of
from draftscope.diagnose.sides import SweptSide, choosing
from draftscope.faults.facts_slots import Held
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.findings import Placed
from draftscope.states.types import Sequence
from draftscope.target.parts import TargetParts
from draftscope.target.spoiling import Phase

FAR = 0.3
"""Error from which an orthogonal map is looked for."""
ROWS = 4096
PHASES: tuple[Phase | None, ...] = (None, "prefill", "verify")


def hold(case: Case, m: Measurements, swept: dict[str, SweptSide]) -> None:
    """Fill `detail.held` of both sides: slots against their reference, last states against boundary n."""
    for facts, selected in ((m.train, case.train), (m.serve, case.serve)):
        if facts is None or selected is None or facts.name not in swept:
            continue
        wanted = _wanted(m, facts)
        phases = PHASES if facts.detail.phases else (None,)
        side = swept[facts.name]
        sequences = _chosen(selected)
        for phase in phases:
            for slot, boundary in wanted:
                if boundary in side.kept:
                    found = [(s.features[:, slot], side.reference(s.name, [boundary])[:, 0], s) for s in sequences]
                    facts.detail.held += _held(slot, phase, boundary, found, case.parts)
            lasts = [(s.last, side.last[s.name], s) for s in sequences if s.last is not None]
            if lasts and m.layers is not None:
                facts.detail.held += _held(-1, phase, m.layers, lasts, case.parts)


def _wanted(m: Measurements, facts: SideFacts) -> list[tuple[int, int]]:
    """(slot, boundary) that a side's slots should hold: what the reference says; the training side's own where it is that."""
    reference: Several[Placed] = m.reference or ()
    if facts.name == "train" and m.departed != "train" and m.expected is not None and len(m.expected) == len(facts.slots):
        return [(p.slot, b if p.boundary is None or not p.transform.startswith(("none", "lag", "scale")) else p.boundary)
                for p, b in zip(facts.slots, m.expected, strict=True)]
    return [(slot, p.boundary) for slot, p in enumerate(reference)
            if p.boundary is not None and p.kind == "stream" and slot < len(facts.slots)]


def _chosen(selected: Selected) -> list[Sequence]:
    names = set(choosing([s.name for s in selected.sequences]))
    return [s for s in selected.sequences if s.name in names]


def _held(
    slot: int, phase: Phase | None, boundary: int, found: list[tuple[Tensor, Tensor, Sequence]], parts: TargetParts | None,
) -> list[Held]:
    xs, rs = [], []
    for states, own, sequence in found:
        x, r = states.float(), own.float()
        norms = r.norm(dim=-1)
        rows = x.isfinite().all(-1) & (norms <= SINK * norms.median()) & rows_of(sequence, phase)
        rows[0] = False
        xs.append(x[rows])
        rs.append(r[rows])
    x, r = torch.cat(xs)[:ROWS], torch.cat(rs)[:ROWS]
    if len(x) < FEWEST:
        return []
    plain = float(error_of(x, r).median())
    once = twice = float("inf")
    if parts is not None:
        _, once, twice = norm_errors(x, r, parts.final_norm)
    return [Held(
        slot, phase, boundary, len(x), plain, once, twice, partial_factor(x, r), turn_of(x, r) if plain > FAR else None,
    )]
