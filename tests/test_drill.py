"""The exercise: what is exercised, that nothing is done twice, that a crash is an outcome, and how outcomes are counted."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from families import family_target
from scipy.stats import binomtest
from tiny import DRAFT, TARGET, TINY, tiny_prompts, tiny_target

from draftscope.boundaries import Boundary
from draftscope.cli.main import run
from draftscope.diagnose.case import Inputs
from draftscope.drilling.cases import (
    Case,
    Setting,
    changed,
    chosen,
    clean,
    others,
    pairs,
    plainest,
    singles,
    spread_evenly,
    together,
)
from draftscope.drilling.exercised import Pair, open_pair
from draftscope.drilling.kept import Remembering
from draftscope.drilling.report import Drill, Named, Outcome, Planted
from draftscope.drilling.running import LINES, NAMES, exercise, inputs_of, read_outcomes
from draftscope.drilling.scoring import PAIRS, SINGLES, score
from draftscope.drilling.strengths import OTHERS
from draftscope.drilling.table import markdown
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.generated import Summary
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults import FAULTS, fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.shares import at_most, wilson

HEALTHY = Plant.healthy((2, 4, 5))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair(TARGET, DRAFT, TINY / "prompts.json", "tiny", lambda _: None, served=8, max_new=24, learned=6)


def test_prompts_are_parted_into_served_and_learned(tmp_path: Path) -> None:
    lines = [json.dumps({"token_ids": ids}) for ids in tiny_prompts()["train"][:9]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    found = open_pair(TARGET, DRAFT, tmp_path / "prompts.jsonl", None, lambda _: None, served=3, learned=5)
    served, learned = found.prompts, [c.token_ids[: c.prompt_length] for c in found.conversations]
    assert (len(served), len(learned), found.name, found.boundaries) == (3, 5, "tiny", (2, 4, 5))
    assert not [ids for ids in served if ids in learned]
    assert all(json.dumps({"token_ids": ids}) in lines for ids in (*served, *learned))
    with pytest.raises(UsageError, match="needs its draft and prompts"):
        open_pair(TARGET, None, None, None, lambda _: None)
    (tmp_path / "few.jsonl").write_text(lines[0])
    with pytest.raises(DraftscopeError, match="holds 1 prompts"):
        open_pair(TARGET, DRAFT, tmp_path / "few.jsonl", None, lambda _: None)


@pytest.mark.parametrize(("hits", "trials"), [(0, 5), (5, 5), (3, 11), (97, 100)])
def test_intervals_are_scipys(hits: int, trials: int) -> None:
    theirs = binomtest(hits, trials)
    assert wilson(hits, trials) == pytest.approx(tuple(theirs.proportion_ci(0.95, "wilson")))
    upper = binomtest(hits, trials, alternative="less").proportion_ci(0.95, "exact").high
    assert at_most(hits, trials) == pytest.approx(upper)


def test_nothing_follows_from_no_trial() -> None:
    assert wilson(0, 0) is None
    assert at_most(0, 0) is None


def test_every_variant_is_a_case_and_a_plain_one_of_each_side_is_kept() -> None:
    every = chosen([])
    assert len(every) == sum(len(one.variants) for one in FAULTS)
    assert {one.id for one, _ in plainest(every)} == {one.id for one in FAULTS}
    assert [v for _, v in plainest(chosen(["layer-offset"]))] == ["+1", "train +1"]
    assert chosen(["layer-offset: -1"]) == [(fault("layer-offset"), "-1")]
    with pytest.raises(UsageError, match="no fault or variant `layer`"):
        chosen(["layer"])


def test_faults_that_touch_the_same_are_no_pair() -> None:
    offset, permuted = (fault("layer-offset"), "+1"), (fault("layer-set"), "permuted")
    assert together(HEALTHY, offset, permuted) is None
    both = together(HEALTHY, offset, (fault("recur-state"), "post-norm fed back"))
    assert both is not None
    assert changed(HEALTHY, both) == {".serve.slots", ".engine.feedback"}


def test_pairs_are_of_two_faults_drawn_over_the_classes() -> None:
    found = pairs(HEALTHY, chosen([]), 20, 0)
    assert len({case.key for case in found}) == 20
    assert all(len({p.fault for p in case.planted}) == 2 for case in found)
    assert len({frozenset(p.fault for p in case.planted) for case in found}) == 20
    assert [c.key for c in found] == [c.key for c in pairs(HEALTHY, chosen([]), 20, 0)]
    assert pairs(HEALTHY, [(fault("layer-offset"), "+1"), (fault("layer-set"), "permuted")], 5, 0) == []


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_strengths_are_none_of_the_variants(name: str) -> None:
    one = fault(name)
    made = [one.make(HEALTHY, variant) for variant in one.variants]
    drawn = list(others(HEALTHY, [(one, one.variants[0])], 8, 12, 0))
    assert len(drawn) >= 2, "a strength at least that is no variant, and another"
    assert len({case.key for case in drawn}) == len(drawn), "each is told from the others by its words"
    for case in drawn:
        assert case.plant != HEALTHY
        assert case.plant not in made, case.key


def test_a_budget_cuts_off_some_of_every_kind() -> None:
    kinds = [list(singles(HEALTHY, chosen(["layer-offset"]))), [], list(clean(HEALTHY, 16, 4, 0))]
    found = spread_evenly(kinds)
    assert {c.key for c in found if c.kind == "single"} == {c.key for c in kinds[0]}
    assert {c.key for c in found if c.kind == "clean"} == {c.key for c in kinds[2]}
    assert [c.kind for c in found[: len(found) // 2]].count("clean") == 2


def test_a_budget_cuts_off_some_of_every_class() -> None:
    every = list(singles(HEALTHY, chosen([])))
    found = spread_evenly([every])
    assert sorted(c.key for c in found) == sorted(c.key for c in every)
    half = {c.planted[0].fault for c in found[: len(found) // 2]}
    assert len(half) > 0.8 * len({c.planted[0].fault for c in every})
    assert spread_evenly([every[::-1]]) == found  # whatever the catalogue's order


def test_healthy_runs_differ_in_how_they_are_served() -> None:
    found = list(clean(HEALTHY, 16, 12, 0))
    assert all(case.plant == HEALTHY and not case.planted for case in found)
    settings = [case.setting for case in found]
    assert len(set(settings)) == 12
    assert {s.dtype for s in settings} == {"float32", "bfloat16"}


def test_kept_states_are_the_targets(pair: Pair) -> None:
    ids, taps = torch.tensor([tiny_prompts()["train"][0]]), [Boundary(2), Boundary(5, "pre", "partial")]
    remembering = Remembering(tiny_target(), most=1)
    for _ in range(2):
        assert torch.equal(remembering.forward(ids, taps).taps, tiny_target().forward(ids, taps).taps)
    other = ids.flip(1)
    assert torch.equal(remembering.forward(other, taps).taps, tiny_target().forward(other, taps).taps)


def test_a_capture_is_kept_where_only_the_training_data_is_spoilt(pair: Pair, tmp_path: Path) -> None:
    rig = pair.rig(Setting(), tmp_path)
    first = rig.run(HEALTHY, tmp_path / "a")
    again = rig.run(fault("layer-offset").make(HEALTHY, "train +1"), tmp_path / "b")
    spoilt = rig.run(fault("layer-offset").make(HEALTHY, "+1"), tmp_path / "c")
    names = [p.name for p in sorted(first.serve.iterdir())]

    def written(folder: Path) -> list[int]:
        return [(folder / name).stat().st_mtime_ns for name in names]

    assert written(first.serve) == written(again.serve)
    assert not set(written(first.serve)) & set(written(spoilt.serve))
    assert first.summary == again.summary


def test_everything_that_a_run_left_is_handed_over(pair: Pair, tmp_path: Path) -> None:
    left = Run(train=tmp_path / "t", serve=tmp_path / "s", draft=tmp_path / "d", metrics=tmp_path / "m",
               summary=Summary(3, 0, 0, 0, [], None, [], [], 0, 0.0))
    given = inputs_of(left, HEALTHY, pair.target, max_tokens=64)
    assert (given.train, given.serve, given.draft, given.metrics) == (left.train, left.serve, left.draft, None)
    assert (given.target, given.max_tokens) == (TARGET, 64)
    known = {field.name for field in fields(Inputs)}
    assert [f.name for f in fields(Run) if NAMES.get(f.name, f.name) not in known] == ["summary"], "an input of that name"
    assert inputs_of(left, HEALTHY, pair.target, counted=True).metrics == left.metrics
    assert inputs_of(left, fault("metric").make(HEALTHY, fault("metric").variants[0]), pair.target).metrics == left.metrics


def test_nothing_is_done_twice_and_a_crash_is_an_outcome(pair: Pair, tmp_path: Path) -> None:
    broken = Case("broken", "single", HEALTHY, (Planted(fault="layer-set", variant="none"),), broken=ZeroDivisionError("of 99"))
    cases = [broken, *singles(HEALTHY, chosen(["layer-offset: +1"])), Case("health", "clean", HEALTHY)]
    seen: list[Outcome] = []

    def stop(outcome: Outcome) -> None:
        seen.append(outcome)
        if outcome.key != "broken":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exercise(pair, cases, [64, None], tmp_path, stop)
    assert [(o.key, o.tokens) for o in seen] == [("broken", 64), ("broken", None), ("layer-offset: +1", 64)]
    assert "99" in (seen[0].error or "")
    with (tmp_path / LINES).open("a") as file:
        file.write('{"key": "cut sho')
    (tmp_path / LINES).write_text((tmp_path / LINES).read_text() + "\n")
    seen.clear()
    exercise(pair, cases, [64, None], tmp_path, seen.append)
    assert [(o.key, o.tokens) for o in seen] == [("layer-offset: +1", None), ("health", 64), ("health", None)]
    outcomes = {(o.key, o.tokens): o for o in read_outcomes(tmp_path)}
    found = outcomes["layer-offset: +1", None]
    assert found.first_right
    assert found.findings[0].fault == "layer-offset"
    assert found.rows["serve"] > outcomes["layer-offset: +1", 64].rows["serve"]
    assert outcomes["health", None].first_right
    with pytest.raises(UsageError, match="another pair"):
        exercise(Pair("other", pair.target, pair.draft, (2, 4, 5), [], [], "0"), [], [None], tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def outcome(key: str, planted: list[str], named: list[tuple[str, str]], tokens: int | None = None, **more: object) -> Outcome:
    findings = [Named(fault=f, strength=s, right=f in planted) for f, s in named]  # type: ignore[arg-type]
    kind = "clean" if not planted else "single" if len(planted) == 1 else "pair"
    return Outcome(**({
        "key": key, "pair": "tiny", "kind": kind, "planted": [Planted(fault=f, variant="") for f in planted], "tokens": tokens,
        "verdict": "wiring", "findings": findings, "first_right": findings[0].right if findings else not planted,
        "both": set(planted) <= {f.fault for f in findings},
        "wrong_proven": [f.fault for f in findings if f.strength == "proven" and not f.right],
    } | more))


def test_what_cannot_be_made_is_an_outcome_too(pair: Pair, tmp_path: Path) -> None:
    """A variant that is at a loss on this pair does not end the exercise."""

    class Lost(type(fault("layer-offset"))):  # type: ignore[misc]
        def make(self, plant: Plant, variant: str) -> Plant:
            raise IndexError("no such slot here")

    lost = (Lost(), "+1")
    exercise(pair, singles(HEALTHY, [lost]), [None], tmp_path)
    assert [o.error for o in read_outcomes(tmp_path)] == ["IndexError: no such slot here"]
    assert together(HEALTHY, lost, (fault("recur-state"), fault("recur-state").variants[0])) is None


def test_outcomes_are_counted() -> None:
    found = score([
        outcome("a", ["layer-set"], [("layer-set", "proven")]),
        outcome("a", ["layer-set"], [], tokens=64),
        outcome("b", ["layer-set"], [("layer-offset", "proven"), ("layer-set", "suspected")]),
        outcome("c", ["layer-set"], [], error="ValueError: no"),
        outcome("d", ["layer-set", "metric"], [("metric", "proven")]),
        outcome("e", [], []), outcome("f", [], [("metric", "suspected")]),
    ])
    by_name = {one.fault: one for one in found.scores}
    layers = by_name["layer-set"]
    assert (layers.cases, layers.errors, layers.wrong_proven, layers.proven) == (3, 1, 1, 1)
    assert (layers.first.hits, layers.first.of, layers.any.hits) == (1, 2, 2)
    assert {n: (s.hits, s.of) for n, s in layers.by_tokens.items()} == {"64": (0, 1), "all": (1, 2)}
    assert layers.misses == ["tiny: b: layer-offset (proven), layer-set (suspected)", "tiny: c: crashed: ValueError: no"]
    assert by_name[SINGLES].first.hits == 1
    both = by_name[PAIRS].both
    assert both is not None
    assert (both.hits, by_name[PAIRS].first.hits) == (0, 1)
    assert found.clean is not None
    assert (found.clean.alarms.hits, found.clean.alarms.of) == (1, 2)
    assert found.clean.told == ["tiny: f (rows all): metric (suspected)"]
    page = markdown(found)
    assert "| layer-set | 3 | 1 of 2 " in page
    assert "## Missed: pairs of faults" in page


def test_the_command_writes_what_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["drill", "--target", str(TARGET), "--draft", str(DRAFT), "--prompts", str(TINY / "prompts.json"),
                 "--served", "4", "--max-new", "16", "--tokens", "all", "--out", str(tmp_path / "kept"), "--threads", "1"]
    assert run([*arguments, "--faults", "weight-missing", "--plain", "--shard", "1/1", "--json", str(tmp_path / "a.json"),
                "--markdown", str(tmp_path / "a.md")]) == 0
    held = Drill.model_validate(json.loads((tmp_path / "a.json").read_text()))
    assert [o.key for o in held.cases] == [f"weight-missing: {fault('weight-missing').variants[0]}"]
    assert held.cases[0].first_right
    assert "weight-missing" in " ".join(capsys.readouterr().out.split())
    assert run(["drill", "--from", str(tmp_path / "kept"), "--brief", "--json", str(tmp_path / "b.json")]) == 0
    again = Drill.model_validate(json.loads((tmp_path / "b.json").read_text()))
    assert (again.scores, again.cases) == (held.scores, [])
    assert run(["drill", "--from", str(tmp_path / "nothing")]) == 2
    assert run([*arguments, "--shard", "3/2"]) == 2
    assert run([*arguments, "--tokens", "some"]) == 2


def test_a_refusal_while_a_case_is_made_is_told_without_the_folder(pair: Pair, tmp_path: Path) -> None:
    broken = replace(HEALTHY, export=("transpose fc.weight",))  # which is not square
    exercise(pair, [Case("shapes", "single", broken, (Planted(fault="weight-missing", variant="x"),))], [64], tmp_path)
    (told,) = read_outcomes(tmp_path)
    assert told.error and "fc.weight" in told.error and str(tmp_path) not in told.error
    assert [one.errors for one in score([told]).scores] == [1, 1]


def test_what_cannot_befall_a_pair_is_not_exercised_on_it(pair: Pair, tmp_path: Path) -> None:
    config = load_checkpoint(DRAFT, target_layers=pair.target.layers).config
    every = [(one, variant) for one in FAULTS for variant in one.variants]
    assert not [(one.id, v) for one, v in every if one.beyond(v, pair.target, config)], "the tiny pair can have them all"
    wider = config.model_copy(update={"head_dim": 2 * config.head_dim})
    assert {v for one, v in every if one.beyond(v, pair.target, wider)} == {"engine: o transposed", "checkpoint: o transposed"}
    gemma = family_target("gemma2", tmp_path)
    assert {v for one, v in every if one.beyond(v, gemma, config)} == {
        "partial sums", "partial sums of eight ranks, one slot", "train partial sums"}
