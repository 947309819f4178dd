"""What passes over rows: one contract for all engines, against the accumulators and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scan import TOLERANCE, close, numbers, reference, some_rows
from torch import Tensor

from draftscope.errors import UsageError
from draftscope.scan import core, kernels
from draftscope.scan.accumulators import ACCUMULATORS, Norms, row_norms
from draftscope.scan.core import CELLS, ENGINES, POSITIONS, Engine, cells_of, class_of, engine_of, name_of
from draftscope.scan.core_arrays import decoded
from draftscope.scan.core_tensors import wide
from draftscope.scan.joint import row_keys
from draftscope.scan.statistics import Statistics
from draftscope.scan.tally import _columns

HERE = [name for name in ENGINES if core._works(name)]
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, *NARROW)
each = pytest.mark.parametrize("engine", HERE)
compiled = pytest.mark.skipif("numba" not in HERE, reason="numba is not installed")


def passed(name: str, rows: Tensor, *chosen: Tensor, columns: int = 1) -> Statistics:
    """Rows [N, H] as the second of three entries, all of one cell, in so many updates."""
    engine = engine_of(name)
    store = engine.store(3, rows.shape[1])
    for some in chosen or (torch.arange(len(rows)),):
        states = torch.zeros(len(some), 3, rows.shape[1], dtype=rows.dtype)
        states[:, 1] = rows[some]
        if len(some):
            take(engine, store, states, 1, np.full(len(some), 5, np.int8), columns)
    total = Statistics()
    for entry, cell, found in store.results():
        assert (entry, cell) == (1, 5)
        total.merge(found)
    return total


def take(engine: Engine, store: core.Store, states: Tensor, entry: int, cells: np.ndarray, columns: int = 1) -> None:
    view, count = engine.view(states), len(states)
    norms = engine.norms(view, entry, 0, count)
    plan = store.begin(view, entry, norms, cells, 0)
    for low, high in _columns(states.shape[2], columns):
        store.add(view, entry, plan, low, high)


def on_tensors(rows: Tensor) -> Statistics:
    made = Statistics()
    made.update(wide(rows))
    return made


def alike(a: Statistics, b: Statistics, rows: Tensor) -> None:
    """Within the tolerance that `scan.core` states; a norm at the edge of a bin may be in either."""
    largest = float(rows.double().nan_to_num(0, 0, 0).abs().max()) if rows.numel() else 0.0
    assert a.counts.result() == b.counts.result()
    found, expected = numbers(a.norms.result()), numbers(b.norms.result())
    close(found[5:8], expected[5:8], 0.023)
    close(found[:5] + found[8:], expected[:5] + expected[8:], TOLERANCE, 1e-9)
    close(numbers(a.dimensions.result()), numbers(b.dimensions.result()), TOLERANCE, 1e-14 * largest**2 + 1e-14 * largest)
    assert numbers(a.outliers.result()) == numbers(b.outliers.result())


@each
class TestEngines:
    @settings(deadline=None, max_examples=40)
    @given(data=st.data(), dtype=st.sampled_from(DTYPES), width=st.sampled_from([1, 3, 6, 17, 64, 65]))
    def test_equals_the_accumulators(self, engine: str, data: st.DataObject, dtype: torch.dtype, width: int) -> None:
        """However the rows are split."""
        rows = data.draw(some_rows(width)).to(dtype)
        whole = on_tensors(rows)
        alike(passed(engine, rows), whole, rows)
        order = torch.tensor(data.draw(st.permutations(range(len(rows)))), dtype=torch.int64)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
        alike(passed(engine, rows, *order.tensor_split(cuts)), whole, rows)

    @settings(deadline=None, max_examples=30)
    @given(rows=some_rows(), dtype=st.sampled_from(DTYPES))
    def test_equals_the_reference(self, engine: str, rows: Tensor, dtype: torch.dtype) -> None:
        rows = wide(rows.to(dtype))
        found = passed(engine, rows)
        slack = 1e-9 * float(rows.double().nan_to_num(0, 0, 0).abs().max()) ** 2 if len(rows) else 0.0
        for name, kind in ACCUMULATORS.items():
            shown, expected = numbers(getattr(found, name).result()), reference(kind, rows)
            if kind is Norms:
                close(shown[5:8], expected[5:8], 0.011)
                shown[5:8] = expected[5:8] = []
            close(shown, expected, 1e-6, slack if name == "dimensions" else 1e-9)

    def test_every_narrow_value_is_read_as_torch_reads_it(self, engine: str) -> None:
        """All 65,536 of either 16-bit type and all 256 of either 8-bit type: subnormal, infinite, NaN."""
        for dtype in (torch.float16, torch.bfloat16, *NARROW):
            bits = torch.arange(256, dtype=torch.uint8) if dtype in NARROW else torch.arange(-(2**15), 2**15).to(torch.int16)
            every = bits.view(dtype)[:, None, None]
            made = engine_of(engine)
            norms = torch.from_numpy(made.norms(made.view(every), 0, 0, len(every)))
            exact = every.float()[:, 0, 0]
            assert torch.equal(norms.isfinite(), exact.isfinite())
            assert torch.equal(norms[norms.isfinite()], exact[exact.isfinite()].double().abs())
            one_row = wide(every)[exact.isfinite()].to(dtype)[:, 0].view(1, -1)
            alike(passed(engine, one_row), on_tensors(one_row), one_row.float())
            store = made.store(1, 1)
            take(made, store, every, 0, np.zeros(len(every), np.int8))
            counted = next(found for _, _, found in store.results()).counts.result()
            assert (counted.nan, counted.infinite) == (int(exact.isnan().sum()), int(exact.isinf().sum()))

    def test_rows_fall_into_the_cells_of_their_entry(self, engine: str) -> None:
        """Three entries over several sequences, each with cells of its own, against brute force."""
        g = torch.Generator().manual_seed(0)
        made = engine_of(engine)
        store = made.store(3, 40)
        by_cell: dict[tuple[int, int], list[Tensor]] = {}
        for _ in range(3):
            states = torch.randn(90, 3, 40, generator=g).bfloat16() * 7
            for entry in range(3):
                cells = torch.randint(0, CELLS, (90,), generator=g).to(torch.int8)
                take(made, store, states, entry, cells.numpy())
                for cell in range(CELLS):
                    by_cell.setdefault((entry, cell), []).append(states[cells == cell, entry])
        found = {(entry, cell): statistics for entry, cell, statistics in store.results()}
        assert found.keys() == by_cell.keys()
        for key, parts in by_cell.items():
            alike(found[key], on_tensors(torch.cat(parts)), torch.cat(parts))

    def test_a_large_channel_that_hardly_varies(self, engine: str) -> None:
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(5000, 9, generator=g)
        rows[:, 2] = 24000 + 0.25 * rows[:, 2]
        rows[0] *= 50
        found = passed(engine, rows, torch.arange(7), torch.arange(7, 5000)).dimensions.result()
        assert found.variance == pytest.approx(rows.double().var(0, correction=0), rel=1e-9)

    def test_columns_apart_give_the_same_bits(self, engine: str) -> None:
        rows = torch.randn(100, 2100, generator=torch.Generator().manual_seed(0)).bfloat16()
        parts = 4 if engine == "numba" else 1
        whole, apart = passed(engine, rows), passed(engine, rows, columns=parts)
        assert all(torch.equal(tensor, apart.tensors()[name]) for name, tensor in whole.tensors().items())
        assert _columns(2100, 4) == [(0, 512), (512, 1024), (1024, 1536), (1536, 2100)]
        assert _columns(300, 4) == [(0, 300)]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_that_lie_apart_or_unaligned(self, engine: str, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        states = torch.randn(40, 3, 19, generator=g).to(dtype)
        made = engine_of(engine)
        held = bytearray(1) + bytearray(states.view(torch.uint8).numpy().tobytes())
        moved = torch.frombuffer(held, dtype=dtype, offset=1).view(states.shape)
        for given_ in (states, moved, states[5:, 1:, :]):
            store = made.store(given_.shape[1], 19)
            take(made, store, given_, 1, np.full(len(given_), 3, np.int8))
            alike(next(store.results())[2], on_tensors(given_[:, 1]), states.float())

    def test_cells_are_those_of_the_rule(self, engine: str) -> None:
        g = torch.Generator().manual_seed(0)
        made = engine_of(engine)
        for count in (1, 2, 15, 17, 300, 5000):
            norms = torch.rand(count, generator=g).double().numpy()
            norms[:: 7] *= 30
            norms[3:: 11], norms[5:: 13] = np.nan, 0
            answer = (torch.rand(count, generator=g) > 0.5).numpy()
            for known in (answer, None):
                assert made.cells(norms, known).tolist() == cells_of(norms, known).tolist()
        assert made.cells(np.full(3, np.nan), None).tolist() == [0, 2 + len(POSITIONS), 2 + len(POSITIONS)]


def test_cells_in_words() -> None:
    assert [class_of(cell) for cell in (0, 1, 2, 7, 8, 13)] == [
        ("first", -1), ("sink", -1), ("answer", 0), ("answer", 5), ("other", 0), ("other", 5)]
    assert (name_of(0), name_of(5)) == ("1 to 15", "4096 on")


def test_moments_hold_over_very_many_values() -> None:
    """The bound: deviations from a pivot near the mean are summed in float64, N of them to N * 2^-53 relative of what they add.

    For 10^9 values that is 1.1e-7, below 1e-6, were every rounding to go the same way. Here 4 million values in blocks that go on
    adding to the same sums, where float32 sums would be off by parts in a hundred.
    """
    g = torch.Generator().manual_seed(0)
    block = torch.randn(4000, 8, generator=g) + torch.tensor([0.0, 1e-3, 1.0, 10.0, 1e3, 1e4, -3.0, 0.5])
    rows = block.float()
    found = passed(HERE[0], rows, *[torch.arange(len(rows))] * 128).dimensions.result()
    exact = rows.double()
    assert found.count == 128 * 4000
    assert found.variance == pytest.approx(exact.var(0, correction=0), rel=1e-9)
    assert (found.mean - exact.mean(0)).abs().max() <= 1e-9 * float(exact.var(0).sqrt().min())
    bound = 1e9 * 2.0**-53
    assert bound < 1e-6


def test_the_fastest_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_of().name == HERE[0]
    with pytest.raises(UsageError, match="no engine `abacus`"):
        engine_of("abacus")

    def broken() -> Engine:
        raise OSError("LLVM does not know this processor")

    def wrong() -> Engine:
        made = engine_of("numpy")
        monkeypatch.setattr(made, "norms", lambda *_: np.zeros(3))
        return made

    core._works.cache_clear()
    monkeypatch.setitem(core.ENGINES, "numba", broken)
    try:
        assert engine_of().name == "torch"
        with pytest.raises(UsageError, match="numba does not work here"):
            engine_of("numba")
        monkeypatch.setitem(core.ENGINES, "torch", wrong)
        core._works.cache_clear()
        assert engine_of().name == "numpy"
    finally:
        monkeypatch.undo()
        core._works.cache_clear()


def test_values_are_decoded_from_their_bytes() -> None:
    for dtype in (*DTYPES, torch.float64):
        rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert torch.equal(torch.from_numpy(decoded(rows)), rows.double())


@compiled
def test_what_is_not_compiled() -> None:
    states = torch.randn(4, 3, 8)
    assert kernels.fits(states)
    for other in (states.double(), states.transpose(1, 2), states[:0], states.to(torch.float8_e4m3fnuz)):
        assert not kernels.fits(other)


@compiled
def test_keys_and_norms_are_the_same_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(50, 90, generator=torch.Generator().manual_seed(0))
    keys, norms = row_keys(rows), row_norms(rows)
    monkeypatch.setattr(kernels, "compiled", lambda: None)
    assert torch.equal(keys, row_keys(rows))
    assert norms == pytest.approx(row_norms(rows), rel=1e-12)
