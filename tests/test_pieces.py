"""Pieces of a source, merged: against a scan of the whole, shards against what is missing of them, projections by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from draftscope.cli.main import _filled, run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.fingerprint import Fingerprint, Shape, load_fingerprint
from draftscope.scan.merging import merge_files, shard_of
from draftscope.scan.pieces import Done, Job, Piece, Tree, finished, in_order, joined, listing_of, scan_piece, spans
from draftscope.scan.projecting import project, span, words
from draftscope.scan.scan import scan
from draftscope.states.opening import open_source

FILES, WIDTH = 11, 24


def write_source(folder: Path, files: int = FILES, seed: int = 0, width: int = WIDTH) -> Path:
    """Plain training data of some lengths."""
    folder.mkdir(exist_ok=True)
    g = torch.Generator().manual_seed(seed)
    for i in range(files):
        rows = 20 + 13 * (i % 4)
        states = torch.randn(rows, 4, width, generator=g) * (1 + torch.arange(4))[:, None] + i % 3
        save_file({"hidden_states": states.bfloat16(), "token_ids": torch.randint(0, 99, (rows,), generator=g),
                   "loss_mask": (torch.arange(rows) > 8).long()}, folder / f"hs_{i}.safetensors")
    return folder


def tensors_of(made: Fingerprint) -> dict[str, Tensor]:
    """By name; parts by theirs, whose numbers in a file follow from the order of the rows."""
    named = {f"{key}.{name}": t for key, cell in made.cells.items() for name, t in cell.tensors().items()}
    for part, held in made.parts.items():
        named |= {f"{part}.{key}.{name}": t for key, cell in held.cells.items() for name, t in cell.tensors().items()}
        named |= {f"{part}.cosines.{name}": t for name, t in held.cosines.state().items()}
    for of, kinds in (("sample", made.samples), ("shape", made.shapes)):
        for entry, one in kinds.items():
            state = one.tensors() if isinstance(one, Shape) else one.state()
            named |= {f"{of}.{entry}.{name}": t for name, t in state.items()}
    for of, state in (("between", made.between.state()), ("kept", made.kept.state()), ("inputs", made.inputs.tensors())):
        named |= {f"{of}.{name}": t for name, t in state.items()}
    return named


def identical(one: Fingerprint, other: Fingerprint) -> None:
    """Bit for bit."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert (one.origins, one.odd, one.notes) == (other.origins, other.odd, other.notes)


def alike(one: Fingerprint, other: Fingerprint) -> None:
    """The same to rounding: counts, histograms and inputs exactly."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, second[name], rtol=1e-9, atol=1e-9)
        else:
            assert torch.equal(tensor, second[name]), name
    assert (one.sequences, one.rows, one.origins) == (other.sequences, other.rows, other.origins)


@given(st.integers(1, 300), st.integers(1, 40))
def test_every_file_is_in_one_piece(files: int, pieces: int) -> None:
    found = spans(files, pieces)
    assert [number for each in found for number in each] == list(range(files))
    assert len(found) == min(files, pieces)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.integers(0, 70))
def test_the_tree_keeps_the_order_and_holds_few(count: int) -> None:
    tree: Tree[tuple[int, ...]] = Tree(lambda one, other: one + other)
    for number in range(count):
        tree.add((number,))
        assert len(tree._held) <= (number + 1).bit_length()
    assert tree.result() == (tuple(range(count)) if count else None)


@pytest.mark.parametrize("pieces", [1, 3, 11])
def test_pieces_make_the_whole(tmp_path: Path, pieces: int) -> None:
    folder = write_source(tmp_path / "d")
    job = Job(str(folder), every=1)
    listing = listing_of(job.open())
    made = [scan_piece(job, listing, each) for each in spans(FILES, pieces)]
    assert sum(piece.done.files for piece in made) == FILES
    assert sum(piece.done.size for piece in made) == sum(4 * WIDTH * 2 * (20 + 13 * (i % 4)) for i in range(FILES))
    alike(finished(in_order(iter(made)), listing), scan(open_source(folder)))


def test_a_piece_of_bad_files_alone_is_counted(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "d")
    for i in (0, 1, 2, 10):
        (folder / f"hs_{i}.safetensors").write_bytes(b"nonsense")
    job = Job(str(folder), "plain", every=1)
    listing = listing_of(job.open())
    made = [scan_piece(job, listing, each) for each in spans(FILES, 4)]
    assert made[0].made is None
    whole, wanted = finished(in_order(iter(made)), listing), scan(open_source(folder))
    assert (whole.sequences, whole.origins[0].skipped) == (FILES - 4, 4)
    assert sorted(name for name, _ in whole.odd["bad"].named) == sorted(name for name, _ in wanted.odd["bad"].named)
    for path in folder.iterdir():
        path.write_bytes(b"nonsense")
    nothing = [scan_piece(job, listing, each) for each in spans(FILES, 4)]
    with pytest.raises(DraftscopeError, match="none of 11 files can be read; the first"):
        finished(in_order(iter(nothing)), listing)


def test_machines_have_to_see_the_same_files(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "d")
    job = Job(str(folder), every=1)
    listing = listing_of(job.open())
    (folder / "hs_3.safetensors").rename(folder / "hs_33.safetensors")
    with pytest.raises(DraftscopeError, match="other files on"):
        scan_piece(job, listing, range(2))


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one, other = (Job(str(write_source(tmp_path / str(width), width=width)), every=1) for width in (WIDTH, 2 * WIDTH))
    pieces = [scan_piece(job, listing_of(job.open()), range(3)) for job in (one, other)]
    with pytest.raises(DraftscopeError, match="different width"):
        joined(*pieces)
    again = scan_piece(one, listing_of(one.open()), range(2, 4))
    with pytest.raises(DraftscopeError, match="count twice"):
        joined(pieces[0], again)


def shards(folder: Path, out: Path, count: int, which: range | None = None) -> list[str]:
    for i in which or range(count):
        assert run(["scan", str(folder), "--shard", f"{i}/{count}", "-o", str(out / "part-{i}"), "--every", "1", "-q"]) == 0
    return [str(out / f"part-{i}") for i in which or range(count)]


def test_shards_make_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_source(tmp_path / "d")
    names = shards(folder, tmp_path, 4)
    assert run(["scan", "merge", *reversed(names), "-o", str(tmp_path / "all"), "--json", str(tmp_path / "j")]) == 0
    found, wanted = load_fingerprint(tmp_path / "all"), scan(open_source(folder))
    assert (found.sequences, found.rows, found.origins) == (FILES, wanted.rows, wanted.origins)
    for key, cell in wanted.cells.items():
        torch.testing.assert_close(found.cells[key].dimensions.mean, cell.dimensions.mean, rtol=1e-12, atol=1e-12)
    assert {one.name for one in found.inputs} == {one.name for one in wanted.inputs}
    assert json.loads((tmp_path / "j").read_text())["remarks"] == []
    capsys.readouterr()
    assert run(["scan", "merge", names[0], names[2], "-o", str(tmp_path / "half")]) == 0
    assert "2 of 4 shards are missing (1, 3)" in capsys.readouterr().err
    assert {o.part for o in load_fingerprint(tmp_path / "half").origins} == {"0 of 4", "2 of 4"}
    assert run(["scan", "merge", names[0], names[1], names[0], "-o", str(tmp_path / "x")]) == 3
    assert "count twice" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_shards_of_two_divisions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_source(tmp_path / "d", files=6)
    halves, thirds = shards(folder, tmp_path, 2), [str(tmp_path / "third")]
    # The third shard of six holds the file that is in the first of two: nothing is shared with the second of two.
    assert run(["scan", str(folder), "--shard", "2/6", "-o", thirds[0], "--every", "1", "-q"]) == 0
    assert run(["scan", "merge", halves[1], thirds[0], "-o", str(tmp_path / "x")]) == 3
    assert "is in shards of 2 and of 6" in capsys.readouterr().err


def test_differing_settings_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_source(tmp_path / "d")
    for i, every in ((0, "1"), (1, "3")):
        assert run(["scan", str(folder), "--shard", f"{i}/2", "-o", str(tmp_path / f"f{i}"), "--every", every, "-q"]) == 0
    assert run(["scan", "merge", str(tmp_path / "f0"), str(tmp_path / "f1"), "-o", str(tmp_path / "all")]) == 0
    assert "differ in rows taken whole, one in: 1, 3" in capsys.readouterr().err
    other = write_source(tmp_path / "e", seed=4)
    assert run(["scan", str(other), "-o", str(tmp_path / "f2"), "--every", "1", "-q"]) == 0
    merged = merge_files([tmp_path / name for name in ("f0", "f1", "f2")])
    assert any("of 2 sources" in note for note in merged.notes)
    assert merged.fingerprint.sequences == 2 * FILES


@pytest.mark.parametrize(("environment", "shard"), [
    ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 8)),
    ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "2"}, (3, 4)),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2)),
])
def test_schedulers_say_which_shard(environment: dict[str, str], shard: tuple[int, int]) -> None:
    assert shard_of("auto", environment) == shard
    assert shard_of(f"{shard[0]}/{shard[1]}", {}) == shard


@pytest.mark.parametrize("text", ["auto", "4/4", "x", "1/", "-1/2"])
def test_no_shard(text: str) -> None:
    with pytest.raises(UsageError):
        shard_of(text, {"RANK": "1"})


def done(size: float, seconds: float, disk: float = -1) -> Done:
    return Done(1, 1, int(size), seconds, int(disk), "here")


def test_a_projection_by_hand() -> None:
    """Two workers at 1 GB/s each: 7.3 TB on 32 of that kind is 7300 / 32 seconds."""
    seen = [done(5e9, 5, 5e9), done(3e9, 3, 3e9), done(0, 9)]
    told = project(7_300_000_000_000, 32, seen, 2)
    assert told is not None
    assert (told.rate, told.seconds) == (pytest.approx(1e9), pytest.approx(7300 / 32))
    assert (told.low, told.longest) == (None, None), "of two pieces there are no tenths"
    assert told.measured.model_dump() == {"bytes": 8 * 10**9, "seconds": 8.0, "workers": 2, "pieces": 2, "from_disk": 1.0}
    text = " ".join(words(told))
    assert "projected, not measured: 7.30 TB on 32 workers would take 3.8 min" in text
    assert "32.0 GB/s in all" in text
    assert "100 % of the bytes came from disk" in text
    many = project(10**12, 1, [done(1e9, 1 + i / 10, 0) for i in range(10)], 1)
    assert many is not None
    assert (many.low, many.high) == (pytest.approx(1e9 / 1.8), pytest.approx(1e9 / 1.1))
    assert many.longest is not None
    assert many.longest > many.seconds > (many.shortest or 0)
    assert any("in memory already" in line for line in many.assumes)
    unknown = project(10**12, 1, [done(1e9, 1)], 1)
    assert unknown is not None
    assert any("not known how much came from disk" in line for line in unknown.assumes)
    assert project(10**12, 1, [done(1e6, 1)], 1) is None
    assert [span(s) for s in (5, 130, 7300, 200_000)] == ["5 s", "2.2 min", "2.0 h", "2.3 d"]


def test_nothing_is_projected_from_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_source(tmp_path / "d", files=2)
    assert run(["scan", str(folder), "-o", str(tmp_path / "f"), "--project", "7.3TB", "--json", str(tmp_path / "j")]) == 0
    assert json.loads((tmp_path / "j").read_text())["projection"] is None
    assert "no projection" in capsys.readouterr().err
    assert run(["scan", str(folder), "-o", str(tmp_path / "f"), "--project", "much"]) == 2


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_source(tmp_path / "d", files=2))
    for options in (["--ray", "--shard", "0/2"], ["--ray", "local", "--on", "a@b"], ["--pieces", "3"], ["--ray-resource", "x"]):
        assert run(["scan", folder, "-o", str(tmp_path / "f"), *options]) == 2, options
    assert run(["scan", "merge", folder, folder, "-o", str(tmp_path / "f"), "--ray"]) == 2
    assert not (tmp_path / "f").exists()


def test_an_address_may_be_left_out() -> None:
    """`--ray` alone is the cluster of this machine; what a command after `--` has is its own."""
    for line, wanted in (
        ("scan d --ray -o f", "scan d --ray auto -o f"), ("scan d -o f --ray", "scan d -o f --ray auto"),
        ("scan d --ray head:6379 -o f", "scan d --ray head:6379 -o f"), ("capture vllm -- x --ray", "capture vllm -- x --ray"),
    ):
        assert _filled(line.split()) == wanted.split()


def test_a_piece_may_be_none() -> None:
    none = Piece(None, done(0, 1))
    assert joined(none, Piece(None, done(0, 2))).made is None
