"""Training data rewritten: what comes back from a round trip is what went in, and what cannot be carried is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from state_files import a_sample, specforge_record, write_one
from support import VOCAB, WIDTH, random_target

from draftscope.cli.main import run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.pipeline.convert_data import convert_data
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample

needs_arrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow, the extra `arrow`, is not installed")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_target(3, tied=False)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(WIDTH, generator=torch.Generator().manual_seed(5)) + 0.5)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder


def samples(count: int = 3) -> list[Sample]:
    made = []
    for number in range(count):
        sample = a_sample(9 + number, 4, WIDTH, seed=number)
        sample.states *= 7
        sample.token_ids = sample.token_ids % VOCAB
        made.append(replace(sample, index=5 * number, labels=("a", "layer 3", "b", "last"), claimed_norm="pre"))
    made[1].loss_mask = None
    return made


def write(folder: Path) -> list[Sample]:
    for sample in samples():
        write_sample(folder / f"hs_{sample.index}.safetensors", sample)
    return samples()


def same(path: Path, wanted: list[Sample], *, norm: str = "pre") -> None:
    read = list(open_source(path))
    assert [sample.index for sample in read] == [sample.index for sample in wanted]
    for one, other in zip(read, wanted, strict=True):
        assert one.states.dtype == other.states.dtype
        assert torch.equal(one.states.view(torch.uint8), other.states.view(torch.uint8))
        assert torch.equal(one.token_ids, other.token_ids) and one.labels == other.labels and one.claimed_norm == norm
        assert (one.loss_mask is None) == (other.loss_mask is None)
        assert one.loss_mask is None or torch.equal(one.loss_mask, other.loss_mask)


def test_plain_to_specforge_and_back_needs_the_target_once(target: Path, tmp_path: Path) -> None:
    wanted = write(tmp_path / "plain")
    with pytest.raises(DraftscopeError, match="--target"):
        convert_data(tmp_path / "plain", tmp_path / "no", "specforge")
    assert not (tmp_path / "no").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["plain"]
    seen: list[int] = []
    done = convert_data(tmp_path / "plain", tmp_path / "forge", "specforge", target=target, on_tokens=seen.append)
    assert done.files == 3 and done.tokens == sum(seen) == 9 + 10 + 11 and any("final norm was applied" in s for s in done.steps)
    held = torch.load(tmp_path / "forge" / "rows_0-2000" / "data_5.ckpt")
    weight = random_target(3, tied=False).model.norm
    with torch.no_grad():
        weight.weight.copy_(torch.rand(WIDTH, generator=torch.Generator().manual_seed(5)) + 0.5)
        expected = weight(wanted[1].states[:, -1].float())
    assert held["hidden_state"].shape == (1, 10, WIDTH) and held["aux_hidden_state"].shape == (1, 10, 3 * WIDTH)
    assert torch.allclose(held["hidden_state"][0].float(), expected, rtol=1e-2, atol=1e-2)
    back = convert_data(tmp_path / "forge", tmp_path / "again", "plain")
    assert any("taken from there" in step for step in back.steps)
    same(tmp_path / "again", wanted)


@needs_arrow
def test_plain_to_speculators_and_back(tmp_path: Path) -> None:
    wanted = write(tmp_path / "plain")
    convert_data(tmp_path / "plain", tmp_path / "spec", "speculators")
    assert sorted(p.name for p in (tmp_path / "spec" / "hidden_states").iterdir()) == [f"hs_{i}.safetensors" for i in range(3)]
    assert json.loads((tmp_path / "spec" / "state.json").read_text())["_data_files"]
    source = open_source(tmp_path / "spec")
    assert source.format == "speculators" and source.meta["rows"] == 3
    convert_data(tmp_path / "spec", tmp_path / "again", "plain")
    same(tmp_path / "again", wanted)


@needs_arrow
def test_specforge_to_speculators_and_back_gives_the_same_teacher(target: Path, tmp_path: Path) -> None:
    """The norm over what speculators gets is what SpecForge had, and the way back is exact."""
    wanted = write(tmp_path / "plain")
    convert_data(tmp_path / "plain", tmp_path / "forge", "specforge", target=target)
    bare = tmp_path / "bare" / "rows_0-2000"
    bare.mkdir(parents=True)
    for file in (tmp_path / "forge" / "rows_0-2000").iterdir():
        held = torch.load(file)
        held.pop("hidden_state_prenorm")  # as SpecForge itself writes it
        torch.save(held, bare / file.name)
    with pytest.raises(DraftscopeError, match="after the final norm"):
        convert_data(tmp_path / "bare", tmp_path / "no", "speculators")
    done = convert_data(tmp_path / "bare", tmp_path / "spec", "speculators", target=target)
    assert any("divided by the final norm's weight" in step for step in done.steps)
    model = random_target(3, tied=False).model.norm
    with torch.no_grad():
        model.weight.copy_(torch.rand(WIDTH, generator=torch.Generator().manual_seed(5)) + 0.5)
        for read, forge in zip(open_source(tmp_path / "spec"), open_source(tmp_path / "bare"), strict=True):
            assert torch.allclose(model(read.states[:, -1].float()), forge.states[:, -1].float(), rtol=2e-2, atol=2e-2)
            assert torch.equal(read.states[:, :-1], forge.states[:, :-1])
    convert_data(tmp_path / "spec", tmp_path / "again", "specforge")
    same(tmp_path / "again", list(open_source(tmp_path / "bare")), norm="post")
    assert len(wanted) == 3


def test_specforge_to_plain_and_back_needs_nothing(tmp_path: Path) -> None:
    for number in (3, 12):
        write_one("specforge", tmp_path / "forge", number)
    wanted = list(open_source(tmp_path / "forge"))
    convert_data(tmp_path / "forge", tmp_path / "plain", "plain")
    same(tmp_path / "plain", wanted, norm="post")
    convert_data(tmp_path / "plain", tmp_path / "again", "specforge")
    same(tmp_path / "again", wanted, norm="post")


def test_the_data_outrank_what_files_say(target: Path, tmp_path: Path) -> None:
    """States before the norm in SpecForge's field: recognised by the target, normed on the way."""
    wanted = samples()
    for sample in wanted:
        torch.save(specforge_record(replace(sample, loss_mask=torch.ones(len(sample.token_ids)).bool())),
                   tmp_path / f"data_{sample.index}.ckpt")
    done = convert_data(tmp_path, tmp_path / "out", "specforge", target=target)
    assert any("the files say that the last state is post-norm; by the target it is pre-norm" in step for step in done.steps)


def test_what_is_no_training_data_or_no_place_is_refused(tmp_path: Path) -> None:
    write_one("capture", tmp_path / "c", 0)
    write_one("plain", tmp_path / "p", 0)
    with pytest.raises(UsageError, match="capture"):
        convert_data(tmp_path / "c", tmp_path / "out", "plain")
    with pytest.raises(UsageError, match="holds something"):
        convert_data(tmp_path / "p", tmp_path / "c", "specforge")
    with pytest.raises(UsageError, match="Known: plain"):
        convert_data(tmp_path / "p", tmp_path / "out", "arrow")


def test_bad_files_are_counted_and_numbers_kept_apart(tmp_path: Path) -> None:
    for group in ("rows_0-2000", "rows_2000-4000"):
        (tmp_path / "in" / group).mkdir(parents=True)
        torch.save(specforge_record(a_sample(seed=len(group))), tmp_path / "in" / group / "data_7.ckpt")
    (tmp_path / "in" / "rows_0-2000" / "data_8.ckpt").write_bytes(b"broken")
    done = convert_data(tmp_path / "in", tmp_path / "out", "plain")
    assert done.files == 2 and [Path(s.path).name for s in done.skipped] == ["data_8.ckpt"]
    assert any("numbered anew" in step for step in done.steps) and any("carried by" in step for step in done.steps)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["hs_0.safetensors", "hs_7.safetensors"]


@pytest.mark.parametrize("form", [pytest.param("speculators", marks=needs_arrow), "specforge"])
def test_the_command_there_and_back(target: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [replace(sample, loss_mask=torch.arange(len(sample.token_ids)) > 3) for sample in samples()]
    for sample in wanted:
        write_sample(tmp_path / "in" / f"hs_{sample.index}.safetensors", sample)
    there = ["convert", str(tmp_path / "in"), "--to", form, "-o", str(tmp_path / "there"), "--target", str(target)]
    assert run([*there, "--json", str(tmp_path / "there.json")]) == 0
    assert json.loads((tmp_path / "there.json").read_text())["schema"].startswith("draftscope.convert/")
    assert run(there) == 2 and "holds something already" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "there"), "--to", "plain", "-o", str(tmp_path / "back"), "--target", str(target)]) == 0
    same(tmp_path / "back", wanted)
