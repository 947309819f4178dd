"""Whether the serving target's weights are the given ones, rounded: the target run again with rounded weights."""

from __future__ import annotations

import torch

from draftscope.boundaries import Boundary
from draftscope.compare.maps import error_of
from draftscope.diagnose.case import Case
from draftscope.diagnose.sides import choosing
from draftscope.faults.measurements import Measurements
from draftscope.faults.target_quant import BEYOND, growth
from draftscope.target.quantised import PRECISIONS, quantised

LARGEST = 4 << 30
"""Bytes of weights from which no rounded copy is made."""
SEQUENCES = 4


def try_precisions(case: Case, m: Measurements) -> None:
    """Fill `rounded` of the serving side: the slots' error against the target with its weights rounded, by precision.

    Only where the slots are all at their boundaries and further off than the training files' rounding.
    """
    found = growth(m)
    if found is None or case.target is None or case.serve is None or m.serve is None or m.reference is None:
        return
    boundary, error = found.deepest
    if error <= BEYOND * found.trained.get(boundary, 0.0) or error < m.serve.detail.resolution:
        return
    if sum(p.numel() * p.element_size() for p in case.target.model.parameters()) > LARGEST:
        return
    names = choosing([s.name for s in case.serve.sequences])[:SEQUENCES]
    sequences = [s for s in case.serve.sequences if s.name in names]
    taps = [Boundary(place.boundary or 0) for place in m.reference]
    for precision in PRECISIONS:
        target = quantised(case.target, precision)
        errors = []
        for sequence in sequences:
            own = target.forward(sequence.token_ids[None, : sequence.rows], taps).taps[0, 1:].float()
            errors.append(error_of(sequence.features[1:].float(), own.cpu()).flatten())
        m.serve.detail.rounded[precision] = float(torch.cat(errors).nanmedian())
