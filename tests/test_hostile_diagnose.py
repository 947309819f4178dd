"""What `diagnose`, `gate` and `drill` are handed beside states and checkpoints: logs, baselines, folders to write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_files import write_one
from support import within
from tiny import DRAFT, TARGET

from draftscope.cli.main import run
from draftscope.diagnose.learning import curve_facts
from draftscope.diagnose.traininglog import read_curve
from draftscope.drilling.running import LINES, read_outcomes
from draftscope.errors import DraftscopeError
from draftscope.pipeline import conversations

HUGE = "1" + "0" * 400
KNOWN = "step 1: {'loss': 1.0}\n"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A log that is read for ever, or in quadratic time, becomes an error."""
    with within(120):
        yield


@pytest.mark.parametrize("line", [
    f'{{"step": 1, "loss": {HUGE}}}', f'{{"step": {HUGE}, "loss": 1}}', '{"step": 1, "loss": NaN, "accuracy": [NaN, Infinity]}',
    f'{{"step": 1, "loss": 1, "losses": [{HUGE}], "accuracy": [{HUGE}], "rows": [{HUGE}], "epoch": {HUGE}}}',
    f'{{"step": 1, "heldout": {{"walk": {HUGE}}}}}', '{"step": 1, "loss": 1e308, "accuracy": [1e308]}', '{"step": 1, "loss": -1}',
    '{"step": 1, "loss": true, "losses": [true], "accuracy": [false], "heldout": []}',
])
def test_figures_that_cannot_be_are_no_crash(line: str, tmp_path: Path) -> None:
    rest = "".join(f'\n{{"step": {i}, "loss": {3 - i / 100}}}' for i in range(2, 30))
    (tmp_path / "log.jsonl").write_text((line + "\n") * 20 + line + rest)
    facts = curve_facts(read_curve((tmp_path / "log.jsonl",)), 100)
    assert facts.last_loss == pytest.approx(2.71, abs=0.01) and 0 <= facts.steps < 1 << 60


@pytest.mark.parametrize("step", ["nan", "inf", "-inf", "1e400", "1e30"])
def test_a_printed_step_that_is_none_is_the_one_before(step: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"train/loss=1, global_step=7\ntrain/loss=2, global_step={step}\n")
    assert [point.step for point in read_curve((tmp_path / "a.log",)).points] == [7, 7]


@pytest.mark.parametrize("line", [
    "step 1: {" * 110000, "step 1: {" + "'a': [" * 170000 + "}", "resum" * 200000, "resume at " * 100000, " " * 1000000 + "x",
    "train/loss=1" + " " * 1000000 + "x", "a.py" * 250000, "'" * 1000000, "train/a=" * 130000, "[1" * 500000,
])
@pytest.mark.parametrize("first", [KNOWN, "train/loss=1, global_step=1\n"])
def test_a_line_of_a_million_characters_is_read_in_time(line: str, first: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(first + line + "\n" + first)
    assert len(read_curve((tmp_path / "a.log",)).points) >= 1


def test_many_records_are_searched_for_restarts_in_time(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {i}, "loss": {3 - i / 1e6}}}\n' for i in range(200_000)))
    facts = curve_facts(read_curve((tmp_path / "log.jsonl",)), 100)
    assert facts.points == 200_000 and not facts.restarts


def test_what_is_no_regular_file_is_no_log(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.log")
    for path in (tmp_path / "pipe.log", Path("/dev/zero")):
        with pytest.raises(DraftscopeError, match="no regular file"):
            read_curve((path,))


def test_the_last_of_many_trainer_states_is_read(tmp_path: Path) -> None:
    for n in range(1, 101):
        (tmp_path / f"checkpoint-{n}").mkdir()
        history = [{"step": i, "loss": 3.0} for i in range(n)]
        (tmp_path / f"checkpoint-{n}" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert len(read_curve((tmp_path,)).points) == 100


def test_a_line_of_conversations_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LINE", 1 << 16)
    with pytest.raises(DraftscopeError, match="line 1 is longer"):
        list(conversations.read_lines(Path("/dev/zero"), lambda: None))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b'{"a":' * 20_000 + b"1" + b"}" * 20_000, b"\xff\xfe\x00", b"[]", b"{}"])
def test_what_is_no_baseline_is_said_to_be_none(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.json").write_bytes(text)
    assert run(["gate", "--baseline", str(tmp_path / "b.json"), "--current", str(tmp_path / "b.json")]) == 3
    assert "b.json" in capsys.readouterr().err


def a_baseline(**changes: object) -> dict[str, object]:
    counted = {"name": "a", "rounds": 4, "reached": [4, 2], "passed": [2, 1]}
    rung = {"readout": "walk", "says": "\x1b[31m", "sequences": [counted | changes] * 8}
    return {"schema": "draftscope.baseline/1", "k": 2, "rungs": {"\x1b[31m[bold]\u202e": rung}}


@pytest.mark.parametrize("changes", [{"reached": [-4, -2]}, {"reached": [10**30, 1]}, {"reached": []}, {"passed": [1]},
                                     {"passed": [9, 9]}, {"rounds": -1}])
def test_counts_that_cannot_be_are_no_baseline(changes: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(a_baseline(**changes)))
    (tmp_path / "good.json").write_text(json.dumps(a_baseline()))
    for one, other in (("bad", "good"), ("good", "bad")):
        assert run(["gate", "--baseline", str(tmp_path / f"{one}.json"), "--current", str(tmp_path / f"{other}.json")]) == 3


def test_a_gate_prints_names_harmlessly_and_overwrites_no_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, summary = tmp_path / "b.json", tmp_path / "s.md"
    base.write_text(json.dumps(a_baseline()))
    words = ["gate", "--baseline", str(base), "--current", str(base)]
    assert run([*words, "--summary", str(summary)]) == 0 and run([*words, "--summary", str(summary)]) == 0
    for text in (capsys.readouterr().out, summary.read_text()):
        assert "[bold]" in text and "\x1b" not in text and "\u202e" not in text
    both = str(tmp_path / "o")
    for outputs in (["--summary", str(base)], ["--json", str(base)], ["--summary", both, "--json", both]):
        assert run([*words, *outputs]) == 2
    assert json.loads(base.read_text()) == a_baseline()


def test_kept_outcomes_that_are_none_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / LINES).write_bytes(b"\xff\x00\n" + b"[" * 100_000 + b"\n{}\n")
    (tmp_path / "shard" / LINES).mkdir(parents=True)
    assert read_outcomes(tmp_path) == []


@pytest.mark.parametrize("option", ["--apply", "--absorb"])
def test_a_copy_that_could_not_be_written_is_refused_before_the_work(option: str, tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    write_one("capture", tmp_path / "c", 0)
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    for out in (tmp_path / "file" / "x", tmp_path / "file", tmp_path, tmp_path / "dangling", DRAFT):
        code = run(["diagnose", "--serve", str(tmp_path / "c"), "--draft", str(DRAFT), "--target", str(TARGET), option, str(out)])
        assert code == 2 and "reading" not in capsys.readouterr().err


def test_two_copies_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_one("capture", tmp_path / "c", 0)
    both = [word for option in ("--apply", "--absorb") for word in (option, str(tmp_path / "out"))]
    assert run(["diagnose", "--serve", str(tmp_path / "c"), "--draft", str(DRAFT), *both]) == 2
    assert "same folder" in capsys.readouterr().err and not (tmp_path / "out").exists()
