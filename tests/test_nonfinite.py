"""NaN and Inf are counted against all rows that were looked at, whichever sequences hold them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftscope.diagnose import case
from draftscope.diagnose.case import Inputs, open_case
from draftscope.diagnose.run import diagnose

ROWS = (30, 40, 50)


def capture(folder: Path, bad: dict[int, list[tuple[int, int]]]) -> Path:
    """Requests of 30, 40 and 50 rows of three slots of eight channels; `bad`: by request, the (row, channel) that are NaN."""
    folder.mkdir()
    for i, rows in enumerate(ROWS):
        states, last = torch.randn(rows, 24), torch.randn(rows, 8)
        for row, channel in bad.get(i, []):
            states[row, channel] = torch.nan
        save_file({"fc_input": states, "last_hidden": last, "token_ids": torch.arange(rows)}, folder / f"request_{i}.safetensors")
    return folder


def test_the_share_is_of_all_rows_looked_at(tmp_path: Path) -> None:
    places = {1: [(7, 2), (8, 2), (8, 12)], 2: [(3, 1)]}
    found = diagnose(Inputs(serve=capture(tmp_path / "capture", places)))
    assert found.findings[0].fault == "nonfinite"
    assert found.findings[0].evidence[0].figures == {
        "slot 0": {"rows": 3, "of": sum(ROWS), "first": "request_1.safetensors", "first_row": 7},
        "slot 1": {"rows": 1, "of": sum(ROWS), "first": "request_1.safetensors", "first_row": 8},
    }
    assert f"NaN or Inf in 3 of {sum(ROWS)} rows" in found.findings[0].says


def test_rows_beyond_the_first_reading_are_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "INTEGRITY_BYTES", ROWS[0] * 24 * 4)
    serve = open_case(Inputs(serve=capture(tmp_path / "capture", {2: [(3, 1)]}))).serve
    assert serve is not None and serve.checked == 1
    assert {(slot, rows, of) for slot, rows, of, *_ in serve.nonfinite} == {(0, 1, sum(ROWS))}
