"""Any subset of inputs gives what it can, says what to measure next, and never claims more than it saw."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.cli.main import run
from draftscope.consumers import ask
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.findings import Diagnosis

BOUNDARIES = (2, 4, 5)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_rig().run(Plant.healthy(BOUNDARIES), tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The case: an embedding in front, labels wrong."""
    plant = dataclasses.replace(Plant.healthy(BOUNDARIES), labels=("embed", "layer 2", "layer 4", "layer 5"))
    return tiny_rig().run(fault("layer-set").make(plant, "embedding in front"), tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the target's embedding and final norm (its head is tied)."""
    folder = tmp_path_factory.mktemp("parts")
    tensors = load_file(TARGET / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers." not in n}, folder / "model.safetensors")
    shutil.copy(TARGET / "config.json", folder)
    return folder


def _views_are_whole(found: Diagnosis) -> None:
    """Every view agrees with what the diagnosis says elsewhere."""
    views = found.views
    assert [c.slot for c in views.channels] == [0, 1, 2, -1]
    assert views.channels[0].alike == 0
    assert views.channels[3].alike is not None
    assert views.channels[3].alike > 0.9  # the last state was served as trained
    assert all(sum(slot.explained) <= 1 for slot in views.components)
    for request in views.requests:
        assert request.recorded
        slots = [statistics.median(v for v in column if v is not None) for column in request.cosines]
        assert slots[0] < 0.4 < slots[2] < 0.99  # the embedding, and a neighbouring boundary
        assert len(request.ids) == len(request.status) == len(request.text) == len(request.drafted)
    ladder = {"trained": found.acceptance.trained, "as read": found.acceptance.as_read, "measured": found.acceptance.measured}
    for one in views.breakdowns:
        rung = ladder[one.rung]
        assert rung is not None
        assert sum(part.rounds for part in one.parts) == rung.rounds
        pooled = sum((part.length or 0) * part.rounds for part in one.parts) / rung.rounds
        assert pooled == pytest.approx(rung.length, rel=0.01)  # exactly, but for rounds that are censored
    assert {one.by for one in views.breakdowns} == {"context", "kind"}
    assert views.learning is None


def test_case_is_told_whole(case: Run) -> None:
    found = diagnose(Inputs(train=case.train, serve=case.serve, draft=case.draft, target=TARGET, metrics=case.metrics))
    first = found.findings[0]
    assert (first.fault, first.strength, found.verdict) == ("layer-set", "proven", "wiring")
    assert "the embedding was put in front" in first.says
    assert [p.boundary for p in found.placement.serve] == [0, 2, 4]
    assert [p.boundary for p in found.placement.train] == [2, 4, 5, 8]
    for placed in found.placement.serve + found.placement.train:
        assert all(placed.lag_errors[i] > 10 * placed.lag_errors[2] for i in (0, 1, 3, 4))  # type: ignore[operator]
    assert found.norms is not None
    assert (len(found.norms.train), len(found.norms.serve)) == (4, 4)
    assert set(found.norms.serve[0].classes) >= {"first", "prompt", "answer"}
    # What slot 1 was trained on slot 2 now holds.
    trained, served = found.norms.train[1].classes["first"], found.norms.serve[2].classes["first"]
    assert served.quantiles[5] == pytest.approx(trained.quantiles[5], rel=0.05)
    _views_are_whole(found)
    assert any("labels are wrong" in c and "embed" in c for c in first.caveats)
    assert not any("something is left" in c for c in first.caveats)
    assert first.fix.config[ask("vllm").known.id]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert first.fix.config[ask("sglang").known.id]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    effect = first.acceptance
    assert effect is not None
    assert effect.length_now is not None
    assert effect.length_if_fixed is not None
    assert effect.length_if_fixed > effect.length_now + 0.5
    assert effect.gain_interval is not None
    assert effect.gain_interval[0] > 0
    ladder = found.acceptance
    assert ladder.reference is not None
    assert ladder.served is not None
    assert ladder.as_read is not None
    assert ladder.as_read.length == ladder.served.length
    assert ladder.reference.length == pytest.approx(effect.all_fixed, rel=0.15)


def test_case_with_parts_only(case: Run, parts: Path) -> None:
    """The embedding in a slot is proven without running the target; texts that begin alike place the others."""
    found = diagnose(Inputs(train=case.train, serve=case.serve, draft=case.draft, target=parts))
    assert found.findings[0].fault == "layer-set"
    assert found.findings[0].strength == "proven"
    assert found.placement.serve[0].boundary == 0
    assert any("--target" in text for text in found.next)


def test_case_unpaired(case: Run, tmp_path: Path) -> None:
    """No target, no text in common: statistics give a candidate, and it is called no more than that."""
    for file in case.serve.glob("*.safetensors"):
        tensors = load_file(file)
        kept = tensors["accepted"] & (torch.arange(len(tensors["accepted"])) >= 24)
        rows = kept.nonzero().squeeze(-1)
        save_file({n: tensors[n][rows].contiguous() for n in ("fc_input", "token_ids")}, tmp_path / file.name)
    found = diagnose(Inputs(train=case.train, serve=tmp_path, draft=case.draft))
    assert found.findings[0].fault == "layer-set"
    assert found.findings[0].strength == "suspected"
    assert found.findings[0].acceptance is None
    assert any("--target" in text for text in found.next)


def test_healthy_without_target_is_undecided(healthy: Run) -> None:
    found = diagnose(Inputs(train=healthy.train, serve=healthy.serve, draft=healthy.draft))
    assert found.findings == []
    assert found.verdict == "undecided"
    assert any("--target" in text for text in found.next)
    assert found.acceptance.measured is not None


@pytest.mark.parametrize("given", ["train", "serve", "draft"])
def test_one_input_alone(healthy: Run, given: str) -> None:
    found = diagnose(Inputs(target=TARGET, **{given: getattr(healthy, given)}))  # type: ignore[arg-type]
    assert found.findings == []
    assert found.verdict == "undecided"
    assert found.next


def test_without_steps_runtime_stays_open(healthy: Run, tmp_path: Path) -> None:
    for file in healthy.serve.glob("*.safetensors"):
        tensors = load_file(file)
        kept = {n: t for n, t in tensors.items() if n in ("fc_input", "token_ids", "phase", "accepted", "last_hidden")}
        save_file(kept, tmp_path / file.name)
    found = diagnose(Inputs(train=healthy.train, serve=tmp_path, draft=healthy.draft, target=TARGET))
    assert found.findings == []
    assert found.verdict == "undecided"
    assert any("verify steps" in text for text in found.next)
    assert found.acceptance.served is not None
    assert found.acceptance.as_read is None  # nobody said whose reading is in effect


def test_rows_beside_each_other_without_marks(case: Run, tmp_path: Path) -> None:
    """The ten-line capture: `fc_input` and `token_ids` of accepted rows, nothing else."""
    for file in case.serve.glob("*.safetensors"):
        tensors = load_file(file)
        rows = tensors["accepted"].nonzero().squeeze(-1)
        save_file({"fc_input": tensors["fc_input"][rows].contiguous(), "token_ids": tensors["token_ids"][rows].contiguous()},
                  tmp_path / file.name)
    found = diagnose(Inputs(serve=tmp_path, draft=case.draft, target=TARGET))
    assert found.findings[0].fault == "layer-set"
    assert found.findings[0].strength == "proven"


def test_two_faults_are_both_named(tmp_path: Path) -> None:
    plant = fault("scale-mult").make(fault("layer-offset").make(Plant.healthy(BOUNDARIES), "last slot +1"), "one slot x1.2")
    run = tiny_rig().run(plant, tmp_path)
    found = diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET))
    assert {f.fault for f in found.findings if f.strength == "proven"} == {"layer-offset", "scale-mult"}
    for finding in found.findings:
        assert finding.acceptance is not None
        assert finding.acceptance.all_fixed is not None
        assert finding.acceptance.left_in is not None


def test_of_many_faults_those_without_figures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    plant = fault("scale-mult").make(fault("layer-offset").make(Plant.healthy(BOUNDARIES), "last slot +1"), "one slot x1.2")
    made = tiny_rig().run(plant, tmp_path)
    monkeypatch.setattr("draftscope.diagnose.effects.MOST", 1)
    report = tmp_path / "found.json"
    run(["diagnose", "--train", str(made.train), "--serve", str(made.serve), "--draft", str(made.draft), "--target", str(TARGET),
         "--json", str(report)])
    found = json.loads(report.read_text())
    assert [one["acceptance"] is None for one in found["findings"]] == [False, True]
    assert [one for one in found["next"] if "not replayed: of many, the 1 strongest" in one and one.startswith("1 fault ")]
    printed = capsys.readouterr().out
    assert "was not replayed" in printed and "bounds it" not in printed


def test_same_inputs_same_answer(case: Run) -> None:
    inputs = Inputs(train=case.train, serve=case.serve, draft=case.draft, target=TARGET)
    assert diagnose(inputs).json_text() == diagnose(inputs).json_text()


def test_from_python(healthy: Run) -> None:
    import draftscope

    found = draftscope.diagnose(serve=str(healthy.serve), draft=healthy.draft, target=TARGET)
    assert isinstance(found, draftscope.Diagnosis)
    assert found.findings == []


def test_draft_of_another_target(healthy: Run, tmp_path: Path) -> None:
    from support import save_target

    save_target(tmp_path / "other", width=32)
    with pytest.raises(DraftscopeError, match="width"):
        diagnose(Inputs(serve=healthy.serve, draft=healthy.draft, target=tmp_path / "other"))


def test_nothing_given() -> None:
    with pytest.raises(UsageError):
        diagnose(Inputs())


def test_training_data_given_as_capture(healthy: Run) -> None:
    with pytest.raises(DraftscopeError, match="training data"):
        diagnose(Inputs(serve=healthy.train, draft=healthy.draft))


def test_token_beyond_the_vocabulary(healthy: Run, tmp_path: Path) -> None:
    file = sorted(healthy.serve.glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors["token_ids"][3] = 99_999
    save_file(tensors, tmp_path / file.name)
    with pytest.raises(DraftscopeError, match=f"{file.name}, row 3"):
        diagnose(Inputs(serve=tmp_path, draft=healthy.draft, target=TARGET))


def test_command_exit_codes(case: Run, healthy: Run, tmp_path: Path) -> None:
    common = ["diagnose", "--train", str(case.train), "--draft", str(case.draft), "--target", str(TARGET), "--quiet"]
    out = tmp_path / "d.json"
    assert run([*common, "--serve", str(case.serve), "--json", str(out)]) == 1
    assert json.loads(out.read_text())["findings"][0]["fault"] == "layer-set"
    assert run([*common, "--serve", str(healthy.serve)]) == 0
    assert run(["diagnose", "--draft", str(DRAFT), "--quiet"]) == 5


def test_unreadable_input_still_writes_json(tmp_path: Path) -> None:
    broken = tmp_path / "capture"
    broken.mkdir()
    (broken / "r.safetensors").write_bytes(b"\xff" * 40)
    out = tmp_path / "d.json"
    assert run(["diagnose", "--serve", str(broken), "--json", str(out)]) == 3
    written = json.loads(out.read_text())
    assert written["verdict"] == "undecided"
    assert "r.safetensors" in written["next"][0]


def test_capture_of_another_engine_claims_its_consumer(healthy: Run, tmp_path: Path) -> None:
    """The capture says that vLLM made it: the checkpoint is then read as vLLM reads it, and the claim is shown."""
    for file in healthy.serve.glob("*.safetensors"):
        shutil.copy(file, tmp_path)
    (tmp_path / "capture.json").write_text(json.dumps({"engine": "vllm", "engine_version": "0.32.0", "num_spec_tokens": 3}))
    found = diagnose(Inputs(serve=tmp_path, draft=healthy.draft, target=TARGET))
    assert found.provenance["consumer"] == "vllm@0.32"


def test_half_of_the_values_are_nan(healthy: Run, tmp_path: Path) -> None:
    for file in healthy.serve.glob("*.safetensors"):
        tensors = load_file(file)
        tensors["fc_input"][:, 0] = torch.nan
        save_file(tensors, tmp_path / file.name)
    found = diagnose(Inputs(train=healthy.train, serve=tmp_path, draft=healthy.draft, target=TARGET))
    assert found.findings[0].fault == "nonfinite"
    assert found.findings[0].where[0] == "slot 0"
