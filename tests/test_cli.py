"""The entry point: laziness, exit codes, and where output goes."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import draftscope.cli
from draftscope.cli import common
from draftscope.cli.main import MEANT, TABLE, Entry, available, load, run

COMMAND = '''
from pathlib import Path
from typing import Annotated
import os, signal, sys
import typer
from pydantic import BaseModel
from draftscope.cli.common import HtmlOption, JsonOption, QuietOption, SeedOption, ThreadsOption, keep, setup
from draftscope.errors import DraftscopeError, UsageError

class Out(BaseModel):
    next: list[str] = []
    value: float | None = None

def command(
    does: str, json: JsonOption = None, html: HtmlOption = None, quiet: QuietOption = False,
    seed: SeedOption = 0, threads: ThreadsOption = None,
) -> int | None:
    """Does what it is told."""
    ui = setup(quiet, json=json, html=html, refusal=lambda e: Out(next=[str(e)]))
    if does == "unreadable": raise DraftscopeError("holds nothing", where="a\\x1b[31m.bin", remedy="Give another file.")
    if does == "contradictory": raise UsageError("these do not go together")
    if does == "bug": raise ValueError("odd")
    if does == "missing": Path("/no/such/file").read_text()
    if does == "exit": raise typer.Exit(5)
    if does == "interrupt":
        keep("12 of 40 samples are in out/; run it again to go on")
        os.kill(os.getpid(), signal.SIGINT)
    if does.startswith("SIG"):
        with open("half", "w"):
            try:
                os.kill(os.getpid(), getattr(signal, does))
                for _ in range(10**6): pass
            finally:
                os.unlink("half")
    if does == "cut":
        import torch
        Path("mapped").write_bytes(bytes(2**20))
        seen = torch.from_file("mapped", shared=True, size=2**20, dtype=torch.uint8)
        os.truncate("mapped", 4096)
        seen.sum()
    if does == "flood":
        for i in range(100000): ui.print(f"line {i}")
    with ui.progress("counting", total=3, unit="rows") as advance:
        for _ in range(3): advance()
    ui.print("people [bold]read[/bold] this")
    ui.note("a remark")
    ui.write_json(Out(value=float("nan")))
    ui.write_html(lambda: "<p>page</p>")
    return 1 if does == "found" else None
'''


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of its own in the package's path, as an installed one would be."""
    (tmp_path / "probe.py").write_text(COMMAND)
    monkeypatch.setattr(draftscope.cli, "__path__", [*draftscope.cli.__path__, str(tmp_path)])
    monkeypatch.setitem(TABLE, "probe", Entry("A probe.", "Commands"))
    monkeypatch.delitem(sys.modules, "draftscope.cli.probe", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_process(folder: Path, *arguments: str, env: Mapping[str, str] = {}, **streams: Any) -> subprocess.CompletedProcess[str]:
    """The probe in a process of its own (signals, pipes and terminals need one)."""
    code = (
        # Whoever started the tests in the background has SIGINT ignored, or SIGHUP, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"import sys, draftscope.cli as c; c.__path__.append({str(folder)!r})\n"
        "from draftscope.cli import main as m; m.TABLE['probe'] = m.Entry('A probe.', 'Commands')\n"
        f"sys.argv = ['draftscope', *{list(arguments)!r}]; m.main()"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=60, env={**os.environ, **env}, **streams)


def test_an_option_of_another_programs_name_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for command, option, wanted in (("diagnose", "--capture", "--serve"), ("replay", "--model", "--target"),
                                    ("train", "--lr", "--learning-rate")):
        assert run([command, option, "x"]) == 2
        assert f"(Possible options: {wanted})" in capsys.readouterr().err
    ours = {option for name in TABLE for parameter in load(name).params for option in parameter.opts}
    assert {option for meant in MEANT.values() for option in meant} <= ours


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom draftscope.cli.main import run\nassert run(['--help']) == 0\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'scipy', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_what_exists_and_nothing_else(capsys: pytest.CaptureFixture[str], probe: Path) -> None:
    assert run(["--help"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line.split()}
    modules = {p.stem for p in Path(draftscope.cli.__path__[0]).glob("*.py")} | {"probe"}
    assert words & set(TABLE) == {name for name in TABLE if name in modules}
    assert "probe" in words


def test_every_command_of_the_table_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in available():
        assert run([name, "--help"]) == 0
        assert f"draftscope {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("nothing", 0, ""), ("found", 1, ""), ("exit", 5, ""), ("contradictory", 2, "these do not go together"),
        ("unreadable", 3, "holds nothing. Give another file."), ("missing", 3, "/no/such/file: No such file or directory"),
        ("bug", 4, "internal error: ValueError"),
    ],
)
def test_exit_codes(does: str, code: int, says: str, probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", does]) == code
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert "\x1b" not in error


def test_usage_errors_of_the_parser_are_2(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe"]) == 2
    assert run(["probe", "nothing", "--threads", "many"]) == 2
    for number in ("0", "1025", "100000"):
        assert run(["probe", "nothing", "--threads", number]) == 2
        assert "Invalid value for '--threads'" in capsys.readouterr().err
    assert run(["prob", "nothing"]) == 2
    assert "Did you mean 'probe'" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["flag before", "flag after", "variable"])
def test_debug_shows_the_traceback(
    how: str, probe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("DRAFTSCOPE_DEBUG", "1")
    arguments = {"flag before": ["--debug", "probe", "bug"], "flag after": ["probe", "bug", "--debug"]}.get(how, ["probe", "bug"])
    assert run(arguments) == 4
    assert "Traceback" in capsys.readouterr().err


def test_json_on_stdout_is_alone_there(probe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "nothing", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"next": [], "value": None}
    assert "people [bold]read[/bold] this" in err


def test_json_and_html_files(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "found", "--json", "o.json", "--html", "o.html"]) == 1
    assert json.loads((probe / "o.json").read_text())["value"] is None
    assert (probe / "o.html").read_text() == "<p>page</p>"
    assert "people" in capsys.readouterr().out
    assert not list(probe.glob("*.partial")) + list(probe.glob(".*.partial"))


def test_a_refusal_still_writes_json(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "unreadable", "--json", "o.json"]) == 3
    assert "holds nothing" in json.loads((probe / "o.json").read_text())["next"][0]


def test_quiet_prints_nothing(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "found", "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_unwritable_output_is_told_before_the_work(option: str, probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (probe / "folder").mkdir()
    for target in ("no/such/folder/o", "folder"):
        assert run(["probe", "bug", option, target]) == 2
        assert target in capsys.readouterr().err


def test_interrupt_says_what_was_kept(probe: Path) -> None:
    done = in_process(probe, "probe", "interrupt")
    assert done.returncode == 130
    assert done.stderr == "draftscope: interrupted; 12 of 40 samples are in out/; run it again to go on\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_being_stopped_is_like_an_interrupt(name: str, probe: Path) -> None:
    done = in_process(probe, "probe", name)
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr == "draftscope: interrupted; files already complete are kept\n"
    assert not (probe / "half").exists()


def test_closed_pipe_is_quiet(probe: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = in_process(probe, "probe", "flood", stdout=out)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["flood"], ["nothing"], ["nothing", "--json", "-"], ["nothing", "--json", "/dev/full"]])
def test_a_full_disk_is_told_and_is_no_success(arguments: list[str], probe: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = in_process(probe, "probe", *arguments, stdout=full)
    assert done.returncode == 3 and "cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr


@pytest.mark.parametrize("stream", [1, 2])
def test_a_stream_that_was_closed_before_the_start_is_no_fault(stream: int, probe: Path) -> None:
    out = probe / "o.json"
    done = in_process(probe, "probe", "nothing", "--json", str(out), preexec_fn=lambda: os.close(stream))
    assert (done.returncode, json.loads(out.read_text())) == (0, {"next": [], "value": None})


@pytest.mark.skipif(sys.platform != "linux", reason="pages of a cut file are told on Linux")
def test_a_file_cut_while_it_is_read_is_an_error_that_names_it(probe: Path) -> None:
    done = in_process(probe, "probe", "cut", "--json", "o.json")
    said = f"{probe / 'mapped'}: was cut short while it was read. Run it again when its writer is done"
    assert (done.returncode, done.stderr) == (3, f"draftscope: {said}\n")
    assert json.loads((probe / "o.json").read_text())["next"] == [said]


def test_colour_and_progress_only_on_a_terminal(probe: Path) -> None:
    piped = in_process(probe, "probe", "nothing", env={"FORCE_COLOR": ""})
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "counting" not in piped.stderr
    leader, follower = pty.openpty()
    try:
        in_process(probe, "probe", "nothing", stderr=follower, env={"TERM": "xterm-256color"})
        seen = os.read(leader, 65536).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert "counting" in seen
    assert "3/3 rows" in seen


def test_in_a_pipe_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(0, 7)
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    for quiet in (False, True):
        ui = common.setup(quiet)
        with ui.progress("speculating", None, "tokens") as advance:
            for n in range(12):
                advance(100, **({"total": 1200} if n == 7 else {}))
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.splitlines() == ([] if quiet else [
            "speculating: 500 tokens, 14/s", "speculating: 1,000/1,200 tokens, 14/s"])


def test_write_text_is_whole_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "o.txt"
    target.write_text("before")
    target.chmod(0o640)
    link = tmp_path / "link.txt"
    link.symlink_to(target)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            common.write_text(link, "after")
    assert target.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.txt", "o.txt"]
    common.write_text(link, "after")
    assert (link.is_symlink(), target.read_text(), target.stat().st_mode & 0o777) == (True, "after", 0o640)
    common.write_text(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_json_of_anything_is_valid(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    common.write_json(tmp_path / "o", {"a": [numpy.float32("inf"), numpy.arange(2)], "b": "\udcff", "c": Path("x"), "d": {2, 1}})
    assert json.loads((tmp_path / "o").read_text()) == {"a": [None, [0, 1]], "b": "\\udcff", "c": "x", "d": [1, 2]}


def test_console_width_is_bounded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    widths = {}
    for asked in ("20", "120", "500", ""):
        monkeypatch.setenv("COLUMNS", asked)
        widths[asked] = common.make_console(stderr=False).width
    assert widths == {"20": 60, "120": 120, "500": 200, "": common.PIPED_WIDTH}
