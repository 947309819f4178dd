"""The gate: its tests have the size and the power that they state, a fault fails it, health passes, unlike builds are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import TARGET, tiny_prompts, tiny_rig

from draftscope.cli.main import run
from draftscope.diagnose import climb
from draftscope.diagnose.case import Inputs
from draftscope.eagle3.acceptance import Counts as Rows
from draftscope.eagle3.acceptance import summarise
from draftscope.engines.counted import Counters
from draftscope.engines.counters import read_counters
from draftscope.errors import DraftscopeError
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.findings import Placed, Placement
from draftscope.gating import observing
from draftscope.gating.judging import judge
from draftscope.gating.report import Counted, Counts, Gate, Observed
from draftscope.gating.slots import compare_slots
from draftscope.gating.testing import adjust, rung_tests, side

K = 3


def sequences(rng: np.random.Generator, shares: np.ndarray, steps: int = 20) -> list[Counted]:
    """Sequences whose every draft is accepted with the sequence's own chance."""
    found = []
    for i, p in enumerate(shares):
        lead = (rng.random((steps, K)) < p).cumprod(1).sum(1)
        rows = Rows.of(f"request {i}", lead, np.full(steps, K), K)
        found.append(Counted(name=rows.name, rounds=steps, reached=rows.reached.tolist(), passed=rows.passed.tolist()))
    return found


def failing(drop: float, *, paired: bool, p: float, count: int = 16, times: int = 150) -> float:
    """How often a fall of every draft's chance fails the gate, over simulated builds."""
    rng, failed = np.random.default_rng(5), 0
    for _ in range(times):
        shares = rng.beta(12 * p, 12 * (1 - p), count)
        before = sequences(rng, shares)
        after = sequences(rng, np.clip((shares if paired else rng.beta(12 * p, 12 * (1 - p), count)) - drop, 0, 1))
        if not paired:
            after = [s.model_copy(update={"name": f"other {s.name}"}) for s in after]
        failed += any(t.fell for t in adjust(rung_tests("served", before, after, K), 0.05))
    return failed / times


@pytest.mark.parametrize(("p", "paired"), [(0.7, True), (0.7, False), (0.15, True), (0.15, False)])
def test_false_alarms_are_as_rare_as_stated(p: float, paired: bool) -> None:
    assert failing(0.0, paired=paired, p=p) <= 0.05 + 2 * (0.05 * 0.95 / 150) ** 0.5


def test_a_fall_is_found() -> None:
    """Accept length falls by about a quarter."""
    assert failing(0.1, paired=True, p=0.7) > 0.75
    assert failing(0.2, paired=False, p=0.7) > 0.75


def test_the_stated_least_fall_is_found_four_times_of_five() -> None:
    rng = np.random.default_rng(2)
    shares = np.full(24, 0.6)
    leasts = [rung_tests("served", sequences(rng, shares), sequences(rng, shares), K)[0].least for _ in range(30)]
    least = float(np.mean([x for x in leasts if x is not None]))
    found = [
        rung_tests("served", sequences(rng, shares), sequences(rng, shares - least), K)[0].p <= 0.05 for _ in range(200)
    ]
    assert np.mean(found) == pytest.approx(0.8, abs=0.1)


def test_figures_are_those_of_the_ladder() -> None:
    rng = np.random.default_rng(0)
    some = sequences(rng, rng.beta(6, 4, 12))
    rung = summarise([Rows(s.name, np.array(s.reached), np.array(s.passed), s.rounds) for s in some], K, "walk")
    values = side(some, K).values
    assert values[:K].tolist() == pytest.approx(rung.conditional)
    assert values[K] == pytest.approx(rung.length)


def test_the_pull_of_a_sequence_is_the_change_that_it_brings() -> None:
    """Against a finite difference: one sequence counted a little more."""
    rng = np.random.default_rng(3)
    some = sequences(rng, rng.beta(6, 4, 10))

    def weighted(weight: float) -> np.ndarray:
        heavy = [s if i else s.model_copy(update={"reached": [x * weight for x in s.reached],
                                                 "passed": [x * weight for x in s.passed]}) for i, s in enumerate(some)]
        return side(heavy, K).values

    slope = (weighted(1 + 1e-6) - weighted(1 - 1e-6)) / 2e-6
    assert side(some, K).pulls[0] == pytest.approx(slope, abs=1e-6)


def test_few_sequences_are_tested_by_their_counts() -> None:
    before = [Counted(name="counters", rounds=400, reached=[400, 280, 196], passed=[280, 196, 137])]
    after = [Counted(name="counters", rounds=400, reached=[400, 200, 140], passed=[200, 140, 98])]
    found = adjust(rung_tests("measured", before, after, K), 0.05)
    assert [t.how for t in found] == ["pooled"] * 3
    assert [t.fell for t in found] == [True, False, False]
    assert not any(t.fell for t in adjust(rung_tests("measured", before, before, K), 0.05))


def test_a_margin_is_allowed() -> None:
    rng = np.random.default_rng(1)
    shares = np.full(30, 0.7)
    before, after = sequences(rng, shares), sequences(rng, shares - 0.1)
    assert any(t.fell for t in adjust(rung_tests("served", before, after, K), 0.05))
    assert not any(t.fell for t in adjust(rung_tests("served", before, after, K, margin=0.9), 0.05))


def placed(boundary: int | None, **more: object) -> Placed:
    fields: dict[str, object] = {"slot": 0, "label": "", "norm": "pre", "kind": "stream", "margin": 0.9, "error": 1e-3, "lag": 0,
                                 "scale": 1.0, "share": 1.0}
    return Placed(**(fields | {"boundary": boundary} | more))


@pytest.mark.parametrize(("now", "what"), [
    (placed(4), None), (placed(5), "moved"), (placed(4, norm="post"), "moved"),
    (placed(4, scale=1.5, transform="scale"), "moved"), (placed(4, lag=1, transform="lag"), "moved"), (placed(None), "lost"),
    (placed(4, error=8e-3), "worse"),
    (placed(4, error=2.5e-3), None), (placed(4, share=0.9), "worse"), (placed(4, scale=1.01), None),
])
def test_slots(now: Placed, what: str | None) -> None:
    found, compared = compare_slots("serve", [placed(4)], [now])
    assert ([slot.what for slot in found], compared) == ([] if what is None else [what], 1)


def build(k: int = K, readout: str = "walk", rung: str = "served", tree: str = "", share: float = 0.7) -> Observed:
    taken = sequences(np.random.default_rng(0), np.full(12, share))
    cut = [s.model_copy(update={"reached": s.reached[:k], "passed": s.passed[:k]}) for s in taken]
    counts = Counts(readout=readout, says="replayed", sequences=cut)
    return Observed(schema="draftscope.baseline/1", k=k, tree=tree, rungs={rung: counts},
                    placement=Placement(serve=[placed(4)]))


@pytest.mark.parametrize(("other", "says"), [
    (build(k=2), "different K: 3 and 2"), (build(readout="engine"), "differently: over walk rows and over engine rows"),
    (build(rung="trained"), "the current build has none"), (build(tree="topk 4"), "different shapes"),
    (build().model_copy(update={"placement": Placement()}), "places of the serve slots"),
])
def test_unlike_builds_are_refused(other: Observed, says: str) -> None:
    with pytest.raises(DraftscopeError, match=says) as refused:
        judge(build(), other)
    assert refused.value.exit_code == 3


def test_refusal_is_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(build().model_dump_json(by_alias=True))
    (tmp_path / "b.json").write_text(build(k=2).model_dump_json(by_alias=True))
    (tmp_path / "c.json").write_text("{}")
    arguments = ["gate", "--baseline", str(tmp_path / "a.json"), "--current", str(tmp_path / "b.json")]
    assert run([*arguments, "--json", str(tmp_path / "gate.json")]) == 3
    answer = Gate.model_validate_json((tmp_path / "gate.json").read_text())
    assert answer.verdict == "undecided"
    assert "different K" in answer.next[0]
    assert "different K" in capsys.readouterr().err
    assert run(["gate", "--baseline", str(tmp_path / "c.json"), "--current", str(tmp_path / "b.json")]) == 3
    assert run([*arguments, "--serve", "x"]) == 2
    assert run(["gate", "--baseline", str(tmp_path / "a.json")]) == 2


def test_a_fault_fails_and_health_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, on the tiny pair: a baseline, the same pair on other prompts, and with a fault in the engine."""
    rig, healthy, page = tiny_rig(), Plant.healthy((2, 4, 5)), tmp_path / "page.md"

    def inputs(plant: Plant, name: str) -> list[str]:
        made = rig.run(plant, tmp_path / name)
        return ["--serve", str(made.serve), "--draft", str(made.draft), "--target", str(TARGET)]

    baseline = ["gate", "--baseline", str(tmp_path / "baseline.json")]
    assert run([*baseline, "--write-baseline", *inputs(healthy, "healthy")]) == 0
    spoilt = inputs(fault("layer-offset").make(healthy, "last slot +1"), "spoilt")
    rig.prompts = tiny_prompts()["heldout"][16:32]
    other = inputs(healthy, "other")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert run([*baseline, *other]) == 0
    assert run([*baseline, *spoilt, "--summary", str(tmp_path / "summary.md"), "--json", str(tmp_path / "gate.json")]) == 1
    answer = Gate.model_validate(json.loads((tmp_path / "gate.json").read_text()))
    assert [(slot.slot, slot.what) for slot in answer.slots] == [(2, "moved")]
    assert answer.findings[0].where == ["slot 2"]
    assert page.read_text().count("## draftscope gate") == 2
    assert "slot 2 moved" in (tmp_path / "summary.md").read_text()
    assert run([*baseline, *other, "-k", "2"]) == 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_rig().run(Plant.healthy((2, 4, 5)), tmp_path_factory.mktemp("served"))


def test_counters_are_read_once(served: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second reading of a server's counters would be of another window, after another wait."""
    seen: list[float] = []

    def read(given: object, window: float = 0.0) -> Counters:
        seen.append(window)
        return read_counters(given, window)  # type: ignore[arg-type]

    for place in (climb, observing):
        monkeypatch.setattr(place, "read_counters", read, raising=False)
    found = observing.observe(Inputs(serve=served.serve, metrics=served.metrics))
    counters = read_counters(served.metrics)
    assert seen == [0.0]
    (one,) = found.rungs["measured"].sequences
    assert (one.rounds, one.passed) == (counters.drafts, list(counters.accepted))


def test_inputs_of_two_runs_are_refused(served: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = json.loads(served.metrics.read_text())
    counts["drafts"] //= 10
    counts["accepted_per_position"] = [count // 10 for count in counts["accepted_per_position"]]
    (tmp_path / "counters.json").write_text(json.dumps(counts))
    baseline = tmp_path / "baseline.json"
    assert run(["gate", "--baseline", str(baseline), "--write-baseline", "--serve", str(served.serve), "--metrics",
                str(tmp_path / "counters.json")]) == 3
    said = capsys.readouterr().err
    assert "--serve and --metrics" in said and "the counters are not of the run that the capture is of" in said.replace("\n", " ")
    assert not baseline.exists()
