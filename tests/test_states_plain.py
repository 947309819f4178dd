"""Plain training data, and which format is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from state_files import a_sample, a_trace, write_one

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states import capture, plain
from draftscope.states.capture import write_trace
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import from_sample

PERSISTENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    stored = torch.bfloat16 if dtype.itemsize == 1 else dtype  # what eight bits are widened to, exactly
    assert torch.equal(read.states.view(torch.uint8), sample.states.to(stored).view(torch.uint8)) and read.states.dtype == stored
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
