"""Each stage of the draft is spoilt in the engine alone; only the comparison at that stage must show it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from serving import served, small_draft

from draftscope.eagle3.model import Draft
from draftscope.eagle3.stages import Stages, stages

EXACT = 1e-6


def run(engine: Draft, ours: Draft, **options: object) -> Stages:
    ours.embedding = engine.embedding
    return stages(ours, [served(engine, 100 + i) for i in range(4)], **options)


@pytest.mark.parametrize("switches", [{}, {"norm_output": True}, {"sliding_window": 5}, {"draft_vocab": 5}], ids=str)
def test_the_same_draft_agrees_at_every_stage(switches: dict[str, object]) -> None:
    draft = small_draft(**switches)
    found = run(draft, draft)
    assert found.steps == 32
    assert found.fc_error < EXACT and found.layer_error < EXACT and found.head_agreement["offset"] == 1.0
    fed, other = ("post", "pre") if switches.get("norm_output") else ("pre", "post")
    assert found.feedback_error[fed] < EXACT < 0.01 < found.feedback_error[other]


def test_a_lost_fc_shows_at_fc_alone() -> None:
    engine, ours = small_draft(), small_draft()
    engine.fc.weight.data.normal_()
    found = run(engine, ours)
    assert found.fc_error > 0.5
    assert found.layer_error < EXACT and found.head_agreement["offset"] == 1.0 and found.feedback_error["pre"] < EXACT


def test_without_fc_output_a_lost_fc_shows_at_the_layer() -> None:
    engine, ours = small_draft(), small_draft()
    engine.fc.weight.data.normal_()
    ours.embedding = engine.embedding
    found = stages(ours, [replace(served(engine, 1), fc_output=None)])
    assert found.fc_error is None and found.layer_error > 0.1 and found.head_agreement["offset"] == 1.0


def test_a_lost_layer_shows_at_the_layer() -> None:
    engine, ours = small_draft(), small_draft()
    engine.midlayer.mlp.down_proj.weight.data.normal_()
    found = run(engine, ours)
    assert found.fc_error < EXACT and found.layer_error > 0.1 and found.head_agreement["offset"] == 1.0


def test_a_lost_head_shows_at_the_head_under_every_map() -> None:
    engine, ours = small_draft(draft_vocab=5), small_draft(draft_vocab=5)
    engine.lm_head.weight.data.normal_()
    found = run(engine, ours)
    assert found.fc_error < EXACT and found.layer_error < EXACT and found.feedback_error["pre"] < EXACT
    assert max(found.head_agreement.values()) < 0.8


@pytest.mark.parametrize("reading", ["absolute", "zero"])
def test_the_meaning_of_the_map_is_told(reading: str) -> None:
    engine, ours = small_draft(draft_vocab=5), small_draft(draft_vocab=5)
    own = torch.arange(5)
    offsets = ours.target_ids - own
    engine.target_ids = {"absolute": offsets, "zero": own}[reading]
    found = run(engine, ours)
    assert found.head_agreement[reading] == 1.0 > found.head_agreement["offset"]
    ours.target_ids = own
    assert run(engine, ours, offsets=offsets).head_agreement == found.head_agreement


def test_the_wrong_feedback_is_told_from_the_right_one() -> None:
    engine, ours = small_draft(norm_output=True), small_draft()
    found = run(engine, ours)
    assert found.layer_error < EXACT and found.feedback_error["post"] < EXACT and found.feedback_error["pre"] > 0.01


def test_what_was_not_recorded_is_absent() -> None:
    draft = small_draft()
    sequence = served(draft, 2)
    assert stages(draft, [replace(sequence, steps=None, fc_output=None)]) is None
    assert stages(draft, []) is None
    only_fc = stages(draft, [replace(sequence, steps=None)])
    assert only_fc.steps == 0 and only_fc.fc_error < EXACT and only_fc.layer_error is None and not only_fc.head_agreement
    sequence.features[9] = torch.nan
    spoilt = stages(draft, [sequence])
    assert spoilt.layer_error < EXACT and 0 < spoilt.steps < 8
