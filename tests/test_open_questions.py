"""What stays open beside the findings is told as it is, and once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import DRAFT

from draftscope.diagnose.case import Inputs, open_case
from draftscope.diagnose.run import Examination
from draftscope.diagnose.verdict import _open_questions
from draftscope.faults.measurements import SideFacts
from draftscope.findings import Finding, Fix, Placed


@pytest.fixture(scope="module")
def examination(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    return Examination(open_case(Inputs(draft=Path(DRAFT))), lambda _: None)


def last(boundary: int | None) -> SideFacts:
    placed = Placed(slot=-1, label="last", boundary=boundary, norm="pre", kind="stream", margin=None)
    return SideFacts("train", sequences=8, tokens=800, proof="sweep", last=placed)


@pytest.mark.parametrize(("boundary", "said"), [
    (None, "train:last holds no state of this target"), (0, "train:last is not the last state but the embedding"),
    (7, "train:last is not the last state but boundary 7"), (8, ""),
])
def test_a_last_state_that_is_none_is_told_once(boundary: int | None, said: str, examination: Examination) -> None:
    examination.m.layers, examination.m.train = 8, last(boundary)
    asked = [text for text in _open_questions(examination, []) if "last state" in text or "train:last" in text]
    assert [text.split(":", 2)[0] + ":" + text.split(":", 2)[1] for text in asked] == ([said] if said else [])
    named = Finding(fault="nonfinite", where=["train:last"], says="it is NaN", strength="proven", recovery="needs-retraining",
                    evidence=[], fix=Fix(says="write it again"))
    assert not any("train:last" in text for text in _open_questions(examination, [named]))
