"""`--on`: the same answers as here, from a machine behind a real sshd; what it refuses, and that nothing stays there."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from farside import Far, far_fixture  # noqa: F401 (fixture)
from places import Inspect, Places, inspect_fixture, parts_fixture, places_fixture, write  # noqa: F401 (fixtures)
from safetensors.torch import save_file
from state_files import write_one
from support import random_draft

from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import save_native
from draftscope.elsewhere import answers
from draftscope.elsewhere.far import GONE, _watch
from draftscope.elsewhere.partial import Partial
from draftscope.scan.fingerprint import load_fingerprint
from draftscope.states.opening import FORMATS

pytestmark = pytest.mark.remote

FOREIGN = ("pydantic", "pydantic_core", "transformers", "typer", "rich", "fsspec", "pyarrow", "jinja2", "scipy", "filelock",
           "gguf")
"""Packages of ours that the other machine may lack."""


def without(*names: str) -> str:
    return f"sys.modules.update(dict.fromkeys({names!r}))"


def bare(far: Far, folder: Path) -> str:
    """An interpreter there with torch, numpy and safetensors alone, whose temporary folder is `folder`."""
    folder.mkdir(exist_ok=True)
    # torch itself imports fsspec where it is, and does without it elsewhere.
    return far.interpreter("bare", f"{without(*FOREIGN)}; import tempfile; tempfile.tempdir = '{folder}'")


def test_the_answer_is_the_one_from_here(far: Far, inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(0, 3, 6, 8))
    code, here = inspect(folder, "--norms", "--as", "speculators")
    python = bare(far, tmp_path / "tmp")
    home = set(os.listdir(Path.home()))
    again, there = inspect(folder, "--norms", "--as", "speculators", "--on", far.name, "--python", python)
    assert there["inspected"][0]["path"] == there["as_trainer"][0]["path"] == f"{far.name}:{folder}"
    assert (again, json.loads(json.dumps(there).replace(f"{far.name}:", ""))) == (code, here) and code == 1
    assert not list((tmp_path / "tmp").iterdir()) and set(os.listdir(Path.home())) == home


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_is_read_there(name: str, far: Far, inspect: Inspect, tmp_path: Path) -> None:
    if name == "speculators":
        pytest.skip("its masks need pyarrow there as here")
    for number in (10, 2):
        write_one(name, tmp_path / "d", number)
    code, here = inspect(tmp_path / "d", "--format", name)
    again, there = inspect(tmp_path / "d", "--format", name, "--on", far.name, "--python", bare(far, tmp_path / "tmp"))
    assert (again, json.loads(json.dumps(there).replace(f"{far.name}:", ""))) == (code, here)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_target_here_says_what_the_entries_there_are(far: Far, inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(0, 3, 6, 8))
    _, found = inspect(folder, "--target", places.folder, "--on", far.name, "--python", bare(far, tmp_path / "tmp"))
    assert [entry["placed"]["boundary"] for entry in found["inspected"][0]["entries"]] == [0, 3, 6, 8]


def test_several_paths_a_draft_among_them(far: Far, inspect: Inspect, tmp_path: Path) -> None:
    save_native(tmp_path / "draft", random_draft(), None)
    write_one("plain", tmp_path / "d", 1)
    paths = (tmp_path / "d", tmp_path / "no such", tmp_path / "draft")
    options = ("--on", far.name, "--python", far.python)
    code, here = inspect(*paths)
    again, there = inspect(*paths, *options)
    assert (again, json.loads(json.dumps(there).replace(f"{far.name}:", ""))) == (code, here)
    assert [one["what"] for one in there["inspected"]] == ["training data", "draft checkpoint"]
    code, found = inspect(*paths, "--on", far.name, "--python", bare(far, tmp_path / "tmp"))
    assert code == 3 and "pydantic" in found["next"][-1] and len(found["inspected"]) == 1


def test_the_fingerprint_comes_back(far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        write_one("plain", tmp_path / "a b", number)
    for name, more in (("here", []), ("there", ["--on", far.name, "--python", bare(far, tmp_path / "tmp")])):
        assert run(["scan", str(tmp_path / "a b"), "--shard", "1/2", "-o", str(tmp_path / name), *more]) == 0
    here, there = load_fingerprint(tmp_path / "here"), load_fingerprint(tmp_path / "there")
    assert there.origins[0].path == f"{far.name}:{here.origins[0].path}" and there.origins[0].part == "1 of 2"
    assert here.cells.keys() == there.cells.keys() and here.rows == there.rows
    for key, cell in here.cells.items():
        for name, tensor in cell.tensors().items():
            assert torch.equal(tensor, there.cells[key].tensors()[name])
    assert {one.engine for one in there.provenance} == {one.engine for one in here.provenance}, "as fast there as here"
    assert not list((tmp_path / "tmp").iterdir())
    assert "read as plain" in capsys.readouterr().err


def test_a_login_shell_may_print_before_the_answer(far: Far, inspect: Inspect, tmp_path: Path) -> None:
    write_one("plain", tmp_path / "d", 1)
    python = far.interpreter("chatty", "print('Welcome to the cluster', flush=True)")
    assert inspect(tmp_path / "d", "--on", far.name, "--python", python)[0] == 0


@pytest.mark.parametrize(("before", "says"), [
    (without("numpy"), "lacks numpy"), (without("torch"), "lacks torch"), (without("safetensors"), "lacks safetensors"),
    ("sys.version_info = (3, 8, 1, 'final', 0)", "is too old"), ("sys.exit(9)", "ended with code 9"),
])
def test_pythons_there_that_will_not_do(before: str, says: str, far: Far, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    write_one("plain", tmp_path / "d", 1)
    assert run(["inspect", str(tmp_path / "d"), "--on", far.name, "--python", far.interpreter("odd", before)]) == 3
    assert says in capsys.readouterr().err


def test_what_is_not_there_is_named(far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--on", far.name, "--python", far.python]
    for arguments, code, says in (
        (["inspect", "/no/such", *options], 3, f"{far.name}:/no/such: does not exist"),
        (["inspect", "/etc", "--format", "nonsense", *options], 2, "no format `nonsense`"),
        (["inspect", "/etc", "--on", far.name, "--python", "/no/python"], 3, "`/no/python` cannot be run there"),
        (["inspect", "/etc", "--on=-oProxyCommand=x"], 2, "is no host"),
        (["inspect", "/etc", "--on", "nobody@far"], 3, "no connection"),
        (["scan", "/no/such", "-o", str(tmp_path / "f"), *options], 3, f"{far.name}:/no/such: does not exist"),
        (["scan", "merge", "a", "b", "-o", str(tmp_path / "f"), *options], 2, "for scanning"),
    ):
        assert run(arguments) == code
        assert says in capsys.readouterr().err
    assert not (tmp_path / "f").exists()


def test_memory_there_is_capped(far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sparse file of 3 GiB, mapped: refused under 2 GiB, read under 4."""
    header = {"hidden_states": {"dtype": "BF16", "shape": [3 * 2**17, 4, 1024], "data_offsets": [0, 3 * 2**30]},
              "token_ids": {"dtype": "I64", "shape": [3 * 2**17], "data_offsets": [3 * 2**30, 3 * 2**30 + 3 * 2**20]}}
    text = json.dumps(header).encode()
    file = tmp_path / "hs_0.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + 3 * 2**30 + 3 * 2**20)
    options = ["--on", far.name, "--python", far.python, "--memory", "2"]
    assert run(["inspect", str(file), *options]) == 3
    assert "--memory GIB allows more" in capsys.readouterr().err


class Stuck:
    """A command at work on the other machine, which does not get on; `pid` is the process there."""

    def __init__(self, far: Far, tmp_path: Path) -> None:
        write_one("plain", tmp_path / "d", 1)
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        before = (f"import tempfile, builtins, os, time; tempfile.tempdir = '{temporary}'; real = compile; "
                  f"stop = lambda: (open('{fifo}', 'w').write(str(os.getpid())), time.sleep(600)); "
                  "builtins.compile = lambda s, n, *a, **k: (stop() if 'elsewhere.tasks' in str(n) "
                  "else 0, real(s, n, *a, **k))[1]")
        command = [sys.executable, "-m", "draftscope", "inspect", str(tmp_path / "d"), "--on", far.name, "--python",
                   far.interpreter("stuck", before)]
        environment = {**far.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        # Whoever started the tests in the background has SIGINT ignored, and children inherit that.
        kept = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.command = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, kept)
        self.temporary = temporary
        self.pid = int(fifo.read_text())
        self._there = os.pidfd_open(self.pid)
        assert list(temporary.iterdir())

    def ended_there(self) -> bool:
        ready, _, _ = select.select([self._there], [], [], 60)
        os.close(self._there)
        return bool(ready) and not list(self.temporary.iterdir())


def test_an_interruption_here_ends_the_process_there(far: Far, tmp_path: Path) -> None:
    stuck = Stuck(far, tmp_path)
    stuck.command.send_signal(signal.SIGINT)
    _, err = stuck.command.communicate(timeout=60)
    assert stuck.command.returncode == 130 and "interrupted" in err
    assert stuck.ended_there()


def test_a_death_here_ends_the_process_there(far: Far, tmp_path: Path) -> None:
    stuck = Stuck(far, tmp_path)
    stuck.command.kill()
    stuck.command.communicate(timeout=60)
    assert stuck.ended_there()


def test_a_lost_connection_is_said_and_ends_the_process_there(far: Far, tmp_path: Path) -> None:
    stuck = Stuck(far, tmp_path)
    for pid in children(far.server.pid):
        os.kill(pid, signal.SIGKILL)
    _, err = stuck.command.communicate(timeout=60)
    assert stuck.command.returncode == 3 and "no connection, or it was lost" in err and far.name in err
    assert stuck.ended_there()


def children(pid: int) -> list[int]:
    """The server's own processes, one a connection."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields: Any = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def test_silence_ends_the_process_there() -> None:
    """A connection that died without a word, as of a machine that lost its power."""
    here, there = os.pipe()
    left: list[int] = []
    os.write(there, b"\n\n")
    _watch(left.append, here, 0.05)
    os.close(there)
    _watch(left.append, here, 600.0)
    os.close(here)
    assert left == [GONE, GONE]


@pytest.mark.parametrize("answer", [b"", b"{}", b"[1]", b'{"kind": "answer"}', b'{"kind": "answer", "path": 3}', b"nonsense",
                                    b'{"kind": "progress"}', b'{"kind": "error"}'])
def test_answers_that_are_none_are_refused(answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """An ssh that answers with a frame of its own, under the mark that it was given."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!{sys.executable}\nimport sys, json, zlib, struct\nstdin = sys.stdin.buffer\n"
                   "stdin.read(int(stdin.readline()))\nsent = zlib.decompress(stdin.read(int(stdin.readline())))\n"
                   "mark = json.loads(sent)['mark']\n"
                   f"text = {answer!r}\nout = sys.stdout.buffer\nout.write(mark.encode() + b'\\n')\n"
                   "out.write(struct.pack('>QQ', len(text), 0) + text)\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["inspect", "/x", "--on", "far"]) == 3
    err = capsys.readouterr().err
    assert "no answer" in err or "failed there" in err


def write_states(folder: Path, files: int) -> Path:
    folder.mkdir()
    g = torch.Generator().manual_seed(0)
    for i in range(files):
        rows = 20 + 7 * (i % 3)
        save_file({"hidden_states": torch.randn(rows, 4, 16, generator=g).bfloat16(), "token_ids": torch.arange(rows)},
                  folder / f"hs_{i}.safetensors")
    return folder


def scanned(far: Far, folder: Path, out: Path, *more: str) -> int:
    return run(["scan", str(folder), "-o", str(out), "--every", "1", "--on", far.name, "--python", far.python, *more])


def alike(found: Path, wanted: Path) -> None:
    one, other = load_fingerprint(found), load_fingerprint(wanted)
    assert (one.sequences, one.rows, len(one.origins)) == (other.sequences, other.rows, 1)
    assert [each.name for each in one.inputs] == [each.name for each in other.inputs]
    assert one.cells.keys() == other.cells.keys()
    for key, cell in other.cells.items():
        assert torch.equal(one.cells[key].norms.histogram, cell.norms.histogram)
        torch.testing.assert_close(one.cells[key].dimensions.mean, cell.dimensions.mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one.cells[key].dimensions.squares, cell.dimensions.squares, rtol=1e-9, atol=1e-12)


def partials(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.partial"))


def test_a_scan_there_comes_in_parts(far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_states(tmp_path / "d", 6)
    monkeypatch.setattr(answers, "SECONDS", -1.0)  # each file a part
    kept: list[int] = []
    keep = Partial.keep
    monkeypatch.setattr(Partial, "keep", lambda self: (kept.append(self.next), keep(self))[1])
    assert scanned(far, folder, tmp_path / "there") == 0
    assert kept == [1, 2, 3, 4, 5]
    assert run(["scan", str(folder), "-o", str(tmp_path / "here"), "--every", "1"]) == 0
    alike(tmp_path / "there", tmp_path / "here")
    assert not partials(tmp_path)


@pytest.mark.parametrize("lost", ["the connection", "this process"])
def test_a_lost_connection_costs_the_part_in_hand(
    far: Far, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lost after the third of six files; the same command reads the other three, and the figures are those of a scan here."""
    folder, out, text = write_states(tmp_path / "d", 6), tmp_path / "there", tmp_path / "j"
    monkeypatch.setattr(answers, "SECONDS", -1.0)
    keep = Partial.keep

    def lose(self: Partial) -> None:
        keep(self)
        if self.next == 3:
            if lost == "this process":
                raise KeyboardInterrupt
            for pid in children(far.server.pid):
                os.kill(pid, signal.SIGKILL)

    # The process there waits after its third part, so that no more is on its way.
    told = "yield said, Path(name).read_bytes()"
    waiting = (f"import builtins; real = compile; builtins.compile = lambda s, n, *a, **k: real(s.replace({told!r}, "
               f"{told!r} + '; (time.sleep(600) if next == 3 else None)') if 'elsewhere.tasks' in str(n) else s, n, *a, **k)")
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", lose)
        code = run(["scan", str(folder), "-o", str(out), "--every", "1", "--on", far.name, "--python",
                    far.interpreter("waiting", waiting)])
    err = " ".join(capsys.readouterr().err.split())
    if lost == "this process":
        assert (code, "the same command goes on from there" in err) == (130, True)
    else:
        assert (code, "goes on after" in err) == (3, True)
    assert not out.exists()
    (left,) = partials(tmp_path)
    assert left.name.endswith("-3.partial")
    assert scanned(far, folder, out, "--json", str(text)) == 0
    assert json.loads(text.read_text())["resumed_after"] == 3
    assert "went on after 3 files" in capsys.readouterr().err
    assert run(["scan", str(folder), "-o", str(tmp_path / "here"), "--every", "1"]) == 0
    alike(out, tmp_path / "here")
    assert not partials(tmp_path)


def test_what_was_kept_of_other_files_is_not_gone_on_from(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_states(tmp_path / "d", 4), tmp_path / "there"
    monkeypatch.setattr(answers, "SECONDS", -1.0)
    keep = Partial.keep

    def lose(self: Partial) -> None:
        keep(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "keep", lose)
        assert scanned(far, folder, out) == 130
    # Another question begins anew; one about files that were changed since is refused.
    assert scanned(far, folder, tmp_path / "half", "--shard", "0/2") == 0
    os.utime(folder / "hs_3.safetensors", ns=(1, 1))
    capsys.readouterr()
    assert scanned(far, folder, out) == 3
    assert "other files than when this scan was begun" in capsys.readouterr().err
    for path in partials(tmp_path):
        path.write_bytes(b"cut")
    assert scanned(far, folder, out) == 0, "what cannot be read is as good as nothing"


def test_bad_files_there_are_counted_in_any_part(far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_states(tmp_path / "d", 5)
    for i in (0, 3):
        (folder / f"hs_{i}.safetensors").write_bytes(b"nonsense")
    monkeypatch.setattr(answers, "SECONDS", -1.0)
    assert scanned(far, folder, tmp_path / "there") == 0
    found = load_fingerprint(tmp_path / "there")
    assert (found.sequences, found.origins[0].skipped, found.odd["bad"].count) == (3, 2, 2)
    for path in folder.iterdir():
        path.write_bytes(b"nonsense")
    assert scanned(far, folder, tmp_path / "none") == 3
