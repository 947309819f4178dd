"""SGLang's dumps and answers: passes put together into requests, held against a log of what was served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from state_files import a_sample, dump_pass, dumped, dumper_pass, response, wide

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.opening import open_source
from draftscope.states.types import Trace, from_trace


def states_of(ids: list[int], positions: list[int]) -> torch.Tensor:
    """[R, 4, 8] that say which token stood where."""
    return torch.tensor([[[100.0 * i + b + p / 1000] * 8 for b in range(4)] for i, p in zip(ids, positions, strict=True)])


def add(folder: Path, number: int, runs: list[tuple[list[int], int]], lengths: list[int]) -> None:
    ids = [token for run, _ in runs for token in run]
    positions = [start + i for run, start in runs for i in range(len(run))]
    dump_pass(folder, number, ids, positions, lengths, states_of(ids, positions))


def traces(path: Path, format: str | None = None) -> list[Trace]:
    return list(open_source(path, format))


def test_chunks_decoding_and_two_requests(tmp_path: Path) -> None:
    """One request in two pieces of prefill, a second that joins, both decoded, one of them longer."""
    home = tmp_path / "TP0_PP0_Rank0_pid1"
    add(home, 0, [([5, 6, 7], 0)], [3])
    add(home, 1, [([8, 9], 3), ([20, 21], 0)], [5, 2])
    add(home, 2, [([10], 5), ([22], 2)], [6, 3])
    add(home, 3, [([23], 3)], [4])
    first, second = traces(tmp_path)
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9, 10] and second.token_ids.tolist() == [20, 21, 22, 23]
    assert first.phase.tolist() == [0] * 5 + [1] and second.phase.tolist() == [0, 0, 1, 1]
    assert bool(first.accepted.all()) and first.accepted_counts is None and first.positions.tolist() == list(range(6))
    assert first.fc_input.shape == (6, 24) and first.fc_input[4].tolist()[::8] == pytest.approx([900.004, 901.004, 902.004])
    assert second.last_hidden[3, 0].item() == pytest.approx(2303.003)


def test_verify_steps_show_what_was_accepted(tmp_path: Path) -> None:
    """Three drafted tokens a step: two accepted, none, then the end of the dump."""
    home = tmp_path / "target" / "TP0_PP0_Rank0_pid1"
    add(home, 0, [([5, 6], 0)], [2])
    add(home, 1, [([7, 8, 9, 1], 2)], [2])
    add(home, 2, [([10, 11, 2, 3], 5)], [5])
    add(home, 3, [([12, 4, 4, 4], 6)], [6])
    dump_pass(tmp_path / "draft" / "TP0_PP0_Rank0_pid1", 0, [1], [0], [1], states_of([1], [0]))
    dump_pass(tmp_path / "target" / "TP1_PP0_Rank1_pid2", 0, [1], [0], [1], states_of([1], [0]))
    source = open_source(tmp_path)
    (trace,) = source
    assert trace.accepted_counts.tolist() == [2, 0] and trace.draft_token_ids.tolist() == [[8, 9, 1], [11, 2, 3]]
    sequence = from_trace(trace, 3)
    assert sequence.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 12]
    assert sequence.steps.start.tolist() == [1, 4] and sequence.steps.accepted.tolist() == [2, 0]
    assert {"draft's own" in s.why or "tensor-parallel" in s.why for s in source.skipped} == {True}


def test_requests_of_one_length_that_cannot_be_told_apart_end_there(tmp_path: Path) -> None:
    home = tmp_path / "TP0_PP0_Rank0_pid1"
    add(home, 0, [([5, 6], 0), ([7, 8], 0), ([1, 2, 3], 0)], [2, 2, 3])
    add(home, 1, [([9], 2)], [3])
    source = open_source(tmp_path)
    assert [trace.token_ids.tolist() for trace in source] == [[5, 6], [7, 8], [1, 2, 3]]
    assert any("several requests" in note for note in source.notes)  # type: ignore[attr-defined]


def test_boundaries_are_chosen_by_name(tmp_path: Path) -> None:
    home = tmp_path / "TP0_PP0_Rank0_pid1"
    add(home, 0, [([5, 6], 0)], [2])
    (trace,) = traces(tmp_path, "sglang-dump@2,0")
    assert trace.fc_input[0, ::8].tolist() == pytest.approx([502.0, 500.0]) and trace.meta["layer_ids"] == [2, 0]
    with pytest.raises(DraftscopeError, match="no boundary 7"):
        traces(home, "sglang-dump@7")
    with pytest.raises(UsageError, match="sglang-dump@2,15,27"):
        traces(tmp_path, "sglang-dump@low")


def test_pipeline_ranks_are_put_together(tmp_path: Path) -> None:
    states = states_of([5, 6], [0, 1])
    whole = torch.load(dump_pass(tmp_path / "w", 0, [5, 6], [0, 1], [2], states))
    for rank, kept in ((0, ("embed", "layers.0", "layers.1", "batch")), (1, ("layers.2", "model.norm", "batch"))):
        home = tmp_path / "d" / f"TP0_PP{rank}_Rank{rank}_pid{rank}"
        home.mkdir(parents=True)
        torch.save({k: v for k, v in whole.items() if any(part in k for part in kept)}, home / "Pass00000.pt")
    (trace,) = traces(tmp_path / "d", "sglang-dump")
    assert trace.fc_input.shape == (2, 24) and trace.last_hidden is not None


def test_dumped_tensors_follow_their_numbers_and_request_ids(tmp_path: Path) -> None:
    home = tmp_path / "dump_1"
    first, second = a_sample(4, seed=1), a_sample(3, seed=2)
    dumper_pass(home, 1, first.token_ids, first.states, ["a"])
    dumper_pass(home, 20, second.token_ids, second.states, ["b"])
    dumped(home, 40, "input_ids", torch.tensor([1]), rank=1)
    one, two = traces(tmp_path)
    assert (one.name, two.name) == ("a", "b") and torch.equal(two.token_ids, second.token_ids)
    assert torch.equal(one.fc_input, wide(first)) and torch.equal(two.last_hidden, second.states[:, 3])


def test_states_dumped_by_hand_are_taken_as_they_are(tmp_path: Path) -> None:
    sample = a_sample()
    held = [("input_ids", sample.token_ids), ("positions", torch.arange(6)), ("seq_lens", torch.tensor([6]))]
    for index, (name, value) in enumerate(held):
        dumped(tmp_path / "d", index + 1, name, value)
    for layer in range(3):
        dumped(tmp_path / "d", 10 + layer, "layer_start__hidden_states", sample.states[:, layer].clone(), layer_id=4 * layer)
    source = open_source(tmp_path)
    (trace,) = source
    assert torch.equal(trace.fc_input, wide(sample))
    assert any("dumped by hand" in note for note in source.notes)  # type: ignore[attr-defined]


def test_an_answer_gives_the_rows_of_every_token_but_the_last(tmp_path: Path) -> None:
    sample = a_sample()
    (tmp_path / "a.json").write_text(json.dumps([response(sample, 4), response(sample, 2)], indent=1))
    one, two = traces(tmp_path)
    assert torch.equal(one.fc_input, wide(sample).float()) and one.phase.tolist() == [0, 0, 0, 0, 1, 1]
    assert two.phase.tolist() == [0, 0, 1, 1, 1, 1] and one.name == "a.json[0]"
    sequence = from_trace(one, 3)
    assert sequence.token_ids.tolist() == [*sample.token_ids.tolist(), 7]


def test_lines_of_answers_and_bad_ones_among_them(tmp_path: Path) -> None:
    good, bare, short = response(a_sample(), 3), response(a_sample(seed=1), 3), response(a_sample(seed=2), 3)
    del bare["input_ids"]
    short["meta_info"]["hidden_states"].pop()
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(one) for one in (good, bare, short)) + "\n")
    source = open_source(tmp_path)
    assert len(list(source)) == 1
    assert [(s.row, s.cause) for s in source.skipped] == [(1, "layout"), (2, "rows")]
    assert "input_ids" in source.skipped[0].why and "5 rows for 3 prompt tokens" in source.skipped[1].why
    with pytest.raises(DraftscopeError, match="row 1"):
        traces(tmp_path / "a.jsonl")


def test_a_cached_prefix_has_no_rows(tmp_path: Path) -> None:
    held = response(a_sample(), 4)
    held["meta_info"]["hidden_states"][0] = held["meta_info"]["hidden_states"][0][2:]
    held["meta_info"]["cached_tokens"] = 2
    (tmp_path / "a.json").write_text(json.dumps(held))
    (trace,) = traces(tmp_path)
    assert trace.positions.tolist() == [2, 3, 4, 5] and trace.token_ids.tolist() == a_sample().token_ids.tolist()[2:]


@pytest.mark.parametrize("text", [
    '{"meta_info": {"hidden_states": [[[1, 2], [3]]]}}', '{"meta_info": {"hidden_states": [[1, "x"]]}}',
    '{"meta_info": {"hidden_states": [[[[1]]]]}}', '{"meta_info": {"hidden_states": [[1, 2',
    '{"meta_info": {"hidden_states": []}}', '{"meta_info": {"hidden_states": 0}}', '{"hidden_states": [[1, 2]]}', "[" * 5000,
    "{}", '{"meta_info": {"hidden_states": [[]]}}',
])
def test_answers_that_are_none_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DraftscopeError, match=r"a\.json"):
        traces(tmp_path / "a.json", "sglang-response")


def test_null_is_not_a_number(tmp_path: Path) -> None:
    held = response(a_sample(), 4)
    held["meta_info"]["hidden_states"][2][3] = None
    (tmp_path / "a.json").write_text(json.dumps(held))
    (trace,) = traces(tmp_path)
    assert int(trace.fc_input.isnan().sum()) == 1
