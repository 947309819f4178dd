"""Every fault, made on the tiny pair where real ones act, is found first; nothing else is proven; a healthy pair is clean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_rig

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.faults import FAULTS
from draftscope.faults.base import Fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig
from draftscope.findings import Diagnosis

CASES = [(fault, variant) for fault in FAULTS for variant in fault.variants]
BOUNDARIES = (2, 4, 5)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig()


def examine(rig: Rig, plant: Plant, folder: Path, **more: object) -> Diagnosis:
    run = rig.run(plant, folder)
    if plant.reported != "counts":
        more |= {"metrics": run.metrics}
    more |= {"train_heldout": run.heldout, "logs": run.logs, "conversations": run.conversations}
    return diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=rig.target.folder,
                           source_draft=run.source_draft, **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def healthy(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return examine(rig, Plant.healthy(BOUNDARIES), tmp_path_factory.mktemp("healthy"))


def test_healthy_pair_is_clean(healthy: Diagnosis) -> None:
    assert healthy.findings == []
    assert healthy.verdict == "clean", healthy.next
    assert [p.boundary for p in healthy.placement.serve] == list(BOUNDARIES)
    ladder = healthy.acceptance
    assert ladder.as_read is not None
    assert ladder.measured is not None
    assert ladder.as_read.length is not None
    assert ladder.as_read.length > 2
    assert healthy.power["smallest_length_difference"] > 0


def test_healthy_pair_with_its_own_counts_is_clean(rig: Rig, tmp_path: Path) -> None:
    run = rig.run(Plant.healthy(BOUNDARIES), tmp_path)
    found = diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=rig.target.folder, metrics=run.metrics))
    assert (found.findings, found.verdict) == ([], "clean"), found.next


def test_training_answers_that_the_target_sampled_are_no_fault(rig: Rig, tmp_path: Path) -> None:
    """As unlikely as another author's text; but at some temperature they are the target's own."""
    healthy = Plant.healthy(BOUNDARIES)
    found = examine(rig, replace(healthy, texts=replace(healthy.texts, author="sampled hot")), tmp_path)
    assert found.findings == [], [(f.fault, f.strength, f.says) for f in found.findings]


@pytest.mark.parametrize(("fault", "variant"), CASES, ids=[f"{f.id}: {v}" for f, v in CASES])
def test_fault_is_found_first(rig: Rig, fault: Fault, variant: str, tmp_path: Path, healthy: Diagnosis) -> None:
    plant = fault.make(Plant.healthy(BOUNDARIES), variant)
    found = examine(rig, plant, tmp_path)
    named = [f.fault for f in found.findings]
    assert named, (found.verdict, found.next)
    assert named[0] == fault.id, [(f.fault, f.strength, f.says) for f in found.findings]
    others = [f for f in found.findings[1:] if f.fault != fault.id and f.fault not in fault.includes and f.strength == "proven"]
    assert not others, [(f.fault, f.says) for f in others]
    first = found.findings[0]
    assert found.matched["contradictions"] == [], "what is spoilt is not of another target, draft or run"
    assert first.evidence
    assert first.fix.says
    json.loads(found.json_text())
    if variant.startswith("train ") or fault.id.startswith("lossmask"):
        assert all(w.startswith("train:") for w in first.where), first.where
        assert found.verdict == "data"
    if first.recovery == "replayed":
        assert first.acceptance is not None
        assert first.acceptance.length_if_fixed is not None
        healthy_length = healthy.acceptance.as_read
        assert healthy_length is not None
        assert healthy_length.length is not None
        # Undone, the draft does as well as in health: on the tokens that it served, hence not to the last digit.
        assert first.acceptance.length_if_fixed == pytest.approx(healthy_length.length, rel=0.2)
