"""What the report draws: measured against float64 and brute force, and told as its own figures say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from diagnoses import case

from draftscope.diagnose.breakdown import KINDS, kind_of
from draftscope.diagnose.portraits import KEPT, _channels, _components, short
from draftscope.diagnose.strips import told
from draftscope.diagnose.traininglog import Curve, Point
from draftscope.diagnose.views import POINTS, learning
from draftscope.faults.facts_data import CurveFacts
from draftscope.report import clouds, parts, strip
from draftscope.report.drawing import nice
from draftscope.views import SlotComponents


def test_channels_are_root_mean_squares() -> None:
    random_ = torch.Generator().manual_seed(3)
    train, serve = torch.randn(50, 40, generator=random_), 1.1 * torch.randn(70, 40, generator=random_)
    train[:, 7] = 90.0
    found = _channels(2, train, serve)
    assert (found.slot, found.width, found.train_rows, found.serve_rows) == (2, 40, 50, 70)
    assert found.channel == list(range(40))
    for held, rows in ((found.train, train), (found.serve, serve)):
        assert held == pytest.approx(np.sqrt((rows.double().numpy() ** 2).mean(0)), rel=1e-3)
    assert found.outliers == [7]
    ratios = np.sqrt((train.double().numpy() ** 2).mean(0)) / np.sqrt((serve.double().numpy() ** 2).mean(0))
    assert found.alike == pytest.approx(np.mean((ratios < 1.25) & (ratios > 0.8)))


def test_wide_slots_keep_outliers_and_what_differs() -> None:
    random_ = torch.Generator().manual_seed(4)
    train = torch.randn(30, 3000, generator=random_)
    serve = train.clone()
    train[:, 2999], serve[:, 2999] = 80.0, 80.0
    serve[:, 1501] *= 3
    serve[:, 1503] = 0
    found = _channels(0, train, serve)
    assert found.outliers == [2999]
    assert {1501, 1503, 2999} <= set(found.channel)
    assert len(found.channel) <= KEPT
    assert found.channel == sorted(set(found.channel))
    assert found.serve[found.channel.index(1503)] == 0


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    random_ = torch.Generator().manual_seed(5)
    train = torch.randn(40, 12, generator=random_) * torch.linspace(4, 0.5, 12)
    serve = torch.randn(40, 12, generator=random_) * torch.linspace(4, 0.5, 12) + 3.0
    found = _components(1, train, serve)
    assert found is not None
    both = torch.cat([train, serve]).double().numpy()
    both -= both.mean(0)
    _, values, directions = np.linalg.svd(both, full_matrices=False)
    assert found.explained == pytest.approx(values[:2] ** 2 / (values**2).sum(), rel=1e-3)
    points = np.array([*found.train, *found.serve])
    assert np.abs(points) == pytest.approx(np.abs(both @ directions[:2].T), rel=1e-2, abs=1e-3)
    assert _components(0, torch.ones(5, 4), torch.ones(6, 4)) is None


@pytest.mark.parametrize("seed", range(5))
def test_each_token_comes_from_where_the_rounds_say(seed: int) -> None:
    chance = random.Random(seed)
    k, prompt = 3, 4
    text, expected, starts, accepted, drafted = list(range(prompt + 1)), ["prompt"] * prompt + ["own"], [], [], []
    while len(text) < 40:
        kept = chance.randint(0, k)
        starts.append(len(text) - 2)
        accepted.append(kept)
        drafted.append([100 * len(text) + j for j in range(k)])
        expected += ["accepted"] * kept + ["bonus" if kept == k else "instead"]
        text += [0] * (kept + 1)
    rounds = (np.array(starts), np.array(accepted), torch.tensor(drafted))
    status, instead = told(len(text), rounds, k)
    assert status == expected
    for start, kept, ids in zip(starts, accepted, drafted, strict=True):
        assert instead[start + 2 + kept] == (ids[kept] if kept < k else -1)
    assert sum(i >= 0 for i in instead) == expected.count("instead")
    unknown, none = told(len(text), (*rounds[:2], None), k)
    assert unknown == expected
    assert set(none) == {-1}


def test_rounds_that_are_missing_leave_their_tokens_untold() -> None:
    status, _ = told(12, (np.array([3, 8]), np.array([1, 0]), None), 3)
    assert status == ["prompt"] * 4 + ["own", "accepted", "instead", "unknown", "unknown", "unknown", "instead", "unknown"]


@pytest.mark.parametrize(("prompt", "kind"), [
    ("Write a python function that sorts a list", "code"), ("```\nx = 1\n```", "code"), ("What is 17 * 23?", "figures"),
    ("Solve the equation for x", "figures"), ("为什么天空是蓝色的？请解释一下", "another script"),
    ("Who wrote Faust?", "question"),
    ("Tell me about bees", "instruction"), ("word " * 400, "long text"), ("", "instruction"),
])
def test_kinds_of_prompt(prompt: str, kind: str) -> None:
    assert kind_of(prompt) == kind
    assert kind in KINDS


def test_a_long_log_is_thinned_to_means() -> None:
    points = [Point(i, loss=float(i), rate=1e-4) for i in range(1000)]
    points[500].loss = math.nan
    found = learning(Curve("ours", points), CurveFacts("ours", 1000, 999))
    assert len(found.loss) == len(found.step) == len(found.rate) <= POINTS
    finite = [p.loss for p in points if p.loss is not None and math.isfinite(p.loss)]
    assert found.loss[0] == pytest.approx(np.mean(finite[:4]))
    assert found.step[-1] == 999
    assert all(math.isfinite(v) for v in found.loss)


def test_clouds_say_what_they_show() -> None:
    shown = clouds.components(case())
    assert shown is not None
    assert shown.says == "two clouds, one a side: slot 0 (4.5 of its own spread apart); one mixed cloud: slot 1"
    assert shown.drawn.count("m-2.6 0h5.2") == 2 * 25 + 1
    narrow = SlotComponents(slot=0, explained=(0.5, 0.1), train=[(-4, 0), (4, 0)], serve=[(-1, 0), (1, 0)])
    assert clouds.apart(narrow) == 0
    assert clouds.wider(narrow) == 0.25
    diagnosis = case()
    diagnosis.views.components = [narrow]
    shown = clouds.components(diagnosis)
    assert shown is not None
    assert shown.says == "clouds of another width: slot 0 (serving spreads 0.25 times as far)"


def test_channels_say_what_they_show() -> None:
    shown = clouds.channels(case())
    assert shown is not None
    assert shown.says == (
        "Of slot 0's channels 2 % have about the same size on both sides, of slot 1's 99 %; 1 channel stands out of the rows, "
        "channel 5 of slot 1 the most (60); 8,160 channels are left out of the drawing")
    assert shown.table.rows[12][:1] + shown.table.rows[12][3:] == ("slot 1, channel 5", "1", "yes")
    assert shown.drawn.count('class="outlier"') == 1 + 1  # and one in the legend


def test_parts_say_what_they_show() -> None:
    shown = parts.breakdown(case(), "context")
    assert shown is not None
    assert shown.says == (
        "Measured, acceptance is least for 100 to 300 (1.20) and most for 0 to 99 (1.90); the intervals do not overlap; against "
        "trained it loses most for 100 to 300 (1.10) and least for 0 to 99 (0.40)")
    assert shown.table.rows[3] == ("measured, 100 to 300", "1.20", "[1.10, 1.30]", "0.50", "90", "12")
    kind = parts.breakdown(case(), "kind")
    assert kind is not None
    assert "the intervals overlap; against trained it loses most for code (1.29)" in kind.says
    diagnosis = case()
    for one in diagnosis.views.breakdowns:
        one.parts = [part.model_copy(update={"rounds": 3}) for part in one.parts]
    few = parts.breakdown(diagnosis, "context")
    assert few is not None
    assert few.says.startswith("Too few rounds")
    diagnosis.views.breakdowns = []
    assert parts.breakdown(diagnosis, "context") is None


def test_the_curve_says_what_it_shows() -> None:
    shown = parts.learning(case())
    assert shown is not None
    assert shown.says == (
        "The loss goes from 7.95 to 3.15 in 500 steps (10.4 would be knowing nothing); held out, accuracy is best at step 300 "
        "(0.55) and ends at 0.5; resumed, or jumping, at step 250")
    assert "knows nothing" in shown.drawn
    assert len(shown.table.rows) == 50 + 3
    diagnosis = case()
    diagnosis.views.learning = None
    assert parts.learning(diagnosis) is None


def test_a_strip_says_what_it_shows() -> None:
    (shown,) = strip.strips(case())
    assert shown.says == (
        "Accept length 2.00 over 9 rounds by the engine's counts; of the tokens shown 5 were drafted and kept, and at 1 a draft "
        "was rejected; median cosine of what the draft received with what it was trained on: slot 0 0.450 with boundary 2, "
        "slot 1 0.990 with boundary 15")
    assert [token.shown for token in shown.tokens].index(True) == 5
    assert shown.tokens[5].says == "position 35: in place of a rejected draft “ up”; cosine slot 0 0.500, slot 1 0.990"
    assert shown.table.rows[9] == ("39", " slept", "the target's own after all drafts", "–", "0.9000", "–")
    assert [status for status, _ in strip.statuses(shown)] == ["prompt", "own", "accepted", "instead", "bonus"]
    diagnosis = case()
    request = diagnosis.views.requests[0]
    request.text, request.drafted_text, request.cosines = [], [], []
    (bare,) = strip.strips(diagnosis)
    assert bare.drawn is None
    assert "no cosines can be told" in bare.says
    assert (bare.tokens[0].letters, bare.table.rows[5][3]) == ("100", "77")


@pytest.mark.parametrize(("low", "high"), [(0, 10), (0.3, 0.31), (0, 12345), (5, 5)])
def test_plain_ticks_are_few_and_within(low: float, high: float) -> None:
    ticks = nice(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_four_digits() -> None:
    assert short(torch.tensor(0.123456)) == 0.1235
    assert short(12345678.0) == 12350000.0
