"""Training data as each trainer reads them: entry to slot, teacher, norm, alignment, and what would go wrong without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROWS, Inspect, Places, inspect_fixture, parts_fixture, places_fixture, write  # noqa: F401 (fixtures)
from state_files import modelopt_record, specforge_record, torchspec_record, write_one

from draftscope.inspecting.as_trainer import CONDITIONS, KNOWN
from draftscope.inspecting.trainers import TRAINERS
from draftscope.states.capture import write_trace
from draftscope.states.opening import FORMATS
from draftscope.states.types import Sample, Trace


def one(number: int, places: Places, last: torch.Tensor) -> Sample:
    entries = [entry[number] for entry in [*places.entries(2, 4, 5), last]]
    return Sample("", places.ids[number], torch.stack(entries, 1).to(torch.bfloat16), torch.arange(ROWS) >= 20, ())


def files(folder: Path, places: Places, last: torch.Tensor, record: Any, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2, 3):
        torch.save(record(one(number, places, last)), folder / name.format(10 if number == 3 else number))
    return folder


def test_the_facts_are_whole() -> None:
    for trainer in TRAINERS.values():
        facts = [trainer.slots, trainer.teacher, *trainer.alignment, *trainer.silently]
        assert all(fact.source and fact.says and fact.when in CONDITIONS for fact in facts)
        assert {v for fact in facts for v in fact.versions} <= set(trainer.versions)
        assert set(trainer.reads) <= set(FORMATS) and "" in trainer.norm
        assert all(set(versions) <= set(trainer.versions) for versions in trainer.reads.values())
        assert trainer.name in KNOWN


def test_specforge_swaps_names_and_applies_no_norm(inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    folder = files(tmp_path / "post", places, places.post, specforge_record, "data_{}.ckpt")
    (read,) = inspect(folder, "--as", "specforge@0.2.0", "--target", parts)[1]["as_trainer"]
    assert not read["refuses"] and "aux_hidden_state, called hidden_state" in read["reads"]
    assert [feed["goes_to"] for feed in read["feeds"]] == ["slot 0", "slot 1", "slot 2", "teacher (target)"]
    assert not any("norm" in warning for warning in read["feeds"][3]["warns"])
    assert "mask of token t is 1" in read["alignment"][0] and all(read["sources"])
    assert any("data_10.ckpt before data_2.ckpt" in line for line in read["silently"])
    folder = files(tmp_path / "pre", places, places.stream[8], specforge_record, "data_{}.ckpt")
    (read,) = inspect(folder, "--as", "specforge", "--target", parts)[1]["as_trainer"]
    assert any("feeds it to the head as it is" in warning for warning in read["feeds"][3]["warns"])


@pytest.mark.parametrize(("marker", "last", "warns"), [
    (None, "pre", "feeds it to the head as it is"), (None, "post", ""), (True, "pre", ""), (True, "post", "once more"),
    (False, "pre", "feeds it to the head as it is"),
])
def test_modelopt_believes_its_marker(marker: bool | None, last: str, warns: str, inspect: Inspect, places: Places,
                                      parts: Path, tmp_path: Path) -> None:
    state = places.post if last == "post" else places.stream[8]

    def record(sample: Sample) -> dict[str, Any]:
        return {**modelopt_record(sample), **({} if marker is None else {"hidden_states_prenorm": marker})}

    folder = files(tmp_path / "d", places, state, record, "c{}.pt")
    (read,) = inspect(folder, "--as", "modelopt@0.47", "--target", parts)[1]["as_trainer"]
    said = [warning for warning in read["feeds"][3]["warns"] if "norm" in warning and "deepest" not in warning]
    assert (not said) if not warns else (len(said) == 1 and warns in said[0])
    assert any("answer_only_loss" in line for line in read["silently"]) and "t+1" in read["alignment"][0]


def test_modelopt_refuses_mixed_markers(inspect: Inspect, places: Places, tmp_path: Path) -> None:
    for number in (1, 2):
        record = {**modelopt_record(one(number, places, places.post)), "hidden_states_prenorm": number == 1}
        torch.save(record, tmp_path / f"c{number}.pt")
    (read,) = inspect(tmp_path, "--as", "modelopt")[1]["as_trainer"]
    assert any("a batch of both" in line for line in read["refuses"])


def test_torchspec_depends_on_its_setting(inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    torch.save(torchspec_record(*(one(n, places, places.stream[8]) for n in (1, 2)), length=128), tmp_path / "g.pt")
    (read,) = inspect(tmp_path / "g.pt", "--as", "torchspec", "--target", parts)[1]["as_trainer"]
    assert any("last_hidden_states_prenorm must be true" in warning for warning in read["feeds"][3]["warns"])
    assert any("never read back" in line for line in read["silently"])


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("format", ["plain", "specforge", "modelopt", "speculators-v0", "trtllm"])
def test_a_trainer_refuses_what_others_wrote(trainer: str, format: str, inspect: Inspect, tmp_path: Path) -> None:
    write_one(format, tmp_path / "d", 0)
    (read,) = inspect(tmp_path / "d", "--as", trainer)[1]["as_trainer"]
    assert bool(read["refuses"]) == (format not in TRAINERS[trainer].reads)
    assert read["feeds"][3]["goes_to"].startswith("teacher")


def test_versions_of_speculators_differ(inspect: Inspect, tmp_path: Path) -> None:
    write_one("speculators-v0", tmp_path / "d", 0)
    assert not inspect(tmp_path / "d", "--as", "speculators@0.3.0")[1]["as_trainer"][0]["refuses"]
    assert inspect(tmp_path / "d", "--as", "speculators@0.4.0")[1]["as_trainer"][0]["refuses"]



def test_speculators_takes_the_last_entry_as_teacher(inspect: Inspect, places: Places, parts: Path, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    labels = ("embed", "layer 3", "layer 5", "layer 7")
    folder = write(tmp_path / "d", places, places.entries(3, 5, 6, 8), labels)
    _, found = inspect(folder, "--as", "speculators", "--target", places.folder)
    (read,) = found["as_trainer"]
    assert [feed["goes_to"] for feed in read["feeds"]] == ["slot 0", "slot 1", "slot 2", "teacher (verifier_last_hidden_states)"]
    assert [feed["inferred"] for feed in read["feeds"]] == ["boundary 3", "boundary 5", "boundary 6", "boundary 8"]
    assert [feed["label"] for feed in read["feeds"]] == list(labels)
    assert read["feeds"][3]["warns"] == [] and "no embedding" in read["feeds"][0]["warns"][0]
    wrong = write(tmp_path / "w", places, places.entries(0, 2, 4, 5))
    for more in ((), ("--target", parts), ("--target", places.folder)):
        _, found = inspect(wrong, "--as", "speculators", *more)
    assert "middle layer" in found["as_trainer"][0]["feeds"][3]["warns"][0]
    normed = write(tmp_path / "n", places, [*places.entries(2, 4, 5), places.post])
    _, found = inspect(normed, "--as", "speculators", "--target", parts)
    assert any("once more" in warning for warning in found["as_trainer"][0]["feeds"][3]["warns"])
    assert "goes to" in capsys.readouterr().out


def test_what_the_version_does_not_read_or_does_otherwise(inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(2, 4, 5, 8))
    assert inspect(folder, "--as", "speculators@0.4.0")[1]["as_trainer"][0]["refuses"]
    assert not inspect(folder, "--as", "speculators@0.9.0")[1]["as_trainer"][0]["refuses"]
    torch.save({"input_ids": places.ids[0], "loss_mask": torch.ones(ROWS).long(),
                "hidden_states": [s[0].contiguous() for s in places.entries(2, 4, 5, 8)]}, tmp_path / "data_0.pt")
    assert inspect(tmp_path / "data_0.pt", "--as", "speculators@0.8")[1]["as_trainer"][0]["refuses"]
    (read,) = inspect(tmp_path / "data_0.pt", "--as", "speculators@v0.3.0", "--target", parts)[1]["as_trainer"]
    assert not read["refuses"] and any("before the final norm" in warning for warning in read["feeds"][3]["warns"])


@pytest.mark.parametrize("name", ["megatron", "speculators@7.1", "speculators@"])
def test_unknown_trainers_are_refused_with_those_known(name: str, inspect: Inspect, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    write_one("plain", tmp_path / "d", 0)
    code, found = inspect(tmp_path / "d", "--as", name)
    if name == "speculators@":
        assert code in (0, 1)
        return
    assert code == 2 and "speculators@0.9" in capsys.readouterr().err and found["verdict"] == "undecided"


def test_a_capture_is_no_training_data(inspect: Inspect, tmp_path: Path) -> None:
    write_trace(tmp_path / "c" / "r.safetensors", Trace("", torch.ones(3, 6), torch.arange(3), torch.ones(3).bool()))
    assert inspect(tmp_path / "c", "--as", "speculators")[0] == 2


