"""What so much data would have shown: the differences that a clean verdict excludes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftscope.diagnose.ladder import as_meant, combine
from draftscope.diagnose.reference import SAME_SCALE
from draftscope.eagle3.acceptance import Difference
from draftscope.eagle3.replayed import GATE_SHARE, Replay, compare
from draftscope.faults.measurements import SideFacts
from draftscope.findings import Rung
from draftscope.shares import at_most

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

NOTICEABLE = 0.02
"""Accept length that a loss has to exceed, beyond its interval."""
UNPAIRED = 0.05
"""The same where no interval of the difference is known."""
REPLAYED = ("reference", "served", "as_read")


def paired(examination: Examination, upper: str, lower: str) -> Difference | None:
    """Lower minus upper accept length where both rungs are replays of the same sequences; None where they are not."""
    if upper not in REPLAYED or lower not in REPLAYED or examination.ladder is None:
        return None
    first, second = _replay(examination, upper), _replay(examination, lower)
    found, _ = compare(first, second, second.readout, seed=examination.case.inputs.seed)
    return found if found.interval is not None else None


def _replay(examination: Examination, rung: str) -> Replay:
    ladder, meant = examination.ladder, as_meant(examination.m)
    assert ladder is not None
    if rung == "reference":
        return ladder.remade(meant)
    return ladder.served(meant if rung == "served" else combine([], examination.as_read))


def power_of(examination: Examination) -> dict[str, Any]:
    """The smallest effects that this much data would have shown.

    `smallest_length_difference`: of accept length, between the target's own states and what the draft received (paired) or, where
    that could not be made, within the interval of one rung. `rows_amiss`: by side, the share of a slot's rows that may be amiss
    without having shown (95 %); `steps_amiss`: of verify steps, counted otherwise than replayed.
    """
    m = examination.m
    margins = [p.margin for side in m.sides() for p in side.slots if p.margin is not None]
    length, how = _least_length(examination)
    rows = {side.name: _rows_amiss(side) for side in m.sides()}
    gate = m.gate
    steps = None if gate is None else at_most(gate.steps - round(gate.share * gate.steps), gate.steps)
    excludes = []
    swept = [side.name for side in m.sides() if side.proof == "sweep"]
    if swept:
        excludes.append(f"another state in a {' or '.join(swept)} slot, or a factor beyond {SAME_SCALE:.0%}")
    excludes += [f"a fault in {share:.1%} of a slot's {side} rows or more" for side, share in rows.items() if share is not None]
    if steps is not None and gate is not None and gate.share >= GATE_SHARE:
        excludes.append(f"a runtime that counts otherwise in {steps:.1%} of the steps or more")
    if length is not None:
        excludes.append(f"a loss of {length:.2f} of accept length or more ({how})")
    return {
        "rows": {side.name: side.tokens for side in m.sides()},
        "smallest_length_difference": length,
        "smallest_margin": min(margins) if margins else None,
        "steps": None if gate is None else gate.steps,
        "rows_amiss": rows,
        "steps_amiss": steps,
        "excludes": excludes,
    }


def _least_length(examination: Examination) -> tuple[float | None, str]:
    rungs = examination.rungs
    lower = "as_read" if "as_read" in rungs else "served"
    if "reference" in rungs and lower in rungs:
        found = paired(examination, "reference", lower)
        if found is not None and found.interval is not None:
            return NOTICEABLE + (found.interval[1] - found.interval[0]) / 2, "paired with the target's own states"
    rung: Rung | None = rungs.get(lower)
    if rung is None or rung.interval is None:
        return None, ""
    return max(UNPAIRED, (rung.interval[1] - rung.interval[0]) / 2), "against one rung's own spread"


def _rows_amiss(side: SideFacts) -> float | None:
    """The largest share over the slots that were placed row by row; None where none was."""
    shares = [p.share for p in side.slots if p.share is not None]
    if side.proof != "sweep" or not shares:
        return None
    return max(at_most(side.tokens - round(share * side.tokens), side.tokens) or 0.0 for share in shares)
