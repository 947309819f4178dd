"""`--on`: the same answers as here, from a machine behind a real sshd; what it refuses, and that nothing stays there."""

from __future__ import annotations

from pathlib import Path

import pytest
from farside import Far, far_fixture  # noqa: F401 (fixture)
from places import Inspect, Places, inspect_fixture, parts_fixture, places_fixture, write  # noqa: F401 (fixtures)

pytestmark = pytest.mark.remote


def test_the_answer_is_the_one_from_here(far: Far, inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(0, 3, 6, 8))
    here = inspect(folder, "--norms", "--as", "speculators")
    there = inspect(folder, "--norms", "--as", "speculators", "--on", far.name, "--python", far.python)
    assert there[1]["inspected"][0].pop("path") == f"{far.name}:{here[1]['inspected'][0].pop('path')}"
    assert there[0] == here[0] == 1
    assert {**there[1], "as_trainer": None} == {**here[1], "as_trainer": None}
