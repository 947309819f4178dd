"""Formats of states: what is written is what is read, and what cannot be read is named, never a traceback."""

from __future__ import annotations

import json
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states import capture, plain, speculators_v1
from draftscope.states.capture import write_trace
from draftscope.states.opening import FORMATS, open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample, Source, Trace, from_sample, from_trace

PERSISTENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def a_sample(rows: int = 6, entries: int = 4, width: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, entries, width, generator=draw).to(dtype)
    ids = torch.randint(0, 50, (rows,), generator=draw)
    return Sample("", ids, states, torch.arange(rows) >= rows // 2, tuple(f"entry {i}" for i in range(entries)))


def a_trace(prompt: int = 5, counts: tuple[int, ...] = (2, 0, 3), k: int = 3, width: int = 12, *, seed: int = 0) -> Trace:
    """A prompt and verify steps, rejected rows included."""
    draw = torch.Generator().manual_seed(seed)
    rows = prompt + len(counts) * (k + 1)
    step = torch.cat([torch.full((prompt,), -1), torch.arange(len(counts)).repeat_interleave(k + 1)])
    within = torch.cat([torch.zeros(prompt, dtype=torch.int64), torch.arange(k + 1).repeat(len(counts))])
    limit = torch.cat([torch.full((prompt,), k), torch.tensor(counts).repeat_interleave(k + 1)])
    ids = torch.randint(0, 50, (rows,), generator=draw)
    return Trace(
        name="", fc_input=torch.randn(rows, width, generator=draw).to(torch.bfloat16), token_ids=ids, accepted=within <= limit,
        phase=(step >= 0).to(torch.uint8), step=step, positions=torch.arange(rows), verified_ids=torch.randint(0, 50, (rows,)),
        last_hidden=torch.randn(rows, 4, generator=draw), fc_output=torch.randn(rows, 6, generator=draw),
        draft_token_ids=ids[prompt:].reshape(len(counts), k + 1)[:, 1:], accepted_counts=torch.tensor(counts),
        draft_states=torch.randn(len(counts), k, 6, generator=draw),
        meta={"engine": "vllm", "layer_ids": [2, 4, 5], "temperature": 0.5},
    )


def v1_file(path: Path, sample: Sample, **extra: object) -> Path:
    torch.save({"input_ids": sample.token_ids, "loss_mask": sample.loss_mask.long(),
                "hidden_states": [entry.contiguous() for entry in sample.states.unbind(1)], **extra}, path)
    return path


def write_one(name: str, folder: Path, number: int) -> Path:
    """One healthy file of each format."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == plain.NAME:
        write_sample(folder / f"hs_{number}.safetensors", a_sample(seed=number))
        return folder / f"hs_{number}.safetensors"
    if name == capture.NAME:
        write_trace(folder / f"req-{number}.safetensors", a_trace(seed=number))
        return folder / f"req-{number}.safetensors"
    return v1_file(folder / f"data_{number}.pt", a_sample(seed=number))


# --- the contract that every format keeps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_is_listed_by_number_read_lazily_and_counted(name: str, tmp_path: Path) -> None:
    files = [write_one(name, tmp_path, number) for number in (10, 2, 1)]
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "sub").mkdir()
    source = open_source(tmp_path)
    assert isinstance(source, Source) and source.format == name
    assert files[0].name in source.chosen or "has" in source.chosen or files[2].name in source.chosen
    assert [Path(s.path).name for s in source.skipped] == ["README.md", "sub"]
    assert len(source) == 3
    names = [item.name for item in source]
    assert names == [files[2].name, files[1].name, files[0].name]
    assert [item.name for item in source] == names and len(source.skipped) == 2  # a second pass counts nothing twice


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_but_the_listing_happens_before_an_item_is_asked_for(name: str, tmp_path: Path) -> None:
    for number in range(3):
        write_one(name, tmp_path, number)
    source = open_source(tmp_path)
    middle = source.files[1]  # type: ignore[attr-defined]
    middle.write_bytes(b"gone bad since")
    assert [item.name for item in source] == [source.files[0].name, source.files[2].name]  # type: ignore[attr-defined]
    assert [Path(s.path).name for s in source.skipped] == [middle.name]
    assert source.skipped[0].cause == "broken"


@pytest.mark.parametrize("name", FORMATS)
def test_a_single_file_is_a_source_of_one_and_its_trouble_is_an_error(name: str, tmp_path: Path) -> None:
    file = write_one(name, tmp_path, 7)
    assert len(list(open_source(file))) == 1
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DraftscopeError, match=file.name):
        list(open_source(file))
    with pytest.raises(DraftscopeError, match=file.name):
        list(open_source(file, format=name))
    with pytest.raises(DraftscopeError):
        list(open_source(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_named(name: str, tmp_path: Path) -> None:
    """Every cut near a structural point and a spread of others; a healthy neighbour stays readable."""
    keep = write_one(name, tmp_path, 1)
    cut = write_one(name, tmp_path, 2)
    whole = cut.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0] + 8 if cut.suffix == ".safetensors" else 64
    points = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1, *range(0, len(whole), len(whole) // 23)}
    for point in sorted(p for p in points if 0 <= p < len(whole)):
        cut.write_bytes(whole[:point])
        source = open_source(tmp_path)
        assert [item.name for item in source] == [keep.name], point
        assert [(Path(s.path).name, s.cause) for s in source.skipped] == [(cut.name, "broken")], point
        with pytest.raises(DraftscopeError, match=cut.name):
            list(open_source(cut))


@pytest.mark.parametrize("name", FORMATS)
def test_one_token_is_a_sequence(name: str, tmp_path: Path) -> None:
    if name == capture.NAME:
        write_trace(tmp_path / "a.safetensors", Trace("", torch.ones(1, 6), torch.tensor([3]), torch.tensor([True])))
    elif name == plain.NAME:
        write_sample(tmp_path / "hs_0.safetensors", a_sample(1))
    else:
        v1_file(tmp_path / "data_0.pt", a_sample(1))
    (item,) = open_source(tmp_path)
    assert len(item.token_ids) == 1


def test_unknown_format_and_missing_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="speculators-v1"):
        open_source(tmp_path, format="arrow")
    with pytest.raises(DraftscopeError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(DraftscopeError, match="no file with states"):
        open_source(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DraftscopeError, match="train"):
        open_source(tmp_path)


def test_the_format_that_most_files_have_wins_and_a_tie_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        write_one(plain.NAME, tmp_path, number)
    write_one(capture.NAME, tmp_path, 0)
    source = open_source(tmp_path)
    assert source.format == plain.NAME and len(list(source)) == 2
    assert [(Path(s.path).name, s.cause) for s in source.skipped] == [("req-0.safetensors", "layout")]
    write_one(capture.NAME, tmp_path, 1)
    with pytest.raises(DraftscopeError, match="several formats"):
        open_source(tmp_path)
    assert len(list(open_source(tmp_path, format=capture.NAME))) == 2


# --- plain training data --------------------------------------------------------------------------------------------------


@PERSISTENT
@given(
    rows=st.integers(1, 9), entries=st.integers(1, 5), width=st.integers(1, 7),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]),
    masked=st.sampled_from([None, "some", "none", "all"]), named=st.booleans(), number=st.integers(0, 10**9),
)
def test_a_sample_comes_back_as_written(tmp_path: Path, rows: int, entries: int, width: int, dtype: torch.dtype,
                                        masked: str | None, named: bool, number: int) -> None:
    sample = a_sample(rows, entries, width, dtype=dtype, seed=number % 1000)
    sample.loss_mask = {None: None, "some": sample.loss_mask, "none": torch.zeros(rows, dtype=torch.bool),
                        "all": torch.ones(rows, dtype=torch.bool)}[masked]
    if named:
        sample.labels = tuple(f"layer {3 * i}" for i in range(entries))
    path = tmp_path / f"hs_{number}.safetensors"
    write_sample(path, sample, {"layer_ids": [9] * entries})
    (read,) = open_source(path)
    assert torch.equal(read.states.view(torch.uint8), sample.states.view(torch.uint8)) and read.states.dtype == dtype
    assert torch.equal(read.token_ids, sample.token_ids) and read.token_ids.dtype == torch.int64
    assert (read.loss_mask is None) == (masked is None)
    if masked is not None:
        assert torch.equal(read.loss_mask, sample.loss_mask) and read.loss_mask.dtype == torch.bool
    assert read.labels == (sample.labels if named else ("layer 9",) * entries)
    assert read.index == number
    path.unlink()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint64])
def test_the_mask_may_be_any_integer(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"hidden_states": torch.ones(3, 4, 2), "token_ids": torch.arange(3), "loss_mask": torch.tensor([0, 1, 1]).to(dtype)}
    save_file(tensors, tmp_path / "hs_0.safetensors")
    (read,) = open_source(tmp_path)
    assert read.loss_mask.tolist() == [False, True, True]


def test_odd_token_ids_and_values_are_content_not_errors(tmp_path: Path) -> None:
    states = torch.ones(3, 4, 2)
    states[1, 2, 0] = torch.nan
    ids = torch.tensor([2**64 - 1, 5, 2**63], dtype=torch.uint64)
    save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "hs_0.safetensors")
    save_file({"hidden_states": torch.ones(1, 2, 5), "token_ids": torch.tensor([-7])}, tmp_path / "hs_1.safetensors")
    first, second = open_source(tmp_path)
    assert first.token_ids.tolist() == [-1, 5, -(2**63)] and torch.isnan(first.states[1, 2, 0])
    assert second.token_ids.tolist() == [-7] and second.states.shape == (1, 2, 5)


WRONG = {
    "no states": ({"token_ids": torch.arange(3)}, "hidden_states", "layout"),
    "no ids": ({"hidden_states": torch.ones(3, 4, 2)}, "token_ids", "layout"),
    "two axes": ({"hidden_states": torch.ones(3, 8), "token_ids": torch.arange(3)}, r"\[3, 8\]", "layout"),
    "batched": ({"hidden_states": torch.ones(1, 3, 4, 2), "token_ids": torch.arange(3)}, r"\[1, 3, 4, 2\]", "layout"),
    "ids batched": ({"hidden_states": torch.ones(3, 4, 2), "token_ids": torch.arange(3)[None]}, r"\[1, 3\]", "layout"),
    "integer states": ({"hidden_states": torch.ones(3, 4, 2).int(), "token_ids": torch.arange(3)}, "int32", "layout"),
    "float ids": ({"hidden_states": torch.ones(3, 4, 2), "token_ids": torch.ones(3)}, "float32", "layout"),
    "fewer ids": ({"hidden_states": torch.ones(3, 4, 2), "token_ids": torch.arange(2)}, "2 rows for 3", "rows"),
    "short mask": ({"hidden_states": torch.ones(3, 4, 2), "token_ids": torch.arange(3), "loss_mask": torch.ones(2).long()},
                   "loss_mask", "rows"),
    "float mask": ({"hidden_states": torch.ones(3, 4, 2), "token_ids": torch.arange(3), "loss_mask": torch.ones(3)},
                   "loss_mask", "layout"),
    "no rows": ({"hidden_states": torch.ones(0, 4, 2), "token_ids": torch.arange(0)}, "empty", "layout"),
    "no width": ({"hidden_states": torch.ones(3, 4, 0), "token_ids": torch.arange(3)}, "empty", "layout"),
    "something else": ({"fc.weight": torch.ones(3, 4)}, "fc.weight", "foreign"),
    "nothing": ({}, "no tensor", "foreign"),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_do_not_fit_are_skipped_with_the_reason_or_refused_when_named(case: str, tmp_path: Path) -> None:
    tensors, says, cause = WRONG[case]
    write_one(plain.NAME, tmp_path, 0)
    file = tmp_path / "hs_1.safetensors"
    save_file(tensors, file)
    source = open_source(tmp_path)
    assert len(list(source)) == 1
    (skip,) = source.skipped
    assert Path(skip.path) == file and skip.cause == cause
    with pytest.raises(DraftscopeError, match=says) as caught:
        list(open_source(file, format=plain.NAME))
    assert file.name in str(caught.value)
    with pytest.raises(DraftscopeError, match=file.name):
        list(open_source(file))


@pytest.mark.parametrize(("metadata", "labels", "notes"), [
    ({"labels": '["embed", "layer 3"]'}, ("embed", "layer 3"), 0),
    ({"layer_ids": "[3, 59]"}, ("layer 3", "layer 59"), 0),
    ({"labels": "[not json"}, ("entry 0", "entry 1"), 1),
    ({"labels": '["embed"]'}, ("entry 0", "entry 1"), 1),
    ({"labels": '{"a": 1}', "layer_ids": "[1, 2]"}, ("layer 1", "layer 2"), 1),
    ({"labels": "[" * 100000}, ("entry 0", "entry 1"), 1),
    ({"labels": "[[1], 2]"}, ("entry 0", "entry 1"), 1),
    ({}, ("entry 0", "entry 1"), 0),
])
def test_labels_are_taken_where_they_fit(metadata: dict[str, str], labels: tuple[str, ...], notes: int, tmp_path: Path) -> None:
    tensors = {"hidden_states": torch.ones(3, 2, 2), "token_ids": torch.arange(3)}
    save_file(tensors, tmp_path / "hs_0.safetensors", metadata or None)
    source = open_source(tmp_path)
    (read,) = source
    assert read.labels == labels and len(source.notes) == notes  # type: ignore[attr-defined]


def test_writing_replaces_whole_files_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "new" / "hs_0.safetensors"
    write_sample(path, a_sample(seed=1))
    before = path.read_bytes()
    bad = a_sample(seed=2)
    bad.token_ids = bad.token_ids[:-1]
    with pytest.raises(DraftscopeError, match="rows"):
        write_sample(path, bad)
    assert path.read_bytes() == before
    write_sample(path, a_sample(seed=2))
    assert path.read_bytes() != before
    assert [p.name for p in path.parent.iterdir()] == ["hs_0.safetensors"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(DraftscopeError, match="cannot be written"):
        write_sample(tmp_path / "file" / "hs_0.safetensors", a_sample())


def test_views_and_shared_memory_can_be_written(tmp_path: Path) -> None:
    everything = torch.randn(10, 4, 6)
    sample = a_sample()
    sample.states = everything[2:8]
    write_sample(tmp_path / "hs_0.safetensors", sample)
    (read,) = open_source(tmp_path)
    assert torch.equal(read.states, everything[2:8])
    trace = a_trace()
    trace.last_hidden = trace.fc_input[:, :4]
    trace.positions = trace.token_ids
    write_trace(tmp_path / "c" / "a.safetensors", trace)
    (back,) = open_source(tmp_path / "c")
    assert torch.equal(back.last_hidden, trace.fc_input[:, :4]) and torch.equal(back.positions, trace.token_ids)


def test_a_sample_as_a_sequence_has_slots_and_the_last_state_apart(tmp_path: Path) -> None:
    write_sample(tmp_path / "hs_4.safetensors", a_sample())
    (read,) = open_source(tmp_path)
    sequence = from_sample(read)
    assert torch.equal(sequence.features, a_sample().states[:, :3]) and torch.equal(sequence.last, a_sample().states[:, 3])


# --- plain capture --------------------------------------------------------------------------------------------------------

OPTIONAL = ("phase", "step", "positions", "verified_ids", "last_hidden", "fc_output", "draft_token_ids", "accepted_counts",
            "draft_states")


@PERSISTENT
@given(dropped=st.sets(st.sampled_from(OPTIONAL)), seed=st.integers(0, 99), prompt=st.integers(1, 6),
       counts=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_a_trace_comes_back_as_written(tmp_path: Path, dropped: set[str], seed: int, prompt: int, counts: list[int]) -> None:
    trace = a_trace(prompt, tuple(counts), seed=seed)
    for name in dropped:
        setattr(trace, name, None)
    write_trace(tmp_path / "r.safetensors", trace)
    (read,) = open_source(tmp_path)
    for name in ("fc_input", "token_ids", "accepted", *OPTIONAL):
        wrote, got = getattr(trace, name), getattr(read, name)
        assert (wrote is None) == (got is None), name
        assert wrote is None or (torch.equal(wrote, got) and wrote.dtype == got.dtype), name
    assert read.meta == trace.meta


def test_the_least_a_capture_can_be(tmp_path: Path) -> None:
    """Two tensors, written with nothing of ours."""
    save_file({"fc_input": torch.ones(4, 6), "token_ids": torch.arange(4)}, tmp_path / "x.safetensors")
    (read,) = open_source(tmp_path)
    assert read.accepted.tolist() == [True] * 4
    assert all(getattr(read, name) is None for name in (*OPTIONAL, "draft_parents")) and read.meta == {}
    sequence = from_trace(read, 3)
    assert sequence.positions.tolist() == [0, 1, 2, 3] and sequence.answer is None and sequence.steps is None


def test_a_capture_of_ten_lines_gives_the_sequence_it_stands_for(tmp_path: Path) -> None:
    """Rejected rows go, steps start at the last accepted row before their own, the bonus follows."""
    tensors = {
        "fc_input": torch.arange(9.0)[:, None].repeat(1, 3), "token_ids": torch.tensor([5, 6, 7, 20, 21, 22, 30, 31, 32]),
        "phase": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1]), "step": torch.tensor([-1, -1, -1, 0, 0, 0, 1, 1, 1]),
        "accepted": torch.tensor([1, 1, 1, 1, 1, 0, 1, 0, 0]), "verified_ids": torch.tensor([0, 0, 20, 21, 30, 0, 40, 0, 0]),
        "accepted_counts": torch.tensor([1, 0]), "draft_token_ids": torch.tensor([[21, 22], [31, 32]]),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    (read,) = open_source(tmp_path)
    sequence = from_trace(read, 3)
    assert sequence.token_ids.tolist() == [5, 6, 7, 20, 21, 30, 40]
    assert sequence.features[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 6]
    assert sequence.steps.start.tolist() == [2, 4] and sequence.steps.accepted.tolist() == [1, 0]
    assert sequence.answer.tolist() == [False] * 3 + [True] * 4


def test_the_files_own_metadata_outranks_capture_json(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text(json.dumps({"engine": "sglang", "layer_ids": [1, 2, 3], "note": "x"}))
    own = {"engine": "vllm", "num_spec_tokens": "3", "topk": "one", "draft": "[broken"}
    save_file({"fc_input": torch.ones(4, 6), "token_ids": torch.arange(4)}, tmp_path / "r2.safetensors", own)
    save_file({"fc_input": torch.ones(4, 6), "token_ids": torch.arange(4)}, tmp_path / "r10.safetensors")
    source = open_source(tmp_path)
    first, second = source
    assert first.meta == {"engine": "vllm", "layer_ids": [1, 2, 3], "note": "x", "num_spec_tokens": 3}
    assert second.meta == {"engine": "sglang", "layer_ids": [1, 2, 3], "note": "x"}
    assert source.meta["engine"] == "vllm" and len(source.notes) == 2  # type: ignore[attr-defined]
    assert source.skipped == []


@pytest.mark.parametrize("text", ["{", "[1, 2]", "[" * 200000, '{"layer_ids": ' + "9" * 5000 + "}", "\udcff"])
def test_a_capture_json_that_is_none_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    write_one(capture.NAME, tmp_path, 0)
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and len(source.notes) == 1  # type: ignore[attr-defined]


WRONG_TRACE = {
    "no input": ({"fc_input": None}, "fc_input", "layout"),
    "no ids": ({"token_ids": None}, "token_ids", "layout"),
    "three axes": ({"fc_input": torch.ones(17, 3, 4)}, r"\[17, 3, 4\]", "layout"),
    "short ids": ({"token_ids": torch.arange(16)}, "16 rows for 17", "rows"),
    "short phase": ({"phase": torch.ones(2).long()}, "phase", "rows"),
    "short last": ({"last_hidden": torch.ones(2, 4)}, "last_hidden", "rows"),
    "float step": ({"step": torch.ones(17)}, "step", "layout"),
    "steps differ": ({"accepted_counts": torch.ones(2).long()}, "steps", "rows"),
    "k differs": ({"draft_states": torch.ones(3, 2, 6)}, "drafted tokens", "rows"),
    "flat drafts": ({"draft_token_ids": torch.ones(3).long()}, "draft_token_ids", "layout"),
    "accepted is no bool": ({"accepted": torch.ones(17)}, "accepted", "layout"),
}


@pytest.mark.parametrize("case", WRONG_TRACE)
def test_captures_that_contradict_themselves_are_skipped_or_refused(case: str, tmp_path: Path) -> None:
    change, says, cause = WRONG_TRACE[case]
    write_one(capture.NAME, tmp_path, 0)
    file = tmp_path / "req-1.safetensors"
    write_trace(file, a_trace())
    tensors = {**load_file(file), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and [(Path(s.path), s.cause) for s in source.skipped] == [(file, cause)]
    with pytest.raises(DraftscopeError, match=says):
        list(open_source(file, format=capture.NAME))


def test_a_request_without_steps_is_whole(tmp_path: Path) -> None:
    tensors = {"fc_input": torch.ones(4, 6), "token_ids": torch.arange(4), "accepted_counts": torch.zeros(0).long(),
               "draft_token_ids": torch.zeros(0, 3).long()}
    save_file(tensors, tmp_path / "x.safetensors")
    (read,) = open_source(tmp_path)
    assert read.accepted_counts is None and read.draft_token_ids is None


# --- speculators' torch files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["list", "tuple", "tensor", "named"])
def test_old_torch_files_come_back(shape: str, tmp_path: Path) -> None:
    sample = a_sample()
    entries = [entry.contiguous() for entry in sample.states.unbind(1)]
    named = {f"n{i}": entry for i, entry in enumerate(entries)}
    value = {"list": entries, "tuple": tuple(entries), "tensor": sample.states, "named": named}[shape]
    torch.save({"input_ids": sample.token_ids, "loss_mask": sample.loss_mask, "hidden_states": value}, tmp_path / "data_3.pt")
    (tmp_path / "data_config.json").write_text(json.dumps({"version": "2.0", "hidden_states": {"layer_ids": [2, 30, 58, 60]}}))
    torch.save({"d2t": torch.arange(3)}, tmp_path / "vocab_mapping.pt")
    source = open_source(tmp_path)
    (read,) = source
    assert torch.equal(read.states, sample.states) and torch.equal(read.token_ids, sample.token_ids)
    assert torch.equal(read.loss_mask, sample.loss_mask) and read.index == 3
    assert read.labels == (("n0", "n1", "n2", "n3") if shape == "named" else ("layer 2", "layer 30", "layer 58", "layer 60"))
    assert source.meta["version"] == "2.0"
    assert [(Path(s.path).name, s.cause) for s in source.skipped] == [("vocab_mapping.pt", "foreign")]


def test_a_single_torch_file_keeps_its_own_labels(tmp_path: Path) -> None:
    file = v1_file(tmp_path / "sample.pt", a_sample(), labels=["embed", "layer 3", "layer 31", "layer 59"])
    (read,) = open_source(file)
    assert read.labels == ("embed", "layer 3", "layer 31", "layer 59")
    (tmp_path / "other").mkdir()
    unmasked = {"input_ids": torch.arange(6), "hidden_states": list(a_sample().states.unbind(1))}
    torch.save(unmasked, tmp_path / "other" / "x.pt")
    (bare,) = open_source(tmp_path / "other" / "x.pt")
    assert bare.loss_mask is None


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("open('/tmp/draftscope-trap', 'w').write('sprung')",))


class Balloon:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return (bytearray, (1 << 42,))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("planted", [Trap(), Balloon(), OrderedDict(a=Trap()), {1, 2}],
                         ids=["exec", "bytearray", "nested", "set"])
def test_a_pickle_that_names_anything_but_tensors_is_not_executed(planted: object, protocol: int, tmp_path: Path) -> None:
    trap = Path("/tmp/draftscope-trap")
    trap.unlink(missing_ok=True)
    file = v1_file(tmp_path / "data_0.pt", a_sample(), extra=None)
    held = {"input_ids": torch.arange(6), "hidden_states": [torch.ones(6, 2)], "extra": planted}
    torch.save(held, file, pickle_protocol=protocol)
    with pytest.raises(DraftscopeError, match="nothing was executed"):
        open_source(file)
    assert not trap.exists()


def test_other_zip_archives_raw_pickles_and_oversized_entries_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "data_0.pt"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("hello.txt", "hello")
    with pytest.raises(DraftscopeError, match=r"torch\.save"):
        open_source(archive)
    archive.write_bytes(pickle.dumps({"input_ids": [1], "hidden_states": []}))
    with pytest.raises(DraftscopeError, match=r"torch\.save"):
        open_source(archive)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as z:  # a bomb: small file, huge entry
        z.writestr("a/data.pkl", b"\0" * 10**7)
    with pytest.raises(DraftscopeError, match="more data than the file holds"):
        open_source(archive)


def test_views_that_declare_more_than_they_hold_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data_0.pt"
    torch.save({"input_ids": torch.arange(1).expand(10**9), "hidden_states": [torch.ones(1, 1).expand(10**9, 7168)] * 4}, file)
    with pytest.raises(DraftscopeError, match="more values than the file holds"):
        open_source(file)


WRONG_V1 = {
    "no states": ({"input_ids": torch.arange(3)}, "hidden_states", "layout"),
    "no ids": ({"hidden_states": [torch.ones(3, 2)]}, "input_ids", "layout"),
    "unequal rows": ({"input_ids": torch.arange(3), "hidden_states": [torch.ones(3, 2), torch.ones(2, 2)]}, r"\[1\]", "rows"),
    "unequal widths": ({"input_ids": torch.arange(3), "hidden_states": [torch.ones(3, 2), torch.ones(3, 4)]}, r"\[1\]", "layout"),
    "ids too few": ({"input_ids": torch.arange(2), "hidden_states": [torch.ones(3, 2)]}, "3 rows", "rows"),
    "numbers": ({"input_ids": torch.arange(3), "hidden_states": [1, 2]}, "int", "layout"),
    "flat": ({"input_ids": torch.arange(3), "hidden_states": torch.ones(3, 6)}, r"\[3, 6\]", "layout"),
    "empty": ({"input_ids": torch.arange(3), "hidden_states": []}, "no list", "layout"),
    "a list": ([1, 2], "dict", "foreign"),
    "text ids": ({"input_ids": ["a", "b", "c"], "hidden_states": [torch.ones(3, 2)]}, "input_ids", "layout"),
}


@pytest.mark.parametrize("case", WRONG_V1)
def test_torch_files_that_do_not_fit(case: str, tmp_path: Path) -> None:
    held, says, cause = WRONG_V1[case]
    write_one(speculators_v1.NAME, tmp_path, 0)
    file = tmp_path / "data_1.pt"
    torch.save(held, file)
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and [(Path(s.path), s.cause) for s in source.skipped] == [(file, cause)]
    with pytest.raises(DraftscopeError, match=says):
        open_source(file)


# --- hostile headers ------------------------------------------------------------------------------------------------------

HEADERS = st.one_of(
    st.binary(max_size=64),
    st.builds(
        lambda name, dtype, shape, start, end, extra: json.dumps({
            name: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}, **extra}).encode(),
        st.sampled_from(["hidden_states", "token_ids", "fc_input", "x"]),
        st.sampled_from(["F32", "BF16", "I64", "F4", "C64", "nope"]),
        st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63 - 1, 2**64 - 1, -1]), max_size=4),
        st.integers(-1, 40), st.integers(-1, 2**64),
        st.sampled_from([{}, {"__metadata__": {"labels": "["}}, {"__metadata__": 3},
                         {"token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}]),
    ),
)


def attempt(path: Path, name: str | None) -> tuple[list[Sample | Trace] | None, str]:
    try:
        return list(open_source(path, format=name)), ""
    except DraftscopeError as error:
        return None, str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=HEADERS, declared=st.one_of(st.none(), st.integers(0, 2**64 - 1)), body=st.binary(max_size=48))
def test_no_header_makes_more_than_an_error(tmp_path: Path, header: bytes, declared: int | None, body: bytes) -> None:
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if declared is None else declared) + header + body)
    for name in (None, plain.NAME, capture.NAME):
        items, said = attempt(path, name)
        assert path.name in said if items is None else len(items) == 1 and len(items[0].token_ids) >= 1


def test_sizes_declared_by_a_file_allocate_nothing(tmp_path: Path) -> None:
    """In a process of its own with 3 GB of address space above what the imports take: each file is refused as a file."""
    huge = {"hidden_states": {"dtype": "F32", "shape": [2**40, 4, 64], "data_offsets": [0, 2**50]}}
    header = json.dumps(huge).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 2**62) + header)
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", 99_000_000) + header)
    expanded = {"input_ids": torch.arange(1).expand(10**12), "hidden_states": [torch.ones(1, 1).expand(10**9, 7168)] * 4}
    torch.save(expanded, tmp_path / "d.pt")
    torch.save({"input_ids": torch.arange(6), "hidden_states": [torch.ones(6, 2)], "extra": Balloon()}, tmp_path / "e.pt")
    code = f"""
import resource, sys
from pathlib import Path
from draftscope.errors import DraftscopeError
from draftscope.states.opening import open_source
size = int(open('/proc/self/statm').read().split()[0]) * {resource.getpagesize()}
resource.setrlimit(resource.RLIMIT_AS, (size + 3 * 2**30,) * 2)
for path in sorted(Path({str(tmp_path)!r}).iterdir()):
    try:
        list(open_source(path))
    except DraftscopeError as error:
        print(path.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["a.safetensors", "b.safetensors", "c.safetensors", "d.pt", "e.pt"], done.stderr


def test_reading_one_row_of_a_large_sample_reads_little(tmp_path: Path) -> None:
    """Mapped, not loaded: 400 MB on disk, one row touched."""
    path = tmp_path / "hs_0.safetensors"
    header = json.dumps({"hidden_states": {"dtype": "F32", "shape": [25000, 4, 1000], "data_offsets": [0, 400_000_000]},
                         "token_ids": {"dtype": "I64", "shape": [25000], "data_offsets": [400_000_000, 400_200_000]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 400_200_000)  # a sparse file
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (sample,) = open_source(path)
    assert float(sample.states[20000, 2].sum()) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_bytes_of_the_library_are_what_others_read(tmp_path: Path) -> None:
    """The writer's file through safetensors alone, without the reader here."""
    sample = a_sample()
    write_sample(tmp_path / "hs_0.safetensors", sample)
    loaded = load_file(tmp_path / "hs_0.safetensors")
    assert set(loaded) == {"hidden_states", "token_ids", "loss_mask"}
    assert torch.equal(loaded["hidden_states"], sample.states) and loaded["token_ids"].dtype == torch.int64
    assert len(save(loaded)) == (tmp_path / "hs_0.safetensors").stat().st_size
