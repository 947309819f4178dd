"""What is taken of whole rows: the sketch's bound, histograms, projections; sequences kept; which inputs are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_scan import folder_of, sample
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.scan import kept as keeping
from draftscope.scan.fingerprint import load_fingerprint
from draftscope.scan.inputs import Input, Inputs, identity_of
from draftscope.scan.kept import KeptSequences, key_of
from draftscope.scan.rich import rich_rows
from draftscope.scan.scan import scan
from draftscope.scan.shapes import BINS, DIRECTIONS, Sketch, Slices, ValueHistogram, bins_of, edges, omega_of
from draftscope.states.opening import open_source
from draftscope.states.tensorfile import TensorFile, save_tensors

WIDTH = 200


def rows_with(sizes: Tensor, count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows whose covariance has eigenvalues sizes^2, and the directions."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64))[0]
    scores = torch.linalg.qr(torch.randn(count, WIDTH, generator=g, dtype=torch.float64))[0]
    scores = torch.linalg.qr(scores - scores.mean(0))[0] * count**0.5
    return scores * sizes @ turn.T + 3, turn


class TestSketch:
    def test_few_components_are_found_exactly(self) -> None:
        sizes = torch.zeros(WIDTH, dtype=torch.float64)
        sizes[:5] = torch.tensor([50.0, 20.0, 10.0, 3.0, 1.0])
        rows, turn = rows_with(sizes)
        sketch = Sketch()
        for part in rows.split(77):
            sketch.update(part)
        total, shares, directions = sketch.components()
        expected = sizes.square() / sizes.square().sum()
        assert total == pytest.approx(float(sizes.square().sum()), rel=1e-9)
        assert shares[:5] == pytest.approx(expected[:5], rel=1e-6)
        assert float(shares[5:].sum()) < 1e-9
        assert (directions[:, :5] * turn[:, :5]).sum(0).abs() == pytest.approx(torch.ones(5).double(), abs=1e-6)

    @pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
    def test_the_bound_holds(self, decay: float) -> None:
        """Expected error in the nuclear norm, over turned data: at most 1 + r / (k - r - 1) times the best."""
        sizes = torch.arange(1, WIDTH + 1, dtype=torch.float64) ** (-decay / 2)
        for rank in (3, 8):
            ratios = []
            for seed in range(8):
                rows, _ = rows_with(sizes, seed=seed)
                sketch = Sketch()
                sketch.update(rows)
                total, shares, directions = sketch.components()
                centred = rows - rows.mean(0)
                covariance = centred.T @ centred / len(rows)
                kept = directions[:, :rank] * (shares[:rank] * total) @ directions[:, :rank].T
                error = float(torch.linalg.eigvalsh(covariance - kept).abs().sum())
                ratios.append(error / float(sizes.square()[rank:].sum()))
            assert 1 <= np.mean(ratios) <= 1 + rank / (DIRECTIONS - rank - 1)

    def test_directions_are_the_same_everywhere(self) -> None:
        omega = omega_of(WIDTH)
        assert omega.shape == (WIDTH, DIRECTIONS)
        assert abs(float(omega.mean())) < 0.03
        assert float(omega.std()) == pytest.approx(1, rel=0.03)
        assert omega[0, :3].tolist() == pytest.approx(omega_of(WIDTH + 0)[0, :3].tolist())
        assert float((omega.T @ omega / WIDTH - torch.eye(DIRECTIONS)).abs().max()) < 0.5


def test_values_fall_into_bins_by_their_bits() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, 1.124, 1.126, -1.0, 3e38, 2.0])
    bins = bins_of(values)
    assert bins[0] == bins[1] == 0
    assert edges()[bins.long()].tolist() == pytest.approx([0, 0, 1, 1, 1.125, -1, float(edges()[int(bins[6])]), 2])
    largest = torch.finfo(torch.float32).max
    assert int(bins_of(torch.tensor([1e300], dtype=torch.float64))) == int(bins_of(torch.tensor([largest])))
    held = ValueHistogram()
    held.update(values[None])
    assert held.histogram.sum() == 8
    assert held.histogram.shape == (BINS,)


def test_shapes_are_of_the_rows_that_the_hash_chooses(tmp_path: Path) -> None:
    """Against brute force over the ordinary rows, whatever the batches; merged from shards too."""
    samples = [sample(i) for i in range(6)]
    data = folder_of(tmp_path / "data", samples)
    whole = scan(open_source(data), every=3)
    shards = [scan(open_source(data), every=3, shard=(i, 2)) for i in range(2)]
    for found in (whole, shards[1].merge(shards[0])):
        for entry in range(4):
            rows, before = [], []
            for one in samples:
                taken = rich_rows(one.name, 30, 3)
                taken[0] = False
                if entry == 2:
                    taken[5] = False  # a sink
                rows.append(one.states[torch.from_numpy(taken), entry].double())
                before.append(one.states[torch.from_numpy(np.flatnonzero(taken) - 1), entry].double())
            all_rows, earlier = torch.cat(rows), torch.cat(before)
            shape = found.shapes[entry]
            assert int(shape.values.histogram.sum()) == all_rows.numel()
            assert shape.sketch.count == shape.slices.moments.count == len(all_rows)
            assert shape.sketch.components()[0] == pytest.approx(float(all_rows.var(0, correction=0).sum()), rel=1e-9)
            projected = all_rows @ omega_of(16)[:, :16]
            assert shape.slices.moments.mean == pytest.approx(projected.mean(0), rel=1e-9)
            assert torch.equal(shape.slices.histogram[3], torch.bincount(bins_of(projected[:, 3]), minlength=BINS))
            cosine = torch.nn.functional.cosine_similarity(all_rows, earlier, dim=-1)
            assert shape.neighbours.result().mean == pytest.approx(float(cosine.mean()), rel=1e-9)


def test_projections_tell_a_turned_slot() -> None:
    rows, turn = rows_with(torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -1.0)
    plain, turned = Slices(), Slices()
    plain.update(rows)
    turned.update(rows @ turn)
    assert not torch.allclose(plain.moments.squares, turned.moments.squares, rtol=0.05)


def test_the_sequences_kept_are_those_of_the_smallest_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "KEEP", 4)
    monkeypatch.setattr(keeping, "LONGEST", 20)
    samples = [sample(i) for i in range(9)]
    data = folder_of(tmp_path / "data", samples)
    expected = sorted((one.name for one in samples), key=key_of)[:4]
    shards = [scan(open_source(data), shard=(i, 3)) for i in range(3)]
    total = shards[2].merge(shards[0]).merge(shards[1])
    total.save(tmp_path / "f")
    for found in (scan(open_source(data)), total, load_fingerprint(tmp_path / "f")):
        kept = found.kept.result()
        assert [one.name for one in kept] == expected
        for one in kept:
            origin = next(each for each in samples if each.name == one.name)
            assert one.rows == 30
            assert torch.equal(one.token_ids, origin.token_ids[:20])
            assert one.answer.tolist() == [0] * 10 + [1] * 10
            assert one.norms == pytest.approx(origin.states[:20].double().norm(dim=-1).T, rel=1e-6)
    assert KeptSequences.from_state(KeptSequences().state()).result() == []
    broken = total.kept.state()
    with pytest.raises(ValueError, match="do not fit"):
        KeptSequences.from_state(broken | {"token_ids": broken["token_ids"][:-1]})


class TestInputs:
    def test_what_makes_two_inputs_the_same(self) -> None:
        one = sample(0)
        own = identity_of("a/hs_0", 10, one.token_ids, one.states)
        assert own == identity_of("b/c/hs_0", 10, one.token_ids, one.states.clone())
        changed = one.states.clone()
        changed[:, :, :] = changed * 1.01
        for other in (
            identity_of("hs_1", 10, one.token_ids, one.states), identity_of("hs_0", 11, one.token_ids, one.states),
            identity_of("hs_0", 10, one.token_ids + 1, one.states), identity_of("hs_0", 10, one.token_ids, changed),
            identity_of("hs_0", 10, one.token_ids, one.states.float()),
            identity_of("hs_0", 10, one.token_ids[:9], one.states[:9]),
        ):
            assert other != own

    def test_files_that_begin_alike_differ(self) -> None:
        """Two samples of one prompt: the same first rows, other values later on."""
        one = sample(0, tokens=300)
        other = one.states.clone()
        other[150:] += 1
        assert identity_of("x", 1, one.token_ids, one.states) != identity_of("x", 1, one.token_ids, other)

    def test_they_survive_the_file(self, tmp_path: Path) -> None:
        held = Inputs([Input("ä/hs_0[3]", 5, 7, "", 3, "ab" * 16), Input("b", -1, -1, '"tag"', 0, "")])
        save_tensors(tmp_path / "f", held.tensors(), {})
        opened = TensorFile(tmp_path / "f")
        read = {name: opened.tensor(name) for name in opened.names}
        assert Inputs.from_tensors(read).held == held.held
        assert Inputs.from_tensors(Inputs().tensors()).held == []
        with pytest.raises(ValueError, match="identity"):
            Inputs.from_tensors(read | {"identity": read["identity"][:1]})

    def test_the_unknown_is_never_twice(self) -> None:
        held = Inputs([Input("a", 1, 1, "", 1, "")])
        held.merge([Input("a", 1, 1, "", 1, "")])
        with pytest.raises(DraftscopeError, match="a: is in both fingerprints, and 1 more"):
            Inputs([Input("a", 1, 1, "", 1, "0a"), Input("b", 1, 1, "", 1, "0b")]).merge(
                [Input("a", 1, 1, "", 1, "0a"), Input("b", 1, 1, "", 1, "0b")])

    def test_a_fingerprint_names_its_inputs(self, tmp_path: Path) -> None:
        data = folder_of(tmp_path / "data", [sample(i) for i in (0, 7)])
        found = scan(open_source(data), command="here")
        assert [(one.name, one.rows) for one in found.inputs] == [("hs_0.safetensors", 30), ("hs_7.safetensors", 30)]
        for one in found.inputs:
            held = (data / one.name).stat()
            assert (one.size, one.time) == (held.st_size, held.st_mtime_ns)
        assert found.provenance[0].command == "here"
        assert found.provenance[0].version
        alone = scan(open_source(data / "hs_7.safetensors"))
        with pytest.raises(DraftscopeError, match=r"hs_7\.safetensors: is in both"):
            found.merge(alone)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32])
def test_what_is_stored_is_read_without_a_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    """Eight-bit states are scanned as they lie, with the figures of their values."""
    stored = (sample(0).states.float() / 50).to(dtype)
    (tmp_path / "data").mkdir()
    save_tensors(tmp_path / "data" / "hs_0.safetensors", {"hidden_states": stored, "token_ids": torch.arange(30)}, {})
    for engine in (None, "torch", "numpy"):
        found = scan(open_source(tmp_path / "data"), engine=engine)
        assert found.dtypes == (str(dtype).removeprefix("torch."),)
        rows = stored.double()[1:, 1]
        assert found.statistics(1, ("other",)).dimensions.mean == pytest.approx(rows.mean(0), rel=1e-9)
        assert torch.equal(found.samples[1].rows.sort(0).values, rows.float().unique(dim=0).sort(0).values)
