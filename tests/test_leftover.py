"""What a process killed on the way leaves is removed by the next that writes there; what is another's is left alone."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from state_files import write_one
from tiny import DRAFT, tiny_conversations, tiny_target

from draftscope.cli.common import write_text
from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.copying import whole_folder, write_copy
from draftscope.pipeline.conversations import Conversation
from draftscope.pipeline.convert_data import convert_data
from draftscope.pipeline.extract import extract
from draftscope.states import leftover
from draftscope.states.leftover import SUFFIX, scratch, sweep_up, temporary, workspace
from draftscope.states.tensorfile import save_tensors


def killed(work: Callable[[], object]) -> None:
    """Run in a process that is killed once the work lets it: no handler, no `finally` runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child runs none of them
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(SUFFIX)]


def halfway_to_a_folder(out: Path) -> None:
    with whole_folder(out) as (made, _):
        (made / "model.safetensors").write_bytes(b"half")
        die()


def halfway_to_tensors(path: Path) -> None:
    import draftscope.states.tensorfile as module

    module.save_file = die  # type: ignore[assignment]
    save_tensors(path, {"a": torch.ones(2)}, {})


def halfway_to_a_text(path: Path) -> None:
    os.replace = die  # type: ignore[assignment]
    write_text(path, "half")


def test_a_copy_of_a_checkpoint(tmp_path: Path) -> None:
    killed(lambda: halfway_to_a_folder(tmp_path / "out"))
    killed(lambda: halfway_to_a_folder(tmp_path / "other"))
    assert len(left(tmp_path)) == 2
    with whole_folder(tmp_path / "out") as (made, keep):
        write_copy(load_checkpoint(DRAFT), {}, made)
        keep()
    assert [name.split(".")[1] for name in left(tmp_path)] == ["other"], "another output is another run's business"
    assert load_checkpoint(tmp_path / "out").missing == load_checkpoint(DRAFT).missing


def test_converted_data(tmp_path: Path) -> None:
    write_one("speculators", tmp_path / "data", 0)
    killed(lambda: convert_data(tmp_path / "data", tmp_path / "out", to="plain", on_tokens=die))
    assert len(left(tmp_path)) == 1
    assert convert_data(tmp_path / "data", tmp_path / "out", to="plain").files == 1
    assert left(tmp_path) == []


def test_extracted_states(tmp_path: Path) -> None:
    killed(lambda: halfway_to_tensors(tmp_path / "hs_0.safetensors"))
    assert len(left(tmp_path)) == 1
    one = tiny_conversations(2)[0]
    ids = torch.tensor(one.token_ids)
    extract(tiny_target(), [Conversation(0, ids, torch.arange(len(ids)) >= one.prompt_length)], tmp_path)
    assert left(tmp_path) == [] and (tmp_path / "hs_0.safetensors").is_file()


def test_a_fingerprint_and_a_report(tmp_path: Path) -> None:
    write_one("plain", tmp_path / "data", 0)
    killed(lambda: halfway_to_tensors(tmp_path / "f"))
    killed(lambda: halfway_to_a_text(tmp_path / "scan.json"))
    assert len(left(tmp_path)) == 2
    assert run(["scan", str(tmp_path / "data"), "-o", str(tmp_path / "f"), "--json", str(tmp_path / "scan.json"), "--quiet"]) == 0
    assert left(tmp_path) == []
    assert json.loads((tmp_path / "scan.json").read_text())["schema"] == "draftscope.scan/1"


def test_work_below_a_folder_and_in_the_systems_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def work(inside: Callable[[], object]) -> Callable[[], None]:
        def done() -> None:
            with inside() as made:  # type: ignore[attr-defined]
                (made / "gigabytes").write_bytes(b"x")
                die()
        return done

    killed(work(lambda: scratch(tmp_path, "drill")))
    killed(work(workspace))
    assert len(left(tmp_path)) == 2
    leftover._sweep_temporary_files.cache_clear()
    with scratch(tmp_path, "drill") as one, workspace() as two:
        assert sorted(left(tmp_path)) == sorted([one.name, two.name]) and not any(one.iterdir())
    assert left(tmp_path) == []


def test_what_may_be_anothers_stays(tmp_path: Path) -> None:
    mine = temporary(tmp_path / "f")
    theirs = mine.name.replace(f"-{os.getpid()}", f"-{os.getppid()}")
    elsewhere = mine.name.replace(leftover._system(), "0" * 8).replace(f"-{os.getpid()}", "-99999999")
    zero = mine.name.replace(f"-{os.getpid()}", "-0")
    for name in (mine.name, theirs, elsewhere, zero, ".f.part", ".f.1.part", "f.safetensors.part"):
        (tmp_path / name).write_text("x")
    dead = mine.name.replace(f"-{os.getpid()}", "-99999999")
    (tmp_path / dead).symlink_to(tmp_path / "keep", target_is_directory=True)
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "x").write_text("x")
    assert sweep_up(tmp_path, "other") == []
    assert [path.name for path in sweep_up(tmp_path, "f")] == [dead], "a number that no process can have"
    assert (tmp_path / "keep" / "x").is_file() and len(list(tmp_path.iterdir())) == 8
    assert sweep_up(tmp_path / "nowhere") == []
