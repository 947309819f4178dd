"""What `diagnose` is handed to compare with or to write to, and `scan` to group by: refused clearly, and nothing is damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_files import write_one
from support import within
from tiny import DRAFT, TARGET

from draftscope.cli.main import run

QWEN = Path(__file__).parent / "data" / "tiny-qwen3" / "draft"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A read of a pipe without a writer never ends: it becomes an error."""
    with within(60):
        yield


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def a_folder(folder: Path) -> Path:
    (folder / "folder").mkdir()
    return folder / "folder"


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def cut(folder: Path) -> Path:
    copy = shutil.copytree(DRAFT, folder / "cut")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return copy


def without_config(folder: Path) -> Path:
    copy = shutil.copytree(DRAFT, folder / "bare")
    (copy / "config.json").unlink()
    return copy


def wider(folder: Path) -> Path:
    """Of twice the inner width, otherwise the same draft."""
    copy = shutil.copytree(DRAFT, folder / "wider")
    tensors = load_file(copy / "model.safetensors")
    for name in tensors:
        if "mlp." in name:
            tensors[name] = torch.cat([tensors[name]] * 2, 1 if "down" in name else 0)
    save_file(tensors, copy / "model.safetensors")
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"intermediate_size": 2 * raw["intermediate_size"]}))
    return copy


SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "nowhere", "does not exist"), "a file": (a_file, "not a folder"),
    "the weights alone": (lambda folder: DRAFT / "model.safetensors", "not a folder"), "empty": (a_folder, "no config.json"),
    "a pipe": (a_pipe, "not a folder"), "the target": (lambda folder: TARGET, "holds a whole model"),
    "cut": (cut, "truncated"), "without config": (without_config, "no config.json"), "wider": (wider, "another shape"),
    "of other heads": (lambda folder: QWEN, "another shape"), "the draft itself": (lambda folder: DRAFT, "is the draft itself"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_draft_that_is_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, told = SOURCES[name]
    source, before = made(tmp_path), {path: path.read_bytes() for path in DRAFT.iterdir()}
    code = run(["diagnose", "--draft", str(DRAFT), "--source-draft", str(source), "--apply", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert code == (2 if name == "the draft itself" else 3) and told in said and str(source) in said
    assert not (tmp_path / "out").exists() and {path: path.read_bytes() for path in DRAFT.iterdir()} == before


def test_a_source_draft_needs_its_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_one("capture", tmp_path / "c", 0)
    assert run(["diagnose", "--serve", str(tmp_path / "c"), "--source-draft", str(DRAFT)]) == 2
    assert "--draft" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--apply", "--absorb"])
def test_a_copy_of_what_cannot_be_read_is_not_begun(option: str, tmp_path: Path) -> None:
    write_one("capture", tmp_path / "c", 0)
    draft = cut(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(["diagnose", "--serve", str(tmp_path / "c"), "--draft", str(draft), option, str(tmp_path / "out")]) in (1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--apply", "--absorb"])
def test_a_copy_does_not_get_among_the_inputs(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_one("capture", tmp_path / "c", 0)
    source, link = shutil.copytree(DRAFT, tmp_path / "source"), tmp_path / "link"
    link.symlink_to(source)
    for out in (source / "out", link / "out", tmp_path / "c" / "out"):
        words = ["diagnose", "--serve", str(tmp_path / "c"), "--draft", str(DRAFT), "--source-draft", str(source)]
        code = run([*words, option, str(out)])
        assert code == 2 and str(out) in capsys.readouterr().err and not out.exists()


GROUPS: dict[str, tuple[bytes | Callable[[Path], Path], int, str]] = {
    "missing": (lambda folder: folder / "nowhere", 3, "No such file"), "a folder": (a_folder, 3, "no regular file"),
    "a pipe": (a_pipe, 3, "no regular file"), "a device": (lambda folder: Path("/dev/zero"), 3, "no regular file"),
    "empty": (b"", 2, "no line has the key"), "binary": (b"\xff\xfe\x00\n", 3, "line 1"),
    "deep": (b"[" * 100_000 + b"\n", 3, "line 1 is no JSON (nested too deeply)"),
    "a line cut short": (b'{"source": "a"}\n{"source": "b"\n', 3, "line 2"),
    "of another key": (b'{"domain": "a"}\n', 2, "--group-by"), "of lists": (b'{"source": ["a"]}\n', 2, "no line has the key"),
    "longer than the samples": (b'{"source": "a"}\n' * 50, 0, ""), "with escapes": (b'{"source": "\\u001b[31m"}\n', 0, ""),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_are_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        write_one("plain", tmp_path / "data", i)
    made, code, told = GROUPS[name]
    path = tmp_path / "groups"
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        path = made(tmp_path)
    out = tmp_path / "f"
    assert run(["scan", str(tmp_path / "data"), "-o", str(out), "--groups", str(path)]) == code
    said = capsys.readouterr()
    assert told in said.err and "\x1b" not in said.out and out.exists() == (code == 0)
    if code == 0:
        assert run(["compare", str(out), str(out)]) in (0, 1)


def test_a_fingerprint_does_not_take_the_place_of_its_groups(tmp_path: Path) -> None:
    write_one("plain", tmp_path / "data", 0)
    groups = tmp_path / "groups"
    groups.write_text('{"source": "a"}\n')
    assert run(["scan", str(tmp_path / "data"), "-o", str(groups), "--groups", str(groups)]) == 2
    assert groups.read_text() == '{"source": "a"}\n'
