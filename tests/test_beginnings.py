"""A capture of rows and tokens alone: the chat template shows where answers begin, or nothing is said of who wrote them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.counterfactual import counterfactuals
from draftscope.diagnose.beginnings import last_answer
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.faults.plant import Plant
from draftscope.pipeline.turns import Markers
from draftscope.report.words import matched

MARKERS = Markers(opening=(7, 8), closing=frozenset([9]), separators=(5,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "capture"
    tiny_rig(8, 32).serve(Plant.healthy((2, 4, 5)), DRAFT, folder)
    return folder


def stripped(whole: Path, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for path in whole.glob("*.safetensors"):
        tensors = load_file(path)
        kept = tensors["accepted"].bool()
        save_file({name: tensors[name][kept].contiguous() for name in names}, folder / path.name)
    return folder


def test_the_template_shows_where_answers_begin(whole: Path, tmp_path: Path) -> None:
    full = diagnose(Inputs(serve=whole, draft=DRAFT, target=TARGET))
    bare = diagnose(Inputs(serve=stripped(whole, tmp_path / "bare", "fc_input", "token_ids"), draft=DRAFT, target=TARGET))
    assert (bare.matched["served_text"]["own"], bare.matched["served_text"]["unknown"]) == (8, 0)
    assert full.acceptance.served is not None and bare.acceptance.served is not None
    assert bare.acceptance.served.readout == "walk"
    assert bare.acceptance.served.length == pytest.approx(full.acceptance.served.length, abs=0.15)
    assert any("chat template shows it in 8 of 8 requests" in step for step in bare.steps)
    assert not any("`phase`" in text for text in bare.next)


def test_without_a_template_the_author_is_unknown(whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    found = diagnose(Inputs(serve=stripped(whole, tmp_path / "bare", "fc_input", "token_ids"), draft=DRAFT, target=target))
    text = found.matched["served_text"]
    assert (text["own"], text["other"], text["unknown"]) == (0, 0, 8)
    assert any("who wrote them is unknown" in said and "`phase`" in said for said in found.next), found.next
    assert any("8 of unknown authors" in line and "0 of another's" in line for line in matched(found.matched))
    replayed = counterfactuals([DRAFT], stripped(whole, tmp_path / "last", "fc_input", "token_ids", "last_hidden"), target=target)
    assert replayed.rungs[0].text["unknown"] == 8
    assert any("8 of 8 sequences" in note and "`phase`" in note for note in replayed.notes)


@pytest.mark.parametrize(("ids", "answer"), [
    ([1, 7, 8, 2, 3, 9], (3, 6)), ([1, 7, 8, 2, 3], (3, 5)), ([1, 7, 8, 2, 9, 5], (3, 5)),
    ([7, 8, 2, 9, 5, 1, 7, 8, 3, 4], (8, 10)),  # the last of several
    ([7, 8, 2, 9, 5, 1, 1, 1], None), ([1, 2, 3], None), ([1, 7, 8], None),
])
def test_an_answer_is_what_the_text_ends_in(ids: list[int], answer: tuple[int, int] | None) -> None:
    found = last_answer(torch.tensor(ids), MARKERS)
    if answer is None:
        assert found is None
    else:
        assert found is not None and found.nonzero().squeeze(-1).tolist() == list(range(*answer))
