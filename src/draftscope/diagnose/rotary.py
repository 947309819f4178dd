"""Whether the draft was trained with another rotary base than its configuration names: its own training states tell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftscope.diagnose.explaining import some
from draftscope.diagnose.ladder import Ladder, Repair
from draftscope.eagle3.replay import replay
from draftscope.eagle3.replayed import compare
from draftscope.faults.facts_checkpoint import OtherTheta

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

THETAS = (1e4, 5e5, 1e6)
"""Bases in common use; the target's own is tried beside them."""
NOTICEABLE = 0.005
"""Fall of -log p from which another base counts."""


def try_thetas(examination: Examination, ladder: Ladder, meant: Repair) -> None:
    """Replay training states under other bases; kept if one is better beyond chance, paired by sequence."""
    case, m = examination.case, examination.m
    chosen = case.heldout or case.train
    if m.checkpoint is None or case.checkpoint is None or chosen is None:
        return
    own = dict(case.checkpoint.config.rope_parameters)
    configured = float(own.get("rope_theta", 1e4))
    sequences = some(chosen.sequences)
    before = replay(ladder.draft(meant.reading, meant.rebuilt_map), sequences, parts=case.parts, k=case.k)
    best: OtherTheta | None = None
    for theta in sorted({*THETAS, *_of_target(examination)} - {configured}):
        settings = {**meant.reading.settings, "rope_parameters": {**own, "rope_theta": theta}}
        draft = ladder.draft(replace(meant.reading, settings=settings), meant.rebuilt_map)
        after = replay(draft, sequences, parts=case.parts, k=case.k)
        _, found = compare(before, after, seed=case.inputs.seed)
        if found.value is None or found.interval is None or found.interval[1] > -NOTICEABLE:
            continue
        if best is None or found.value < best.gain:
            best = OtherTheta(configured, theta, before.rung("all").nll or 0.0, found.value, found.interval, own)
    if best is not None:
        m.checkpoint.theta = best
        examination.steps.append(f"on the training states the draft does better with a rope theta of {best.theta:g} than with "
                                 f"the {best.configured:g} of its configuration: -log p {best.gain:+.3f}")


def _of_target(examination: Examination) -> set[float]:
    target = examination.case.target
    if target is None:
        return set()
    text = target.config.get_text_config() if hasattr(target.config, "get_text_config") else target.config
    parameters = getattr(text, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    return {float(theta)} if theta else set()
