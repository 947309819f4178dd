"""SGLang to 0.5.10 captures the target's graphs before it knows the configured layer ids; what lint says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import random_draft, save_target

from draftscope.eagle3.checkpoint import save_native
from draftscope.linting.lint import lint

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = save_target(tmp_path / "target", 3)
    draft = random_draft(5)
    save_native(tmp_path / "draft", draft, None)
    return tmp_path / "draft", target


def with_ids(folder: Path, ids: list[int]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eagle_config": {IDS: ids}}))


@pytest.mark.parametrize(("consumer", "says"), [
    ("sglang@0.5.5", True), ("sglang@0.5.10", True), ("sglang@0.5.14", False), ("sglang@0.5.23", False), ("vllm@0.32", False),
])
def test_other_ids_than_the_defaults(pair: tuple[Path, Path], consumer: str, says: bool) -> None:
    draft, target = pair
    with_ids(draft, [0, 1, 3])
    (read,) = lint(draft, [consumer], target_config=target).readings
    found = [finding for finding in read.findings if finding.fault == "graph-capture"]
    assert bool(found) is says
    if found:
        assert found[0].strength == "supported" and "--disable-cuda-graph" in found[0].fix.says
        assert "[1, 2, 4]" in found[0].says and "[2, 4, 5]" in found[0].says


def test_the_default_ids_are_no_fault(pair: tuple[Path, Path]) -> None:
    draft, target = pair
    (read,) = lint(draft, ["sglang@0.5.10"], target_config=target).readings
    assert not [finding for finding in read.findings if finding.fault == "graph-capture"]
    assert any(row.question == "positions of drafted tokens" and "one too high" in str(row.effect) for row in read.rows)
    (newer,) = lint(draft, ["sglang@0.5.14"], target_config=target).readings
    assert not any(row.question == "positions of drafted tokens" for row in newer.rows)
