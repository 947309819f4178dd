"""Effects of a comparison against brute force on the raw rows, in numpy and float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor

from draftscope.cli.main import run
from draftscope.compare.effects import divided
from draftscope.compare.statistics import Comparison, compare_fingerprints
from draftscope.compare.yardstick import FAR
from draftscope.scan.fingerprint import Fingerprint, Origin, Statistics
from draftscope.scan.inputs import Input
from draftscope.scan.tally import add_sequence, half_of

WIDTH, SLOTS, GROUPS = 24, 2, 4
RANGES = {"1 to 15": (1, 16), "16 to 63": (16, 64), "64 to 255": (64, 256)}


@dataclass
class Raw:
    """Sequences as they are: states [T, SLOTS, WIDTH] bf16, answers from a row on, a group each."""

    name: str
    states: list[Tensor]
    answer_from: int

    def fingerprint(self) -> Fingerprint:
        made = Fingerprint(tuple(f"entry {i}" for i in range(SLOTS)), False, WIDTH, grouped=("given",))
        for i, states in enumerate(self.states):
            add_sequence(made, f"{self.name}{i}", states, torch.arange(len(states)) >= self.answer_from, f"group {i % GROUPS}")
        made.origins = (Origin(self.name, "none", "samples", len(self.states), sum(map(len, self.states))),)
        return made

    def rows(self, slot: int, kind: str = "answer", at: tuple[int, int] = (1, 10**9), group: int | None = None,
             half: int | None = None) -> np.ndarray:
        """[N, WIDTH] float64 of one slot: rows of a class within a range; the states have no sinks."""
        found = []
        for i, states in enumerate(self.states):
            if (group is None or i % GROUPS == group) and (half is None or half_of(f"{self.name}{i}") == half):
                t = np.arange(len(states))
                answer = t >= self.answer_from
                of_kind = {"first": t == 0, "answer": (t > 0) & answer, "prompt": (t > 0) & ~answer, "ordinary": t > 0}[kind]
                found.append(states[:, slot].double().numpy()[of_kind & (t >= (0 if kind == "first" else at[0])) & (t < at[1])])
        return np.concatenate(found)


def made(name: str, seed: int, lengths: range, *, moved: float = 0.0, louder: float = 1.0, answer_from: int = 20) -> Raw:
    """Rows whose mean follows position and group; `moved` shifts channel 5 of slot 1 on rows 64 on, `louder` its channel 9."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.Generator().manual_seed(99)
    profile, by_place = 1 + torch.rand(SLOTS, WIDTH, generator=basis), torch.randn(3, SLOTS, WIDTH, generator=basis)
    by_group = 0.2 * torch.randn(GROUPS, SLOTS, WIDTH, generator=basis)
    states = []
    for i, length in enumerate(lengths):
        t = torch.arange(length)
        place = (t >= 16).long() + (t >= 64).long()
        rows = by_place[place] + by_group[i % GROUPS] + 0.3 * torch.randn(1, SLOTS, WIDTH, generator=g)
        rows = rows + profile * torch.randn(length, SLOTS, WIDTH, generator=g)
        rows[64:, 1, 5] += moved
        rows[:, 1, 9] *= louder
        states.append(rows.bfloat16())
    return Raw(name, states, answer_from)


@pytest.fixture(scope="module")
def a() -> Raw:
    return made("a", 0, range(80, 120))


@pytest.fixture(scope="module")
def b() -> Raw:
    return made("b", 1, range(90, 160, 4), moved=6.0, louder=2.5)


@pytest.fixture(scope="module")
def found(a: Raw, b: Raw) -> Comparison:
    return compare_fingerprints(a.fingerprint(), b.fingerprint())


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The distance of two sets of rows, from its definition."""
    logs = [np.log(np.linalg.norm(rows, axis=1)) for rows in (one, other)]
    size = math.sqrt(np.mean([np.mean((rows**2).sum(1)) for rows in (one, other)]))
    means = np.linalg.norm(one.mean(0) - other.mean(0)) / size
    spread = np.median(np.abs(np.log(one.std(0) / other.std(0))))
    return math.hypot(wasserstein_distance(*logs), means, spread)


@pytest.mark.parametrize("by", ["class", "position"])
def test_effects_are_the_distances_of_their_rows(found: Comparison, a: Raw, b: Raw, by: str) -> None:
    told = [e for e in found.effects if e.by == by]
    assert {e.name for e in told} == ({"first", "prompt", "answer"} if by == "class" else set(RANGES) - {"1 to 15"})
    for effect in told:
        kind, at = (effect.name, (1, 10**9)) if by == "class" else ("answer", RANGES[effect.name])
        one, other = (raw.rows(effect.slot, kind, at) for raw in (a, b))
        assert (effect.rows_a, effect.rows_b) == (len(one), len(other))
        # Norms are held in bins of 1/32 octave.
        assert effect.distance == pytest.approx(apart(one, other), abs=0.02)


def test_units_of_a_class_are_its_own_groups(found: Comparison, a: Raw, b: Raw) -> None:
    for effect in found.effects:
        assert effect.effect is not None
        assert effect.smallest is not None
        assert effect.smallest == pytest.approx(FAR * effect.distance / effect.effect)
        if effect.name not in ("prompt", "answer"):
            assert effect.yardstick == "all rows"
            continue
        assert effect.yardstick == "groups"
        kept = [[a.rows(effect.slot, effect.name, group=g) for g in range(GROUPS)]]
        apart_of = [apart(np.concatenate([rows for j, rows in enumerate(kept[0]) if j != g]), kept[0][g]) for g in range(GROUPS)]
        halves = apart(*(a.rows(effect.slot, effect.name, half=h) for h in (0, 1)))
        rows = len(a.rows(effect.slot, effect.name))
        unit = math.hypot(math.sqrt(np.mean(np.square(apart_of))),
                          halves * math.sqrt(rows / 4 * (1 / rows + 1 / len(b.rows(effect.slot, effect.name)))))
        assert effect.distance / effect.effect == pytest.approx(unit, rel=0.1)


def share_of(a: Raw, b: Raw, slot: int, kinds: dict[str, tuple[str, tuple[int, int]]], whole: str) -> dict[str, float]:
    """By kind: its part of the difference of the means, projected, from the rows."""
    total = [raw.rows(slot, whole) for raw in (a, b)]
    difference = total[1].mean(0) - total[0].mean(0)
    shares = {}
    for name, (kind, at) in kinds.items():
        rows = [raw.rows(slot, kind, at) for raw in (a, b)]
        weight = np.mean([len(r) / len(t) for r, t in zip(rows, total, strict=True)])
        shares[name] = weight * (rows[1].mean(0) - rows[0].mean(0)) @ difference / (difference @ difference)
    return shares


def test_shares_of_the_difference(found: Comparison, a: Raw, b: Raw) -> None:
    by_place = {name: ("answer", at) for name, at in RANGES.items() if name != "1 to 15"}
    by_class = {name: (name, (1, 10**9)) for name in ("prompt", "answer")}
    for slot in range(SLOTS):
        for by, kinds, whole in (("position", by_place, "answer"), ("class", by_class, "ordinary")):
            wanted = share_of(a, b, slot, kinds, whole)
            told = {e.name: e.share for e in found.effects if (e.slot, e.by) == (slot, by) and e.share is not None}
            assert told == pytest.approx(wanted, rel=1e-6)
            (mix,) = [m.share for m in found.mixes if (m.slot, m.by) == (slot, by)]
            assert mix + sum(told.values()) == pytest.approx(1)
    carried = {e.name: e.share or 0 for e in found.effects if (e.slot, e.by) == (1, "position")}
    assert carried["64 to 255"] > 0.7, "channel 5 was moved there"


def test_other_lengths_alone_are_a_mix() -> None:
    """The same rows by position, in other shares: nothing differs within a range, though the means do."""
    g = torch.Generator().manual_seed(3)
    kinds = {"x": torch.randn(40, 5, generator=g), "y": torch.randn(40, 5, generator=g) + 4}

    def filled(rows: Tensor, times: int) -> Statistics:
        held = Statistics()
        for _ in range(times):
            held.update(rows)
        return held

    pairs = {"x": (filled(kinds["x"], 1), filled(kinds["x"], 3)), "y": (filled(kinds["y"], 2), filled(kinds["y"], 1))}
    assert divided(pairs, frozenset(pairs)) == pytest.approx({"x": 0.0, "y": 0.0}, abs=1e-12)
    assert divided({"x": (Statistics(), pairs["x"][0])}, frozenset({"x"})) is None
    assert divided({"x": (pairs["x"][0], pairs["x"][0])}, frozenset({"x"})) is None


def profiles(a: Raw, b: Raw, slot: int) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]], float]:
    """Rows of both sides, each group with all others, and by how much rows are alike."""
    one, other = a.rows(slot), b.rows(slot)
    groups = [a.rows(slot, group=g) for g in range(GROUPS)]
    pairs = [(rows, np.concatenate([r for j, r in enumerate(groups) if j != g])) for g, rows in enumerate(groups)]
    halves = [a.rows(slot, half=h) for h in (0, 1)]
    expected = one.var(0) * sum(1 / len(h) for h in halves)
    return one, other, pairs, max(1.0, float(np.mean((halves[0].mean(0) - halves[1].mean(0)) ** 2 / expected)))


def effects_of(a: Raw, b: Raw, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By dimension: effect of the mean, of the log deviation, and the unit of the mean."""
    one, other, pairs, alike = profiles(a, b, slot)
    means = np.sqrt(np.mean([(x.mean(0) - y.mean(0)) ** 2 for x, y in pairs], 0))
    logs = np.sqrt(np.mean([np.log(x.std(0) / y.std(0)) ** 2 for x, y in pairs], 0))
    unit = np.sqrt(means**2 + alike * (one.var(0) / len(one) + other.var(0) / len(other)))
    log_unit = np.sqrt(logs**2 + alike * 0.5 * (1 / len(one) + 1 / len(other)))
    return np.abs(other.mean(0) - one.mean(0)) / unit, np.abs(np.log(other.std(0) / one.std(0))) / log_unit, unit


def test_dimensions_against_the_rows(found: Comparison, a: Raw, b: Raw) -> None:
    for slot in range(SLOTS):
        one, other, _, alike = profiles(a, b, slot)
        means, logs, unit = effects_of(a, b, slot)
        squared = (other.mean(0) - one.mean(0)) ** 2
        told = [d for d in found.dimensions if d.slot == slot]
        assert [d.dimension for d in told] == np.argsort(-squared, kind="stable")[:5].tolist()
        for d in told:
            i = d.dimension
            assert (d.effect, d.spread_effect) == pytest.approx((means[i], logs[i]), rel=1e-6)
            assert (d.std_a, d.std_b) == pytest.approx((one[:, i].std(), other[:, i].std()))
            assert d.smallest == pytest.approx(FAR * unit[i] / one[:, i].std())
        (carried,) = [c for c in found.carried if c.slot == slot]
        assert carried.rows_alike == pytest.approx(alike)
        assert carried.beyond == int(((means > FAR) | (logs > FAR)).sum())
        falling = np.sort(squared)[::-1].cumsum()
        assert carried.half == int(np.searchsorted(falling, falling[-1] / 2)) + 1
        assert carried.smallest == pytest.approx(np.sort(FAR * unit / one.std(0))[(WIDTH - 1) // 2])
        assert (carried.means or 0) + (carried.norms or 0) + (carried.spread or 0) == pytest.approx(1)
    means, logs, _ = effects_of(a, b, 1)
    assert (means.argmax(), logs.argmax()) == (5, 9), "as planted"


def test_what_is_beyond_is_told_beside_what_usually_is(a: Raw, found: Comparison) -> None:
    for slot in range(SLOTS):
        _, _, pairs, alike = profiles(a, a, slot)
        means = np.sqrt(np.mean([(x.mean(0) - y.mean(0)) ** 2 for x, y in pairs], 0))
        logs = np.sqrt(np.mean([np.log(x.std(0) / y.std(0)) ** 2 for x, y in pairs], 0))
        usual = [int(((np.abs(x.mean(0) - y.mean(0)) > FAR * np.sqrt(means**2 + alike * (x.var(0) / len(x) + y.var(0) / len(y))))
                      | (np.abs(np.log(x.std(0) / y.std(0))) > FAR * np.sqrt(logs**2 + alike * 0.5 * (1 / len(x) + 1 / len(y)))))
                     .sum()) for x, y in pairs]
        (carried,) = [c for c in found.carried if c.slot == slot]
        assert carried.usual == pytest.approx(np.mean(usual))


def test_health_is_within_what_the_groups_differ_by(a: Raw) -> None:
    healthy = compare_fingerprints(a.fingerprint(), made("c", 7, range(85, 125)).fingerprint())
    assert all(c.beyond <= 1 for c in healthy.carried)
    assert all(e.effect is not None and e.effect < FAR for e in healthy.effects)


def test_a_planted_effect_of_the_smallest_size_is_seen(a: Raw) -> None:
    """The smallest shift that would have been seen, planted in one dimension, is; a third of it is not."""
    clean = made("c", 7, range(85, 125))
    told = compare_fingerprints(a.fingerprint(), clean.fingerprint())
    one, _, _, _ = profiles(a, clean, 0)
    unit = effects_of(a, clean, 0)[2][3]
    off = clean.rows(0)[:, 3].mean() - one[:, 3].mean()
    for size, seen in ((1.2 * FAR * unit, True), (unit, False)):
        states = [s.clone() for s in clean.states]
        for s in states:
            s[:, 0, 3] = (s[:, 0, 3].double() + size - off).bfloat16()
        carried = compare_fingerprints(a.fingerprint(), Raw("c", states, clean.answer_from).fingerprint()).carried[0]
        assert carried.beyond - told.carried[0].beyond == int(seen)


def test_without_groups_the_halves_are_the_unit(b: Raw) -> None:
    two = Raw("a", made("a", 0, range(80, 82)).states, 20).fingerprint()
    told = compare_fingerprints(two, b.fingerprint())
    assert {e.yardstick for e in told.effects} == {"halves"}
    assert all(c.usual is None for c in told.carried)


def test_sides_without_rows_have_no_effects(a: Raw) -> None:
    nothing = compare_fingerprints(a.fingerprint(), Raw("b", [s[:1] for s in a.states[:2]], 20).fingerprint())
    assert (nothing.effects, nothing.carried, nothing.dimensions, nothing.mixes) == ([], [], [], [])


@pytest.mark.parametrize(("moves", "course", "at"), [
    ((0, 0, 0, 0), "steady", None), ((9, 9, 9, 9), "apart", None), ((0, 0, 9, 9), "step", 4), ((0, 0, 9, 0), "steps", 4),
    ((0, 4, 8, 12, 16), "drift", None), ((0,), None, None),
])
def test_courses(a: Raw, moves: tuple[float, ...], course: str | None, at: int | None) -> None:
    """Slot 1 of the fingerprints of a server, moved by so much on its later rows."""
    first, *later = (made(f"t{i}", 5 + i, range(90, 130), moved=m).fingerprint() for i, m in enumerate(moves))
    told = compare_fingerprints(a.fingerprint(), first, later).series
    if course is None or told is None:
        assert (course, told) == (None, None), "one fingerprint has no order"
        return
    assert (told.course, told.at, told.drifts) == (course, at, course == "drift")
    assert told.slot == 1 or course == "steady"
    for i, point in enumerate(told.points[1:], 1):
        for slot in range(SLOTS):
            both = [made(f"t{j}", 5 + j, range(90, 130), moved=moves[j]).rows(slot) for j in (i - 1, i)]
            assert point.from_previous[slot] == pytest.approx(apart(*both), abs=0.02)


def test_times_of_the_files_are_told(a: Raw) -> None:
    """In the order given; where the files say another, that is said."""
    given = [made(f"t{i}", 5 + i, range(90, 110)).fingerprint() for i in range(3)]
    for hour, one in zip((3, 1, 2), given, strict=True):
        for minute in (0, 30):
            one.inputs.add(Input(f"{hour}-{minute}", 1, (hour * 3600 + minute * 60) * 10**9, "", 1, ""))
    series = compare_fingerprints(a.fingerprint(), given[0], given[1:]).series
    assert series is not None
    assert [(p.began, p.ended) for p in series.points][:2] == [
        ("1970-01-01T03:00:00+00:00", "1970-01-01T03:30:00+00:00"), ("1970-01-01T01:00:00+00:00", "1970-01-01T01:30:00+00:00")]
    assert "in another order" in series.says
    ordered = compare_fingerprints(a.fingerprint(), given[1], [given[2], given[0]]).series
    assert ordered is not None
    assert "in another order" not in ordered.says


def test_a_page_and_json_hold_the_same(tmp_path: Path, a: Raw, b: Raw, capsys: pytest.CaptureFixture[str]) -> None:
    for raw in (a, b):
        raw.fingerprint().save(tmp_path / raw.name)
    later = [made("c", 5, range(90, 130)), made("d", 6, range(90, 130), moved=6.0)]
    for raw in later:
        raw.fingerprint().save(tmp_path / raw.name)
    names = [str(tmp_path / n) for n in "abcd"]
    assert run(["compare", *names, "--json", str(tmp_path / "c.json"), "--html", str(tmp_path / "c.html")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    read = Comparison.model_validate_json((tmp_path / "c.json").read_text())
    page = (tmp_path / "c.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert read.series is not None
    for text in (shown, page):
        assert f"{read.carried[1].beyond} of {WIDTH} dimensions" in " ".join(text.split())
        assert "64 to 255" in text
    for point in read.series.points:
        for effect in point.effects:
            assert f"{effect:.2f}" in page
    for text in {look.says for look in read.looks}:
        assert text.split(":")[0] in page
