"""How deep an engine drafted: as its steps show it where no file claims it, and nothing is cut to less in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.eagle3.depth import recorded_depth
from draftscope.eagle3.tree import DEEPEST
from draftscope.states.types import Steps

ACCEPTED = (0, 2, 4, 1)


def capture(folder: Path, width: int | None, claims: int | None = None) -> Path:
    """One request that accepts 0, 2, 4, 1 tokens, with `width` columns of drafts of which the last was never used."""
    folder.mkdir()
    rows = 10 + sum(ACCEPTED) + len(ACCEPTED)
    step = torch.cat([torch.full((10,), -1), *(torch.full((n + 1,), i) for i, n in enumerate(ACCEPTED))])
    tensors = {"fc_input": torch.randn(rows, 24), "token_ids": torch.arange(rows), "phase": (step >= 0).to(torch.uint8),
               "step": step, "accepted": torch.ones(rows, dtype=torch.bool), "accepted_counts": torch.tensor(ACCEPTED)}
    if width is not None:
        drafted = torch.ones(len(ACCEPTED), width, dtype=torch.int64)
        drafted[:, -1] = -1
        tensors["draft_token_ids"] = drafted
    save_file(tensors, folder / "request_0.safetensors")
    if claims is not None:
        (folder / "capture.json").write_text(json.dumps({"num_spec_tokens": claims}))
    return folder


@pytest.mark.parametrize(("width", "claims", "asked", "k"), [
    (6, None, None, 5), (None, None, None, 4), (6, 4, None, 4), (6, None, 7, 7),
])
def test_k_follows_the_steps_where_nobody_says_it(width: int | None, claims: int | None, asked: int | None, k: int,
                                                  tmp_path: Path) -> None:
    found = diagnose(Inputs(serve=capture(tmp_path / "capture", width, claims), k=asked))
    assert found.provenance["k"] == k
    assert found.acceptance.measured is not None
    assert found.acceptance.measured.length == pytest.approx(1 + sum(ACCEPTED) / len(ACCEPTED))
    assert not any("give --k" in text for text in found.steps)


@pytest.mark.parametrize(("claims", "asked"), [(3, None), (None, 3), (5, 3)])
def test_counts_beyond_k_are_told(claims: int | None, asked: int | None, tmp_path: Path) -> None:
    found = diagnose(Inputs(serve=capture(tmp_path / "capture", 6, claims), k=asked))
    said = "1 of 4 recorded steps accepted more than K = 3 tokens, up to 4, and count as 3: give --k 4"
    assert any(said in text for text in found.steps) and any(said in text for text in found.next)


def test_steps_that_tell_no_depth() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert recorded_depth([None, Steps(none, None, none, None)]) is None
    assert recorded_depth([Steps(torch.tensor([3]), None, torch.tensor([0]), None)]) is None
    assert recorded_depth([Steps(torch.tensor([3]), None, torch.tensor([DEEPEST + 1]), None)]) is None
    tree = Steps(torch.tensor([3]), torch.ones(1, 9, dtype=torch.int64), torch.tensor([2]), None, parents=torch.full((1, 9), -1))
    assert recorded_depth([tree]) == 2
