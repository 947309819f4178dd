"""Scans that are interrupted, resumed, cut to a sample, and given bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from test_scan import folder_of, same_fingerprint, sample
from torch import Tensor

from draftscope.cli.main import run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.report import scanning
from draftscope.report.scanning import Front, front
from draftscope.scan import resuming, tally
from draftscope.scan import scan as scanning_module
from draftscope.scan.between import Between
from draftscope.scan.fingerprint import Fingerprint, load_fingerprint
from draftscope.scan.resuming import Choice, choice_of, partial_of, scan_to
from draftscope.scan.scan import MASKED, SINGLE, Progress, Settings, scan
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample

COUNT = 12


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "data", [sample(i) for i in range(COUNT)])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three samples a chunk."""
    monkeypatch.setattr(scanning_module, "CHUNK", 2 * sample(0).states.nbytes + 1)


def tensors_of(path: Path) -> dict[str, Tensor]:
    from draftscope.states.tensorfile import TensorFile

    opened = TensorFile(path)
    return {name: opened.tensor(name) for name in opened.names}


def same_bits(a: Path, b: Path) -> None:
    first, second = tensors_of(a), tensors_of(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


class Stop(KeyboardInterrupt):
    pass


def stopped_after(files: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.done == files:
            raise Stop

    return watch


@pytest.mark.usefixtures("small_chunks")
class TestResume:
    def test_a_stopped_scan_ends_with_the_same_bits(self, data: Path, tmp_path: Path) -> None:
        whole, out = tmp_path / "whole", tmp_path / "out"
        scan_to(whole, open_source(data), Settings(), choice_of(open_source(data)))
        kept: list[tuple[int, int]] = []
        for files in (5, 8, 8, 11):
            with pytest.raises(Stop):
                scan_to(out, open_source(data), Settings(), choice_of(open_source(data)), resume=True,
                        on_progress=stopped_after(files), on_kept=lambda done, of: kept.append((done, of)))
            assert not out.exists()
        assert kept == [(3, COUNT), (6, COUNT), (9, COUNT)], "all but the chunk in hand"
        unfinished = load_fingerprint(partial_of(out))
        assert unfinished.sequences == 9 == len(unfinished.inputs)
        assert unfinished.notes[-1] == f"unfinished: the first 9 of {COUNT} files"
        found = scan_to(out, open_source(data), Settings(), choice_of(open_source(data)), resume=True)
        assert found.rows == COUNT * 30
        assert not any("unfinished" in note for note in found.notes)
        assert not partial_of(out).exists()
        same_bits(whole, out)

    def test_killed_it_loses_the_chunk_in_hand_alone(self, data: Path, tmp_path: Path) -> None:
        """A process that ends itself in the middle, as kill -9 does."""
        out, whole = tmp_path / "out", tmp_path / "whole"
        program = (
            "import os, sys, signal\n"
            "from pathlib import Path\n"
            "from draftscope.scan import scan as module\n"
            "from draftscope.scan.resuming import scan_to, choice_of\n"
            "from draftscope.states.opening import open_source\n"
            f"module.CHUNK = {scanning_module.CHUNK}\n"
            "source = open_source(sys.argv[1])\n"
            "def watch(progress):\n"
            "    if progress.done == 8: os.kill(os.getpid(), signal.SIGKILL)\n"
            "scan_to(Path(sys.argv[2]), source, module.Settings(), choice_of(source), every_seconds=0, on_progress=watch)\n"
        )
        ended = subprocess.run([sys.executable, "-c", program, str(data), str(out)], env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert ended.returncode == -signal.SIGKILL
        assert load_fingerprint(partial_of(out)).sequences == 6
        assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "out.partial"]
        scan_to(out, open_source(data), Settings(), choice_of(open_source(data)), resume=True)
        scan_to(whole, open_source(data), Settings(), choice_of(open_source(data)))
        same_bits(whole, out)

    def test_only_the_same_scan_goes_on(self, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"

        def again(settings: Settings, choice: Choice | None = None, resume: bool = True) -> Fingerprint:
            source = open_source(data)
            return scan_to(out, source, settings, choice or choice_of(source), resume=resume)

        with pytest.raises(Stop):
            scan_to(out, open_source(data), Settings(), choice_of(open_source(data)), on_progress=stopped_after(8))
        with pytest.raises(UsageError, match="unfinished scan into the same file"):
            again(Settings(), resume=False)
        with pytest.raises(UsageError, match="share of rows differ"):
            again(Settings(every=3))
        with pytest.raises(UsageError, match="groups differ"):
            again(Settings(groups={0: "a"}))
        with pytest.raises(UsageError, match="list of files and shard differ"):
            again(Settings(), choice_of(open_source(data), (0, 2)))
        write_sample(data / "hs_12.safetensors", sample(12))
        with pytest.raises(UsageError, match="list of files differ"):
            again(Settings())
        (data / "hs_12.safetensors").unlink()
        os.utime(data / "hs_4.safetensors", ns=(1, 1))
        with pytest.raises(DraftscopeError, match=r"hs_4\.safetensors: has changed since it was counted"):
            again(Settings())
        partial_of(out).write_bytes(b"else")
        with pytest.raises(UsageError, match="in the way"):
            again(Settings(), resume=False)
        partial_of(out).unlink()
        assert again(Settings()).sequences == COUNT

    def test_the_command(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                         monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "out"
        real = resuming.Course.run

        def interrupted(self: resuming.Course, *given: Any) -> Iterator[None]:
            for number, step in enumerate(real(self, *given)):
                yield step
                if number == 1:
                    raise KeyboardInterrupt

        monkeypatch.setattr(resuming.Course, "run", interrupted)
        assert run(["scan", str(data), "-o", str(out)]) == 130
        assert "6 of 12 files are safe in out.partial; go on with --resume" in capsys.readouterr().err
        monkeypatch.setattr(resuming.Course, "run", real)
        assert run(["scan", str(data), "-o", str(out)]) == 2
        assert run(["scan", str(data), "-o", str(out), "--resume", "--budget", "1"]) == 2
        assert run(["scan", str(data), "-o", str(out), "--resume"]) == 0
        found = load_fingerprint(out)
        assert found.sequences == COUNT
        assert found.provenance[0].command == f"draftscope scan {data}"


class TestEstimates:
    def test_a_sample_is_named_so(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """And has its interval."""
        out = tmp_path / "out"
        assert run(["scan", str(data), "-o", str(out), "--sample", "5", "--json", "-"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["sequences"] == 5
        assert shown["estimate"]["asked"] == [{"how": "sample 5", "taken": 5, "of": COUNT}]
        figure = next(f for f in shown["estimate"]["figures"] if (f["entry"], f["class"]) == (1, "answer"))
        assert figure["norm"]["low"] < figure["norm"]["value"] < figure["norm"]["high"]
        whole = scan(open_source(data)).statistics(1, ("answer",)).norms.result().mean
        assert figure["norm"]["low"] < whole < figure["norm"]["high"]
        found = load_fingerprint(out)
        assert (found.population, found.estimated[0].how) == (COUNT, "sample 5")
        assert run(["scan", str(data), "-o", str(out), "--sample", "5"]) == 0
        assert "An estimate (sample 5): 5 of 12 files" in capsys.readouterr().out
        assert run(["scan", str(data), "-o", str(out), "--sample", "50"]) == 0
        assert not load_fingerprint(out).estimated, "all of them are no estimate"

    def test_by_time(self, data: Path, tmp_path: Path) -> None:
        source = open_source(data)
        choice = choice_of(source, budget=1e-9)
        found = scan_to(tmp_path / "out", source, Settings(), choice)
        assert (found.sequences, found.estimated[0].how) == (1, "budget 1e-09 s")
        assert choice.positions[0] == choice_of(source, sample=1).positions[0]
        assert sorted(choice.positions) == list(range(COUNT))
        found = scan_to(tmp_path / "out", open_source(data), Settings(), choice_of(source, budget=1e9))
        assert (found.sequences, found.estimated) == (COUNT, ())
        assert not partial_of(tmp_path / "out").exists()

    def test_what_excludes_each_other(self, data: Path, tmp_path: Path) -> None:
        out = str(tmp_path / "out")
        for more in (["--sample", "2", "--budget", "1"], ["--sample", "2", "--shard", "0/2"], ["--sample", "0"],
                     ["--budget", "0"]):
            assert run(["scan", str(data), "-o", out, *more]) == 2

    def test_intervals_hold_the_whole_nineteen_times_in_twenty(self) -> None:
        """Samples of 20 of 200 sequences that differ in length and norm: the share of intervals with the true mean in them."""
        g = np.random.default_rng(0)
        norms = [g.lognormal(g.normal(0, 0.5), 0.2, (1, int(g.integers(20, 60)))) for _ in range(200)]
        cells = [np.where(g.random(one.shape) < 0.1, 1, 8).astype(np.int8) for one in norms]
        truth = float(np.concatenate([one[cell == 8] for one, cell in zip(norms, cells, strict=True)]).mean())
        share = float(np.concatenate([(cell == 1)[0] for cell in cells]).mean())
        inside = [0, 0]
        for _ in range(300):
            parts = [Between(), Between()]
            for number in g.choice(200, 20, replace=False):
                parts[number % 2].add_sequence(norms[number], cells[number])
            parts[0].merge(parts[1])
            found = ((parts[0].norm(0, "other", 200), truth), (parts[0].share(0, "sink", 200), share))
            for at, (figure, exact) in enumerate(found):
                assert figure is not None
                assert figure.low is not None
                assert figure.high is not None
                inside[at] += figure.low <= exact <= figure.high
        assert all(0.90 <= count / 300 <= 0.99 for count in inside), inside
        one = Between()
        one.add_sequence(norms[0], cells[0])
        assert one.norm(0, "other").low is None
        assert one.norm(0, "answer") is None
        assert Between().norm(0, "other") is None


class TestBadInput:
    def test_what_cannot_be_read_is_listed(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        whole = data / "hs_3.safetensors"
        whole.write_bytes(whole.read_bytes()[:-100])
        (data / "hs_5.safetensors").write_bytes(b"")
        found = scan(open_source(data))
        assert found.sequences == COUNT - 2
        assert found.odd["bad"].count == 2
        assert [name for name, _ in found.odd["bad"].named] == ["hs_3.safetensors", "hs_5.safetensors"]
        assert all("whole safetensors" in why for _, why in found.odd["bad"].named)
        out = tmp_path / "out"
        assert run(["scan", str(data), "-o", str(out)]) == 0
        assert "hs_3.safetensors" in capsys.readouterr().err
        assert load_fingerprint(out).odd == found.odd
        shards = [scan(open_source(data), shard=(i, 2)) for i in range(2)]
        assert shards[0].merge(shards[1]).odd["bad"].count == 2
        assert run(["scan", str(whole), "-o", str(out)]) == 3, "a file that was named is refused"

    def test_nothing_readable(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path / "data", [sample(0)])
        source = open_source(folder)
        (folder / "hs_0.safetensors").write_bytes(b"0" * 9)
        with pytest.raises(DraftscopeError, match="none of 1 files can be read; the first"):
            scan(source)
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(DraftscopeError, match="holds no file with states"):
            open_source(empty)
        with pytest.raises(DraftscopeError, match="shard 1 of 2 is empty: the source has 1 file"):
            scan(open_source(folder_of(tmp_path / "one", [sample(0)])), shard=(1, 2))

    def test_mixed_widths(self, data: Path) -> None:
        write_sample(data / "hs_7.safetensors", sample(7, width=8))
        with pytest.raises(DraftscopeError, match=r"hs_7\.safetensors: has 4 entries of width 8"):
            scan(open_source(data))
        found = scan(open_source(data), skip_odd=True)
        assert (found.sequences, found.odd["bad"].named[0][0]) == (COUNT - 1, "hs_7.safetensors")

    @pytest.mark.usefixtures("small_chunks")
    def test_a_sample_that_changes_while_it_is_read(self, data: Path, tmp_path: Path) -> None:
        """Its rows are taken out again, whatever was added before it was noticed."""
        expected = scan(open_source(folder_of(tmp_path / "without", [sample(i) for i in range(COUNT) if i != 4])))
        done = []

        def watch(progress: Progress) -> None:
            if progress.done == 5 and not done:
                done.append(progress.done)
                os.utime(data / "hs_4.safetensors", ns=(1, 1))

        found = scan(open_source(data), on_progress=watch)
        assert done
        assert found.odd["bad"].named == [("hs_4.safetensors", "changed while it was read")]
        assert (found.sequences, found.rows) == (COUNT - 1, 30 * (COUNT - 1))
        assert [one.name for one in found.inputs] == [one.name for one in expected.inputs]
        assert set(found.cells) == set(expected.cells)
        for key, cell in expected.cells.items():
            assert found.cells[key].dimensions.mean == pytest.approx(cell.dimensions.mean, rel=1e-12)

    def test_one_token_and_no_answer(self, tmp_path: Path) -> None:
        masked = sample(2)
        masked.loss_mask = torch.zeros(30, dtype=torch.bool)
        short = Sample("hs_1.safetensors", torch.arange(1), sample(1).states[:1], None, ("a", "b", "c", "d"), 1)
        both = Sample("hs_3.safetensors", torch.arange(1), sample(3).states[:1], torch.zeros(1).bool(), ("a", "b", "c", "d"), 3)
        found = scan(open_source(folder_of(tmp_path / "data", [sample(0), short, masked, both])))
        assert (found.sequences, found.rows) == (4, 62)
        assert [name for name, _ in found.odd[SINGLE].named] == ["hs_1.safetensors", "hs_3.safetensors"]
        assert [name for name, _ in found.odd[MASKED].named] == ["hs_2.safetensors"]
        assert found.statistics(0, ("first",)).counts.result().rows == 4

    def test_a_shard_given_twice_is_named(self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Wherever it lies, by what it holds: another file of its name counts as another."""
        elsewhere = folder_of(tmp_path / "elsewhere" / "deep", [sample(i) for i in (3, 30)])
        first, second = tmp_path / "first", tmp_path / "second"
        assert run(["scan", str(data), "-o", str(first)]) == 0
        assert run(["scan", str(elsewhere), "-o", str(second)]) == 0
        assert run(["scan", "merge", str(first), str(second), "-o", str(tmp_path / "m")]) == 3
        assert "hs_3.safetensors: is in both fingerprints" in capsys.readouterr().err
        assert not (tmp_path / "m").exists()
        write_sample(elsewhere / "hs_3.safetensors", sample(99))
        assert run(["scan", str(elsewhere), "-o", str(second)]) == 0
        assert run(["scan", "merge", str(first), str(second), "-o", str(tmp_path / "m")]) == 0
        assert load_fingerprint(tmp_path / "m").sequences == COUNT + 2

    def test_a_damaged_file_is_named(self, data: Path, tmp_path: Path) -> None:
        path = tmp_path / "f"
        scan(open_source(data)).save(path)
        held = path.read_bytes()
        for at in (len(held) - 5, len(held) // 2):
            path.write_bytes(held[:at] + bytes([held[at] ^ 1]) + held[at + 1 :])
            with pytest.raises(DraftscopeError, match="checksum"):
                load_fingerprint(path)
        path.write_bytes(held.replace(b'\\"last\\": true', b'\\"last\\":false'))
        with pytest.raises(DraftscopeError, match="checksum"):
            load_fingerprint(path)
        path.write_bytes(held[:-1])
        with pytest.raises(DraftscopeError, match="not a whole safetensors file"):
            load_fingerprint(path)
        path.write_bytes(held.replace(b"fingerprint/3", b"fingerprint/4"))
        with pytest.raises(DraftscopeError, match="version 4, this program reads those up to 3"):
            load_fingerprint(path)

    def test_a_full_disk(self, data: Path, tmp_path: Path) -> None:
        """The process may write files of 64 KiB at most: what was there stays, and nothing else is left behind."""
        out = tmp_path / "out"
        scan(open_source(data)).save(out)
        before = out.read_bytes()
        program = (
            "import resource, sys\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
            "from draftscope.cli.main import run\n"
            "sys.exit(run(sys.argv[1:]))\n"
        )
        ended = subprocess.run([sys.executable, "-c", program, "scan", str(data), "-o", str(out)], capture_output=True, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"})
        assert ended.returncode == 3, ended.stderr
        assert "cannot be written" in ended.stderr
        assert out.read_bytes() == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "out"]


class TestFront:
    def progress(self, data: Path) -> Progress:
        found = scan(open_source(data))
        return Progress(of=100, done=10, sequences=10, rows=300, size=5 * 10**9, bad=2, total=found)

    def test_a_line_tells_rate_and_time_left(self, data: Path) -> None:
        now = [0.0]
        made = Front("data", lambda: now[0])
        made.line(Progress(of=100, done=1))
        now[0] = 2.0
        assert made.line(self.progress(data)) == "10/100 files, 2.50 GB/s, 18 s left, 2 bad"

    def test_on_a_terminal_the_norms_show(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scanning, "REFRESH", 0)
        console = Console(force_terminal=True, width=100, record=True)
        with front(console, "scanning data") as (shown, draw):
            draw(self.progress(data))
            console.print(shown.table(self.progress(data)))
        text = console.export_text()
        assert "10/100 files" in text
        assert "mean norm so far" in text
        assert "3 d" in text

    def test_lines_where_there_is_no_terminal(self, data: Path) -> None:
        console = Console(force_terminal=False, width=100, record=True)
        with front(console, "scanning data", every=0) as (_, say):
            say(self.progress(data))
        assert "scanning data: 10/100 files" in console.export_text()
        quiet = Console(force_terminal=False, record=True)
        with front(quiet, "scanning data", quiet=True, every=0) as (_, say):
            say(self.progress(data))
        assert quiet.export_text() == ""


def test_threads_and_sharding_change_no_bit(data: Path, tmp_path: Path) -> None:
    """The same sharding gives the same bits, whatever the number of threads."""
    for threads in (1, 3):
        scan(open_source(data), threads=threads).save(tmp_path / f"f{threads}")
    same_bits(tmp_path / "f1", tmp_path / "f3")
    same_fingerprint(load_fingerprint(tmp_path / "f1"), scan(open_source(data)))


def test_more_threads_than_entries_share_the_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "ALONE", 0)
    data = folder_of(tmp_path / "data", [sample(i, entries=3, width=1100) for i in range(3)])
    for threads in (1, 7):
        scan(open_source(data), threads=threads).save(tmp_path / f"f{threads}")
    same_bits(tmp_path / "f1", tmp_path / "f7")


def test_a_sequence_too_large_to_be_mapped_at_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 7 rows: the same figures, the pages of each block given back."""
    whole = scan(open_source(data))
    given_back: list[int] = []
    monkeypatch.setattr(tally, "BLOCK", 7 * sample(0).states[:1].nbytes)
    monkeypatch.setattr(tally, "release", lambda piece, whole: given_back.append(len(piece)))
    for engine in (None, "torch", "numpy"):
        given_back.clear()
        same_fingerprint(scan(open_source(data), engine=engine), whole)
        assert given_back == [7, 7, 7, 7, 2] * 2 * COUNT
