"""Steps 4 and 5: what every slot holds, by the best means at hand, and what it should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftscope.boundaries import default_boundaries
from draftscope.compare.evidence import Candidate
from draftscope.compare.pairing import Matched, match_entries, pair
from draftscope.diagnose.case import Selected
from draftscope.diagnose.holding import hold
from draftscope.diagnose.ladder import Ladder, as_meant
from draftscope.diagnose.precision import try_precisions
from draftscope.diagnose.reference import decide, from_boundaries
from draftscope.diagnose.sides import SweptSide, candidate, side_facts, sweep_side
from draftscope.diagnose.unpaired import by_statistics
from draftscope.diagnose.unreduced import unreduced
from draftscope.faults.measurements import TRAINED
from draftscope.findings import Placed
from draftscope.target.recorded import RecordedSweep

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

MATCHED = 0.05
"""Relative error up to which a served slot equals a training entry on the rows of a shared text."""
TEXTS_DIFFER = 0.2
"""-log p by which two texts of one target may differ without anything being wrong."""
CLEAR = 0.5
"""Least margin over the next entry."""


def place(examination: Examination) -> None:
    """Place both sides, decide what the slots should hold, and set up the ladder."""
    case, m = examination.case, examination.m
    if case.target is not None or case.recorded is not None:
        _by_sweep(examination)
    else:
        examination.next.append("give the target's weights (--target): running it over the same tokens places every slot")
        _by_parts(examination)
        _by_pairs(examination)
        by_statistics(examination)
    train = m.train.slots if m.train and m.train.proof == "sweep" else []
    serve = m.serve.slots if m.serve and m.serve.proof == "sweep" else []
    if case.checkpoint is not None and _has_embedding(examination):
        examination.ladder = Ladder(case, examination.swept.get("serve"), None)
    m.reference, m.reference_from, m.departed = decide(train, serve, m.expected, lambda: _prefers_served(examination))
    compared = m.serve is not None and (
        m.serve.proof == "pairs" or (m.serve.proof == "parts" and m.train is not None and bool(m.train.embedding))
    )
    if compared:
        # Told from training rows themselves; the configuration only lends the entries their names.
        m.reference_from = TRAINED
    if examination.ladder is not None:
        examination.ladder.reference = m.reference
    hold(case, m, examination.swept)
    examination.steps += unreduced(case, m)
    try_precisions(case, m)


def _by_sweep(examination: Examination) -> None:
    """The target run over the same tokens: every slot against every boundary."""
    case, m = examination.case, examination.m
    target = case.recorded or case.target
    assert target is not None
    wanted = {b for b in (m.expected or ()) if 0 <= b <= target.layers} | set(default_boundaries(target.layers))
    parts: set[Candidate] = set()
    for facts, selected in ((m.train, case.train), (m.serve, case.serve)):
        if facts is None or selected is None or (case.recorded is not None and not _covered(case.recorded, selected)):
            continue
        what = "training states" if facts.name == "train" else "capture"
        examination.report(f"running the target over {selected.rows} tokens of the {what}")
        swept = sweep_side(target, selected, tuple(sorted(wanted)), parts=parts)
        if turned := _turned_elsewhere(swept) - wanted:
            # The map between these and what was recorded is fitted on the target's own states there.
            wanted |= turned
            swept = sweep_side(target, selected, tuple(sorted(wanted)), parts=parts)
        examination.swept[facts.name] = swept
        placed = side_facts(facts.name, selected, swept)
        facts.slots, facts.last, facts.proof, facts.detail = placed.slots, placed.last, "sweep", placed.detail
        parts |= {candidate(p) for p in facts.slots if p.boundary is not None and p.kind in ("branch", "partial")}
        wanted |= {p.boundary for p in facts.slots if p.boundary is not None and p.kind == "stream" and p.norm == "pre"}
        held = ", ".join(_words(p) for p in facts.slots)
        examination.steps.append(f"{facts.name} slots placed against {target.layers + 1} boundaries: {held}")


def _turned_elsewhere(swept: SweptSide) -> set[int]:
    """Boundaries at which slots were placed in another basis."""
    every = [*swept.placed, *(placed for several in swept.phases.values() for placed in several)]
    return {p.boundary for p in every if p.transform in ("rotation", "permutation") and p.boundary is not None}


def _covered(recorded: RecordedSweep, selected: Selected) -> bool:
    return all(recorded.covered(s.token_ids[: s.rows]) == s.rows for s in selected.sequences)


def _by_parts(examination: Examination) -> None:
    """Only the embedding can be told from the target's ends alone; where the training data holds it too, it is no departure."""
    m = examination.m
    trained = [] if m.train is None else m.train.embedding
    for facts in m.sides():
        found = [bool(e) for e in facts.embedding]
        if facts.name == "serve":
            found = [e and not (i < len(trained) and trained[i]) for i, e in enumerate(found)]
        if any(found):
            facts.slots = [_at(i, 0, None) if is_embedding else _unplaced(i) for i, is_embedding in enumerate(found)]
            facts.proof = "parts"


def _by_pairs(examination: Examination) -> None:
    """Served slots against training entries, on rows of texts that begin alike (a shared system prompt will do)."""
    case, m = examination.case, examination.m
    if case.train is None or case.serve is None or m.serve is None or m.expected is None:
        return
    pairing = pair(case.train.sequences, case.serve.sequences)
    examination.matched["paired"] = dict(pairing.counts)
    matched = match_entries(pairing)
    if not matched:
        examination.steps.append("no served text begins like a training text: no row could be paired")
        return
    slots = len(m.expected)
    for found in matched:
        if found.entry is None or found.error is None or found.error > MATCHED or (found.margin or 0) < CLEAR:
            continue
        if len(m.serve.slots) < len(matched):
            m.serve.slots = [_unplaced(i) for i in range(len(matched))]
        if m.serve.slots[found.slot].boundary is None and found.entry < slots:
            m.serve.slots[found.slot] = _at(found.slot, m.expected[found.entry], found)
            m.serve.proof = "pairs"
    text = ", ".join(
        f"slot {f.slot} is {'no training entry' if f.entry is None else f'training entry {f.entry}'} (error {f.error or 0:.2g})"
        for f in matched
    )
    examination.steps.append(f"{pairing.paired} served rows paired with training rows of the same text: {text}")


def _has_embedding(examination: Examination) -> bool:
    case = examination.case
    if case.parts is not None or (case.checkpoint is not None and "embed_tokens.weight" in case.checkpoint.tensors):
        return True
    examination.next.append(
        "the draft has no embedding of its own: give the target, or only its embedding (--target), to replay it"
    )
    return False


def _prefers_served(examination: Examination) -> bool | None:
    """Whether the draft knows states as the configuration has them better than as the training files have them.

    On the same served tokens, both re-made by the target, where that can be done; else on the two sides as they are, with a
    margin for their different texts. None = can't be told.
    """
    ladder, m = examination.ladder, examination.m
    if ladder is None or m.train is None or examination.case.serve is None or m.expected is None:
        return None
    if m.shapes.get("serve") != m.shapes.get("draft"):
        return None
    meant = as_meant(m)
    found = []
    for reference in (tuple(m.train.slots), from_boundaries(m.expected)):
        ladder.reference = reference
        found.append(ladder.remade(meant).rung("all").nll if ladder.can_remake else None)
    ladder.reference = None
    trained, configured = found
    if trained is not None and configured is not None:
        return configured < trained
    if m.shapes.get("train") != m.shapes.get("draft"):
        return None
    train, serve = ladder.trained(meant).rung("all").nll, ladder.served(meant).rung("all").nll
    return None if train is None or serve is None else serve < train - TEXTS_DIFFER


def _unplaced(slot: int) -> Placed:
    return Placed(slot=slot, label="", boundary=None, norm=None, kind=None, margin=None)


def _at(slot: int, boundary: int, matched: Matched | None) -> Placed:
    placed = from_boundaries([boundary])[0]
    figures = (
        {}
        if matched is None
        else {
            "margin": matched.margin,
            "error": matched.error,
            "lag": matched.lag,
            "scale": matched.scale or 1.0,
        }
    )
    return placed.model_copy(update={"slot": slot, **figures})


def _words(placed: Placed) -> str:
    if placed.boundary is None:
        return "unplaced"
    text = f"{placed.boundary}" + ("" if placed.kind == "stream" else f" ({placed.kind})")
    text += " after the final norm" if placed.norm == "post" else ""
    if placed.lag:
        text += f" lag {placed.lag:+d}"
    if placed.scale is not None and abs(placed.scale - 1) > 0.02:
        text += f" x{placed.scale:.3g}"
    return text
