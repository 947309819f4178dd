"""All that the report draws besides the verdict, from what the diagnosis has at hand; nothing here changes what it says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from draftscope.diagnose.breakdown import breakdowns
from draftscope.diagnose.portraits import portraits, short
from draftscope.diagnose.strips import as_read, requests
from draftscope.diagnose.traininglog import Curve, Point
from draftscope.faults.facts_data import CurveFacts
from draftscope.views import Learning, Views

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

POINTS = 300
"""Records of a training curve kept."""


def views(examination: Examination) -> Views:
    """Figures of states, requests, acceptance and training."""
    channels, components = portraits(examination.case)
    replayed = as_read(examination)
    tokenizer: Any = examination.tokenizer
    return Views(
        channels=channels, components=components,
        requests=requests(examination, tokenizer, replayed),
        breakdowns=breakdowns(examination, tokenizer, replayed),
        learning=None if examination.curve is None or examination.m.data.curve is None
        else learning(examination.curve, examination.m.data.curve),
    )


def learning(curve: Curve, facts: CurveFacts) -> Learning:
    """The log thinned: of so many records one, with the mean loss of all that it stands for."""
    points = [p for p in curve.points if p.loss is not None and math.isfinite(p.loss)]
    each = max(1, math.ceil(len(points) / POINTS))
    blocks = [points[i : i + each] for i in range(0, len(points), each)]
    rated = any(p.rate is not None for p in points)
    return Learning(
        format=curve.format, records=facts.points, step=[block[-1].step for block in blocks],
        loss=[short(sum(p.loss or 0.0 for p in block) / len(block)) for block in blocks],
        rate=[_rate(block[-1]) for block in blocks] if rated else [],
        uniform=facts.uniform, held_what=facts.held_what, held_step=[step for step, _ in facts.held[-POINTS:]],
        held=[short(value) for _, value in facts.held[-POINTS:]], restarts=[restart.step for restart in facts.restarts],
    )


def _rate(point: Point) -> float | None:
    return short(point.rate) if point.rate is not None and math.isfinite(point.rate) else None
