"""A sound capture beside a checkpoint that is not the one that was served: the file is blamed, never the engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TARGET, tiny_rig
from torch import Tensor

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.findings import Diagnosis
from draftscope.report import words


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_rig().run(Plant.healthy((2, 4, 5)), tmp_path_factory.mktemp("healthy"))


def with_other(run: Run, folder: Path, tensors: Callable[[dict[str, Tensor]], None] | None = None,
               config: dict[str, Any] | None = None) -> Diagnosis:
    """The diagnosis of the run, with its checkpoint changed after serving."""
    draft = shutil.copytree(run.draft, folder / "draft")
    if tensors is not None:
        held = load_file(draft / "model.safetensors")
        tensors(held)
        save_file(held, draft / "model.safetensors")
    if config is not None:
        raw = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(raw | config))
    return diagnose(Inputs(serve=run.serve, draft=draft, target=TARGET))


@pytest.mark.parametrize("spoil", [
    lambda t: t.pop("d2t"), lambda t: t["d2t"].zero_(), lambda t: t["d2t"].add_(100_000),
], ids=["missing", "zero", "beyond the vocabulary"])
def test_a_spoilt_map_is_not_taken_for_another_head(
    healthy: Run, tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None],
) -> None:
    found = with_other(healthy, tmp_path, tensors=spoil)
    assert [(f.fault, f.strength) for f in found.findings] == [("vocab-map", "proven")]
    assert any("not the one that it served" in caveat for caveat in found.findings[0].caveats)


def test_a_switch_that_the_weights_contradict_is_the_files_error(healthy: Run, tmp_path: Path) -> None:
    found = with_other(healthy, tmp_path, config={"norm_before_residual": True})
    first = found.findings[0]
    assert (first.fault, first.strength, first.where) == ("config-flag", "supported", ["config norm_before_residual"])
    assert "configuration is wrong" in first.says and "false" in first.fix.says
    assert not any(f.strength == "proven" for f in found.findings)


def test_layers_that_do_worse_than_what_is_served_are_the_files_error(healthy: Run, tmp_path: Path) -> None:
    found = with_other(healthy, tmp_path, config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    first = found.findings[0]
    assert (first.fault, first.where) == ("layer-set", ["slot 0", "slot 1", "slot 2"])
    assert first.strength == "suspected" and first.acceptance is not None
    assert (first.acceptance.gain or 0) < 0
    assert "configuration that is wrong" in first.says and first.fix.says.startswith("Leave the engine")


def test_weights_that_are_not_finite_are_named_and_not_replayed(healthy: Run, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["midlayer.mlp.up_proj.weight"][2, 5] = torch.inf

    found = with_other(healthy, tmp_path, tensors=spoil)
    assert [(f.fault, f.strength, f.where) for f in found.findings] == [
        ("nonfinite", "proven", ["tensor midlayer.mlp.up_proj.weight"])]
    assert found.acceptance.served is None and found.acceptance.measured is not None
    remarks = {name: remark for name, _, remark in words.rungs(found)}
    assert all("up_proj" in remarks[name] for name in ("reference", "served", "as read"))


@pytest.mark.parametrize(("recorded", "named"), [
    (lambda x: torch.cat([x[:, 64:128], x[:, :64], x[:, 128:]], 1), "layer-set"), (lambda x: x.roll(1, 0), "token-shift"),
], ids=["slots swapped", "rows moved"])
def test_a_wrong_recording_is_not_blamed_on_the_engine(
    healthy: Run, tmp_path: Path, recorded: Callable[[Tensor], Tensor], named: str,
) -> None:
    """What `fc` gave out is what it gives on the right states, so that neither weights nor wiring are at fault."""
    capture = shutil.copytree(healthy.serve, tmp_path / "capture")
    for file in capture.glob("*.safetensors"):
        tensors = load_file(file)
        assert "fc_output" in tensors
        save_file(tensors | {"fc_input": recorded(tensors["fc_input"]).contiguous()}, file)
    for train in (None, healthy.train):
        found = diagnose(Inputs(train=train, serve=capture, draft=healthy.draft, target=TARGET))
        assert found.verdict == "measurement"
        assert found.findings[0].fault == named and "recording" in found.findings[0].says
        assert not any(f.strength == "proven" for f in found.findings)


def test_a_tensor_that_only_a_switch_asks_for_may_mean_the_switch(healthy: Run, tmp_path: Path) -> None:
    found = with_other(healthy, tmp_path, config={"norm_before_fc": True})
    assert found.findings[0].fault == "weight-missing"
    assert any("norm_before_fc" in caveat for caveat in found.findings[0].caveats)


def test_counts_that_the_gate_reproduces_leave_no_gap(healthy: Run) -> None:
    found = diagnose(Inputs(serve=healthy.serve, draft=healthy.draft, target=TARGET))
    assert found.findings == [] and found.verdict == "clean"
    assert "served rows" in words.verdict(found) and "accept length" in words.verdict(found)
    assert not any("unexplained" in text for text in found.next)


def test_recorded_steps_without_a_draft_are_not_asked_for_again(healthy: Run) -> None:
    found = diagnose(Inputs(serve=healthy.serve, target=TARGET))
    assert not any("record verify steps" in text for text in found.next)
    assert any("has its verify steps" in text for text in found.next)


def test_matched_reads_as_sentences(healthy: Run) -> None:
    lines = words.matched(diagnose(Inputs(train=healthy.train, serve=healthy.serve, target=TARGET)).matched)
    assert any(line.startswith("training states: ") and "sequences" in line for line in lines)
    assert any(line.startswith("the capture: ") and "verify steps" in line for line in lines)
    assert not any("{" in line for line in lines)
