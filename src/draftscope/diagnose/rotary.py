"""Rotary tables other than the draft's own: bases in common use, the target's, and the base that training states tell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftscope.diagnose.case import Case
from draftscope.diagnose.explaining import some
from draftscope.diagnose.ladder import Ladder, Repair
from draftscope.eagle3.replay import replay
from draftscope.eagle3.replayed import Replay, compare
from draftscope.faults.facts_checkpoint import OtherTheta
from draftscope.states.places import Remote
from draftscope.states.tensorfile import read_json
from draftscope.states.types import Sequence

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

THETAS = (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 8e6, 1e7)
"""Bases in common use; the target's own is tried beside them."""
NOTICEABLE = 0.005
"""Fall of -log p from which another base counts."""
SCREENED = 4
"""Sequences on which bases are tried; the best one then on all."""


def try_thetas(examination: Examination, ladder: Ladder, meant: Repair) -> None:
    """Replay training states under other bases; kept if one is better beyond chance, paired by sequence."""
    case, m = examination.case, examination.m
    chosen = case.heldout or case.train
    if m.checkpoint is None or case.checkpoint is None or chosen is None:
        return
    own = dict(case.checkpoint.config.rope_parameters)
    configured = float(own.get("rope_theta", 1e4))
    sequences = some(chosen.sequences)

    def under(theta: float, these: list[Sequence]) -> Replay:
        settings = {**meant.reading.settings, "rope_parameters": {**own, "rope_theta": theta}}
        draft = ladder.draft(replace(meant.reading, settings=settings), meant.rebuilt_map)
        return replay(draft, these, parts=case.parts, k=case.k)

    def gained(theta: float, these: list[Sequence]) -> tuple[float, tuple[float, float] | None]:
        _, found = compare(before.only({s.name for s in these}), under(theta, these), seed=case.inputs.seed)
        return (0.0 if found.value is None else found.value), found.interval

    before = under(configured, sequences)
    bases = sorted({*THETAS, *([target_rope(case)["rope_theta"]] if target_rope(case) else [])} - {configured})
    best = min(bases, key=lambda theta: gained(theta, sequences[:SCREENED])[0])
    gain, interval = gained(best, sequences)
    if interval is None or interval[1] > -NOTICEABLE:
        return
    m.checkpoint.theta = OtherTheta(configured, best, before.rung("all").nll or 0.0, gain, interval, own)
    examination.steps.append(f"on the training states the draft does better with a rope theta of {best:g} than with the "
                             f"{configured:g} of its configuration: -log p {gain:+.3f}")


def target_config(case: Case) -> dict[str, Any]:
    """The target's config.json, of its text part; empty where there is none."""
    if case.parts is None or isinstance(case.parts.folder, Remote):
        return {}
    path = case.parts.folder / "config.json"
    if not path.is_file():
        return {}
    raw = read_json(path)
    found = raw.get("text_config", raw) if isinstance(raw, dict) else {}
    return found if isinstance(found, dict) else {}


def target_rope(case: Case) -> dict[str, Any]:
    """The target's own rotary table, as `DraftConfig.rope_parameters` spells one; empty where its file names none."""
    raw = target_config(case)
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        return {}
    theta = parameters.get("rope_theta") or raw.get("rope_theta")
    if theta is None:
        return {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return {**{k: v for k, v in parameters.items() if k not in ("type",)}, "rope_type": kind, "rope_theta": float(theta)}
