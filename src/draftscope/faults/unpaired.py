"""Suspicions from statistics of other texts: coarse departures, never more than suspected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftscope.compare.unpaired import Kind, Look
from draftscope.faults.base import Suspicion, Undo
from draftscope.faults.changes import Scale
from draftscope.faults.measurements import Measurements
from draftscope.findings import Evidence, Fix, Recovery

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "layer-set": ("entry", "token alone"), "scale-mult": ("scaled",), "rotated-space": ("turned",), "residual-missing": ("less",),
}
"""What each of these faults looks like."""
_SAYS: Mapping[str, str] = {
    "layer-set": "the served slots do not look like their own training entries but like other states",
    "scale-mult": "the served slots look like their own training entries times a constant",
    "rotated-space": "the served slots look like their own training entries in another basis",
    "residual-missing": "the served slots look as if what the stream carries on were missing",
}
_EXPECTS: Mapping[str, str] = {
    "layer-set": "each slot is nearest to its own training entry, and depends on more than its token, if the wiring is right",
    "scale-mult": "profile over dimensions that of the training entry, norms off by one factor",
    "rotated-space": "norms and sizes of the principal components those of the training entry, dimensions unlike it",
    "residual-missing": "norms short of the training entry's, and cosines with the other slots of the row gone",
}
_FIX: Mapping[str, str] = {
    "layer-set": "then change the captured layers to those of the training data.",
    "scale-mult": "then find the multiplier that is applied on one side only.",
    "rotated-space": "then turn the captured states back before they reach the draft's fc.",
    "residual-missing": "then capture hidden + residual.",
}


def unpaired(fault: str, m: Measurements) -> list[Suspicion]:
    """The suspicion of one fault, where no slot could be placed and statistics speak for it."""
    facts = m.unpaired
    if facts is None or m.serve is None or m.serve.proof != "none":
        return []
    found = [look for look in facts.looks if look.kind in KINDS[fault]]
    if not found:
        return []
    undo, recovery = _undo(fault, found, facts.looks)
    text = "; ".join(f"slot {look.slot}: {look.says}" for look in found)
    caveats = ["a state from before the first layer that was trained on is short, too"] if fault == "residual-missing" else []
    return [Suspicion(
        fault=fault, side="serve", where=[f"slot {look.slot}" for look in found], says=f"{_SAYS[fault]}: {text}",
        strength="suspected",
        evidence=[Evidence(
            hypothesis=_SAYS[fault],
            prediction=_EXPECTS[fault],
            measurement="norms, per-dimension means and variances and principal components of each slot against each training "
            f"entry, and cosines between the slots of a row; in units of what {facts.groups} differ by",
            result=text,
            decides="a candidate only: the same tokens on both sides, or the target's weights, would prove it",
            figures={f"slot {look.slot}": look.model_dump(exclude={"slot", "says"}) for look in facts.looks} | {
                "cosines between slots": {
                    f"{c.slots[0]} and {c.slots[1]}": {"train": c.a, "serve": c.b, "units": c.effect} for c in facts.couplings}},
        )],
        fix=Fix(says=f"Place the slots first (give --target, or training states of the same texts): {_FIX[fault]}"),
        recovery=recovery, undo=undo, caveats=caveats,
    )]


def _undo(fault: str, found: Sequence[Look], every: Sequence[Look]) -> tuple[Undo | None, Recovery]:
    """What a replay can try on the served states alone: another order, a factor."""
    if fault == "scale-mult":
        states = tuple(Scale(look.slot, 1 / look.norm_ratio) for look in found if look.norm_ratio)
        return Undo(states=states), "replayed"
    if fault == "layer-set":
        held = [look.entry if look.kind in ("entry", "own") else None for look in every]
        if sorted(map(str, held)) == sorted(map(str, range(len(every)))):
            return Undo(order=tuple(held.index(slot) for slot in range(len(every)))), "replayed"
    return None, "bounded"
