"""Norms by slot and class, as a diagnosis carries them, against a restatement row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftscope.diagnose.case import Case, Inputs, Selected
from draftscope.diagnose.norms import AT, measure_norms
from draftscope.states.types import Sequence


class Nothing:
    """A source that is not read again."""

    kind, path, format, chosen = "samples", Path("x"), "plain", ""


def sequence(name: str, rows: int, *, last: bool, answers: int | None, seed: int, sink: int | None = None) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 3, 16, generator=generator) * torch.tensor([1.0, 5.0, 20.0])[:, None]
    if sink is not None:
        features[sink] *= 100
    answer = None
    if answers is not None:
        answer = torch.zeros(rows + 1, dtype=torch.bool)
        answer[answers:] = True
    return Sequence(
        name=name, token_ids=torch.arange(rows + 1), features=features.bfloat16(),
        last=torch.randn(rows, 16, generator=generator) if last else None, answer=answer, positions=torch.arange(rows))


def selected(*sequences: Sequence) -> Selected:
    return Selected(Nothing(), list(sequences))  # type: ignore[arg-type]


def test_norms_are_those_of_the_rows() -> None:
    held = [sequence("a", 80, last=True, answers=20, seed=1, sink=30), sequence("b", 60, last=True, answers=35, seed=2)]
    found = measure_norms(Case(Inputs(), train=selected(*held)))
    assert found is not None
    assert (found.at, found.serve) == (list(AT), [])
    assert [entry.slot for entry in found.train] == [0, 1, 2, -1]
    for entry in found.train:
        own: dict[str, list[float]] = {"first": [], "sink": [], "prompt": [], "answer": []}
        for one in held:
            rows = one.last if entry.slot < 0 else one.features[:, entry.slot]
            assert rows is not None
            norms = np.linalg.norm(rows.double().numpy(), axis=1)
            for t, norm in enumerate(norms):
                answers = one.answer is not None and bool(one.answer[t])
                name = "first" if t == 0 else "sink" if norm > 10 * np.median(norms) else "answer" if answers else "prompt"
                own[name].append(norm)
        assert set(entry.classes) == {name for name, norms in own.items() if norms}
        assert ("sink" in entry.classes) == (entry.slot >= 0)
        for name, figures in entry.classes.items():
            assert figures.rows == len(own[name])
            wanted = np.quantile(own[name], AT, method="lower")
            assert figures.quantiles == pytest.approx(wanted, rel=0.012)
            assert (figures.quantiles[0], figures.quantiles[-1]) == pytest.approx((min(own[name]), max(own[name])))


def test_unknown_answers_and_spoilt_rows_are_told() -> None:
    one = sequence("a", 20, last=False, answers=None, seed=3)
    one.features[4, 0] = torch.nan
    one.features[5, 0] = 0
    one.features[:, 2] = torch.nan
    found = measure_norms(Case(Inputs(), serve=selected(one)))
    assert found is not None
    assert found.train == []
    first, _, third = found.serve
    assert set(first.classes) == {"first", "unknown"}
    assert (first.classes["unknown"].rows, first.classes["unknown"].nonfinite, first.classes["unknown"].zero) == (19, 1, 1)
    assert first.classes["unknown"].quantiles[0] == 0
    assert (third.classes["unknown"].nonfinite, third.classes["unknown"].quantiles) == (19, [])


def test_without_states_there_are_none() -> None:
    assert measure_norms(Case(Inputs())) is None
