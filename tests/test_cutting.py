"""Sequences longer than what is looked at: what was drafted after a long prompt is kept, and what is cut away is told."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from diagnoses import case as told_case
from rich.console import Console
from safetensors.torch import save_file

from draftscope.diagnose.case import Inputs, open_case
from draftscope.diagnose.cutting import BEHIND, LONGEST, spread, wanted_rows
from draftscope.diagnose.run import Examination, diagnose
from draftscope.diagnose.verdict import _poor
from draftscope.findings import Rung
from draftscope.report.figures import positions
from draftscope.report.terminal import show
from draftscope.report.words import remark
from draftscope.states.types import Sequence, Steps

NO_ROUNDS = Rung(k=3, length=None, joint=[0.0, 0.0, 0.0], conditional=[None] * 3, rounds=0, rows=0, readout="engine")


def request(prompt: int, steps: int) -> dict[str, torch.Tensor]:
    """A request whose steps accept one token of two, each with its own two rows."""
    rows = prompt + 2 * steps
    step = torch.cat([torch.full((prompt,), -1), torch.arange(steps).repeat_interleave(2)])
    return {"fc_input": torch.randn(rows, 24), "token_ids": torch.arange(rows) % 200, "phase": (step >= 0).to(torch.uint8),
            "step": step, "accepted": torch.ones(rows, dtype=torch.bool), "accepted_counts": torch.ones(steps, dtype=torch.int64)}


def capture(folder: Path, *requests: tuple[int, int]) -> Path:
    folder.mkdir()
    for i, one in enumerate(requests):
        save_file(request(*one), folder / f"request_{i}.safetensors")
    return folder


@pytest.mark.parametrize("prompt", [LONGEST - 10, LONGEST + 10, 3000])
def test_a_long_prompt_does_not_cut_its_steps_away(prompt: int, tmp_path: Path) -> None:
    found = diagnose(Inputs(serve=capture(tmp_path / "long", (prompt, 20), (prompt + 7, 20), (40, 20)), max_tokens=8192))
    assert found.matched["serve"]["steps"] == 60
    assert found.acceptance.measured is not None and found.acceptance.measured.length == pytest.approx(2.0)
    assert not any("beyond row" in text for text in found.next)


def test_steps_that_are_cut_away_are_counted_and_more_rows_bring_them_back(tmp_path: Path) -> None:
    folder = capture(tmp_path / "long", (1500, 30), (1600, 30))
    found = diagnose(Inputs(serve=folder, max_tokens=LONGEST))
    assert found.acceptance.measured is None
    assert found.matched["serve"]["steps_cut"] == 30
    assert any("30 verify steps of the capture lie beyond row 1,024 of their requests" in text and "--max-tokens" in text
               for text in found.next), found.next
    assert not any("record verify steps" in text for text in found.next)
    answer = capture(tmp_path / "answer", (100, 1500))
    cut = open_case(Inputs(serve=answer)).serve
    whole = open_case(Inputs(serve=answer, max_tokens=16384)).serve
    assert cut is not None and whole is not None
    assert (cut.rows, cut.cut_at, whole.rows, whole.steps_cut) == (LONGEST, LONGEST, 3100, 0)
    assert cut.steps_cut == 1500 - sum(len(s.steps.start) for s in cut.sequences if s.steps is not None) > 0


def test_a_late_answer_of_a_training_sample_is_kept() -> None:
    answer = torch.zeros(9000, dtype=torch.bool)
    answer[2500:] = True
    sample = Sequence("hs_0", torch.zeros(9000, dtype=torch.int64), torch.zeros(9000, 1, 2), None, answer, torch.arange(9000))
    assert wanted_rows(sample, 4096) == 2501 + BEHIND
    assert wanted_rows(sample, 2600) == 2600
    assert wanted_rows(sample, 256) == LONGEST
    steps = Steps(torch.tensor([5000]), None, torch.tensor([1]), None)
    served = Sequence("request_0", sample.token_ids, sample.features, None, None, sample.positions, steps)
    assert wanted_rows(served, 8192) == 5001 + BEHIND
    assert spread([1, 0, 3000, 3000, 3000], 3000) == {2}


def test_the_longest_training_sample_is_of_all_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for i, rows in enumerate([300, 1500, 300, 300]):
        save_file({"hidden_states": torch.randn(rows, 2, 8), "token_ids": torch.arange(rows) % 200,
                   "loss_mask": torch.ones(rows, dtype=torch.int64)}, tmp_path / "train" / f"hs_{i}.safetensors")
    train = open_case(Inputs(train=tmp_path / "train", max_tokens=300)).train
    assert train is not None and max(s.rows for s in train.sequences) == 300
    assert train.longest == 1500


def test_a_rung_without_rounds_accuses_nobody(tmp_path: Path) -> None:
    examination = Examination(open_case(Inputs(serve=capture(tmp_path / "short", (40, 4)))), lambda _: None)
    examination.rungs = {"served": NO_ROUNDS}
    assert _poor(examination) == []
    examination.rungs["reference"] = NO_ROUNDS.model_copy(update={"rounds": 9, "joint": [0.1, 0.0, 0.0]})
    assert "10%" in _poor(examination)[0]


@pytest.mark.parametrize("readout", ["engine", "walk"])
def test_a_rung_without_rounds_is_shown_as_one(readout: str) -> None:
    rung = NO_ROUNDS.model_copy(update={"readout": readout})
    assert remark(rung).startswith("no rounds")
    shown = told_case()
    shown.acceptance.served = rung
    out = io.StringIO()
    show(shown, Console(file=out, width=160), None)
    assert "0.00 0.00 0.00" not in out.getvalue() and "no rounds" in out.getvalue()
    assert "served" not in str(positions(shown))
    stated = rung.model_copy(update={"length": 2.1, "joint": [], "readout": "engine"})
    assert "is not told" in remark(stated)
