"""What engines report of acceptance, by release, read back to the counts of a simulated run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_reports import (
    K,
    Simulated,
    sglang_answer,
    sglang_args,
    sglang_info,
    sglang_line,
    sglang_rate,
    sglang_scrape,
    simulate,
    vllm_answer,
    vllm_line,
    vllm_scrape,
    vllm_v0_line,
    windows,
)

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.engines.counted import Counters
from draftscope.engines.counters import read_counters
from draftscope.engines.definitions import DEFINITIONS, SGLANG_RATES, Shape, of_version, version
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.measurements import Measurements, RungFacts
from draftscope.faults.metric import Metric
from draftscope.findings import Diagnosis

RELEASES = ("0.5.5", "0.5.10", "0.5.14", "0.5.23")


def read(tmp_path: Path, *texts: str, window: float = 0.0) -> Counters:
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"given{i}.txt")
        paths[-1].write_text(text)
    return read_counters(paths, window)


def lengths(counters: Counters) -> dict[str, float | None]:
    return {f.definition.name: f.length for f in counters.figures}


@pytest.fixture(params=[0, 1, 2])
def run(request: pytest.FixtureRequest) -> Simulated:
    return simulate(request.param, cut=True)


# -- vLLM -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", [1, 3])
def test_vllm_counters(run: Simulated, engines: int, tmp_path: Path) -> None:
    found = read(tmp_path, vllm_scrape(run, engines=engines))
    assert (found.drafts, found.accepted, found.total) == (len(run.steps), run.per_position, sum(run.steps))
    assert found.length == pytest.approx(run.length, abs=1e-12)
    assert lengths(found)["draft acceptance rate"] == pytest.approx(run.length, abs=1e-12)


def test_vllm_counters_without_total(run: Simulated, tmp_path: Path) -> None:
    """As `llm.get_metrics()` and the per-position counter of 0.8.5 name them."""
    found = read(tmp_path, vllm_scrape(run).replace("_total{", "{"))
    assert (found.drafts, found.accepted) == (len(run.steps), run.per_position)


def test_two_scrapes_count_what_came_in_between(tmp_path: Path) -> None:
    first, more = simulate(3), simulate(4)
    both = Simulated(first.requests + more.requests, first.cut + more.cut)
    found = read(tmp_path, vllm_scrape(first), vllm_scrape(both))
    assert (found.drafts, found.accepted) == (len(more.steps), more.per_position)
    with pytest.raises(DraftscopeError, match="is lower than in"):
        read(tmp_path, vllm_scrape(both), vllm_scrape(first))
    with pytest.raises(DraftscopeError, match="no verify step between"):
        read(tmp_path, vllm_scrape(first), vllm_scrape(first))
    with pytest.raises(UsageError, match="3 scrapes"):
        read(tmp_path, *[vllm_scrape(first)] * 3)


@pytest.mark.parametrize("release", ["0.8.5", "0.9.0", "0.32.0"])
def test_vllm_log(run: Simulated, release: str, tmp_path: Path) -> None:
    """0.8.5's mean length leaves the bonus out, 0.9.0's counts it, in the same words."""
    log = [vllm_line(steps, release) for steps in windows(run.steps)]
    found = read(tmp_path, "\n".join(["INFO starting", *log, "INFO stopping"]))
    assert (found.drafts, found.accepted, found.total) == (len(run.steps), run.per_position, sum(run.steps))
    known = lengths(found)
    assert known["mean acceptance length"] == pytest.approx(run.length)
    assert known["draft acceptance rate"] == pytest.approx(run.length)
    (mean,) = [f for f in found.figures if f.definition.name == "mean acceptance length"]
    assert mean.value == pytest.approx(run.length - (release == "0.8.5"))
    assert mean.definition.bonus == (release != "0.8.5")


def test_vllm_log_of_chains_cut_short(tmp_path: Path) -> None:
    """The rate divides by drafts, of which there are fewer than K a step: it no longer gives the length; the counts do."""
    steps = [0, 1, 3, 2, 0, 1, 1, 3, 0, 2] * 5
    drafted = K * len(steps) - 31
    found = read(tmp_path, vllm_line(steps, "0.32.0", drafted))
    assert (found.drafts, found.total) == (len(steps), sum(steps))
    assert found.length == pytest.approx(1 + sum(steps) / len(steps))
    assert lengths(found)["draft acceptance rate"] != pytest.approx(found.length or 0, abs=0.05)
    assert any("fewer than K" in c for c in found.caveats)


def test_vllm_log_of_many_steps_keeps_the_total(tmp_path: Path) -> None:
    steps = simulate(5, requests=300).steps
    found = read(tmp_path, vllm_line(steps, "0.32.0"))
    assert (found.drafts, found.total) == (len(steps), sum(steps))
    want = [sum(a > k for a in steps) / len(steps) for k in range(K)]
    assert found.joint == pytest.approx(want, abs=6e-4)
    assert any("three decimals" in c for c in found.caveats)


def test_vllm_v0_rate_is_no_acceptance(run: Simulated, tmp_path: Path) -> None:
    found = read(tmp_path, vllm_v0_line(run, lucky=40))
    assert found.length == pytest.approx(run.length)
    known = lengths(found)
    assert known["V0 draft acceptance rate"] is None
    assert known["V0 system efficiency"] == pytest.approx(run.length, abs=3e-3)


def test_vllm_answers(run: Simulated, tmp_path: Path) -> None:
    found = read(tmp_path, "\n".join(json.dumps(vllm_answer(steps)) for steps in run.requests))
    assert (found.drafts, found.accepted) == (len(run.steps), run.per_position)
    assert not found.distortions, "an answer's text is no setting"


# -- SGLang -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("told", ["args", "release", "nothing"])
def test_sglang_log(run: Simulated, release: str, told: str, tmp_path: Path) -> None:
    """Three releases mean three things by `accept rate`; which one is in effect follows from the lines themselves."""
    parts = windows(run.steps)
    given = ["\n".join(([sglang_args()] if told == "args" else []) + [sglang_line(steps, release) for steps in parts])]
    if told == "release":
        given.append(json.dumps(sglang_info(run.length, release)))
    found = read(tmp_path, *given)
    mean = sum((sum(steps) + len(steps)) / len(steps) for steps in parts) / len(parts)
    assert found.length == pytest.approx(mean, abs=0.005)
    (rate,) = [f for f in found.figures if f.definition.name == "accept rate"]
    assert rate.shape.nodes == K + 1
    assert rate.length == pytest.approx(mean, abs=0.005 * (K + 1) + 0.005)
    assert rate.definition.bonus == (release in ("0.5.5", "0.5.10"))
    assert rate.value == pytest.approx(float(np.mean([sglang_rate(s, release, K + 1) for s in parts])), abs=0.005)


def test_sglang_says_both_figures(tmp_path: Path) -> None:
    log = sglang_args() + "\n[x] Decode batch, #running-req: 1, accept len: 1.57, accept rate: 0.19, "
    (rate,) = [f for f in read(tmp_path, log).figures if f.definition.name == "accept rate"]
    assert rate.says().startswith("SGLang's accept rate 0.19 at 4 draft tokens = accept length 1.57 (")


def test_sglang_lines_weigh_by_running_requests(tmp_path: Path) -> None:
    log = [sglang_line([0] * 4, "0.5.14", running=1), sglang_line([3] * 4, "0.5.14", running=3),
           sglang_line([2] * 4, "0.5.14", running=0)]
    assert read(tmp_path, "\n".join(log)).length == pytest.approx((1 * 1 + 3 * 4) / 4)


def test_a_release_that_is_not_what_its_lines_say(tmp_path: Path) -> None:
    log = [sglang_line(steps, "0.5.10") for steps in windows(simulate().steps)]
    found = read(tmp_path, "\n".join(log), json.dumps(sglang_info(2.0, "0.5.23")))
    assert any("is not what release 0.5.23 counts" in c for c in found.caveats)
    (rate,) = [f for f in found.figures if f.definition.name == "accept rate"]
    assert rate.definition is SGLANG_RATES[1]


def test_lengths_and_rates_that_contradict(tmp_path: Path) -> None:
    log = sglang_args() + "\n" + "\n".join(f"[x] Decode batch, #running-req: 1, accept len: 3.{i}0, accept rate: 0.1{i}, "
                                           for i in range(5))
    found = read(tmp_path, log)
    assert any("agree under no definition known" in c for c in found.caveats)
    assert "accept rate" not in lengths(found)


def test_a_trees_rate_falls_while_its_length_rises(tmp_path: Path) -> None:
    small = [1, 2, 0, 1, 2, 1, 0, 3] * 6
    large = [2, 2, 1, 1, 3, 1, 0, 3] * 6
    found = []
    for steps, nodes in ((small, 8), (large, 32)):
        log = sglang_args(nodes=nodes, topk=4) + "\n" + sglang_line(steps, "0.5.23", nodes)
        found.append(read(tmp_path, log))
        (rate,) = [f for f in found[-1].figures if f.definition.name == "accept rate"]
        assert rate.length == pytest.approx(found[-1].length or 0, abs=0.005 * nodes)
        assert found[-1].shape.tree
        assert found[-1].k == K
    rates = [next(f.value for f in c.figures if f.definition.name == "accept rate") for c in found]
    assert rates[1] < rates[0]
    assert (found[1].length or 0) > (found[0].length or 0)


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_answers(run: Simulated, release: str, tmp_path: Path) -> None:
    """Its own length counts prefill's token and loses what was cut; accepted drafts do neither."""
    answers = [sglang_answer(steps, cut, release) for steps, cut in zip(run.requests, run.cut, strict=True)]
    found = read(tmp_path, json.dumps(answers), json.dumps(sglang_info(2.0, release)))
    assert found.drafts == len(run.steps)
    (own,) = [f for f in found.figures if f.definition.name == "spec_accept_length"]
    assert own.value == pytest.approx(sum(a["meta_info"]["completion_tokens"] for a in answers) / len(run.steps))
    assert own.length == pytest.approx((sum(a + 1 for a in run.steps) - sum(run.cut)) / len(run.steps))
    assert lengths(found)["spec_accept_rate"] == pytest.approx(run.length)
    if release == "0.5.5":
        assert found.accepted == ()
        assert found.total == sum(run.steps) - sum(run.cut)
        assert any("prefill" in c for c in found.caveats)
    else:
        assert found.total == sum(run.steps)
        assert found.length == pytest.approx(run.length)
        assert found.accepted == run.per_position


def test_sglang_answers_pad_positions_never_accepted(tmp_path: Path) -> None:
    found = read(tmp_path, json.dumps(sglang_answer([0, 1, 0, 1], 0, "0.5.23")))
    assert found.accepted == (2, 0, 0)
    assert found.k == K


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_scrape(run: Simulated, release: str, tmp_path: Path) -> None:
    last = run.steps[-37:]
    found = read(tmp_path, sglang_scrape(run, release, last), json.dumps(sglang_info(run.length, release)))
    mean = sum(a + 1 for a in last) / len(last)
    assert lengths(found)["accept rate"] == pytest.approx(mean)
    if release in ("0.5.14", "0.5.23"):
        assert found.drafts == len(run.steps)
        assert found.total == sum(run.steps) - sum(run.cut)
    else:
        assert found.drafts == 0
        assert found.length in (pytest.approx(mean), pytest.approx(run.length))


def test_sglang_scrapes_of_a_window(tmp_path: Path) -> None:
    first, more = simulate(7), simulate(8)
    both = Simulated(first.requests + more.requests, first.cut + more.cut)
    found = read(tmp_path, sglang_scrape(first, "0.5.23", [1]), sglang_scrape(both, "0.5.23", [2]))
    assert (found.drafts, found.total) == (len(more.steps), sum(more.steps))


def test_sglang_server_info(tmp_path: Path) -> None:
    found = read(tmp_path, json.dumps(sglang_info(2.34)))
    assert (found.length, found.k, found.drafts) == (2.34, K, 0)
    assert "secret" not in repr(found)


# -- settings that void the counts ------------------------------------------------------------------------------------------


SIMULATED = {
    "sglang environment": "export SGLANG_SIMULATE_ACC_LEN=2.5",
    "sglang command": "+ SGLANG_SIMULATE_ACC_LEN=3 python -m sglang.launch_server --model-path m",
    "vllm arguments": "INFO non-default args: {'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 3, "
                      "'rejection_sample_method': 'synthetic', 'synthetic_acceptance_length': 2.5}}",
    "vllm command": "vllm serve m --speculative-config '{\"rejection_sample_method\": \"synthetic\"}'",
}
LOSSY = {
    "single": sglang_args(single=0.9),
    "acc on the command line": "python -m sglang.launch_server --speculative-accept-threshold-acc 0.7 --model-path m",
    "typical": "INFO non-default args: {'speculative_config': {'acceptance_method': 'typical_acceptance_sampler'}}",
    "typical, older": "vllm serve m --spec-decoding-acceptance-method typical_acceptance_sampler",
}
HARMLESS = {
    "off": "export SGLANG_SIMULATE_ACC_LEN=-1", "exact": sglang_args(),
    "standard": "INFO non-default args: {'speculative_config': {'rejection_sample_method': 'standard'}}",
    "somebody's words": "INFO Received request r: prompt: 'vllm serve with SGLANG_SIMULATE_ACC_LEN=3', params",
    "a mention": "INFO SGLANG_SIMULATE_ACC_LEN=3 would fake it",
}


@pytest.mark.parametrize("name", [*SIMULATED, *LOSSY, *HARMLESS])
def test_settings_that_void_the_counts(name: str, tmp_path: Path) -> None:
    line = (SIMULATED | LOSSY | HARMLESS)[name]
    found = read(tmp_path, line + "\n" + sglang_line([1, 2, 3], "0.5.23"))
    assert found.simulated == (name in SIMULATED)
    assert len(found.distortions) == (name not in HARMLESS)


def test_server_info_tells_lossy_verification(tmp_path: Path) -> None:
    found = read(tmp_path, json.dumps(sglang_info(2.0, single=0.5)))
    assert [d.key for d in found.distortions] == ["speculative_accept_threshold_single"]
    told = json.dumps({"vllm_config": {"speculative_config": {"rejection_sample_method": "synthetic"}}, "vllm_env": {}})
    assert read(tmp_path, told).simulated


def simulated_run(length: float, steps: int, seed: int = 0) -> Simulated:
    """SGLang's `match-expected`: the length below or above, so that the mean is the one asked for."""
    random = np.random.default_rng(seed)
    low = int(length)
    return Simulated([[low - 1 + int(random.random() < length - low) for _ in range(steps)]], [0])


def test_counts_too_regular_for_a_draft(tmp_path: Path) -> None:
    for length in (2.0, 2.5, 3.3):
        assert read(tmp_path, vllm_scrape(simulated_run(length, 500))).too_regular(), length
    for chances in ((0.7, 0.55, 0.5), (0.2, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.97, 0.02, 0.0)):
        assert not read(tmp_path, vllm_scrape(simulate(1, conditional=chances))).too_regular(), chances
    assert not read(tmp_path, vllm_scrape(simulated_run(2.5, 20))).too_regular(), "too few steps to tell"


# -- other inputs -----------------------------------------------------------------------------------------------------------


def test_packed_files_and_generates_json(run: Simulated, tmp_path: Path) -> None:
    packed = tmp_path / "scrape.gz"
    packed.write_bytes(gzip.compress(vllm_scrape(run).encode()))
    assert read_counters(packed).accepted == run.per_position
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"drafts": len(run.steps), "accepted_per_position": run.per_position}))
    assert read_counters(str(counts)).accepted == run.per_position


def test_the_most_detailed_decides_and_all_are_told(tmp_path: Path) -> None:
    run = simulate(2)
    log = sglang_args() + "\n" + sglang_line([0, 1, 0, 1], "0.5.23")
    found = read(tmp_path, log, json.dumps([sglang_answer(steps, 0, "0.5.23") for steps in run.requests]))
    assert found.accepted == run.per_position
    assert {"accept len", "spec_accept_length"} <= set(lengths(found))
    assert any("another span of time" in c for c in found.caveats)


HOSTILE: dict[str, tuple[str, str]] = {
    "nan": ('vllm:spec_decode_num_drafts_total{m="a"} NaN', "is not finite"),
    "infinite": ("vllm:spec_decode_num_drafts_total +Inf", "is not finite"),
    "negative": ("vllm:spec_decode_num_drafts_total -3", "is negative"),
    "huge": ("vllm:spec_decode_num_drafts_total 1e300", "larger than any count"),
    "fraction": ("vllm:spec_decode_num_drafts_total 2.5", "no whole number"),
    "twice": ("vllm:spec_decode_num_drafts 2\nvllm:spec_decode_num_drafts_total 2", "a second time"),
    "no value": ("vllm:spec_decode_num_drafts_total", "no sample"),
    "words": ("vllm:spec_decode_num_drafts_total many", "no sample"),
    "underscored": ("vllm:spec_decode_num_drafts_total 1_0", "no sample"),
    "three values": ("vllm:spec_decode_num_drafts_total 1 2 3", "no sample"),
    "braces": ("vllm:spec_decode_num_drafts_total{" + "}" * 100_000, "no sample"),
    "quotes": ('vllm:spec_decode_num_drafts_total{a="' + '\\"' * 100_000, "no sample"),
    "dots": ("vllm:spec_decode_num_drafts_total 1.2.3", "no sample"),
    "dots in a line": (vllm_line([1, 2, 3], "0.32.0").replace("3.00", "3.0.0"), "nothing of speculative"),
    "digits in a line": (vllm_line([1, 2, 3], "0.9.0").replace("Accepted: 6", "Accepted: " + "6" * 9999), "nothing of spec"),
    "spaces in settings": ("vllm serve --speculative-num-steps" + " " * 1_000_000, "nothing of speculative"),
    "an endless setting": ("vllm serve --speculative-num-steps 1e999", "nothing of speculative"),
    "unclosed": ('vllm:spec_decode_num_drafts_total{a="b} 3', "no sample"),
    "label twice": ('vllm:spec_decode_num_drafts_total{a="b",a="c"} 3', "no sample"),
    "escapes": ("vllm:spec_decode_num_drafts_total \x1b[31m", "no sample"),
    "accepted beyond steps": ('vllm:spec_decode_num_drafts 2\nvllm:spec_decode_num_accepted_tokens_per_pos{position="0"} 5',
                              "contradict each other"),
    "rising": ('vllm:spec_decode_num_drafts 9\nvllm:spec_decode_num_accepted_tokens_per_pos{position="0"} 1\n'
               'vllm:spec_decode_num_accepted_tokens_per_pos{position="1"} 2', "contradict each other"),
    "sums": ('vllm:spec_decode_num_drafts 90\nvllm:spec_decode_num_accepted_tokens 80\n'
             'vllm:spec_decode_num_accepted_tokens_per_pos{position="0"} 10', "contradict each other"),
    "more accepted than drafted": ("vllm:spec_decode_num_drafts 9\nvllm:spec_decode_num_draft_tokens 18\n"
                                   "vllm:spec_decode_num_accepted_tokens 20", "contradict each other"),
    "a hole": ('vllm:spec_decode_num_drafts 9\nvllm:spec_decode_num_accepted_tokens_per_pos{position="1"} 2', "lacks positions"),
    "position": ('vllm:spec_decode_num_drafts 9\nvllm:spec_decode_num_accepted_tokens_per_pos{position="x"} 2', "is no number"),
    "two models": ('vllm:spec_decode_num_drafts{model_name="a"} 9\nvllm:spec_decode_num_drafts{model_name="b"} 9', "2 models"),
    "sglang too short": ("sglang:spec_verify_calls_total 9\nsglang:generation_tokens_total 8\nsglang:num_requests_total 1",
                         "contradict each other"),
    "sglang length below one": ("sglang:spec_accept_length 0.4\nsglang:spec_num_steps 3\nsglang:spec_num_draft_tokens 4",
                                "contradicts"),
    "sglang length beyond the chain": ("sglang:spec_accept_length 7\nsglang:spec_num_steps 3\nsglang:spec_num_draft_tokens 4",
                                       "contradicts"),
    "line against itself": (vllm_line([1, 2, 3], "0.32.0").replace("length: 3.00", "length: 3.40"), "contradicts itself"),
    "more accepted in a line": (vllm_line([1, 2, 3], "0.32.0").replace("Accepted: 6", "Accepted: 60"), "contradicts itself"),
    "sglang line": ("Decode batch, #running-req: 1, accept len: nan, accept rate: 0.5", "accept len nan"),
    "histogram": ('{"acceptance_histogram": [1, -2]}', "no list of counts"),
    "verify count": ('{"spec_verify_ct": 1.5, "completion_tokens": 3}', "spec_verify_ct is no count"),
    "average": ('{"internal_states": [{"avg_spec_accept_length": "2"}]}', "is no length"),
    "generate": ('{"drafts": 3.5, "accepted_per_position": [1]}', "no JSON of `generate`"),
    "generate, negative": ('{"drafts": 3, "accepted_per_position": [1, -1]}', "negative count"),
    "other JSON": ('{"hello": 1}', "without acceptance"),
    "cut JSON": ('{"drafts": 3,', "is no JSON"),
    "deep": ("[" * 100_000, "nested too deeply|is no JSON"),
    "nothing": ("hello", "nothing of speculative decoding"),
    "empty": ("", "nothing of speculative decoding"),
    "other metrics": ("# HELP up x\nup 1", "nothing of speculative decoding"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_reports_are_refused_by_name(name: str, tmp_path: Path) -> None:
    text, says = HOSTILE[name]
    with pytest.raises(DraftscopeError, match=says) as refused:
        read(tmp_path, text)
    assert "\x1b" not in str(refused.value)


def test_files_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scrape"
    path.write_bytes(b"vllm:spec_decode_num_drafts \xff\xfe 3")
    with pytest.raises(DraftscopeError, match="can't be read as text"):
        read_counters(path)
    path.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(DraftscopeError, match="can't be read"):
        read_counters(path)
    with pytest.raises(DraftscopeError, match="can't be read"):
        read_counters(tmp_path / "nowhere")
    monkeypatch.setattr("draftscope.engines.fetching.FILE_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b"\0" * (8 << 20)))
    with pytest.raises(DraftscopeError, match="is larger than 1 MiB"):
        read_counters(path)
    log = sglang_line([1, 2, 3], "0.5.23").encode() + b"\nprompt \xff\n"
    path.write_bytes(log)
    assert read_counters(path).length == pytest.approx(3.0)


def test_a_log_is_no_json_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftscope.engines.counters.JSON_CHARACTERS", 1000)
    line = sglang_line([1, 2, 3], "0.5.23")
    for first in (line, "[info] server_args=ServerArgs(speculative_num_steps=3)"):
        assert read(tmp_path, "\n".join([first, *[line] * (2 if first != line else 20)])).length == pytest.approx(3.0)
    with pytest.raises(DraftscopeError, match="is JSON of more than"):
        read(tmp_path, json.dumps([sglang_answer([1, 2], 0, "0.5.23")] * 9))


def test_samples_beyond_any_engines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftscope.engines.prometheus.MOST_SAMPLES", 100)
    text = "\n".join(f'vllm:spec_decode_num_drafts{{engine="{i}"}} 1' for i in range(101))
    with pytest.raises(DraftscopeError, match="more than 100 samples"):
        read(tmp_path, text)


# -- the facts --------------------------------------------------------------------------------------------------------------


def test_definitions_are_of_releases_and_have_sources() -> None:
    for known in DEFINITIONS:
        assert known.source
        assert known.first <= known.last
        assert known.counts
    assert [of_version(SGLANG_RATES, version(v)) for v in ("0.5.5", "0.5.6", "0.5.10.post1", "0.5.11", "0.5.23")] == [
        SGLANG_RATES[i] for i in (0, 1, 1, 2, 2)]
    assert of_version(SGLANG_RATES, ()) is None


def test_shapes_in_words() -> None:
    assert Shape(4, 3, 1).words() == "4 draft tokens"
    assert Shape(16, 5, 4).words() == "a tree of 16 draft tokens, 5 steps deep"
    assert (Shape(4, 3, 1).k, Shape(16, 5, 4).k, Shape(4).k, Shape(steps=3).k, Shape().k) == (3, 5, 3, 3, None)
    assert Shape(2, 3, 1).k == 1, "fewer tokens verified than drafted"


# -- in a diagnosis ---------------------------------------------------------------------------------------------------------


def diagnosed(tmp_path: Path, *texts: str) -> Diagnosis:
    places: Sequence[Path] = [tmp_path / f"m{i}" for i in range(len(texts))]
    for place, text in zip(places, texts, strict=True):
        place.write_text(text)
    return diagnose(Inputs(metrics=places, k=K))


def test_a_diagnosis_of_counters_alone(tmp_path: Path) -> None:
    run = simulate(1)
    found = diagnosed(tmp_path, vllm_scrape(run))
    measured = found.acceptance.measured
    assert measured is not None
    assert measured.joint == pytest.approx([n / len(run.steps) for n in run.per_position])
    assert measured.length == pytest.approx(run.length)
    assert (found.verdict, found.findings) == ("undecided", [])
    assert any("vLLM's draft acceptance rate" in step for step in found.steps)


def test_simulated_acceptance_is_a_finding_and_no_rung(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, SIMULATED["sglang environment"] + "\n" + sglang_line([1, 2], "0.5.23"))
    assert [(f.fault, f.strength, f.where) for f in found.findings] == [("metric", "proven", ["config SGLANG_SIMULATE_ACC_LEN"])]
    assert found.verdict == "measurement"
    assert found.acceptance.measured is None


def test_regular_counts_and_lossy_settings_are_findings(tmp_path: Path) -> None:
    (regular,) = diagnosed(tmp_path, vllm_scrape(simulated_run(2.5, 500))).findings
    assert (regular.fault, regular.strength) == ("metric", "suspected")
    found = diagnosed(tmp_path, LOSSY["single"] + "\n" + sglang_line([1, 2], "0.5.23"))
    assert [(f.fault, f.strength) for f in found.findings] == [("metric", "supported")]
    assert found.acceptance.measured is not None


MISREAD = {
    "accept_length": [("the bonus token left out", lambda run: run.length - 1)],
    "per_position": [("conditional", lambda run: conditional(run))],
    "accept_rate": [("tokens with the bonus", lambda run: run.length / (K + 1))],
}


def conditional(run: Simulated) -> list[float]:
    before = [len(run.steps), *run.per_position]
    return [n / b for n, b in zip(run.per_position, before, strict=False)]


@pytest.mark.parametrize("key", MISREAD)
def test_figures_that_count_something_else_are_recomputed_from_the_capture(key: str, tmp_path: Path) -> None:
    """Our own definition, or a figure that fits none, is no finding; one that fits another definition alone is."""
    run = simulate(6)
    own = {"accept_length": run.length, "per_position": [n / len(run.steps) for n in run.per_position],
           "accept_rate": (run.length - 1) / K}[key]
    facts = RungFacts(run.length, [n / len(run.steps) for n in run.per_position], None, None, 0)

    def recognised(value: object, steps: int = 500) -> list[str]:
        m = Measurements(counters=read(tmp_path, json.dumps({key: value})), rungs={"measured": facts}, recorded_steps=steps)
        return [s.says for s in Metric().recognise(m)]

    assert recognised(own) == []
    assert recognised([7.0] * K if key == "per_position" else 7.0) == []
    for name, other in MISREAD[key]:
        (says,) = recognised(other(run))
        assert name in says
        assert recognised(other(run), steps=10) == []


def test_a_tree_is_not_compared_in_silence(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, sglang_args(nodes=16, depth=5, topk=4) + "\n" + sglang_line([1, 2], "0.5.23", 16))
    assert any("a tree of 16 draft tokens" in n for n in found.next)
