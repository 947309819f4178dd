"""Much and large: many files in a folder, a sample of more than a gigabyte, names in the order of their numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from state_files import write_one

from draftscope.states import mapped, places, tensorfile
from draftscope.states.opening import open_source
from draftscope.states.places import Entry, Place

LIMIT = 512
"""MiB that the process may ever hold, pages of mapped files among them."""
RSS = """
import sys
from draftscope.cli.main import run
code = run(["inspect", "--quiet", "--threads", "2", *sys.argv[1:]])
# Not ru_maxrss, in which a child begins with what its parent held.
print(code, next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_many_files_are_listed_once_and_few_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = write_one("plain", tmp_path / "seed", 0)
    content = first.read_bytes()
    folder = tmp_path / "d"
    folder.mkdir()
    for number in range(20_000):
        # Empty but for one in a thousand.
        handle = os.open(folder / f"hs_{number}.safetensors", os.O_WRONLY | os.O_CREAT)
        if number % 1000 == 0:
            os.write(handle, content)
        os.close(handle)
    opened: list[Path] = []
    listed: list[Place] = []
    first_open, first_list = tensorfile._Mapped.__init__, places.listing

    def counted(self: tensorfile._Mapped, path: Path) -> None:
        opened.append(path)
        first_open(self, path)

    def noted(path: Place) -> list[Entry]:
        listed.append(path)
        return first_list(path)

    monkeypatch.setattr(tensorfile._Mapped, "__init__", counted)
    monkeypatch.setattr("draftscope.states.folder.listing", noted)
    source = open_source(folder)
    assert len(source) == 20_000 and listed == [folder]
    assert len(set(opened)) <= 32 and len(opened) <= 160
    names = [file.name for file in source.files]  # type: ignore[attr-defined]
    assert names == [f"hs_{number}.safetensors" for number in range(20_000)]
    assert "hs_2.safetensors before hs_10.safetensors, which sorting as text turns round" in source.order  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
def test_a_sample_of_more_than_a_gigabyte_is_inspected_in_half_of_one(tmp_path: Path) -> None:
    rows, width = 20_000, 7168
    size = rows * 4 * width * 2
    header = {"hidden_states": {"dtype": "BF16", "shape": [rows, 4, width], "data_offsets": [0, size]},
              "token_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [size, size + 8 * rows]}}
    text = json.dumps(header).encode()
    file = tmp_path / "hs_0.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)  # the rest is a hole: zeros
    os.truncate(file, 8 + len(text) + size + 8 * rows)
    assert _peak(file) < LIMIT < size / 2**20 / 2


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
def test_a_torch_file_whose_slots_lie_apart_is_put_together_on_disk(tmp_path: Path) -> None:
    rows, width = 6000, 7168
    entry = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    held = {"input_ids": torch.arange(rows), "hidden_states": [entry, entry.roll(1, 0), entry.roll(2, 0), entry.roll(3, 0)]}
    torch.save(held, tmp_path / "data_0.pt")
    assert (tmp_path / "data_0.pt").stat().st_size > 300 * 2**20
    assert _peak(tmp_path / "data_0.pt", "--norms") < LIMIT


def _peak(file: Path, *more: str) -> int:
    done = subprocess.run([sys.executable, "-c", RSS, str(file), *more], capture_output=True, text=True, check=True, timeout=600)
    code, peak = map(int, done.stdout.split()[-2:])
    assert code in (0, 1), done.stderr
    return peak


def test_released_memory_keeps_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file it is read again; memory that is no file's is left alone."""
    monkeypatch.setattr(mapped, "LARGE", 1)
    monkeypatch.setattr(mapped, "PIECE", 5000)
    draw = torch.Generator().manual_seed(0)
    for rows, width in ((1000, 64), (3, 5), (1, 4096), (5000, 1)):
        plain = torch.randn(rows, width, generator=draw)
        on_disk = mapped.room(plain.shape, plain.dtype)
        mapped.fill(on_disk[:, None], [(0, plain)])
        kept = plain.clone()
        for tensor in (on_disk, plain, on_disk[:, : width // 2 or 1], plain[::2]):
            mapped.release(tensor)
        assert torch.equal(on_disk, kept) and torch.equal(plain, kept)
        parts = [plain, plain.roll(1, 0).double(), on_disk]
        assert torch.equal(mapped.stacked(parts), torch.stack([part.double() for part in parts], 1))
