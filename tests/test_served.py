"""Statistics in place of rows: the sums against the accumulators and a scan of the rows themselves, and what runs inside."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_inside import Served as Request
from test_inside import options, said, serve
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from draftscope.cli.main import run as cli
from draftscope.compare.statistics import compare
from draftscope.engines import inside, launching, served
from draftscope.engines.inside import Recorder
from draftscope.errors import DraftscopeError
from draftscope.scan import sums
from draftscope.scan.accumulators import BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, Outliers
from draftscope.scan.core import POSITIONS, SINK
from draftscope.scan.core_tensors import statistics_of
from draftscope.scan.fingerprint import Fingerprint, Statistics, load_fingerprint
from draftscope.scan.scan import scan
from draftscope.scan.served import is_statistics, load_statistics
from draftscope.scan.sums import Sums
from draftscope.states.opening import open_source

K, WIDTH, H = 3, 12, 5


def same(found: Statistics, wanted: Statistics) -> None:
    """All that is told, to rounding of float64."""
    assert found.counts.counts.tolist() == wanted.counts.counts.tolist()
    assert found.norms.histogram.tolist() == wanted.norms.histogram.tolist()
    torch.testing.assert_close(found.norms.moments, wanted.norms.moments, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.norms.extremes, wanted.norms.extremes, rtol=1e-14, atol=0)
    assert found.dimensions.count == wanted.dimensions.count
    if wanted.dimensions.count:
        torch.testing.assert_close(found.dimensions.mean, wanted.dimensions.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.dimensions.squares, wanted.dimensions.squares, rtol=1e-9, atol=1e-12)
        assert torch.equal(found.outliers.largest, wanted.outliers.largest)
        assert torch.equal(found.outliers.exceeds, wanted.outliers.exceeds)


def rows_of(seed: int, count: int, slots: int = 2, width: int = 40) -> Tensor:
    """With outlier channels, zeros, NaN, infinities and a channel that is large and hardly varies."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, slots, width, generator=g) * torch.randn(count, slots, 1, generator=g).exp()
    rows[:, :, 3] *= 40
    rows[:, :, 5] = 300 + 0.5 * rows[:, :, 5]
    kinds = torch.randint(0, 12, (count, slots), generator=g)
    rows[kinds == 0] = 0
    rows[kinds == 1, 7] = torch.nan
    rows[kinds == 2, 0] = torch.inf
    return rows


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**20), counts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
       dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
       together=st.sampled_from([80, 997, 2**23]))
def test_sums_are_the_accumulators(seed: int, counts: list[int], dtype: torch.dtype, together: int) -> None:
    """However rows are split, merged and left out: what `Statistics` tells of the same rows."""
    wanted = [Statistics(), Statistics()]
    total = Sums(2, 40)
    g = torch.Generator().manual_seed(seed)
    for i, count in enumerate(counts):
        rows, taken = rows_of(seed + i, count).to(dtype), torch.rand(count, 2, generator=g) < 0.8
        part = Sums(2, 40)
        part.add(rows, taken if i % 2 else None, together=together)
        total.merge(part)
        for slot, held in enumerate(wanted):
            held.update(rows[taken[:, slot] if i % 2 else slice(None), slot])
    for slot, held in enumerate(wanted):
        same(statistics_of(total.state(), slot), held)


def test_moments_against_float64() -> None:
    g = torch.Generator().manual_seed(1)
    rows = (1000 + torch.randn(20_000, 1, 8, generator=g, dtype=torch.float64) * 0.01).float()
    held = Sums(1, 8)
    for part in rows.split(333):
        held.add(part)
    exact = rows[:, 0].double()
    torch.testing.assert_close(held.mean[0], exact.mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(held.squares[0], (exact - exact.mean(0)).square().sum(0), rtol=1e-6, atol=0)
    assert (sums.BINS, sums.PER_OCTAVE, sums.LOWEST, sums.OUTSTANDING) == (BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, Outliers.FACTOR)
    assert (sums.SINK, sums.POSITIONS) == (SINK, POSITIONS)


def test_a_call_on_an_accelerator_waits_for_nothing() -> None:
    """On made tensors of a CUDA device: every operation has its operands there, and none reads a value, which would raise."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        rows = torch.empty(40, 3, 16, dtype=torch.bfloat16, device="cuda")
        held, other = Sums(3, 16, "cuda"), Sums(3, 16, rows.device)
        held.add(rows)
        other.add(rows, torch.empty(40, 3, dtype=torch.bool, device="cuda"))
        held.merge(other)
        assert {getattr(held, name).device.type for name in Sums.NAMES} == {"cuda"}
        with pytest.raises(DataDependentOutputException):
            bool(held.counts.sum() > 0)
        with pytest.raises(RuntimeError, match="same device"):
            held.add(rows, torch.empty(40, 3, dtype=torch.bool))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def recorder(folder: str, **given: Any) -> Recorder:
        made.append(Recorder(options(tmp_path / folder, **given), {"engine": "made here", "layer_ids": [1, 2, 3]}, k=K))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def requests(count: int) -> list[Request]:
    """Some with rows of a sink's size, in one slot or in all."""
    made = [Request(f"request {i}", i, prompt=4 + 7 * i, steps=6 + 5 * i) for i in range(count)]
    for i, one in enumerate(made):
        take = one.take

        def taken(chunk: int | None = None, *, start: int | None = None, i: int = i,
                  take: Callable[..., dict[str, Any]] = take) -> dict[str, Any]:
            given = take(chunk, start=start)
            for row, position in enumerate(given["positions"]):
                if position and position % 13 == 0:
                    given["fc_input"][row, : WIDTH // 3 if i % 2 else WIDTH] *= 1000
            return given

        one.take = taken  # type: ignore[method-assign]
    return made


def both(make: Callable[..., Recorder], count: int, chunk: int | None = None, **given: Any) -> tuple[Fingerprint, Fingerprint]:
    """The fingerprint of statistics, and that of a scan of the rows of the same requests, read from their files."""
    folders = []
    for name, more in (("rows", {}), ("statistics", {"statistics": True, **given})):
        recorder = make(name, **more)
        serve(recorder, requests(count), chunk=chunk)
        recorder.close()
        assert recorder.stopped is None, recorder.stopped
        folders.append(Path(recorder.options.folder))
    assert {path.name for path in folders[1].iterdir()} == {".lock", "capture.json", "statistics.safetensors"}
    return load_statistics(folders[1]), scan(open_source(folders[0]), slots=3)


@pytest.mark.parametrize("chunk", [None, 9])
def test_the_fingerprint_is_that_of_the_rows(make: Callable[..., Recorder], chunk: int | None) -> None:
    found, wanted = both(make, 9, chunk)
    assert (found.entries, found.width, found.sequences, found.rows) == (wanted.entries, wanted.width, 9, wanted.rows)
    assert found.cells.keys() == wanted.cells.keys()
    assert {row_class for _, row_class, _ in found.cells} == {"first", "sink", "answer", "other"}
    for key, cell in wanted.cells.items():
        same(found.cells[key], cell)
    places = [fingerprint.of_kind("position") for fingerprint in (found, wanted)]
    assert places[0].keys() == places[1].keys() >= {"1 to 15", "16 to 63"}
    for name, part in places[1].items():
        assert places[0][name].cells.keys() == part.cells.keys()
        for key, cell in part.cells.items():
            same(places[0][name].cells[key], cell)


def test_runs_of_requests_are_groups(make: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than runs: two runs become one, again and again, and each holds the rows of its requests."""
    monkeypatch.setattr(served, "RUNS", 4)
    found, _ = both(make, 9)
    groups = found.of_kind("group")
    assert list(groups) == ["requests 1 to 4", "requests 5 to 8", "requests 9 to 9"]
    everything = Statistics()
    for part in groups.values():
        everything.merge(part.statistics(1, ("answer", "other")))
    same(everything, found.statistics(1, ("answer", "other")))
    recorder = make("alone")
    serve(recorder, requests(9)[4:8])
    recorder.close()
    alone = scan(open_source(Path(recorder.options.folder)), slots=3)
    same(groups["requests 5 to 8"].statistics(1, ("answer",)), alone.statistics(1, ("answer",)))


def test_a_sample_of_whole_rows(make: Callable[..., Recorder]) -> None:
    found, wanted = both(make, 6, sample_rows=10_000)
    assert found.every == (1,)
    cosines, exact = found.cosines.result(), wanted.cosines.result()
    assert cosines.count == exact.count
    torch.testing.assert_close(cosines.mean, exact.mean)
    for entry, sample in wanted.samples.items():
        usual = wanted.statistics(entry, ("answer", "other")).dimensions.count
        assert len(found.samples[entry].keys) <= len(sample.keys) == min(usual, sample.keep)
    few, _ = both(lambda name, **more: make(f"few {name}", **more), 6, sample_rows=7)
    assert all(len(sample.rows) == 7 for sample in few.samples.values())
    none, _ = both(lambda name, **more: make(f"none {name}", **more), 6, sample_rows=0)
    assert not none.samples
    assert "no row was kept whole" in none.notes[0]


def test_memory_is_given_back_as_rows_are_summed(make: Callable[..., Recorder]) -> None:
    recorder, one = make("capture", statistics=True, max_held=40_000), Request("a", 1, prompt=4, steps=400)
    recorder.started(one.name, one.about)
    from test_inside import give

    while one.at < len(one.text) - 1:
        for _ in range(20):
            if one.at < len(one.text) - 1:
                give(recorder, [(one, one.take())])
        while not recorder._queue.empty():
            pass
    recorder.finished(one.name)
    recorder.close()
    counted = said(recorder)
    assert (counted["requests"], counted["tails_cut"], counted["rows_cut"]) == (1, 0, 0)
    assert counted["rows"] * (WIDTH * 2 + 34) > 40_000, "all of its rows would not have fitted"
    assert recorder._held == recorder._spent == 0
    assert load_statistics(Path(recorder.options.folder)).rows == counted["rows"] - counted["rows_rejected"]


def test_bounds_and_figures_stay(make: Callable[..., Recorder]) -> None:
    recorder = make("capture", statistics=True, max_requests=2, max_bytes=1)
    serve(recorder, requests(4))
    recorder.close()
    counted = said(recorder)
    assert (counted["requests"], counted["requests_left_out"]) == (2, {"max_requests": 2})
    assert counted["steps"] == sum(len(one.counts) for one in requests(2))
    assert counted["accepted"] == sum(sum(one.counts) for one in requests(2))
    size = (Path(recorder.options.folder) / "statistics.safetensors").stat().st_size
    assert counted["bytes"] == size


def test_a_full_disk_ends_the_statistics_alone(make: Callable[..., Recorder]) -> None:
    recorder = make("capture", statistics=True, keep_free=1 << 60)
    serve(recorder, requests(2))
    recorder.close()
    assert recorder.stopped is not None
    assert "keep_free" in recorder.stopped


def test_what_was_summed_is_written_while_it_goes_on(make: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "_REST", -1.0)
    recorder, (one, other) = make("capture", statistics=True), requests(2)
    serve(recorder, [one])
    serve(recorder, [other])
    recorder.close()
    monkeypatch.undo()
    assert load_statistics(Path(recorder.options.folder)).sequences == 2


def test_the_copy_is_whole_and_does_it_too(tmp_path: Path) -> None:
    """As a file of its own, by a Python that has no draftscope, with the syntax of 3.10."""
    text = launching.source()
    tree = ast.parse(text, feature_version=(3, 10))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"torch"}
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    defined += [target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                if isinstance(target, ast.Name)]
    assert len(defined) == len(set(defined)), "a part hides a name of another"
    launching.emit(tmp_path / "mine.py")
    code = ("import sys, torch; sys.modules['draftscope'] = None; import mine\n"
            "options = mine.Options.parse('out', 'statistics=yes,keep_free=0')\n"
            "recorder = mine.Recorder(options, {}, k=1)\n"
            "recorder.started('a', mine.About([1, 2]))\n"
            "given = recorder.begin(['a'], [0, 4], [0])\n"
            "given.rows('fc_input', torch.arange(48.0).view(4, 12)); given.rows('fc_output', torch.zeros(4, 5))\n"
            "given.rows('token_ids', torch.arange(4)); given.rows('positions', torch.arange(4))\n"
            "given.each('rejected', torch.tensor([0])); given.each('following', torch.tensor([7]))\n"
            "recorder.commit(given); recorder.finished('a'); recorder.close(); print(recorder.stopped)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    found = load_statistics(tmp_path / "out")
    assert (found.rows, found.slots, found.width) == (4, 3, 4)
    assert found.statistics(1, ("other", "answer")).dimensions.mean.tolist() == [28, 29, 30, 31]


def test_files_that_are_none_are_refused(make: Callable[..., Recorder], tmp_path: Path) -> None:
    with pytest.raises(DraftscopeError, match="holds no statistics"):
        load_statistics(tmp_path)
    recorder = make("capture", statistics=True)
    serve(recorder, requests(2))
    recorder.close()
    file = Path(recorder.options.folder) / "statistics.safetensors"
    tensors = load_file(file)
    header = json.loads(json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])["__metadata__"][
        "draftscope"])
    for name, change, says in (
        ("0.mean", lambda t: t[:, 1:], "mean is"), ("0.mean", lambda t: t * torch.nan, "not finite"),
        ("0.counts", lambda t: t.int(), "counts is"), ("sample.rows", lambda t: t[:, :1], "another|sample"),
    ):
        save_file({**tensors, name: change(tensors[name]).contiguous()}, tmp_path / "x", {"draftscope": json.dumps(header)})
        with pytest.raises(DraftscopeError, match=says):
            load_statistics(tmp_path / "x")
    save_file(tensors, tmp_path / "x", {"draftscope": json.dumps({**header, "schema": "draftscope.statistics/9"})})
    with pytest.raises(DraftscopeError, match=r"version draftscope\.statistics/9"):
        load_statistics(tmp_path / "x")
    save_file({n: t for n, t in tensors.items() if n != "0.squares"}, tmp_path / "x", {"draftscope": json.dumps(header)})
    with pytest.raises(DraftscopeError, match="squares"):
        load_statistics(tmp_path / "x")


def test_it_is_compared_like_a_fingerprint(make: Callable[..., Recorder], tmp_path: Path) -> None:
    recorder = make("capture", statistics=True)
    serve(recorder, requests(9))
    recorder.close()
    folder = Path(recorder.options.folder)
    assert is_statistics(folder)
    found = load_statistics(folder)
    found.save(tmp_path / "fingerprint")
    again = load_fingerprint(tmp_path / "fingerprint")
    assert again.rows == found.rows
    assert again.cells.keys() == found.cells.keys()
    assert cli(["scan", str(folder), "-o", str(tmp_path / "again"), "-q"]) == 0
    assert load_fingerprint(tmp_path / "again").rows == found.rows
    told = compare(folder, tmp_path / "fingerprint")
    assert all(d == 0 for d in (told.distances[i][i].total for i in range(3)))
