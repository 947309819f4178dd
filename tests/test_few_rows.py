"""Faults of rows on as little as 256 rows of each side: what is named first is what was planted, and nothing else is proven."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_rig

from draftscope.diagnose.run import diagnose
from draftscope.drilling.running import inputs_of
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig

ROWS = 256
CASES = [
    (name, variant) for name in ("graph-capture", "req-mix") for variant in fault(name).variants
    if not variant.startswith("train") and "fewer rows" not in variant
]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig()


@pytest.mark.parametrize(("name", "variant"), CASES, ids=[f"{name}: {variant}" for name, variant in CASES])
def test_few_rows_mislead_nobody(rig: Rig, name: str, variant: str, tmp_path: Path) -> None:
    plant = fault(name).make(Plant.healthy((2, 4, 5)), variant)
    found = diagnose(inputs_of(rig.run(plant, tmp_path), plant, rig.target, max_tokens=ROWS))
    told = [(f.fault, f.strength, f.says) for f in found.findings]
    assert not told or told[0][0] == name, told
    assert not [one for one in told if one[0] != name and one[1] == "proven"], told
    assert found.verdict != "clean" or name == "req-mix", "a fault may hide in few rows; these show"
