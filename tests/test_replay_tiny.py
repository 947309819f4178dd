"""The engine of this house and replay, on the tiny pair: the same counts, the same states, and both readings of a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import DRAFT, TARGET, tiny_prompts, tiny_target

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.replay import replay
from draftscope.eagle3.stages import stages
from draftscope.engines.transformers import Capture, description
from draftscope.states.opening import open_source
from draftscope.states.types import Sequence, from_trace
from draftscope.target.wiring import Wiring

K = 3


def capture(folder: Path, feedback: str | None = None) -> tuple[list[Sequence], list[int]]:
    target, checkpoint = tiny_target(), load_checkpoint(DRAFT, target_layers=8)
    draft = build_draft(checkpoint, target.parts)
    observer = Capture(folder, description(model=str(TARGET), draft=str(DRAFT), layer_ids=None, k=K))
    answers = generate(
        target, draft, tiny_prompts()["heldout"][:10], wiring=Wiring.of((2, 4, 5)), k=K, max_new=32, stop_ids=target.stop_ids,
        rows=5, feedback=feedback, observer=observer,
    )
    observer.close()
    return [from_trace(trace, 3) for trace in open_source(folder)], [c for a in answers for c in a.accepted_counts]


def test_the_gate_holds_on_what_the_engine_captured(tmp_path: Path) -> None:
    sequences, counts = capture(tmp_path / "capture")
    checkpoint, parts = load_checkpoint(DRAFT, target_layers=8), tiny_target().parts
    draft = build_draft(checkpoint, parts)
    found = replay(draft, sequences, parts=parts, k=K)
    gate = found.gate()
    assert gate.passed and gate.steps > 50 and gate.steps + gate.left_out == len(counts)
    assert found.text()["own"] == len(sequences) and found.text()["share"] > 0.99 and found.text()["pre_norm"] == len(sequences)
    assert found.rung("engine").length == pytest.approx(found.measured().length, abs=0.05) and found.rung("walk").length > 1.5
    unaided = replay(draft, [replace(s, last=None) for s in sequences], k=K)
    assert unaided.rung("walk").joint == found.rung("walk").joint
    there = stages(draft, sequences)
    assert there.fc_error < 1e-4 and there.layer_error < 1e-4 and there.feedback_error["pre"] < 1e-4
    assert there.head_agreement["offset"] > 0.99 and there.feedback_error["post"] > 0.01


def test_another_feedback_in_the_engine_is_proven_by_the_reading_that_passes(tmp_path: Path) -> None:
    sequences, _ = capture(tmp_path / "capture", "post")
    checkpoint, parts = load_checkpoint(DRAFT, target_layers=8), tiny_target().parts
    plain = replay(build_draft(checkpoint, parts), sequences, parts=parts, k=K).gate()
    other = replay(build_draft(checkpoint, parts, Reading(feedback="post")), sequences, parts=parts, k=K).gate()
    assert other.passed and not plain.passed
    there = stages(build_draft(checkpoint, parts), sequences)
    assert there.layer_error < 1e-4 and there.feedback_error["post"] < 1e-4 < 0.01 < there.feedback_error["pre"]
