"""Statistics of two sources side by side, and the assignment that they allow."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from support import random_target
from torch import Tensor

import draftscope
from draftscope.cli.main import run
from draftscope.compare.assignment import assign
from draftscope.compare.distances import distance, wasserstein
from draftscope.compare.statistics import Comparison, compare_fingerprints
from draftscope.errors import DraftscopeError
from draftscope.report.comparison import norm
from draftscope.scan.accumulators import Norms
from draftscope.scan.fingerprint import Fingerprint, Origin, Statistics
from draftscope.scan.tally import add_sequence


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_assignment_against_all_permutations(slots: int, entries: int, seed: int) -> None:
    cost = torch.rand(slots, entries, generator=torch.Generator().manual_seed(seed))
    found = assign(cost)
    short = min(slots, entries)
    totals = []
    for chosen in permutations(range(slots), short):
        for places in permutations(range(entries), short):
            pairs = dict(zip(chosen, places, strict=True))
            totals.append((sum(float(cost[s, e]) for s, e in pairs.items()), pairs))
    least, best = min(totals, key=lambda t: t[0])
    assert found.total == pytest.approx(least, rel=1e-6)
    assert {s: e for s, e in enumerate(found.entries) if e is not None} == best
    assert found.nearest == tuple(cost.argmin(1).tolist())
    if slots <= entries:
        for s, margin in enumerate(found.margins):
            others = [t for t, places in totals if places[s] != best[s]]
            assert margin is None if not others else margin == pytest.approx(1 - least / min(others), rel=1e-4, abs=1e-6)


def test_unknown_distances_are_not_assigned() -> None:
    nan = float("nan")
    found = assign(torch.tensor([[nan, nan], [0.5, nan]]))
    assert found.entries == (None, 0)
    assert found.nearest == (None, 0)
    assert found.margins == (None, None)
    assert assign(torch.full((2, 2), nan)).entries == (None, None)
    assert assign(torch.zeros(0, 3)).entries == ()
    twice = assign(torch.tensor([[0.1, 5.0], [0.1, 0.2]]))
    assert twice.entries == (0, 1)
    assert twice.nearest == (0, 0)


def test_wasserstein_against_scipy() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.exp(torch.randn(400, generator=g)).double(), torch.exp(0.5 * torch.randn(300, generator=g) + 1).double()
    accumulators = Norms(), Norms()
    for accumulator, norms in zip(accumulators, (a, b), strict=True):
        accumulator.update_norms(norms)
    assert wasserstein(*accumulators) == pytest.approx(wasserstein_distance(a.log().numpy(), b.log().numpy()), abs=0.022)


def filled(rows: Tensor) -> Statistics:
    made = Statistics()
    made.update(rows)
    return made


def test_distance() -> None:
    g = torch.Generator().manual_seed(0)
    profile = torch.rand(64, generator=g) + 0.1
    mean = torch.randn(64, generator=g)
    rows = mean + profile * torch.randn(4000, 64, generator=g)
    again = mean + profile * torch.randn(4000, 64, generator=g)
    other = mean.roll(1) + profile.roll(1) * torch.randn(4000, 64, generator=g)
    itself = distance(filled(rows), filled(rows))
    assert itself.total == 0
    near, far, scaled = (distance(filled(rows), filled(x)) for x in (again, other, 8 * again))
    assert near.total is not None
    assert far.total is not None
    assert near.shape is not None
    assert near.total < 0.05 < 0.3 < far.total
    assert scaled.norms == pytest.approx(torch.log(torch.tensor(8.0)).item(), abs=0.05)
    assert scaled.shape == pytest.approx(near.shape, rel=1e-3)
    assert distance(filled(rows), Statistics()).total is None
    zero = filled(torch.zeros(5, 64))
    assert distance(zero, zero).total == 0
    assert distance(zero, filled(rows)).total is not None


def llama_states(seed: int, tokens: int = 60, repeat: int = 12) -> list[Tensor]:
    """All boundaries [T, n+1, H] of a random Llama over random text."""
    model = random_target(seed=5)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        ids = torch.randint(3, 300, (repeat, tokens), generator=g)
        return list(torch.stack(model(ids, output_hidden_states=True).hidden_states, 2))


def fingerprint(sequences: list[Tensor], boundaries: tuple[int, ...], last: bool = True, name: str = "s") -> Fingerprint:
    made = Fingerprint(tuple(f"entry {i}" for i in range(len(boundaries))), last, 64)
    for i, states in enumerate(sequences):
        add_sequence(made, f"{name}{i}", states[:, list(boundaries)].bfloat16(), torch.arange(len(states)) > 20)
    made.origins = (Origin("made here", "none", "samples", len(sequences), sum(map(len, sequences))),)
    return made


@pytest.fixture(scope="module")
def texts() -> tuple[list[Tensor], list[Tensor]]:
    return llama_states(0), llama_states(1)


def test_a_healthy_pair_of_other_text(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    found = compare_fingerprints(fingerprint(texts[0], (1, 3, 6, 8)), fingerprint(texts[1], (1, 3, 6, 8)))
    assert found.rows_compared == "answer"
    assert [c.entry for c in found.assignment] == [0, 1, 2]
    assert all(c.margin is not None and c.margin > 0.2 for c in found.assignment)
    assert all(c.clear for c in found.assignment)
    assert len(found.distances) == 4
    assert all(d.total is not None for d in (*found.split_half_a, *found.split_half_b))
    assert "neither proven" in found.assignment[0].says


def test_slots_moved_by_one_entry(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    """The case: an extra state in front, the last slot dropped out. The embedding has no entry of its own."""
    found = compare_fingerprints(fingerprint(texts[0], (1, 3, 6, 8)), fingerprint(texts[1], (0, 1, 3), last=False))
    assert [c.entry for c in found.assignment[1:]] == [0, 1]
    assert all(c.clear for c in found.assignment[1:])
    first = found.assignment[0]
    assert first.distance is not None
    assert found.assignment[1].distance is not None
    assert first.distance > 5 * found.assignment[1].distance


def test_swapped_and_doubled_slots(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    train = fingerprint(texts[0], (1, 3, 6, 8))
    swapped = compare_fingerprints(train, fingerprint(texts[1], (6, 3, 1), last=False))
    assert [c.entry for c in swapped.assignment] == [2, 1, 0]
    doubled = compare_fingerprints(train, fingerprint(texts[1], (1, 1, 6), last=False))
    assert [c.nearest for c in doubled.assignment] == [0, 0, 2]


def test_a_scaled_slot_by_shape(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    scaled = [x * torch.where(torch.arange(9) == 1, 30.0, 1.0)[:, None] for x in texts[1]]
    found = compare_fingerprints(fingerprint(texts[0], (1, 3, 6, 8)), fingerprint(scaled, (1, 3, 6, 8)))
    assert found.assignment[0].by_shape == 0
    assert found.distances[0][0].norms == pytest.approx(3.4, abs=0.1)


def test_sinks_do_not_count(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    spoilt = [x.clone() for x in texts[1]]
    for x in spoilt:
        x[[0, 30, 40], 1:] *= 5000
    found = compare_fingerprints(fingerprint(texts[0], (1, 3, 6, 8)), fingerprint(spoilt, (1, 3, 6, 8)))
    clean = compare_fingerprints(fingerprint(texts[0], (1, 3, 6, 8)), fingerprint(texts[1], (1, 3, 6, 8)))
    assert [c.entry for c in found.assignment] == [0, 1, 2]
    for a, b in zip(found.assignment, clean.assignment, strict=True):
        assert a.distance == pytest.approx(b.distance, rel=0.25)
    assert found.b.entries[0].classes["sink"].rows == 24


def test_few_rows_and_unknown_answers(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    train = fingerprint(texts[0], (1, 3, 6, 8))
    short = fingerprint([texts[1][0][:20]], (1, 3, 6, 8))
    found = compare_fingerprints(train, short)
    assert found.rows_compared == "ordinary"
    assert [c.entry for c in found.assignment] == [0, 1, 2]
    assert any("B has 1 sequence:" in caveat for caveat in found.caveats)
    assert [c.split_half is not None for c in found.assignment] == [True] * 3
    empty = compare_fingerprints(train, fingerprint([texts[1][0][:1]], (1, 3, 6, 8)))
    assert [c.entry for c in empty.assignment] == [None] * 3
    assert not any(c.clear for c in empty.assignment)


def test_widths_must_agree(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    with pytest.raises(DraftscopeError, match="wide"):
        compare_fingerprints(fingerprint(texts[0], (1, 3)), Fingerprint(("a",), False, 32))


def grouped(sequences: list[Tensor], scale: float = 1.0, name: str = "s", slot: int = 1) -> Fingerprint:
    """Four groups of sequences; one slot may be scaled."""
    made = Fingerprint(("a", "b", "c", "d"), True, 64, grouped=("given",))
    for i, states in enumerate(sequences):
        rows = states[:, [1, 3, 6, 8]].clone()
        rows[:, slot] *= scale
        add_sequence(made, f"{name}{i}", rows.bfloat16(), torch.arange(len(states)) > 20, f"group {i % 4}")
    made.origins = (Origin(f"made as {name}", "none", "samples", len(sequences), sum(map(len, sequences))),)
    return made


def test_yardstick_is_the_spread_of_the_groups(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    a = grouped(texts[0])
    yards = compare_fingerprints(a, grouped(texts[1])).yardsticks
    parts = a.of_kind("group")
    apart = []
    for name, part in parts.items():
        rest = Statistics()
        for other, held in parts.items():
            if other != name:
                rest.merge(held.statistics(1, ("answer",)))
        apart.append(distance(rest, part.statistics(1, ("answer",))).total or 0.0)
    assert (yards[1].groups, yards[1].natural) == (4, True)
    assert yards[1].spread.total == pytest.approx((sum(x * x for x in apart) / 4) ** 0.5)
    # Fewer rows are less certain, and no number of rows makes the groups alike.
    units = [yards[1].unit(rows) or 0.0 for rows in (10, 100, 10**9)]
    assert units[0] > units[1] > units[2] >= yards[1].spread.total
    assert yards[1].unit(0) is None
    ungrouped = compare_fingerprints(fingerprint(texts[0][:2], (1, 3, 6, 8)), grouped(texts[1]))
    assert not ungrouped.yardsticks[0].natural
    assert any("no natural groups" in caveat for caveat in ungrouped.caveats)


def test_effects_name_what_carries_the_difference(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    spoilt = [x.clone() for x in texts[1]]
    for x in spoilt:
        x[1:16, 3, 7] += 40 * x[:, 3].std()
    found = compare_fingerprints(grouped(texts[0]), grouped(spoilt))
    slot = [e for e in found.effects if e.slot == 1]
    positions = {e.name: e.effect or 0.0 for e in slot if e.by == "position"}
    assert set(positions) == {"16 to 63"}, "answers begin at row 21"
    classes = {e.name: e.effect or 0.0 for e in slot if e.by == "class"}
    assert classes["prompt"] > 5 * classes["answer"]
    whole = compare_fingerprints(grouped(texts[0]), grouped([x + 50 * (torch.arange(64) == 7) for x in texts[1]]))
    first = next(d for d in whole.dimensions if d.slot == 1)
    assert (first.dimension, first.share > 0.5) == (7, True)
    assert first.mean_b - first.mean_a == pytest.approx(50, rel=0.1)
    healthy = compare_fingerprints(grouped(texts[0]), grouped(texts[1]))
    assert [look.kind for look in healthy.looks] == ["own"] * 3
    assert all(coupling.effect < 3 for coupling in healthy.couplings)


def test_a_series_drifts_or_steps(texts: tuple[list[Tensor], list[Tensor]]) -> None:
    a = grouped(texts[0])
    still = [grouped(texts[1], name=f"t{i}") for i in range(5)]
    steady = compare_fingerprints(a, still[0], still[1:]).series
    assert steady is not None
    assert (steady.drifts, len(steady.points)) == (False, 5)
    assert "no drift" in steady.says
    growing = [grouped(texts[1], 1.5 ** (i + 1), name=f"t{i}") for i in range(5)]
    drift = compare_fingerprints(a, growing[0], growing[1:]).series
    assert drift is not None
    assert drift.drifts
    assert drift.trend == pytest.approx(1)
    effects = [p.effects[1] or 0.0 for p in drift.points]
    assert effects == sorted(effects)
    step = compare_fingerprints(a, still[0], [*still[1:3], grouped(texts[1], 4.0, name="t7"), grouped(texts[1], 4.0, name="t8"),
                                              grouped(texts[1], 3.9, name="t9")]).series
    assert step is not None
    assert "number 5" in step.says
    with pytest.raises(DraftscopeError, match="widths"):
        compare_fingerprints(a, still[0], [replace(still[1], width=32)])


def test_several_on_the_command_line(
    tmp_path: Path, texts: tuple[list[Tensor], list[Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"f{i}" for i in range(4)]
    for i, path in enumerate(paths):
        grouped(texts[min(i, 1)], 1.0 if i < 3 else 8.0, name=f"t{i}").save(path)
    assert run(["compare", *map(str, paths), "--json", str(tmp_path / "c.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "would have been seen" in shown
    assert "One after the other" in shown
    read = Comparison.model_validate_json((tmp_path / "c.json").read_text())
    assert read.series is not None
    assert len(read.series.points) == 3
    assert run(["compare", str(paths[0]), str(paths[3])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its training entry times 7.8" in shown
    assert "What carries the difference" in shown


def test_command_and_python(tmp_path: Path, texts: tuple[list[Tensor], list[Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    fingerprint(texts[0], (1, 3, 6, 8)).save(a)
    fingerprint(texts[1], (0, 1, 3, 8)).save(b)
    assert run(["compare", str(a), str(b), "--json", str(tmp_path / "c.json")]) == 0
    shown = capsys.readouterr().out
    assert "slot 1 (entry 1): entry 0 (entry 0)" in shown
    assert "neither proven nor excluded" in " ".join(shown.split())
    read = Comparison.model_validate_json((tmp_path / "c.json").read_text())
    assert [c.entry for c in read.assignment[1:]] == [0, 1]
    made = draftscope.compare(a, str(b))
    assert json.loads(made.json_text())["assignment"] == json.loads((tmp_path / "c.json").read_text())["assignment"]
    assert draftscope.compare(fingerprint(texts[0], (1, 3)), a.parent / "b.safetensors").a.width == 64
    assert run(["compare", str(a), str(tmp_path / "nothing")]) == 3


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_is_cut_at_any_width(width: int, tmp_path: Path, texts: tuple[list[Tensor], list[Tensor]],
                                       monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = fingerprint(texts[0], (1, 3, 6, 8))
    made.entries = ("after layer 1 of the target", "layer 3", "layer 6", "the last hidden state")
    made.save(tmp_path / "a.safetensors")
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "a.safetensors")]) == 0
    told = capsys.readouterr().out
    table = told.split("\n\n")[0]
    assert max(map(len, told.splitlines())) <= width
    for entry in draftscope.compare(made, made).a.entries:
        for name in ("first", "sink", "answer", "other"):
            figures = entry.classes[name]
            if figures.rows:
                row = f"{norm(figures.norm_mean)} +{norm(figures.norm_median)} "
                assert re.search(row, table) and norm(figures.norm_max) in table, (row, table)
