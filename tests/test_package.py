"""What is given out: the archives and what is in them, and the public names with their signatures."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import draftscope

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return runpy.run_path(str(ROOT / "scripts" / "build"))["build"](tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_the_package_and_its_data(archives: list[Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        held = set(wheel.namelist())
        (info,) = (name for name in held if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(info).decode())
        points = wheel.read(info.replace("METADATA", "entry_points.txt")).decode()
    source = ROOT / "src"
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wanted = {str((ROOT / name).relative_to(source)) for name in listed}
    assert wanted <= held, sorted(wanted - held)[:5]
    assert {name for name in held if not name.startswith("draftscope/")} == {
        name for name in held if ".dist-info/" in name}, "only the package is installed"
    assert "draftscope/py.typed" in held
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {Path(name).name for name in held if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert set(metadata.get_all("Provides-Extra")) >= {"arrow", "fast", "s3", "docs", "dev"}
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "draftscope = draftscope.cli.main:main" in points


def test_the_source_archive_builds_and_tests_by_itself(archives: list[Path]) -> None:
    with tarfile.open(archives[0]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "NOTICE", "CHANGELOG.md", "mkdocs.yml", "docs/index.md", "tests/tiny.py", "requirements/lock.txt",
            "scripts/build", "Makefile"} <= held
    assert not [name for name in held if "__pycache__" in name]


def test_the_wheel_runs_where_it_is_unpacked(archives: list[Path], tmp_path: Path) -> None:
    """As pipx would have it, with the dependencies of this environment: help, version and a table of the package's data."""
    with zipfile.ZipFile(archives[1]) as wheel:
        wheel.extractall(tmp_path)
    code = ("import draftscope, sys; from draftscope.cli.main import run; from draftscope.faults import FAULTS; "
            "from draftscope.embedded.pair import DRAFT; assert (DRAFT / 'config.json').is_file(); "
            "print(draftscope.__file__, len(FAULTS)); sys.exit(run(['--version']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path,
                          env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.stdout.startswith(str(tmp_path))


def test_public_names_and_signatures_are_pinned() -> None:
    pinned = (ROOT / "tests" / "data" / "public.txt").read_text().splitlines()
    found = runpy.run_path(str(ROOT / "scripts" / "docs-pages"))["public"]()
    assert found == pinned, "the public interface has changed; if that is meant: `make docs-pages`, and a line in CHANGELOG.md"


def test_extras_are_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = set(re.findall(r"^\| `([a-z0-9]+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE))
    assert set(project["optional-dependencies"]) <= listed


def test_what_is_opened_is_scanned_as_a_source_is() -> None:
    from draftscope.opened import Opened, scan
    from draftscope.scan.scan import scan as inner

    known = inspect.signature(inner).parameters
    for function in (Opened.scan, scan):
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in ("self", "source"):
                assert parameter.default == known[name].default, name
                assert parameter.kind == known[name].kind, name


def test_what_is_pinned_is_what_is_called(tmp_path: Path) -> None:
    """The rooms that can be called take what the pinned functions take."""
    from state_files import a_sample, write_one

    for number in range(3):
        write_one("plain", tmp_path / "states", number, a_sample(seed=number))
    source = draftscope.open(tmp_path / "states")
    assert len(source) == 3
    assert [sample.index for sample in source] == [0, 1, 2]
    one, two = source.scan(), draftscope.scan(str(tmp_path / "states"))
    assert one.sequences == two.sequences == draftscope.scan(source).sequences == 3
    assert draftscope.compare(one, tmp_path / "states").b.rows == draftscope.compare(source, two).b.rows
    assert "3 files of samples, plain" in repr(source)
    part = source.scan(shard=(0, 2)).merge(draftscope.scan(source, shard=(1, 2)))
    assert part.sequences == 3
    found = draftscope.diagnose(train=str(tmp_path / "states"), logs=[])
    assert found.provenance["inputs"] == {"train": str(tmp_path / "states")}
    with pytest.raises(TypeError):
        draftscope.diagnose(tran="states/")
    with pytest.raises(draftscope.DraftscopeError, match="does not exist"):
        draftscope.open(tmp_path / "nothing")
