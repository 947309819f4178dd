"""Files in each other's place, or that do not go together: told as what they are, and never called sound."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.cli.main import run
from draftscope.diagnose.run import diagnose
from draftscope.drilling.running import inputs_of
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.errors import DraftscopeError
from draftscope.faults.plant import Plant
from draftscope.linting.lint import lint
from draftscope.states.opening import open_source
from draftscope.target.model import load_target
from draftscope.target.parts import read_parts


def test_a_target_given_as_the_draft() -> None:
    for read in (load_checkpoint, lint):
        with pytest.raises(DraftscopeError, match=r"holds a whole model.*Name the draft's folder here"):
            read(TARGET)


def test_a_draft_given_as_the_target() -> None:
    with pytest.raises(DraftscopeError, match="an EAGLE-3 draft, which goes to --draft"):
        read_parts(DRAFT)


def test_a_folder_above_the_targets(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "models" / "mine")
    for above in (tmp_path, tmp_path / "models"):
        with pytest.raises(DraftscopeError, match=r"There is one in .*models/mine"):
            read_parts(above)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same shape and tokens with other weights."""
    folder = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(TARGET, folder)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t[torch.randperm(len(t))].contiguous() for name, t in tensors.items()}, folder / "model.safetensors",
              {"format": "pt"})
    return folder


def test_states_of_another_target_are_not_called_sound(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_rig().write_training(Plant.healthy((2, 4, 5)), tmp_path / "states")
    assert run(["inspect", str(tmp_path / "states"), "--target", str(TARGET)]) == 0
    assert "nothing wrong found" in capsys.readouterr().out
    code = run(["inspect", str(tmp_path / "states"), "--target", str(other)])
    said = capsys.readouterr().out
    assert code == 3 and "nothing wrong found" not in said and "no entry is a state of this target" in said.replace("\n", " ")


def test_a_draft_that_accepts_nothing_is_not_clean_for_want_of_training_states(other: Path, tmp_path: Path) -> None:
    """A draft of another target, without its training states: its wiring is right; whether it was ever better is unknown."""
    rig, plant = replace(tiny_rig(), target=load_target(other)), Plant.healthy((2, 4, 5))
    found = diagnose(replace(inputs_of(rig.run(plant, tmp_path / "run"), plant, rig.target), train=None))
    assert found.verdict == "undecided", (found.verdict, [f.says for f in found.findings])
    assert any("of another target" in text and "--train" in text for text in found.next), found.next


def test_states_looked_for_in_a_model_or_a_folder_above(tmp_path: Path) -> None:
    with pytest.raises(DraftscopeError, match=r"holds a model .*A draft goes to --draft"):
        open_source(DRAFT)
    tiny_rig().write_training(Plant.healthy((2, 4, 5)), tmp_path / "run" / "train")
    (tmp_path / "run" / "counters.json").write_text("{}")
    with pytest.raises(DraftscopeError, match=r"Name one of its folders: train"):
        open_source(tmp_path / "run")


def test_a_gate_without_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--draft", str(DRAFT), "--target", str(TARGET), "--serve", str(tmp_path)]
    assert run(["gate", "--baseline", str(tmp_path / "gate.json"), *asked]) == 2
    assert "--write-baseline" in capsys.readouterr().err
