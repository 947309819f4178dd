"""Unlucky use: odd dtypes, pipes where files are meant, claims that cannot be, outputs that point at inputs, full disks."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from state_files import SHARED, WRITERS, a_sample, a_trace, dump_pass, v1_file, write_one
from support import within
from tiny import DRAFT, TARGET

from draftscope import stopping
from draftscope.cli.main import run
from draftscope.eagle3.tree import claimed_depth
from draftscope.errors import DraftscopeError
from draftscope.pipeline.prepared import Folder
from draftscope.scan.fingerprint import load_fingerprint
from draftscope.states import capture as plain_capture
from draftscope.states import plain
from draftscope.states.capture import write_trace
from draftscope.states.dtypes import NARROW, common
from draftscope.states.errors import StatesError
from draftscope.states.opening import open_source
from draftscope.states.types import from_trace

CONTRACT = {0, 1, 2, 3, 5}
EIGHT_BITS = [name for name in WRITERS if name not in {"sglang-response", *SHARED}]
"""Decimal text has no dtype, and dumps need arithmetic to be written."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A read of a pipe without a writer never ends: it becomes an error."""
    with within(60):
        yield


def in_contract(*arguments: object) -> int:
    code = run([str(argument) for argument in arguments])
    assert code in CONTRACT, arguments
    return code


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bit_states_are_read_exactly(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sample = a_sample(7, 4, 8)
    sample.states = sample.states.float().abs().to(dtype)
    write_one(name, tmp_path / "d", 0, sample)
    source = open_source(tmp_path / "d", name)
    (item,) = source
    states = item.states if hasattr(item, "states") else item.fc_input
    wanted = sample.states.double()
    if not hasattr(item, "states"):
        wanted = wanted[:, :3].flatten(1)
    assert states.dtype == torch.bfloat16 and torch.equal(states.double(), wanted)
    assert any("widened to bfloat16" in note for note in source.notes)
    out = tmp_path / "f"
    assert in_contract("scan", tmp_path / "d", "--format", name, "-o", out) == 0
    mean = load_fingerprint(out).statistics(0).dimensions.result().mean
    torch.testing.assert_close(mean, sample.states[:, 0].double().mean(0))
    assert in_contract("inspect", tmp_path / "d", "--format", name, "--norms") in (0, 1)
    in_contract("compare", tmp_path / "d", out, "--format", name)


def test_two_values_to_a_byte_are_no_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = json.dumps({"token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
                         "hidden_states": {"dtype": "F4", "shape": [2, 4, 16], "data_offsets": [16, 80]}}).encode()
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(80))
    for arguments in (["inspect", path], ["scan", path, "-o", tmp_path / "f"],
                      ["convert", path, "--to", "plain", "-o", tmp_path / "c"]):
        assert in_contract(*arguments) == 3
        assert "float4" in capsys.readouterr().err
    assert not (tmp_path / "f").exists() and not (tmp_path / "c").exists()


def test_entries_of_unlike_dtypes_lose_nothing(tmp_path: Path) -> None:
    dtypes = [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    sample = a_sample(5, 4, 6)
    entries = [entry.to(dtype) for entry, dtype in zip(sample.states.unbind(1), dtypes, strict=True)]
    v1_file(tmp_path / "data_0.pt", sample, hidden_states=entries)
    (read,) = open_source(tmp_path)
    assert torch.equal(read.states.double(), torch.stack([entry.double() for entry in entries], 1))


@pytest.mark.parametrize("one", sorted(NARROW | {torch.float16, torch.bfloat16, torch.float32, torch.float64}, key=str), ids=str)
def test_the_common_dtype_holds_every_value_of_both(one: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(one) if one.itemsize == 1 else torch.randn(256, dtype=torch.float64).to(one)
    for other in [*NARROW, torch.float16, torch.bfloat16, torch.float32, torch.float64]:
        wide = common([one, other])
        assert one == other or torch.equal(values.to(wide).double().nan_to_num(7), values.double().nan_to_num(7))


def test_a_served_capture_of_eight_bits_is_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for i in range(2):
        trace = _served(i)
        trace.fc_input = trace.fc_input.to(torch.float8_e4m3fn)
        write_trace(tmp_path / "c" / f"r{i}.safetensors", trace)
    in_contract("diagnose", "--serve", tmp_path / "c", "--draft", DRAFT, "--target", TARGET)


# Pipes, devices.


@pytest.mark.parametrize("name", ["config.json", "capture.json", "data_config.json", "model.safetensors.index.json", "x.jsonl",
                                  "d.pt", "e.ckpt.gz", "hs_9.safetensors", "state.json", "tokenizer.json", "verified.json"])
def test_a_pipe_in_a_folder_is_passed_over(name: str, tmp_path: Path) -> None:
    write_one("plain", tmp_path / "d", 0)
    write_one("capture", tmp_path / "c", 0)
    for folder in ("d", "c", "m"):
        (tmp_path / folder).mkdir(exist_ok=True)
        os.mkfifo(tmp_path / folder / name)
        in_contract("inspect", tmp_path / folder)
        in_contract("scan", tmp_path / folder, "-o", tmp_path / "f")
        in_contract("convert", tmp_path / folder, "--to", "plain", "-o", tmp_path / f"out-{folder}")
        in_contract("lint", tmp_path / folder, "--for", "vllm@0.32")
        in_contract("lint", DRAFT, "--for", "vllm@0.32", "--target-config", tmp_path / folder)
    in_contract("capture", "verify", tmp_path / "c")


def test_json_that_never_ends_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link to a device has no size and gives bytes for ever."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert in_contract("inspect", tmp_path) == 3
    assert in_contract("lint", DRAFT, "--for", "vllm@0.32", "--target-config", tmp_path) in (2, 3)
    assert "config.json" in capsys.readouterr().err


# Claims of a capture.


def _served(seed: int, **changes: Any) -> Any:
    trace = a_trace(5, (2, 0, 3), 3, 192, seed=seed)
    trace = replace(trace, last_hidden=torch.randn(17, 64, generator=torch.Generator().manual_seed(seed)), fc_output=None,
                    draft_states=None, meta={"engine": "vllm"})
    return replace(trace, **changes)


@pytest.mark.parametrize("claim", [0, -3, 17, 10**9, 10**30, True, 2.5, "3", None, [], {}, float("nan")])
def test_a_depth_that_cannot_be_is_not_believed(claim: Any, tmp_path: Path) -> None:
    assert claimed_depth({"num_spec_tokens": claim}) is None and claimed_depth({"num_spec_tokens": 16}) == 16
    (tmp_path / "c").mkdir()
    write_trace(tmp_path / "c" / "r.safetensors", _served(0, meta={"num_spec_tokens": claim}))
    out = tmp_path / "o.json"
    assert in_contract("replay", "--draft", DRAFT, "--target", TARGET, "--states", tmp_path / "c", "--json", out) == 0
    assert json.loads(out.read_text())["k"] == 3


@pytest.mark.parametrize("counts", [[-1, 0, 3], [-(2**62), -1, -5], [2**62, 9, 4]])
def test_counts_that_cannot_be_are_left_out_and_found(counts: list[int], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    trace = _served(0, accepted_counts=torch.tensor(counts))
    write_trace(tmp_path / "c" / "r.safetensors", trace)
    steps = from_trace(trace, 3).steps
    assert steps is not None and (steps.accepted >= 0).all() and steps.left_out == sum(count < 0 for count in counts)
    assert in_contract("capture", "verify", tmp_path / "c") == 1
    assert in_contract("replay", "--draft", DRAFT, "--target", TARGET, "--states", tmp_path / "c") == 0
    in_contract("diagnose", "--serve", tmp_path / "c", "--draft", DRAFT, "--target", TARGET)


def test_a_prefix_is_not_taken_from_rows_of_another_width(tmp_path: Path) -> None:
    first = a_trace(6, (), 3, 12)
    write_trace(tmp_path / "a.safetensors", replace(first, fc_input=torch.randn(6, 9)))
    second = replace(a_trace(4, (), 3, 12, seed=1), prefix_token_ids=first.token_ids[:3])
    write_trace(tmp_path / "b.safetensors", second)
    source = plain_capture.open(tmp_path)
    assert [len(trace.fc_input) for trace in source] == [6, 4] and "in no other file" in source.notes[0]
    write_trace(tmp_path / "c.safetensors", replace(first, fc_input=first.fc_input.float().to(torch.float8_e5m2)))
    wanted = torch.cat([first.fc_input[:3].float().to(torch.float8_e5m2).double(), second.fc_input.double()])
    assert torch.equal(list(plain_capture.open(tmp_path))[1].fc_input.double(), wanted)


def test_passes_of_another_width_are_left_out(tmp_path: Path) -> None:
    home = tmp_path / "TP0_PP0_Rank0_pid1"
    dump_pass(home, 0, [5, 6], [0, 1], [2], torch.randn(2, 4, 8))
    dump_pass(home, 1, [7], [2], [3], torch.randn(1, 4, 6))
    source = open_source(tmp_path)
    (trace,) = source
    assert trace.token_ids.tolist() == [5, 6] and any("widths" in note for note in source.notes)


# Outputs.


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_no_output_overwrites_states(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, file = write_one(name, tmp_path / "d", 0)
    before = file.read_bytes()
    for option in ("--json", "--html", "-o"):
        if option == "-o":
            code = in_contract("scan", tmp_path / "d", "-o", file)
        elif option == "--html":
            code = in_contract("diagnose", "--train", tmp_path / "d", "--html", file)
        else:
            code = in_contract("inspect", tmp_path / "d", "--json", file)
        assert code == 2 and file.name in capsys.readouterr().err
        assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_output_overwrites_a_checkpoint(name: str, tmp_path: Path) -> None:
    for file in DRAFT.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert in_contract("lint", tmp_path, "--for", "vllm@0.32", "--json", tmp_path / name) == 2
    assert (tmp_path / name).read_bytes() == (DRAFT / name).read_bytes()


def test_earlier_results_and_empty_files_are_overwritten(tmp_path: Path) -> None:
    write_one("plain", tmp_path / "d", 0)
    outputs = {"--json": tmp_path / "o.json", "--html": tmp_path / "o.html"}
    for empty in outputs.values():
        empty.touch()
    for _ in range(2):
        in_contract("diagnose", "--train", tmp_path / "d", *(word for pair in outputs.items() for word in pair))
        assert in_contract("scan", tmp_path / "d", "-o", tmp_path / "f") == 0
        assert all(output.stat().st_size for output in outputs.values())


@pytest.mark.parametrize(("command", "one", "other"), [
    ("scan d -o {} --json {}", "same", "same"),
    ("scan d -o {} --json {}", "same", "link"),
    ("scan d -o {} --json {}", "link", "same"),
    ("scan d -o {} --json {}", "same", "down/../same"),
    ("scan d -o {} --json {}", "same", "same.partial"),
    ("scan d -o {} --json {}", "same", "same.progress.json"),
    ("scan d -o {} --shard 1/3 --json {}", "s{i}", "s1"),
    ("compare d d --json {} --html {}", "same", "link"),
    ("diagnose --train d --json {} --html {}", "link", "same"),
    ("diagnose --train d --json {} --bundle {}", "same", "same"),
    ("diagnose --train d --html {} --bundle {}", "same", "link"),
    ("diagnose --train d --json {} --apply {}", "same", "link"),
    ("gate --baseline b --serve d --json {} --summary {}", "same", "link"),
    ("gate --serve d --write-baseline --baseline {} --json {}", "same", "link"),
    ("gate --serve d --write-baseline --baseline {} --summary {}", "same", "same"),
    ("drill --markdown {} --calibrate {}", "same", "link"),
    ("drill --markdown {} --json {}", "same", "same"),
])
def test_two_outputs_of_one_name_are_refused_before_the_work(command: str, one: str, other: str, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "down").mkdir()
    (tmp_path / "link").symlink_to("same")
    write_one("plain", tmp_path / "d", 0)
    assert in_contract(*command.format(one, other).split()) == 2
    assert "is used by --" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "down", "link"]


def test_two_outputs_may_go_to_one_device(tmp_path: Path) -> None:
    write_one("plain", tmp_path / "d", 0)
    assert in_contract("compare", tmp_path / "d", tmp_path / "d", "--json", os.devnull, "--html", os.devnull) != 2


WRITTEN = {
    "lint none": "lint", "extract none -o o": "extract", "replay --states none --draft none": "replay",
    "capture verify none": "verify", "compare none none": "compare", "demo --fault none": "diagnosis",
    "inspect none": "inspect", "prepare none -o o": "prepare",
    "convert none --to native -o o": "convert", "generate none": "generate", "train none -o o": "train",
    "capture transformers none -o o": "generate", "capture vllm -o o": "capture", "capture sglang -o o": "capture",
    "capture vllm --sweep none": "sweep", "drill --from none": "drill", "diagnose --draft none": "diagnosis",
    "gate --baseline none --serve none": "gate", "scan none -o o": "scan",
}
"""Every command that writes JSON, given what it refuses, and what it calls its JSON."""


@pytest.mark.parametrize("command", WRITTEN)
def test_json_overwrites_that_of_the_same_command_alone(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    held = tmp_path / "held.json"
    foreign = [*{*WRITTEN.values(), "baseline", "confidence", "absorbed", "progress"} - {WRITTEN[command]}, "", "no"]
    for text in (*(f'{{"schema": "draftscope.{name}/1"}}' for name in foreign),
                 f'{{"tool": {{"schema": "draftscope.{WRITTEN[command]}/1"}}}}'):
        held.write_text(text)
        assert in_contract(*command.split(), "--json", held) == 2
        assert "no earlier result" in capsys.readouterr().err
        assert held.read_text() == text
    held.write_text(f'{{\n  "schema": "draftscope.{WRITTEN[command]}/1"\n}}')
    in_contract(*command.split(), "--json", held)
    assert "no earlier result" not in capsys.readouterr().err


def test_no_file_takes_the_place_of_a_pipe_or_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_one("plain", tmp_path / "d", 0)
    os.mkfifo(tmp_path / "pipe")
    assert in_contract("scan", tmp_path / "d", "-o", tmp_path / "pipe") in (2, 3)
    assert (tmp_path / "pipe").is_fifo() and "pipe" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d", "pipe"]


# Being stopped.


@pytest.mark.parametrize("swallowed", ["an error", "nothing"])
def test_a_library_that_swallows_an_interrupt_does_not_lose_a_file(swallowed: str, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_one("plain", tmp_path, number)
    read = plain.read_sample

    def swallowing(file: Path, notes: list[str]) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**6):
                pass
        except KeyboardInterrupt:
            if swallowed == "an error":
                raise StatesError("cannot be read") from None
        return read(file, notes)

    monkeypatch.setattr(plain, "read_sample", swallowing)
    monkeypatch.setattr(stopping, "_wish", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    others = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        stopping.watch()
        source = open_source(tmp_path)
        with pytest.raises(stopping.Stopped):
            list(source)
        assert source.skipped == []
    finally:
        for number, handler in {signal.SIGINT: before, **others}.items():
            signal.signal(number, handler)


def test_two_writers_of_one_folder_do_not_write_lines_twice(tmp_path: Path) -> None:
    first = Folder(tmp_path / "out", {"seed": 0}, 8)
    with pytest.raises(DraftscopeError, match="another process"):
        Folder(tmp_path / "out", {"seed": 0}, 8)
    first.close(finished=False)
    Folder(tmp_path / "out", {"seed": 0}, 8).close(finished=True)
