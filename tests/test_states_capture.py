"""Plain captures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from state_files import a_trace, write_one

from draftscope.errors import DraftscopeError
from draftscope.states import capture
from draftscope.states.capture import write_trace
from draftscope.states.opening import open_source
from draftscope.states.types import from_trace

PERSISTENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
