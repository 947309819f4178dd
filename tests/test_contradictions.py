"""Inputs of unlike targets, tokenizers, drafts or runs are told as such; spoilt ones and weak ones never are."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import save_target
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.cli.main import run as command
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.contradictions import one_by_one
from draftscope.diagnose.run import diagnose
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig, Run
from draftscope.findings import Diagnosis
from draftscope.target.model import load_target

HEALTHY = Plant.healthy((2, 4, 5))


@pytest.fixture(scope="module")
def rig() -> Rig:
    rig = tiny_rig(8, 32)
    return dataclasses.replace(rig, conversations=rig.conversations[:8])


@pytest.fixture(scope="module")
def healthy(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rig.run(HEALTHY, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape and vocabulary."""
    return save_target(tmp_path_factory.mktemp("other"), seed=5, vocab=259)


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, map and configuration; every other tensor has its rows somewhere else."""
    folder = tmp_path_factory.mktemp("draft")
    shutil.copy(DRAFT / "config.json", folder)
    draw = torch.Generator().manual_seed(3)
    save_file({
        name: tensor if name in ("d2t", "t2d") else tensor[torch.randperm(len(tensor), generator=draw)].contiguous()
        for name, tensor in load_file(DRAFT / "model.safetensors").items()
    }, folder / "model.safetensors")
    return folder


def pairs(found: Diagnosis) -> list[str]:
    return [one["of"] for one in found.matched["contradictions"]]


def test_capture_and_training_of_another_target(healthy: Run, other_target: Path, tmp_path: Path) -> None:
    found = diagnose(Inputs(train=healthy.train, serve=healthy.serve, draft=healthy.draft, target=other_target))
    assert pairs(found) == ["serve and target", "train and target"]
    assert (found.findings, found.verdict) == ([], "undecided")
    assert "the capture is not of the target given" in found.next[0]
    assert "these go together" in found.next[0], "texts that begin alike have the same states on both sides"
    assert found.acceptance.served is None, "nothing replayed with another target's embedding is shown"
    assert found.acceptance.measured is not None
    assert command(["diagnose", "--serve", str(healthy.serve), "--target", str(other_target), "--quiet"]) == 3


def test_training_states_of_another_target(healthy: Run, rig: Rig, other_target: Path, tmp_path: Path) -> None:
    dataclasses.replace(rig, target=load_target(other_target)).write_training(HEALTHY, tmp_path / "train")
    found = diagnose(Inputs(train=tmp_path / "train", serve=healthy.serve, draft=healthy.draft, target=TARGET))
    assert pairs(found) == ["train and target"]
    assert (found.findings, found.verdict) == ([], "undecided"), [f.says for f in found.findings]
    assert "the training states are not of the target given" in found.next[0]
    assert found.acceptance.served is not None, "the other side is told as before"


def test_tokens_of_another_tokenizer(healthy: Run, tmp_path: Path) -> None:
    renumbered = torch.randperm(259, generator=torch.Generator().manual_seed(1))
    for file in healthy.serve.glob("*.safetensors"):
        tensors = load_file(file)
        for name in ("token_ids", "verified_ids", "draft_token_ids"):
            tensors[name] = torch.where(tensors[name] < 0, tensors[name], renumbered[tensors[name].clamp(min=0)])
        save_file(tensors, tmp_path / file.name)
    shutil.copy(healthy.serve / "capture.json", tmp_path)
    found = diagnose(Inputs(train=healthy.train, serve=tmp_path, draft=healthy.draft, target=TARGET))
    assert pairs(found) == ["serve and target"]
    assert found.findings == []
    assert "it is the tokenizer that differs" in found.next[0]


def test_another_draft_of_the_same_shape(healthy: Run, other_draft: Path) -> None:
    found = diagnose(Inputs(train=healthy.train, serve=healthy.serve, draft=other_draft, target=TARGET))
    assert pairs(found) == ["serve and draft"]
    assert (found.findings, found.verdict) == ([], "undecided"), [(f.fault, f.says) for f in found.findings]
    assert "the draft given is not the one that served" in found.next[0]
    assert [p.boundary for p in found.placement.serve] == [2, 4, 5], "the slots do not depend on the draft"


@pytest.mark.parametrize(("steps", "accepted", "told"), [
    (0.5, 0.5, True),  # less than the capture alone
    (1.0, 0.5, True),  # as many steps, and fewer accepted
    (1.5, 3.0, True),  # more accepted than the steps that are not the capture's could have
    (1.0, 1.0, False), (4.0, 4.0, False), (40.0, 25.0, False),
])
def test_counters_of_another_run(healthy: Run, tmp_path: Path, steps: float, accepted: float, told: bool) -> None:
    counts = json.loads(healthy.metrics.read_text())
    made: dict[str, Any] = counts | {"drafts": round(counts["drafts"] * steps)}
    made["accepted_per_position"] = [min(round(n * accepted), made["drafts"]) for n in counts["accepted_per_position"]]
    (tmp_path / "counters.json").write_text(json.dumps(made))
    inputs = Inputs(serve=healthy.serve, metrics=tmp_path / "counters.json")
    found = diagnose(inputs)
    assert pairs(found) == (["serve and metrics"] if told else [])
    assert found.acceptance.measured is not None
    assert (found.acceptance.measured.rounds == counts["drafts"]) == (told or steps == 1), "else the capture's own counts"


def test_a_draft_that_learned_nothing_is_not_called_another(rig: Rig, other_draft: Path, tmp_path: Path) -> None:
    """It is the one that served: replay gives its counts. What it was made for, nothing here can tell."""
    run = dataclasses.replace(rig, checkpoint=other_draft).run(HEALTHY, tmp_path)
    found = diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET, metrics=run.metrics))
    assert pairs(found) == []
    assert [f.fault for f in found.findings] == ["train-budget"]
    assert found.findings[0].strength == "supported"
    assert any("another target" in caveat for caveat in found.findings[0].caveats)


@pytest.mark.parametrize(("name", "variant"), [
    ("req-mix", "of the next request"), ("graph-capture", "zeros everywhere"), ("parallel-shard", "four shards in another order"),
    ("schema-width", "channels before slots"), ("train-budget", "few sequences"), ("weight-missing", "engine: fc"),
])
def test_spoilt_or_weak_inputs_are_not_of_another(rig: Rig, name: str, variant: str, tmp_path: Path) -> None:
    run = rig.run(fault(name).make(HEALTHY, variant), tmp_path)
    found = diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET, metrics=run.metrics))
    assert pairs(found) == []
    assert found.findings[0].fault == name


def test_noise_is_not_of_another_target(healthy: Run, tmp_path: Path) -> None:
    """States that nothing explains, under a text that this target wrote: broken, and of this target for all that is known."""
    draw = torch.Generator().manual_seed(0)
    for file in healthy.serve.glob("*.safetensors"):
        tensors = load_file(file)
        tensors["fc_input"] = torch.randn(tensors["fc_input"].shape, generator=draw)
        save_file(tensors, tmp_path / file.name)
    found = diagnose(Inputs(serve=tmp_path, target=TARGET))
    assert pairs(found) == []
    assert found.verdict == "undecided"
    assert any("hold no state that this target has" in text for text in found.next)


def test_ids_that_go_together_one_by_one() -> None:
    ids = torch.arange(10).repeat(5)
    assert one_by_one(torch.stack([ids, (ids * 7 + 3) % 10], 1)) == 1.0
    assert one_by_one(torch.stack([ids, torch.zeros_like(ids)], 1)) is None, "one id for all is no numbering"
    draw = torch.Generator().manual_seed(0)
    assert one_by_one(torch.stack([ids, torch.randint(0, 10, ids.shape, generator=draw)], 1)) is None
    assert one_by_one(torch.stack([torch.arange(50), torch.arange(50)], 1)) is None, "no id occurs again"
