"""What every format of states keeps: found by content, listed by number, read lazily, names what it cannot read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from state_files import DEEP, SHARED, a_sample, structural_points, wide, write_one
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.opening import FORMATS, format_kind, open_source, recognised
from draftscope.states.types import Sample, Source, Trace

TRACES = {"capture", "vllm-extract", "sglang-dump", "sglang-dumper", "sglang-response"}
MASKED = set(FORMATS) - TRACES - {"trtllm"}


@pytest.fixture(params=list(FORMATS))
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "speculators":
        pytest.importorskip("pyarrow")
    return str(request.param)


def ids_of(items: list[Sample | Trace]) -> list[list[int]]:
    return [item.token_ids.tolist() for item in items]


def test_a_folder_is_listed_by_number_read_lazily_and_counted(name: str, tmp_path: Path) -> None:
    units = {number: write_one(name, tmp_path, number)[0] for number in (10, 2, 1)}
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "sub").mkdir()
    source = open_source(tmp_path)
    assert isinstance(source, Source) and source.format == name and source.kind == format_kind(name)
    assert source.chosen and source.files == [units[1], units[2], units[10]]  # type: ignore[attr-defined]
    assert "before" in source.order  # type: ignore[attr-defined]
    assert {Path(s.path).name for s in source.skipped} == {"README.md"} | (set() if name in DEEP else {"sub"})
    before = len(source.skipped)
    assert len(source) == 3
    expected = [a_sample(seed=number).token_ids.tolist() for number in (1, 2, 10)]
    assert ids_of(list(source)) == expected == ids_of(list(source))
    assert len(source.skipped) == before  # a second pass counts nothing twice
    found = recognised(tmp_path)
    assert found is not None and found.name == name and found.why


@pytest.mark.parametrize("name", sorted(DEEP))
def test_files_of_one_name_in_several_folders_stay_apart(name: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        write_one(name, tmp_path / f"rank_{rank}", 3, a_sample(seed=rank))
    source = open_source(tmp_path)
    names = {item.name: item.token_ids.tolist() for item in source}
    assert list(names.values()) == [a_sample(seed=rank).token_ids.tolist() for rank in (0, 1)]
    assert [found.partition("/")[0] for found in names] == ["rank_0", "rank_1"]
    assert [item.name for item in source] == list(names)
    assert source.items(1)[0].name == list(names)[1]  # type: ignore[attr-defined]
    (alone,) = open_source(tmp_path / "rank_1")
    assert not alone.name.startswith("rank_1")


def test_the_content_is_what_was_written(name: str, tmp_path: Path) -> None:
    unit, _ = write_one(name, tmp_path, 3)
    sample = a_sample(seed=3)
    for path in (tmp_path, unit):
        (read,) = open_source(path)
        assert torch.equal(read.token_ids, sample.token_ids)
        if isinstance(read, Sample):
            assert torch.equal(read.states, sample.states) and read.states.dtype == sample.states.dtype
            assert (read.loss_mask is None) != (name in MASKED)
            assert read.loss_mask is None or torch.equal(read.loss_mask, sample.loss_mask)
            assert len(read.labels) == 4
            continue
        states = read.fc_input.unflatten(1, (-1, 8))
        wanted = wide(sample).unflatten(1, (3, 8)).to(states.dtype)
        assert torch.equal(states, wanted) and bool(read.accepted.all())
        assert name == "sglang-response" or torch.equal(read.last_hidden, sample.states[:, -1])


def test_the_format_may_be_named(name: str, tmp_path: Path) -> None:
    write_one(name, tmp_path, 3)
    source = open_source(tmp_path, name)
    assert len(list(source)) == 1 and source.chosen.startswith(f"named: {name} (")
    other = "plain" if name != "plain" else "vllm-extract"
    try:
        said = open_source(tmp_path, other).chosen
    except DraftscopeError:
        return
    assert f"it would be read as {name}" in said


def test_nothing_but_the_listing_happens_before_an_item_is_asked_for(name: str, tmp_path: Path) -> None:
    files = [write_one(name, tmp_path, number) for number in (1, 2, 3)]
    source = open_source(tmp_path)
    before = len(source.skipped)
    files[1][1].write_bytes(b"gone bad since")
    assert ids_of(list(source)) == [a_sample(seed=number).token_ids.tolist() for number in (1, 3)]
    (skip,) = source.skipped[before:]
    assert files[1][0].name in skip.path and skip.cause == "broken"


def test_a_single_file_is_a_source_of_one_and_its_trouble_is_an_error(name: str, tmp_path: Path) -> None:
    unit, file = write_one(name, tmp_path, 7)
    assert len(list(open_source(unit))) == 1
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    for path in (unit, tmp_path):
        for format in (None, name):
            with pytest.raises(DraftscopeError) as caught:
                list(open_source(path, format))
            assert file.name in str(caught.value) or path == tmp_path
    with pytest.raises(DraftscopeError, match="none of 1 files can be read"):
        list(open_source(unit, name, skip_bad=True))


def test_a_file_cut_anywhere_is_named_and_its_neighbour_stays_readable(name: str, tmp_path: Path) -> None:
    write_one(name, tmp_path, 1)
    unit, cut = write_one(name, tmp_path, 2)
    keep = [a_sample(seed=1).token_ids.tolist()]
    whole = cut.read_bytes()
    for point in sorted(structural_points(cut)):
        cut.write_bytes(whole[:point])
        source = open_source(tmp_path, name)
        assert ids_of(list(source)) == keep, point
        (skip,) = [s for s in source.skipped if s.cause != "foreign"]
        assert unit.name in skip.path and skip.cause == "broken" and (name not in SHARED or cut.name in skip.why), point


def test_one_token_is_a_sequence(name: str, tmp_path: Path) -> None:
    write_one(name, tmp_path, 0, a_sample(1))
    (item,) = open_source(tmp_path)
    assert len(item.token_ids) == 1


def test_a_file_of_no_bytes_is_named(name: str, tmp_path: Path) -> None:
    unit, file = write_one(name, tmp_path, 1)
    file.write_bytes(b"")
    with pytest.raises(DraftscopeError, match=re.escape(file.name)):
        list(open_source(unit))


def test_values_that_are_not_finite_are_content(name: str, tmp_path: Path) -> None:
    sample = a_sample()
    sample.states[2:4, 1] = torch.nan
    write_one(name, tmp_path, 0, sample)
    (item,) = open_source(tmp_path)
    states: Tensor = item.states if isinstance(item, Sample) else item.fc_input
    assert states.isnan().flatten(1).any(1).tolist() == [False, False, True, True, False, False]


def test_hostile_names_are_read_as_names(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\n..%2f"
    write_one(name, folder, 0)
    source = open_source(folder)
    assert len(list(source)) == 1 and source.format == name


def test_what_is_found_does_not_depend_on_how_many_other_files_lie_there(name: str, tmp_path: Path) -> None:
    for number in range(3):
        write_one(name, tmp_path, number)
    (tmp_path / "notes.json").write_text('{"a": 1}')
    (tmp_path / "vocab_mapping.pt").write_bytes(b"x")
    found = recognised(tmp_path)
    assert found is not None and found.name == name
