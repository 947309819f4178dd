"""Broken and hostile files of every format: each is named with what to do, or counted; nothing runs, nothing grows."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_files import (
    PACKED,
    SHARED,
    a_sample,
    angelslim_record,
    modelopt_record,
    specforge_record,
    torchspec_record,
    trtllm_record,
    v0_record,
    v1_record,
    write_one,
)

from draftscope.cli.main import run
from draftscope.errors import DraftscopeError
from draftscope.states.opening import FORMATS, open_source

PERSISTENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TORCH = {"speculators-v1": v1_record, "specforge": specforge_record, "angelslim": angelslim_record, "modelopt": modelopt_record,
         "torchspec": torchspec_record, "trtllm": trtllm_record, "speculators-v0": v0_record}


def attempt(path: Path, format: str | None) -> tuple[list[Any], str]:
    try:
        return list(open_source(path, format)), ""
    except DraftscopeError as error:
        return [], str(error)


class Trap:
    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, (f"open({str(self.sprung)!r}, 'w').write('sprung')",))


@pytest.fixture(params=list(FORMATS))
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "speculators":
        pytest.importorskip("pyarrow")
    return str(request.param)


@pytest.mark.parametrize("name", TORCH)
def test_code_in_a_pickle_is_never_run(name: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    record = TORCH[name](a_sample())
    planted = [{**record[0], "extra": Trap(sprung)}] if isinstance(record, list) else {**record, "extra": Trap(sprung)}
    for file in (tmp_path / "data_0.pt", tmp_path / "data_1.ckpt.gz"):
        whole = io.BytesIO()
        torch.save(planted, whole)
        file.write_bytes(gzip.compress(whole.getvalue()) if file.suffix == ".gz" else whole.getvalue())
        for format in (None, name):
            with pytest.raises(DraftscopeError, match="nothing was executed") as caught:
                list(open_source(file, format))
            assert file.name in str(caught.value)
    assert not sprung.exists()


def test_a_gzip_bomb_is_refused_by_what_it_declares_and_by_what_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "tmp"
    work.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(work))
    file = tmp_path / "data_0.ckpt.gz"
    bomb = gzip.compress(b"\0" * (40 << 20), 9)
    file.write_bytes(bomb)
    with pytest.raises(DraftscopeError, match=r"data_0\.ckpt\.gz: declares 41,943,040 bytes"):
        list(open_source(file))
    file.write_bytes(bomb[:-4] + struct.pack("<I", 100))  # a trailer that lies
    with pytest.raises(DraftscopeError, match=r"data_0\.ckpt\.gz: gives more than 16,777,216 bytes"):
        list(open_source(file, "specforge"))
    file.write_bytes(gzip.compress(b"\0" * (9 << 20)) * 2)  # two members, each within the limit
    with pytest.raises(DraftscopeError, match="gives more than"):
        list(open_source(file, "specforge"))
    assert list(work.iterdir()) == []


def test_compressed_files_cut_anywhere_are_named(tmp_path: Path) -> None:
    unit, _ = PACKED["specforge"](tmp_path, a_sample(), 0)
    whole = unit.read_bytes()
    for point in (0, 1, 2, 10, 17, 18, len(whole) // 2, len(whole) - 9, len(whole) - 5, len(whole) - 1):
        unit.write_bytes(whole[:point])
        with pytest.raises(DraftscopeError, match=r"data_0\.ckpt\.gz"):
            list(open_source(unit))


def test_entries_of_an_archive_lead_nowhere(tmp_path: Path) -> None:
    """Names in a zip archive are never used as paths."""
    file = tmp_path / "data_0.pt"
    torch.save(v1_record(a_sample()), file)
    with zipfile.ZipFile(file) as archive:
        held = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for entry, content in held.items():
            archive.writestr(entry, content)
        archive.writestr("../../outside", b"x")
    before = {path.name for path in tmp_path.parent.iterdir()}
    said = attempt(file, None)[1]
    assert not said or file.name in said
    assert {path.name for path in tmp_path.parent.iterdir()} == before


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SHARED], indirect=True)  # one unit of those is a folder
def test_bad_files_among_good_ones_are_counted_and_bad_ones_alone_stop(name: str, tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """The command line: a folder counts, a file named directly stops, --skip-bad counts there too."""
    write_one(name, tmp_path / "d", 1)
    unit, file = write_one(name, tmp_path / "d", 2)
    good = unit.read_bytes()
    file.write_bytes(good[: len(good) // 2])
    out = str(tmp_path / "scan.bin")
    assert run(["scan", str(tmp_path / "d"), "-o", out]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"read as {name}" in said and "skipped" in said and file.name in said
    assert run(["inspect", str(unit)]) == 3
    assert run(["inspect", str(unit), "--format", name, "--skip-bad"]) == 3
    said = capsys.readouterr().err
    assert "Traceback" not in said and file.name in said
    assert run(["inspect", str(unit), str(tmp_path / "d"), "--skip-bad"]) in (0, 1)


def test_an_unknown_format_lists_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_one("plain", tmp_path, 0)
    for command in (["inspect", str(tmp_path)], ["scan", str(tmp_path), "-o", str(tmp_path / "f")],
                    ["compare", str(tmp_path), str(tmp_path)], ["diagnose", "--train", str(tmp_path)]):
        assert run([*command, "--format", "arrows"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert all(known in said for known in FORMATS)


def test_layouts_that_differ_are_passed_over_when_asked(tmp_path: Path) -> None:
    write_one("plain", tmp_path / "d", 0)
    write_one("plain", tmp_path / "d", 1, a_sample(width=16))
    out = str(tmp_path / "scan.bin")
    assert run(["scan", str(tmp_path / "d"), "-o", out]) == 3
    assert run(["scan", str(tmp_path / "d"), "-o", out, "--skip-bad"]) == 0


SHAPE = st.lists(st.integers(0, 7), min_size=0, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8])
VALUE = st.one_of(
    st.builds(lambda shape, dtype: torch.zeros(shape).to(dtype), SHAPE, DTYPES),
    st.sampled_from([None, 3, "text", [1, 2], [], {"a": torch.ones(2)}, True, [torch.ones(2, 3), torch.ones(2, 3)]]),
)
KEYS = ["input_ids", "token_ids", "loss_mask", "hidden_state", "hidden_states", "aux_hidden_state", "aux_hidden_states", "target",
        "target_hiddens", "last_hidden_states", "attention_mask", "batch", "hidden_states_prenorm", "packed_loss_mask", "value"]


@PERSISTENT
@given(record=st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=6), nested=st.sampled_from(["dict", "list", "batch"]))
def test_no_record_makes_more_than_an_error_or_a_sequence(tmp_path: Path, record: dict[str, Any], nested: str) -> None:
    file = tmp_path / "data_0.pt"
    torch.save({"dict": record, "list": [record], "batch": {"batch": record, "step": 1}}[nested], file)
    for format in (None, *TORCH):
        items, said = attempt(file, format)
        assert items or file.name in said
        for item in items:
            assert item.states.dim() == 3 and len(item.states) == len(item.token_ids) > 0
            assert item.loss_mask is None or len(item.loss_mask) == len(item.token_ids)


@PERSISTENT
@given(content=st.binary(max_size=120), suffix=st.sampled_from([".json", ".jsonl", ".ckpt", ".ckpt.gz", ".pt", ".safetensors"]))
def test_no_bytes_make_more_than_an_error(tmp_path: Path, content: bytes, suffix: str) -> None:
    file = tmp_path / f"x{suffix}"
    file.write_bytes(content)
    for format in (None, "sglang-response", "specforge", "sglang-dump", "sglang-dumper", "vllm-extract", "speculators"):
        with pytest.raises(DraftscopeError, match=rf"x\{suffix}|none of|no file|Arrow"):
            list(open_source(file, format))


def test_a_large_tree_is_known_by_a_few_of_its_files(tmp_path: Path) -> None:
    """Bounded work: only some of the files are opened before the first is read."""
    write_one("specforge", tmp_path, 0)
    healthy = (tmp_path / "rows_0-2000" / "data_0.ckpt").read_bytes()
    (tmp_path / "rows_0-2000" / "data_0.ckpt").unlink()
    for group in range(4):
        folder = tmp_path / f"rows_{group}-x"
        folder.mkdir()
        for number in range(250):
            (folder / f"data_{group * 250 + number}.ckpt").symlink_to(tmp_path / "one")
    (tmp_path / "one").write_bytes(healthy)
    opened: list[str] = []
    real = zipfile.ZipFile.__init__

    def counting(self: zipfile.ZipFile, file: Any, *args: Any, **more: Any) -> None:
        opened.append(str(file))
        real(self, file, *args, **more)

    zipfile.ZipFile.__init__ = counting  # type: ignore[method-assign]
    try:
        source = open_source(tmp_path)
    finally:
        zipfile.ZipFile.__init__ = real  # type: ignore[method-assign]
    assert len(source) == 1000 and source.format == "specforge"
    assert len(opened) < 300
    assert [path.name for path in source.files[:3]] == ["data_0.ckpt", "data_1.ckpt", "data_2.ckpt"]  # type: ignore[attr-defined]


def test_memory_stays_bounded_while_a_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_0.ckpt.gz").write_bytes(gzip.compress(b"\0" * (200 << 20), 1)[:-4] + struct.pack("<I", 7))
    code = f"""
import resource
from draftscope.errors import DraftscopeError
from draftscope.states.opening import open_source
from pathlib import Path
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    open_source(Path({str(tmp_path / 'data_0.ckpt.gz')!r}), 'specforge').items(0)
except DraftscopeError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout and int(done.stdout) < 64_000, done.stderr  # KiB
