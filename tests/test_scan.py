"""Accumulators: one contract for all of them, against float64 references. The scan and its file."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_files import write_one
from torch import Tensor

import draftscope
from draftscope.cli.main import run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan import kernels, tally
from draftscope.scan import scan as scanning_module
from draftscope.scan.accumulators import ACCUMULATORS, Counts, Dimensions, Norms, Outliers
from draftscope.scan.core import engine_of
from draftscope.scan.fingerprint import SCHEMA, Fingerprint, Statistics, is_fingerprint, load_fingerprint
from draftscope.scan.inputs import Inputs
from draftscope.scan.joint import Cosines, RowSample, row_keys
from draftscope.scan.packing import checksum
from draftscope.scan.rich import rich_rows, share_of
from draftscope.scan.scan import Course, Settings, group_of, scan
from draftscope.scan.shapes import Neighbours, Sketch, Slices, ValueHistogram, omega_of
from draftscope.scan.statistics import SHAPES
from draftscope.scan.tally import classes_of, half_of
from draftscope.states.capture import write_trace
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.tensorfile import TensorFile, save_tensors
from draftscope.states.types import Sample, Trace

WIDTH = 6
TOLERANCE = 1e-9  # of split and merge, relative


def numbers(result: Any) -> list[float | None]:
    """A result as a flat list."""
    flat: list[float | None] = []
    for value in astuple(result):
        if isinstance(value, Tensor):
            flat += value.double().flatten().tolist()
        elif isinstance(value, list):
            flat += value
        else:
            flat.append(value)
    return flat


def close(found: list[float | None], expected: list[float | None], rel: float, slack: float = 1e-12) -> None:
    assert [x is None for x in found] == [x is None for x in expected]
    assert [x for x in found if x is not None] == pytest.approx([x for x in expected if x is not None], rel=rel, abs=slack)


def same(a: Any, b: Any) -> None:
    close(numbers(a), numbers(b), TOLERANCE)


def shaped(kind: type, rows: Tensor) -> Tensor:
    """Rows as the accumulator takes them: cosines are between entries, here three of two channels, neighbours are pairs."""
    return rows.unflatten(1, (3 if kind is Cosines else 2, -1)) if kind in (Cosines, Neighbours) else rows


def fed(kind: type, rows: Tensor) -> Any:
    made = kind()
    made.update(shaped(kind, rows))
    return made


def merged(kind: type, *parts: Any) -> Any:
    total = kind()
    for part in parts:
        total.merge(part)
    return total


def reference(kind: type, rows: Tensor) -> list[float | None]:
    """The result in float64, from all rows at once, in the plainest way."""
    usable = rows.double()[rows.isfinite().all(-1)]
    if kind is Counts:
        return [
            len(rows), len(rows) - len(usable), sum(int(r.isnan().sum()) for r in rows), sum(int(r.isinf().sum()) for r in rows),
            sum(not bool(r.any()) for r in usable),
        ]
    if len(usable) == 0:
        return numbers(kind().result())
    if kind is Cosines:
        entries = usable.unflatten(1, (3, -1))
        entries = entries[(entries != 0).any(-1).all(1)]
        if len(entries) == 0:
            return numbers(kind().result())
        table = [[torch.nn.functional.cosine_similarity(entries[:, i], entries[:, j], dim=-1, eps=0) for j in range(3)]
                 for i in range(3)]
        return [len(entries), *(float(c.mean()) for row in table for c in row),
                *(float(c.std(correction=0)) for row in table for c in row)]
    if kind is Neighbours:
        pairs = usable.unflatten(1, (2, -1))
        pairs = pairs[(pairs != 0).any(-1).all(1)]
        if len(pairs) == 0:
            return numbers(kind().result())
        cosine = torch.nn.functional.cosine_similarity(pairs[:, 0], pairs[:, 1], dim=-1, eps=0)
        return [len(pairs), float(cosine.mean()), float(cosine.std(correction=0))]
    if kind is ValueHistogram:
        ordered = np.sort(usable.numpy().astype(np.float32).ravel())
        at = [ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.001, 0.5, 0.999)]
        # Sign, exponent and three bits of the mantissa.
        return [len(ordered), *(float(((value + np.float32(0)).view(np.uint32) >> 20 << 20).view(np.float32)) for value in at)]
    if kind is Slices:
        along = usable @ omega_of(WIDTH)[:, :16]
        return [len(usable), *along.mean(0).tolist(), *along.var(0, correction=0).tolist()]
    if kind in (RowSample, Sketch):
        distinct = usable.unique(dim=0) if kind is RowSample else usable
        if len(distinct) < 2:
            return [len(distinct), None, None]
        if kind is Sketch and len(distinct.unique(dim=0)) == 1:
            return [len(distinct), 0.0, *[0.0] * WIDTH]
        values = torch.linalg.eigvalsh((distinct - distinct.mean(0)).T @ (distinct - distinct.mean(0)) / len(distinct)).flip(0)
        shares = values.clamp_min(0) / values.clamp_min(0).sum()
        return [len(distinct), float(values.sum()), *shares[: WIDTH if kind is Sketch else min(len(distinct), WIDTH)].tolist()]
    if kind is Norms:
        norms = usable.square().sum(-1).sqrt()
        logs = norms[norms > 0].log()
        ordered = norms.sort().values
        at = [float(ordered[int(q * (len(norms) - 1))]) for q in (0.01, 0.5, 0.99)]
        log_mean, log_std = (float(logs.mean()), float(logs.std(correction=0))) if len(logs) else (None, None)
        return [len(norms), float(norms.mean()), log_mean, log_std, float(norms.min()), *at, float(norms.max())]
    if kind is Dimensions:
        return [len(usable), *usable.mean(0).tolist(), *usable.var(0, correction=0).tolist()]
    rms = usable.square().mean(-1).sqrt()
    share = (usable.abs() > 6 * rms[:, None]).double().mean(0)
    channels = sorted((c for c in range(rows.shape[1]) if share[c] >= 0.05), key=lambda c: (-float(share[c]), c))
    return [len(usable), *usable.abs().amax(0).tolist(), *share.tolist(), *map(float, channels)]


@st.composite
def some_rows(draw: st.DrawFn, width: int = WIDTH) -> Tensor:
    """Rows of very different size, some zero, some with NaN or infinity."""
    count = draw(st.integers(0, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(count, width, generator=g) * 10 ** draw(st.floats(-6, 8)) + draw(st.sampled_from([0.0, 1.0, 1e4]))
    for row in range(count):
        kind = draw(st.sampled_from(["as is"] * 6 + ["zero", "nan", "inf", "outlier"]))
        if kind == "zero":
            rows[row] = 0
        elif kind != "as is":
            rows[row, row % width] = {"nan": torch.nan, "inf": -torch.inf, "outlier": 1e6 * float(rows[row].abs().max())}[kind]
    return rows.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


KINDS = {**ACCUMULATORS, "cosines": Cosines, "sample": RowSample, **SHAPES}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
class TestContract:
    """What every accumulator keeps to."""

    @settings(deadline=None, max_examples=40)
    @given(data=st.data())
    def test_splits_and_orders_change_nothing(self, kind: type, data: st.DataObject) -> None:
        rows = data.draw(some_rows())
        cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        parts = [fed(kind, rows[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
        whole = fed(kind, rows).result()
        same(merged(kind, *parts).result(), whole)
        same(merged(kind, *data.draw(st.permutations(parts))).result(), whole)
        one = kind()
        for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            one.update(shaped(kind, rows[a:b]))
        same(one.result(), whole)
        same(fed(kind, rows[torch.randperm(len(rows))]).result(), whole)

    @settings(deadline=None, max_examples=30)
    @given(a=some_rows(), b=some_rows(), c=some_rows())
    def test_merging_is_associative(self, kind: type, a: Tensor, b: Tensor, c: Tensor) -> None:
        left = merged(kind, merged(kind, fed(kind, a), fed(kind, b)), fed(kind, c))
        right = merged(kind, fed(kind, a), merged(kind, fed(kind, b), fed(kind, c)))
        same(left.result(), right.result())

    @settings(deadline=None, max_examples=40)
    @given(rows=some_rows())
    def test_equals_the_reference(self, kind: type, rows: Tensor) -> None:
        found, expected = numbers(fed(kind, rows).result()), reference(kind, rows)
        if kind is Norms:  # quantiles come from bins
            close(found[5:8], expected[5:8], 0.011)
            found[5:8] = expected[5:8] = []
        # Sums of deviations lose digits where the mean is much larger than they are.
        squared = float(rows.double().nan_to_num(0, 0, 0).abs().max()) ** 2 if len(rows) else 0.0
        slack = 1e-9 * squared if kind in (Dimensions, Slices) else 1e-12
        if kind in (Cosines, RowSample, Neighbours, Sketch):  # a spread of nearly nothing is rounding
            slack = 1e-7
        close(found, expected, 1e-6, slack)

    def test_no_rows(self, kind: type) -> None:
        empty = kind()
        result = empty.result()
        assert all(value in (0, None) for value in numbers(result))
        empty.update(shaped(kind, torch.zeros(0, WIDTH)))
        assert numbers(empty.result()) == numbers(result)
        rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
        for total in (merged(kind, fed(kind, rows), kind()), merged(kind, kind(), fed(kind, rows)), merged(kind, kind(), kind())):
            assert numbers(total.result()) in (numbers(fed(kind, rows).result()), numbers(result))
        only_nan = fed(kind, torch.full((3, WIDTH), torch.nan))
        assert kind is Counts or numbers(only_nan.result()) == numbers(result)

    @settings(deadline=None, max_examples=20)
    @given(a=some_rows(), b=some_rows())
    def test_state_is_all_there_is(self, kind: type, a: Tensor, b: Tensor) -> None:
        first = fed(kind, a)
        copy = kind.from_state({key: value.clone() for key, value in first.state().items()})
        same(copy.result(), first.result())
        before = numbers(first.result())
        copy.update(shaped(kind, b))
        same(copy.result(), merged(kind, first, fed(kind, b)).result())
        assert numbers(first.result()) == before, "a copy made from a state shares nothing with its origin"

    def test_merging_leaves_the_other_alone(self, kind: type) -> None:
        g = torch.Generator().manual_seed(0)
        a, b = (fed(kind, torch.randn(4, WIDTH, generator=g)) for _ in range(2))
        before = numbers(b.result())
        total = merged(kind, b)
        total.merge(a)
        total.update(shaped(kind, torch.randn(4, WIDTH, generator=g)))
        assert numbers(b.result()) == before


def test_widths_do_not_mix() -> None:
    for kind in (Dimensions, Outliers, RowSample, Sketch):
        with pytest.raises(ValueError, match="width"):
            merged(kind, fed(kind, torch.ones(2, 3)), fed(kind, torch.ones(2, 4)))
    with pytest.raises(ValueError, match="entries"):
        merged(Cosines, *(_cosines(torch.ones(2, entries, 3)) for entries in (2, 3)))


def _cosines(rows: Tensor) -> Cosines:
    made = Cosines()
    made.update(rows)
    return made


def test_a_sample_keeps_the_smallest_keys() -> None:
    """The same rows whatever the order, the dtype or the way of splitting; equal rows once."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 200, generator=g).bfloat16()
    keys = row_keys(rows)
    assert len(keys.unique()) == 300
    assert torch.equal(keys, row_keys(rows.float()))
    assert int(row_keys(torch.zeros(1, 4))) == int(row_keys(-torch.zeros(1, 4)))
    expected = rows[keys.argsort()[:20]].float()
    sample, parts = RowSample(20), [RowSample(20) for _ in range(3)]
    for i, block in enumerate(torch.cat([rows, rows[:50]])[torch.randperm(350, generator=g)].split(117)):
        parts[i].update(block)
    for part in reversed(parts):
        sample.merge(part)
    assert torch.equal(sample.rows, expected)
    # The sizes of components survive an orthogonal map, directions do not.
    turn = torch.linalg.qr(torch.randn(200, 200, generator=g))[0]
    whole, turned = RowSample(300), RowSample(300)
    whole.update(rows)
    turned.update(rows.float() @ turn)
    first, second = whole.result(), turned.result()
    assert first.shares is not None
    assert second.shares is not None
    assert first.shares == pytest.approx(second.shares, rel=1e-4)
    assert first.total == pytest.approx(second.total, rel=1e-4)


def test_huge_rows_do_not_overflow() -> None:
    rows = torch.full((4, WIDTH), 3e38, dtype=torch.bfloat16)
    found = fed(Norms, rows).result()
    assert found.mean == pytest.approx(float(rows[0, 0].double()) * WIDTH**0.5, rel=1e-6)
    assert fed(Counts, rows).result().nonfinite_rows == 0
    assert fed(Dimensions, rows).result().variance.tolist() == [0.0] * WIDTH


def test_a_large_channel_that_hardly_varies() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(5000, WIDTH, generator=g)
    rows[:, 2] = 24000 + 0.25 * rows[:, 2]
    found = fed(Dimensions, rows).result()
    assert found.variance == pytest.approx(rows.double().var(0, correction=0), rel=1e-9)
    wide = torch.randn(50, 200, generator=g)
    wide[:, 7] = 24000
    wide[:3, 9] = 1e6  # in 6 % of the rows
    assert fed(Outliers, wide).result().channels == [7, 9]
    assert fed(Outliers, wide.repeat(2, 1)[2:]).result().channels == [7]


# -- the scan ------------------------------------------------------------------------------------------------------------------


def sample(index: int, tokens: int = 30, entries: int = 4, width: int = 16, *, masked: bool = True) -> Sample:
    g = torch.Generator().manual_seed(index)
    states = torch.randn(tokens, entries, width, generator=g) * torch.tensor([1.0, 5.0, 20.0, 50.0])[:entries, None]
    states[0, 1:] *= 40
    states[5, 2] *= 30
    mask = None
    if masked:
        mask = torch.arange(tokens) >= 10
    return Sample(f"hs_{index}.safetensors", torch.arange(tokens), states.bfloat16(), mask, ("a", "b", "c", "d")[:entries], index)


def folder_of(path: Path, samples: list[Sample]) -> Path:
    for made in samples:
        write_sample(path / made.name, made)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "data", [sample(i) for i in range(6)])


def test_scan_against_brute_force(data: Path) -> None:
    found = scan(open_source(data))
    assert found.entries == ("a", "b", "c", "d")
    assert (found.last, found.width, found.sequences, found.rows) == (True, 16, 6, 180)
    assert found.dtypes == ("bfloat16",)
    everything = torch.stack([sample(i).states for i in range(6)]).double()  # [6, T, L, H]
    for entry in range(4):
        first = everything[:, 0, entry]
        answers = everything[:, 10:, entry].flatten(0, 1)
        sinks = everything[:, 5:6, entry].flatten(0, 1) if entry == 2 else everything[:0, 0, entry]
        others = torch.cat([everything[:, 1:5, entry], everything[:, 5 + (entry == 2) : 10, entry]], 1).flatten(0, 1)
        for name, rows in (("first", first), ("answer", answers), ("sink", sinks), ("other", others)):
            statistics = found.statistics(entry, (name,))  # type: ignore[arg-type]
            assert statistics.counts.result().rows == len(rows)
            if len(rows):
                dimensions = statistics.dimensions.result()
                assert dimensions.mean is not None
                assert dimensions.variance is not None
                assert torch.allclose(dimensions.mean, rows.mean(0), rtol=1e-9)
                assert torch.allclose(dimensions.variance, rows.var(0, correction=0), rtol=1e-7)
                assert statistics.norms.result().mean == pytest.approx(float(rows.norm(dim=-1).mean()), rel=1e-6)


@pytest.mark.parametrize("size", [2**32, 500, 1])
def test_copies_are_counted_once_however_large_the_data_is(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning_module, "CHUNK", size)
    for number in range(4):
        write_one("specforge", tmp_path / "plain", number)
    plain, twice = scan(open_source(tmp_path / "plain")), tmp_path / "twice"
    shutil.copytree(tmp_path / "plain", twice / "a")
    shutil.copytree(tmp_path / "plain", twice / "backup")
    for source in (open_source(twice), open_source(twice)):
        found = scan(source)
        assert (found.sequences, found.rows, len(found.inputs)) == (4, plain.rows, 4)
        assert found.statistics(0).counts.result() == plain.statistics(0).counts.result()
        assert found.odd["a copy of another"].count == 4
        (said,) = [note for note in found.notes if "cop" in note]
        assert said.startswith("4 sequences are copies of others and not counted again: backup/")
    assert not any("cop" in note for note in plain.notes)


def test_an_interrupted_scan_knows_the_copies_of_what_it_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning_module, "CHUNK", 1)
    for folder in ("a", "backup"):
        write_one("specforge", tmp_path / "d" / folder, 0)
    source = open_source(tmp_path / "d")
    first = Course(source, Settings(), [0])
    list(first.run())
    course = Course(source, Settings(), [0, 1], first.total, 1)
    list(course.run())
    assert (course.finish().sequences, course.finish().odd["a copy of another"].count) == (1, 1)


def test_shards_merge_into_the_whole(data: Path, tmp_path: Path) -> None:
    whole = scan(open_source(data))
    parts = [scan(open_source(data), shard=(i, 3)) for i in range(3)]
    total = parts[2].merge(parts[0]).merge(parts[1])
    assert (total.sequences, total.rows) == (6, 180)
    assert set(total.cells) == set(whole.cells)
    for key, cell in whole.cells.items():
        for name in ACCUMULATORS:
            same(getattr(total.cells[key], name).result(), getattr(cell, name).result())
    assert total.parts.keys() == whole.parts.keys()
    for name, part in whole.parts.items():
        same(total.parts[name].cosines.result(), part.cosines.result())
        for key, cell in part.cells.items():
            same(total.parts[name].cells[key].dimensions.result(), cell.dimensions.result())
    for entry, sample_ in whole.samples.items():
        assert torch.equal(total.samples[entry].rows, sample_.rows)
    with pytest.raises(DraftscopeError, match="twice"):
        total.merge(parts[1])
    with pytest.raises(DraftscopeError, match="width"):
        whole.merge(scan(open_source(folder_of(tmp_path / "other", [sample(0, width=8)]))))
    with pytest.raises(UsageError):
        scan(open_source(data), shard=(3, 3))


def test_parts_make_up_the_ordinary_rows(data: Path) -> None:
    """By group and by position: every ordinary row once in each."""
    found = scan(open_source(data), groups={0: "code", 1: "prose", 2: "code"})
    assert found.grouped == ("given", "runs")
    assert {"code", "prose"} < set(found.of_kind("group"))
    assert set(found.of_kind("position")) == {"1 to 15", "16 to 63"}
    for entry in range(4):
        for row_class in ("answer", "other"):
            whole = found.statistics(entry, (row_class,))
            for kind in ("group", "position"):
                total = Statistics()
                for part in found.of_kind(kind).values():
                    total.merge(part.statistics(entry, (row_class,)))
                same(total.dimensions.result(), whole.dimensions.result())
    assert found.of_kind("group")["code"].statistics(0, ("answer", "other")).counts.result().rows == 2 * 29
    # Row 5 is a sink in one entry, so that it has no cosines.
    assert found.cosines.result().count == 6 * 28


def same_fingerprint(a: Fingerprint, b: Fingerprint) -> None:
    assert a.cells.keys() == b.cells.keys()
    for key, cell in a.cells.items():
        for name in ACCUMULATORS:
            same(getattr(b.cells[key], name).result(), getattr(cell, name).result())
    assert a.parts.keys() == b.parts.keys()
    for name, part in a.parts.items():
        same(b.parts[name].cosines.result(), part.cosines.result())
        assert part.cells.keys() == b.parts[name].cells.keys()
        for key, cell in part.cells.items():
            same(b.parts[name].cells[key].dimensions.result(), cell.dimensions.result())
    assert all(torch.equal(b.samples[e].rows, sample_.rows) for e, sample_ in a.samples.items())


def test_the_same_whatever_passes_over_the_rows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without numba, with threads, and where little is held apart by group."""
    whole = scan(open_source(data))
    before = torch.get_num_threads()
    monkeypatch.setattr(tally, "ALONE", 0)
    torch.set_num_threads(2)
    try:
        threaded = scan(open_source(data))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    same_fingerprint(threaded, whole)
    for key, cell in whole.cells.items():
        assert all(torch.equal(tensor, threaded.cells[key].tensors()[name]) for name, tensor in cell.tensors().items())
    monkeypatch.setattr(tally, "HELD", 0)
    same_fingerprint(scan(open_source(data)), whole)
    for name in ("torch", "numpy"):
        found = scan(open_source(data), engine=name)
        assert found.provenance[0].engine == name
        same_fingerprint(found, whole)


def test_groups_beyond_the_most_are_others(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MOST_GROUPS", 2)
    found = scan(open_source(data), groups={i: f"g{i}" for i in range(6)})
    rows = {name: part.statistics(0, ("answer", "other")).dimensions.count for name, part in found.of_kind("group").items()}
    assert rows == {"g0": 29, "g1": 29, "others": 4 * 29}


def test_a_share_of_rows_by_hash(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chosen by name and position alone; the core takes every value all the same."""
    taken = rich_rows("a", 100_000, 16)
    assert 5_700 < int(taken.sum()) < 6_800
    assert taken[:500].tolist() == rich_rows("a", 500, 16).tolist()
    assert taken.tolist() != rich_rows("b", 100_000, 16).tolist()
    assert float((taken & rich_rows("b", 100_000, 16)).mean()) == pytest.approx(1 / 256, rel=0.2)
    assert bool(rich_rows("a", 9, 1).all())
    assert [share_of(n) for n in (1, 127, 128, 640, 100_000)] == [1, 1, 2, 10, 1024]
    whole, part = scan(open_source(data)), scan(open_source(data), every=4)
    assert (whole.every, part.every) == ((1,), (4,))
    for key, cell in whole.cells.items():
        same(part.cells[key].dimensions.result(), cell.dimensions.result())
    expected = torch.cat([s.states[1:, 0][torch.from_numpy(rich_rows(s.name, 30, 4))[1:]] for s in map(sample, range(6))])
    assert {tuple(r) for r in part.samples[0].rows.tolist()} == {tuple(r) for r in expected.float().tolist()}
    assert 0 < part.cosines.result().count <= len(expected) < whole.cosines.result().count
    shards = [scan(open_source(data), every=4, shard=(i, 2)) for i in range(2)]
    assert torch.equal(shards[1].merge(shards[0]).samples[0].rows, part.samples[0].rows)
    assert replace(whole, origins=(), inputs=Inputs()).merge(part).every == (1, 4)
    out = tmp_path / "f"
    assert run(["scan", str(data), "-o", str(out), "--every", "4"]) == 0
    assert "one ordinary row in 4" in capsys.readouterr().out
    assert load_fingerprint(out).every == (4,)
    with pytest.raises(UsageError, match="every 0"):
        scan(open_source(data), every=0)
    assert run(["scan", "merge", str(out), str(out), "-o", str(out), "--every", "2"]) == 2


def test_groups_of_other_sources() -> None:
    assert group_of("hs_3.safetensors", 3, 8, "data") == ("runs", "data: run 4 of 8")
    assert group_of("hs_9.safetensors", 9, 3, "data") == ("runs", "data: run 8 of 8")
    assert group_of("rows.pt[17]", 3, 8, "data") == ("files", "data: rows.pt")
    assert group_of("hs_3.safetensors", 3, 8, "data", "math") == ("given", "math")


EARLIER = Path(__file__).parent / "data" / "fingerprints"


def _unpacked(version: int, path: Path) -> Path:
    path.write_bytes(gzip.decompress((EARLIER / f"v{version}.safetensors.gz").read_bytes()))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_fingerprints_of_every_version_are_read(version: int, tmp_path: Path) -> None:
    """Files that the releases wrote, with the figures of their rows in float64."""
    path = _unpacked(version, tmp_path / "f")
    expected = json.loads((EARLIER / f"v{version}.json").read_text())
    found = load_fingerprint(path)
    assert TensorFile(path).metadata["draftscope"].startswith(f'{{"schema": "{expected["schema"]}"')
    assert (found.sequences, found.rows, list(found.entries), found.width) == (2, 10, expected["entries"], expected["width"])
    assert [list(key) for key in found.parts] == expected["parts"]
    for entry in range(3):
        held = found.statistics(entry, ("answer",))
        assert held.dimensions.mean.tolist() == pytest.approx(expected["answers"]["mean"][entry], rel=1e-12)
        assert held.dimensions.result().variance.tolist() == pytest.approx(expected["answers"]["variance"][entry], rel=1e-12)
        assert held.norms.result().mean == pytest.approx(expected["answers"]["norm"][entry], rel=1e-12)
        assert len(found.samples[entry].rows) == 8
    assert len(found.inputs) == len(found.kept.result()) == (2 if version > 2 else 0)
    assert [shape.sketch.count for shape in found.shapes.values()] == ([8, 8, 8] if version > 2 else [])
    with pytest.raises(DraftscopeError, match="twice"):
        found.merge(found)
    again = tmp_path / "again"
    found.save(again)
    assert load_fingerprint(again).rows == 10


def test_before_there_were_parts(data: Path, tmp_path: Path) -> None:
    found = load_fingerprint(_unpacked(2, tmp_path / "f"))
    opened = TensorFile(tmp_path / "f")
    header = json.loads(opened.metadata["draftscope"])
    del header["parts"], header["grouped"]
    held = {name: opened.tensor(name) for name in opened.names if not name.startswith(("part.", "sample."))}
    save_tensors(tmp_path / "first", held, {"draftscope": json.dumps(header | {"schema": "draftscope.fingerprint/1"})})
    read = load_fingerprint(tmp_path / "first")
    assert (read.parts, read.samples, read.rows) == ({}, {}, 10)
    assert read.merge(replace(found, origins=())).rows == 10


def test_halves_are_by_name_and_make_up_the_whole(data: Path) -> None:
    assert {half_of(f"hs_{i}.safetensors") for i in range(20)} == {0, 1}
    found = scan(open_source(data))
    for entry in range(4):
        total = Statistics()
        for half in (0, 1):
            total.merge(found.statistics(entry, halves=(half,)))
        same(total.norms.result(), found.statistics(entry).norms.result())


def test_where_a_file_lies_changes_neither_its_half_nor_its_identity(tmp_path: Path) -> None:
    folders = [tmp_path / "all" / f"rank_{rank}" for rank in (0, 1)]
    for rank, folder in enumerate(folders):
        write_one("specforge", folder, 3, sample(rank))
    whole, alone = scan(open_source(tmp_path / "all")), scan(open_source(folders[1]))
    assert [one.name for one in whole.inputs] == [f"rank_{rank}/rows_0-2000/data_3.ckpt" for rank in (0, 1)]
    assert [*whole.inputs][1].identity == next(iter(alone.inputs)).identity
    assert half_of("rank_1/data_3.ckpt") == half_of("data_3.ckpt")


def test_without_a_mask_all_rows_are_other(tmp_path: Path) -> None:
    found = scan(open_source(folder_of(tmp_path / "data", [sample(0, masked=False)])))
    assert {c for _, c, _ in found.cells} == {"first", "sink", "other"}


def test_classes_exclude_each_other() -> None:
    rows = torch.ones(6, 4)
    rows[2] *= 100
    rows[3] = torch.nan
    rows[4] = 0
    first, sink, answer, other = classes_of(rows, torch.tensor([1, 1, 1, 1, 0, 0]).bool())
    assert torch.stack([first, sink, answer, other]).sum(0).tolist() == [1] * 6
    assert first.nonzero().tolist() == [[0]]
    assert sink.nonzero().tolist() == [[2]]
    assert answer.nonzero().tolist() == [[1], [3]]
    assert all(len(c) == 0 for c in classes_of(rows[:0], None))


def trace(name: str = "r0", rows: int = 12) -> Trace:
    g = torch.Generator().manual_seed(1)
    return Trace(
        name=name, fc_input=torch.randn(rows, 24, generator=g).bfloat16(), token_ids=torch.arange(rows),
        accepted=torch.arange(rows) != 7, phase=(torch.arange(rows) >= 4).to(torch.uint8), step=torch.zeros(rows).long() - 1,
        last_hidden=torch.randn(rows, 8, generator=g),
    )


def test_scan_of_a_capture_takes_accepted_rows(tmp_path: Path) -> None:
    write_trace(tmp_path / "capture" / "r0.safetensors", trace())
    found = scan(open_source(tmp_path / "capture"))
    assert found.entries == ("slot 0", "slot 1", "slot 2", "last")
    assert (found.width, found.rows, found.last, found.slots) == (8, 11, True, 3)
    assert found.statistics(0, ("answer",)).counts.result().rows == 7
    kept = trace().fc_input.double()[torch.arange(12) != 7].unflatten(1, (3, 8))
    mean = found.statistics(1).dimensions.result().mean
    assert mean is not None
    assert torch.allclose(mean, kept[:, 1].mean(0), rtol=1e-9)
    assert any("rejected" in note for note in found.notes)
    bare = replace(trace(), last_hidden=None)
    write_trace(tmp_path / "bare" / "r0.safetensors", bare)
    assert scan(open_source(tmp_path / "bare"), slots=4).width == 6
    with pytest.raises(DraftscopeError, match="5 slots"):
        scan(open_source(tmp_path / "bare"), slots=5)


def test_layouts_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(DraftscopeError, match="entries of width"):
        scan(open_source(folder_of(tmp_path / "data", [sample(0), sample(1, width=8)])))


def test_file_round_trip(data: Path, tmp_path: Path) -> None:
    found = scan(open_source(data))
    path = tmp_path / "deep" / "f.safetensors"
    found.save(path)
    assert is_fingerprint(path)
    read = load_fingerprint(path)
    assert (read.entries, read.last, read.width, read.origins) == (found.entries, found.last, found.width, found.origins)
    for key, cell in found.cells.items():
        for name, tensor in cell.tensors().items():
            assert torch.equal(read.cells[key].tensors()[name], tensor)
    assert read.grouped == found.grouped
    assert read.parts.keys() == found.parts.keys()
    for name, part in found.parts.items():
        same(read.parts[name].cosines.result(), part.cosines.result())
        assert read.parts[name].cells.keys() == part.cells.keys()
    assert all(torch.equal(read.samples[e].rows, sample_.rows) for e, sample_ in found.samples.items())
    assert [p.name for p in path.parent.iterdir()] == ["f.safetensors"]


def test_damaged_files_are_refused(data: Path, tmp_path: Path) -> None:
    found = scan(open_source(data))
    path = tmp_path / "f"
    assert not is_fingerprint(data / "hs_0.safetensors")
    assert not is_fingerprint(tmp_path)
    with pytest.raises(DraftscopeError, match="is no fingerprint"):
        load_fingerprint(data / "hs_0.safetensors")
    header = {
        "schema": SCHEMA, "entries": found.entries, "last": True, "width": 16, "dtypes": [], "notes": [], "origins": [],
    }
    tensors = {f"0.other.0.{k}": v for k, v in found.statistics(0, ("other",)).tensors().items()}

    def written(change: dict[str, Any], held: dict[str, Tensor]) -> Path:
        text = json.dumps(header | change)
        save_tensors(path, held, {"draftscope": text, "checksum": checksum(text, held)})
        return path

    assert load_fingerprint(written({}, tensors)).width == 16
    for change, held, message in (
        ({"schema": "draftscope.fingerprint/9"}, tensors, "version"),
        ({"origins": [{"path": 1}]}, tensors, "damaged"),
        ({"width": 8}, tensors, "damaged"),
        ({"entries": 3}, tensors, "damaged"),
        ({}, {k: v for k, v in tensors.items() if "mean" not in k}, "damaged"),
        ({}, tensors | {"9.other.0.counts.counts": torch.zeros(5)}, "damaged"),
        ({}, tensors | {"0.other.0.counts.counts": torch.zeros(5)}, "damaged"),
        ({}, tensors | {"0.other.0.dimensions.mean": torch.full((16,), torch.nan).double()}, "damaged"),
        ({}, {"odd": torch.zeros(1)}, "damaged"),
        ({"parts": [["shoe", "x"]]}, tensors, "damaged"),
        ({}, tensors | {f"part.0.0.other.{k}": v for k, v in found.statistics(0, ("other",)).tensors().items()}, "damaged"),
        ({}, tensors | {"sample.9.rows": torch.zeros(1, 16), "sample.9.keys": torch.zeros(1).long()}, "damaged"),
        ({}, tensors | {"sample.0.rows": torch.zeros(1, 8), "sample.0.keys": torch.zeros(1).long()}, "damaged"),
    ):
        with pytest.raises(DraftscopeError, match=message):
            load_fingerprint(written(change, held))
    path.write_bytes(path.read_bytes()[:200])
    assert not is_fingerprint(path)


def test_a_refused_write_keeps_what_was_there(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scan(open_source(data))
    path = tmp_path / "f.safetensors"
    found.save(path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftscope.states.tensorfile.save_file", full)
    with pytest.raises(DraftscopeError, match="No space"):
        found.save(path)
    assert path.read_bytes() == before


def test_command(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "f.safetensors"
    assert run(["scan", str(data), "-o", str(out), "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["sequences"], shown["rows"]) == ("draftscope.scan/1", 6, 180)
    assert shown["entries"][2]["classes"]["sink"]["rows"] == 6
    for i in range(2):
        assert run(["scan", str(data), "-o", str(tmp_path / f"p{i}"), "--shard", f"{i}/2", "--quiet"]) == 0
    assert run(["scan", "merge", str(tmp_path / "p0"), str(tmp_path / "p1"), "-o", str(tmp_path / "m")]) == 0
    assert "6 sequences" in capsys.readouterr().out
    assert load_fingerprint(tmp_path / "m").rows == load_fingerprint(out).rows
    for arguments, code in (
        (["scan", str(tmp_path / "nothing"), "-o", str(out)], 3), (["scan", "merge", str(out), "-o", str(out)], 2),
        (["scan", str(data), str(data), "-o", str(out)], 2), (["scan", str(data), "-o", str(out), "--shard", "2/2"], 2),
        (["scan", "merge", str(out), str(out), "-o", str(out)], 3),
    ):
        assert run(arguments) == code
    assert load_fingerprint(out).rows == 180


def test_python(data: Path) -> None:
    assert isinstance(draftscope.scan(data), Fingerprint)
    assert draftscope.scan(draftscope.open(data)).rows == 180


def test_an_empty_shard_says_so(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DraftscopeError, match="shard 6 of 8 is empty: the source has 6 files"):
        scan(open_source(data), shard=(6, 8))
    assert run(["scan", str(data), "--shard", "7/8", "-o", str(tmp_path / "f")]) == 3
    assert "shard 7 of 8 is empty" in capsys.readouterr().err


def test_slots_that_do_not_divide_a_row_are_told_by_those_that_do(tmp_path: Path) -> None:
    trace = Trace("a", fc_input=torch.ones(4, 12), token_ids=torch.arange(4), accepted=torch.ones(4, dtype=torch.bool))
    write_trace(tmp_path / "request-000.safetensors", trace)
    with pytest.raises(DraftscopeError, match=r"do not divide into 5 slots.*--slots.*: 1, 2, 3, 4, 6, 12$"):
        scan(open_source(tmp_path), slots=5)


def test_a_size_that_is_none_is_refused_before_anything_is_read(data: Path, tmp_path: Path) -> None:
    assert run(["scan", str(data), "--project", "foo", "-o", str(tmp_path / "f")]) == 2
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(("dtype", "engine", "says"), [
    (torch.float64, [], "over states of float64 ran on torch"), (torch.bfloat16, [], ""),
    (torch.bfloat16, ["--engine", "torch"], "the passes ran on torch, many times slower than compiled"),
])
def test_what_was_not_compiled_is_said_by_its_reason(dtype: torch.dtype, engine: list[str], says: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    if kernels.compiled() is None:
        pytest.skip("numba is not installed")
    held = sample(0)
    held.states = held.states.to(dtype)
    folder = folder_of(tmp_path / "d", [held])
    assert run(["scan", str(folder), *engine, "-o", str(tmp_path / "f")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert says in said and "pip install" not in said and bool(says) == ("slower" in said)


def test_without_numba_its_package_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled", lambda: None)
    monkeypatch.setattr("draftscope.scan.scan.engine_of", lambda name: engine_of("torch"))
    assert run(["scan", str(data), "-o", str(tmp_path / "f")]) == 0
    assert "pip install 'draftscope[fast]'" in " ".join(capsys.readouterr().err.split())
