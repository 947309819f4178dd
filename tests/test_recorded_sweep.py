"""A sweep that an engine recorded stands for the target: the same diagnosis without its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_rig, tiny_target

from draftscope import diagnose
from draftscope.boundaries import default_boundaries
from draftscope.cli.main import run
from draftscope.engines.sweeping import tokens_of
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.states import plain
from draftscope.states.opening import open_source
from draftscope.states.types import Sample
from draftscope.target.parts import read_parts
from draftscope.target.recorded import RecordedSweep
from draftscope.target.sweep import sweep

SERVED = default_boundaries(tiny_target().layers)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training states and a capture with the embedding in front."""
    plant = fault("layer-set").make(Plant.healthy(SERVED), "embedding in front")
    found = tiny_rig(8, 32).run(plant, tmp_path_factory.mktemp("sweep"))
    return found.train, found.serve


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target without its layers."""
    folder = tmp_path_factory.mktemp("parts")
    tensors = load_file(TARGET / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if ".layers." not in name}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def recorded(spoilt: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine would write: every boundary over the capture's tokens and the training data's."""
    folder = tmp_path_factory.mktemp("recorded")
    sequences = [*tokens_of(open_source(spoilt[1]), 10**6), *tokens_of(open_source(spoilt[0]), 10**6)]
    for i, swept in enumerate(sweep(tiny_target(), [(str(i), torch.tensor(ids)) for i, ids in enumerate(sequences)])):
        sample = Sample("", swept.token_ids, swept.stream.transpose(0, 1).contiguous(), None, ())
        plain.write_sample(folder / f"hs_{i}.safetensors", sample)
    return folder


def test_the_diagnosis_needs_no_layers(spoilt: tuple[Path, Path], parts: Path, recorded: Path) -> None:
    train, serve = spoilt
    by_target = diagnose(train=train, serve=serve, draft=DRAFT, target=TARGET)
    by_sweep = diagnose(train=train, serve=serve, draft=DRAFT, target=parts, sweep=recorded)
    without = diagnose(train=train, serve=serve, draft=DRAFT, target=parts)
    for found in (by_target, by_sweep):
        assert found.findings[0].fault == "layer-set" and found.findings[0].strength == "proven"
    assert [p.boundary for p in by_sweep.placement.serve] == [p.boundary for p in by_target.placement.serve]
    one, other = by_sweep.findings[0].acceptance, by_target.findings[0].acceptance
    assert one is not None and other is not None and one.length_if_fixed == pytest.approx(other.length_if_fixed, abs=1e-6)
    assert without.acceptance.reference is None and by_sweep.acceptance.reference is not None


def test_what_it_does_not_cover_is_left_out(spoilt: tuple[Path, Path], parts: Path, recorded: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.mkdir()
    for file in recorded.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: tensor[:20].clone() for name, tensor in tensors.items()}, short / file.name)
    found = diagnose(serve=spoilt[1], draft=DRAFT, target=parts, sweep=short)
    assert found.placement.serve[0].boundary == 0
    assert any("were left out" in step for step in found.steps)
    swept = RecordedSweep(short, read_parts(parts))
    ids = load_file(recorded / "hs_0.safetensors")["token_ids"][:24]
    with pytest.raises(DraftscopeError, match="holds 20 of the 24 tokens of x"):
        list(swept.sweep([("x", ids)]))


def test_another_targets_sweep_is_refused(spoilt: tuple[Path, Path], parts: Path) -> None:
    with pytest.raises(DraftscopeError, match="boundaries"):
        RecordedSweep(spoilt[0], read_parts(parts))
    with pytest.raises(UsageError, match="needs the target's parts"):
        diagnose(serve=spoilt[1], draft=DRAFT, sweep=spoilt[0])


def test_tokens_of_a_capture(spoilt: tuple[Path, Path]) -> None:
    traces = list(open_source(spoilt[1]))
    found = tokens_of(traces, 10**6)
    wanted = {tuple(t.token_ids[t.accepted].tolist()) for t in traces}
    assert {tuple(ids) for ids in found} == {w for w in wanted if not any(o != w and o[: len(w)] == w for o in wanted)}
    assert sum(map(len, tokens_of(traces, 30))) == 30


def test_an_engine_that_fails_is_named(spoilt: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["capture", "vllm", "--sweep", str(spoilt[1]), "-o", str(tmp_path / "out"), "--target", str(TARGET)]
    assert run([*words, "--python", str(tmp_path / "nowhere")]) == 2
    assert run([*words, "--python", sys.executable]) == 3
    assert "No module named 'vllm'" in capfd.readouterr().err
    assert run(words[:4]) == 2


def test_the_script_is_whole_in_itself() -> None:
    """It imports without vLLM, and offers the connector only with it."""
    script = Path(__file__).parent.parent / "src" / "draftscope" / "engines" / "vllm_sweep.py"
    code = f"import runpy; print(sorted(k for k in runpy.run_path({json.dumps(str(script))}) if k.startswith('Sweep')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
