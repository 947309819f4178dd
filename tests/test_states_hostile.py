"""Headers and sizes that lie: an error, never an allocation."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from state_files import a_sample

from draftscope.errors import DraftscopeError
from draftscope.states import capture, plain
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample, Trace

PERSISTENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Balloon:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return (bytearray, (1 << 42,))


HEADERS = st.one_of(
    st.binary(max_size=64),
    st.builds(
        lambda name, dtype, shape, start, end, extra: json.dumps({
            name: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}, **extra}).encode(),
        st.sampled_from(["hidden_states", "token_ids", "fc_input", "x"]),
        st.sampled_from(["F32", "BF16", "I64", "F4", "C64", "nope"]),
        st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63 - 1, 2**64 - 1, -1]), max_size=4),
        st.integers(-1, 40), st.integers(-1, 2**64),
        st.sampled_from([{}, {"__metadata__": {"labels": "["}}, {"__metadata__": 3},
                         {"token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}]),
    ),
)


def attempt(path: Path, name: str | None) -> tuple[list[Sample | Trace] | None, str]:
    try:
        return list(open_source(path, format=name)), ""
    except DraftscopeError as error:
        return None, str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=HEADERS, declared=st.one_of(st.none(), st.integers(0, 2**64 - 1)), body=st.binary(max_size=48))
def test_no_header_makes_more_than_an_error(tmp_path: Path, header: bytes, declared: int | None, body: bytes) -> None:
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if declared is None else declared) + header + body)
    for name in (None, plain.NAME, capture.NAME):
        items, said = attempt(path, name)
        assert path.name in said if items is None else len(items) == 1 and len(items[0].token_ids) >= 1


def test_sizes_declared_by_a_file_allocate_nothing(tmp_path: Path) -> None:
    """In a process of its own with 3 GB of address space above what the imports take: each file is refused as a file."""
    huge = {"hidden_states": {"dtype": "F32", "shape": [2**40, 4, 64], "data_offsets": [0, 2**50]}}
    header = json.dumps(huge).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 2**62) + header)
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", 99_000_000) + header)
    expanded = {"input_ids": torch.arange(1).expand(10**12), "hidden_states": [torch.ones(1, 1).expand(10**9, 7168)] * 4}
    torch.save(expanded, tmp_path / "d.pt")
    torch.save({"input_ids": torch.arange(6), "hidden_states": [torch.ones(6, 2)], "extra": Balloon()}, tmp_path / "e.pt")
    code = f"""
import resource, sys
from pathlib import Path
from draftscope.errors import DraftscopeError
from draftscope.states.opening import open_source
size = int(open('/proc/self/statm').read().split()[0]) * {resource.getpagesize()}
resource.setrlimit(resource.RLIMIT_AS, (size + 3 * 2**30,) * 2)
for path in sorted(Path({str(tmp_path)!r}).iterdir()):
    try:
        list(open_source(path))
    except DraftscopeError as error:
        print(path.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["a.safetensors", "b.safetensors", "c.safetensors", "d.pt", "e.pt"], done.stderr


def test_reading_one_row_of_a_large_sample_reads_little(tmp_path: Path) -> None:
    """Mapped, not loaded: 400 MB on disk, one row touched."""
    path = tmp_path / "hs_0.safetensors"
    header = json.dumps({"hidden_states": {"dtype": "F32", "shape": [25000, 4, 1000], "data_offsets": [0, 400_000_000]},
                         "token_ids": {"dtype": "I64", "shape": [25000], "data_offsets": [400_000_000, 400_200_000]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 400_200_000)  # a sparse file
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (sample,) = open_source(path)
    assert float(sample.states[20000, 2].sum()) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_bytes_of_the_library_are_what_others_read(tmp_path: Path) -> None:
    """The writer's file through safetensors alone, without the reader here."""
    sample = a_sample()
    write_sample(tmp_path / "hs_0.safetensors", sample)
    loaded = load_file(tmp_path / "hs_0.safetensors")
    assert set(loaded) == {"hidden_states", "token_ids", "loss_mask"}
    assert torch.equal(loaded["hidden_states"], sample.states) and loaded["token_ids"].dtype == torch.int64
    assert len(save(loaded)) == (tmp_path / "hs_0.safetensors").stat().st_size
