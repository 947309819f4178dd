"""What each trainer's files mean beyond the contract: widths, markers, batches, scales, rows of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from state_files import (
    PACKED,
    a_sample,
    angelslim_record,
    data_set,
    last,
    modelopt_record,
    specforge_record,
    torchspec_record,
    trtllm_record,
    v0_record,
    wide,
    write_one,
)

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.opening import open_source
from draftscope.states.types import Sample


def one(path: Path, format: str | None = None) -> Sample:
    (sample,) = open_source(path, format)
    assert isinstance(sample, Sample)
    return sample


def save(path: Path, record: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(record, path)
    return path


def test_the_wider_tensor_holds_the_slots_whatever_it_is_called(tmp_path: Path) -> None:
    sample = a_sample()
    record = specforge_record(sample)
    record["hidden_state"], record["aux_hidden_state"] = record["aux_hidden_state"], record["hidden_state"]
    source = open_source(save(tmp_path / "data_0.ckpt", record))
    (read,) = source
    assert torch.equal(read.states, sample.states)
    assert any("by its shape" in note for note in source.notes)  # type: ignore[attr-defined]
    assert read.labels == ("hidden_state 0", "hidden_state 1", "hidden_state 2", "aux_hidden_state")


def test_every_step_is_noted(tmp_path: Path) -> None:
    sample = a_sample()
    record = angelslim_record(sample)
    record["target_hiddens"] = record["target_hiddens"].float()
    source = open_source(save(tmp_path / "data_0.ckpt", record))
    (read,) = source
    assert read.states.dtype == torch.float32 and torch.equal(read.states, sample.states.float())
    said = " ".join(source.notes)  # type: ignore[attr-defined]
    for step in ("split into 3 slots of 8", "widened to float32", "batch axis of one dropped from `target_hiddens`",
                 "axes of one dropped from `input_ids`", "axes of one dropped from `loss_mask`"):
        assert step in said


@pytest.mark.parametrize(("record", "file", "format"), [
    (specforge_record, "a.pt", "specforge"), (angelslim_record, "a.pt", "angelslim"), (modelopt_record, "a.ckpt", "modelopt"),
    (v0_record, "a.ckpt", "speculators-v0"), (trtllm_record, "a.ckpt", "trtllm"), (torchspec_record, "a.ckpt", "torchspec"),
])
def test_no_suffix_decides(record: Any, file: str, format: str, tmp_path: Path) -> None:
    assert open_source(save(tmp_path / file, record(a_sample()))).format == format


def test_compressed_files_are_read_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "tmp"
    work.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(work))
    for number in (2, 10):
        PACKED["specforge"](tmp_path / "d", a_sample(seed=number), number)
    read = list(open_source(tmp_path / "d"))
    assert [sample.index for sample in read] == [2, 10] and list(work.iterdir()) == []
    assert torch.equal(read[1].states, a_sample(seed=10).states) and read[1].claimed_norm == "post"


def test_modelopts_marker_and_its_absence(tmp_path: Path) -> None:
    record = modelopt_record(a_sample())
    for name, marker in (("a", True), ("b", False), ("c", None), ("d", "yes")):
        save(tmp_path / f"{name}.pt", {**record, **({} if marker is None else {"hidden_states_prenorm": marker})})
    source = open_source(tmp_path)
    assert [sample.claimed_norm for sample in source] == ["pre", "post", None, None]
    said = " ".join(source.notes)  # type: ignore[attr-defined]
    assert "no `hidden_states_prenorm`" in said and "is no bool" in said
    assert "conversation c is in" in said and "a.pt and in" in said  # four files, one conversation


def test_a_dump_of_a_batch_gives_its_sequences_without_the_padding(tmp_path: Path) -> None:
    short, long = a_sample(4, seed=1), a_sample(9, seed=2)
    record = torchspec_record(short, long, length=16)
    source = open_source(save(tmp_path / "g.pt", record))
    first, second = source
    assert torch.equal(first.states, short.states) and torch.equal(second.states, long.states)
    assert torch.equal(second.loss_mask, long.loss_mask) and first.name == "g.pt[0]"
    assert any("padding left out" in note for note in source.notes)  # type: ignore[attr-defined]
    record["batch"]["attention_mask"][0, :2] = 0  # padding before the tokens
    save(tmp_path / "g.pt", record)
    with pytest.raises(DraftscopeError, match=r"row 0.*padding before tokens"):
        list(open_source(tmp_path / "g.pt"))
    kept = open_source(tmp_path / "g.pt", skip_bad=True)
    assert len(list(kept)) == 1 and [(s.row, s.cause) for s in kept.skipped] == [(0, "layout")]


def test_a_replay_sample_brings_its_mask_as_run_lengths(tmp_path: Path) -> None:
    sample = a_sample(6)
    record = {"input_ids": sample.token_ids[None], "hidden_states": wide(sample)[None], "last_hidden_states": last(sample)[None],
              "data_id": "7", "packed_loss_mask": "3,2,1", "metadata": {}}
    save(tmp_path / "samples" / "x.pt", record)
    (tmp_path / "samples" / "dataset.json").write_text(json.dumps({"version": 1, "last_hidden_states_prenorm": True}))
    read = one(tmp_path / "samples")
    assert read.loss_mask.tolist() == [False, False, False, True, True, False] and read.claimed_norm == "pre"
    for runs in ("3,x", "-1,3", "999999999999", [3, 2, 1]):
        save(tmp_path / "samples" / "x.pt", {**record, "packed_loss_mask": runs})
        with pytest.raises(DraftscopeError, match="run lengths"):
            list(open_source(tmp_path / "samples" / "x.pt"))


def test_target_logits_are_no_last_state(tmp_path: Path) -> None:
    record = torchspec_record(a_sample())
    record["batch"].pop("last_hidden_states")
    record["batch"]["target"] = torch.zeros(1, 6, 48)
    with pytest.raises(DraftscopeError, match="as wide as no state"):
        list(open_source(save(tmp_path / "g.pt", record), "torchspec"))


def test_requests_of_a_raw_dump_are_told_apart_and_bad_ones_counted(tmp_path: Path) -> None:
    records = trtllm_record(a_sample(seed=1), a_sample(seed=2), a_sample(seed=3))
    records[1]["hidden_state"] = records[1]["hidden_state"][:-1]
    save(tmp_path / "dp_0_1.pt", records)
    source = open_source(tmp_path)
    assert [sample.name for sample in source] == ["dp_0_1.pt[0]", "dp_0_1.pt[2]"]
    assert [(s.row, s.cause) for s in source.skipped] == [(1, "rows")] and "aux_hidden_states has 6 rows" in source.skipped[0].why
    with pytest.raises(DraftscopeError, match="row 1"):
        list(open_source(tmp_path / "dp_0_1.pt"))


WRONG = {
    "no slots": ({"aux_hidden_state": None}, "has no `aux_hidden_state`"),
    "no last state": ({"hidden_state": None}, "has no `hidden_state`"),
    "no ids": ({"input_ids": None}, "input_ids"),
    "widths that do not divide": ({"aux_hidden_state": torch.ones(1, 6, 25)}, "25 wide, no multiple of 8"),
    "fewer rows": ({"aux_hidden_state": torch.ones(1, 5, 24)}, "5 rows for 6"),
    "two sequences": ({"aux_hidden_state": torch.ones(2, 6, 24)}, "one sequence is expected"),
    "integer states": ({"aux_hidden_state": torch.ones(1, 6, 24).int()}, "int32"),
    "no tensor": ({"hidden_state": [1, 2]}, "of type list"),
    "float ids": ({"input_ids": torch.ones(6)}, "no integer tensor"),
    "short mask": ({"loss_mask": torch.ones(4).long()}, "for 6 rows"),
    "no rows": ({"hidden_state": torch.ones(1, 0, 8)}, r"\[1, 0, 8\]"),
    "views": ({"aux_hidden_state": torch.ones(1, 1, 1).expand(1, 6, 24)}, "more values than the file holds"),
}


@pytest.mark.parametrize("case", WRONG)
def test_records_that_do_not_fit_name_file_and_tensor(case: str, tmp_path: Path) -> None:
    change, says = WRONG[case]
    record = {key: value for key, value in {**specforge_record(a_sample()), **change}.items() if value is not None}
    file = save(tmp_path / "data_1.ckpt", record)
    for format in (None, "specforge"):
        with pytest.raises(DraftscopeError, match=says) as caught:
            list(open_source(file, format))
        assert "data_1.ckpt" in str(caught.value)


def test_eight_bits_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    """The file of speculators' fp8 connector, made after its description; the product in float64 bounds the rounding."""
    sample = a_sample(dtype=torch.float32)
    scale = (sample.states.abs().amax((1, 2), keepdim=True) / 448).float()
    small = (sample.states / scale).to(torch.float8_e4m3fn)
    file = tmp_path / "hs_0.safetensors"
    save_file({"hidden_states": small, "hidden_states_scales": scale, "token_ids": sample.token_ids}, file)
    source = open_source(tmp_path)
    (read,) = source
    assert read.states.dtype == torch.bfloat16
    assert torch.allclose(read.states.double(), small.double() * scale.double(), rtol=2**-7, atol=0)
    assert torch.equal(read.states, small.to(torch.bfloat16) * scale.to(torch.bfloat16))
    assert any("times `hidden_states_scales`" in note for note in source.notes)  # type: ignore[attr-defined]
    for bad in (torch.ones(5, 1, 1), torch.ones(6, 1, 8), torch.ones(6, 1, 1).int()):
        save_file({"hidden_states": small, "hidden_states_scales": bad, "token_ids": sample.token_ids}, file)
        with pytest.raises(DraftscopeError, match="hidden_states_scales"):
            list(open_source(file))


def test_rows_of_the_data_set_bring_masks_and_disown_other_ids(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    samples = [a_sample(seed=number) for number in range(3)]
    data_set(tmp_path, samples)
    folder = tmp_path / "hidden_states"
    folder.mkdir()
    for number in (0, 2):
        ids = samples[number].token_ids.clone()
        if number == 2:
            ids[4] += 1
        save_file({"hidden_states": samples[number].states, "token_ids": ids}, folder / f"hs_{number}.safetensors")
    for path in (tmp_path, tmp_path / "hidden_states"):
        source = open_source(path)
        (read,) = source
        assert source.format == "speculators" and torch.equal(read.loss_mask, samples[0].loss_mask)
        (skip,) = [s for s in source.skipped if s.cause == "rows"]
        assert "row 2" in skip.why and "token 4" in skip.why
        assert any("1 of 3 rows" in note for note in source.notes)  # type: ignore[attr-defined]
    assert len(list(open_source(tmp_path / "hidden_states", "plain"))) == 2


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a/b.arrow", ""])
def test_a_data_set_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_one("speculators", tmp_path, 0)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DraftscopeError, match=r"state\.json|Arrow"):
        list(open_source(tmp_path))


def test_arrow_files_that_are_cut_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_one("speculators", tmp_path, 1)
    file = next(tmp_path.glob("*1-of*.arrow"))
    whole = file.read_bytes()
    for point in (0, 4, 8, len(whole) // 3, len(whole) // 2):
        file.write_bytes(whole[:point])
        with pytest.raises(DraftscopeError, match=r"\.arrow|column|rows"):
            list(open_source(tmp_path / "hs_1.safetensors"))


def test_without_pyarrow_the_way_round_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    write_one("speculators", tmp_path, 1)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DraftscopeError, match=r"draftscope\[arrow\].*--format plain"):
        open_source(tmp_path)
    assert len(list(open_source(tmp_path, "plain"))) == 1


def test_what_vllm_extracts_is_what_it_is_asked_for_as(tmp_path: Path) -> None:
    sample = a_sample()
    save_file({"hidden_states": sample.states, "token_ids": sample.token_ids}, tmp_path / "cmpl-1.safetensors")
    assert open_source(tmp_path).kind == "samples" and open_source(tmp_path, kind="traces").format == "vllm-extract"
    (tmp_path / "cmpl-1.safetensors.lock").touch()
    assert open_source(tmp_path).kind == "traces" and open_source(tmp_path, kind="samples").format == "plain"
    (trace,) = open_source(tmp_path, "vllm-extract@all")
    assert torch.equal(trace.fc_input, sample.states.flatten(1)) and trace.last_hidden is None
    with pytest.raises(UsageError, match="vllm-extract@all"):
        open_source(tmp_path, "vllm-extract@2,3")
    with pytest.raises(UsageError, match="nothing to choose"):
        open_source(tmp_path, "plain@2")


def test_two_files_of_one_number_are_told(tmp_path: Path) -> None:
    for group in ("rows_0-2000", "rows_2000-4000"):
        save(tmp_path / group / "data_5.ckpt", specforge_record(a_sample()))
    source = open_source(tmp_path)
    assert len(list(source)) == 2 and any("number 5 is carried by" in note for note in source.notes)  # type: ignore[attr-defined]
