"""No bad file gets more than a clear answer out of the command line: exit code 1 or 3, the file named, never a traceback."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import random_draft, save_target

from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import save_native
from draftscope.states.capture import write_trace
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample, Trace


def inspected(tmp_path: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    out.unlink(missing_ok=True)
    code = run(["inspect", *map(str, arguments), "--json", str(out)])
    return code, json.loads(out.read_text())


def refused(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str], *more: object) -> None:
    """Exit code 3; the error names the file, on stderr and in the JSON."""
    code, found = inspected(tmp_path, path, *more)
    err = capsys.readouterr().err
    assert code == 3, err
    assert "Traceback" not in err and "internal error" not in err
    assert found["verdict"] == "undecided" and found["findings"] == [] and found["next"]
    assert path.name in found["next"][0] and "draftscope:" in err


def a_file(kind: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    states = torch.randn(5, 4, 6)
    if kind == "plain":
        write_sample(folder / "hs_1.safetensors", Sample("", torch.arange(5), states, torch.ones(5).bool(), ("a", "b", "c", "d")))
        return folder / "hs_1.safetensors"
    if kind == "capture":
        write_trace(folder / "r1.safetensors", Trace("", states.flatten(1), torch.arange(5), torch.ones(5).bool()))
        return folder / "r1.safetensors"
    held = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5).long(), "hidden_states": list(states.unbind(1))}
    torch.save(held, folder / "data_1.pt")
    return folder / "data_1.pt"


@pytest.mark.parametrize("kind", ["plain", "capture", "torch"])
def test_cut_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut in the length, in the header, at its end, in each tensor, one byte short."""
    file = a_file(kind, tmp_path / "d")
    whole = file.read_bytes()
    points = {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1}
    if file.suffix == ".safetensors":
        length = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8 : 8 + length])
        points |= {8 + length // 2, 8 + length - 1, 8 + length}
        points |= {8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    for point in sorted(points):
        file.write_bytes(whole[:point])
        refused(tmp_path, file, capsys)
        refused(tmp_path, file.parent, capsys)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), name=st.sampled_from(["hs_0.safetensors", "x.pt", "x.json", "x.bin", "config.json"]))
def test_arbitrary_bytes_under_any_name(tmp_path: Path, content: bytes, name: str) -> None:
    folder = tmp_path / "d"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / name).write_bytes(content)
    for path in (folder / name, folder):
        code, found = inspected(tmp_path, path)
        assert code == 3 and found["verdict"] == "undecided"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_in_good_files(tmp_path: Path, data: st.DataObject) -> None:
    """A wrong byte in the header or the pickle may make the file another valid one; it never gets further than an answer."""
    kind = data.draw(st.sampled_from(["plain", "capture", "torch"]))
    file = a_file(kind, tmp_path / kind)
    whole = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole), 600) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(whole)
    code, found = inspected(tmp_path, file, "--norms", "--as", "speculators")
    assert code in (0, 1, 2, 3)
    assert (code >= 2) == (found["verdict"] == "undecided")


CONFIGS = ["", "[]", "{", "null", '{"model_type": 3}', '{"model_type": "llama"}', "\x00", "[" * 100000, '{"text_config": []}',
           '{"model_type": "llama", "hidden_size": "wide", "num_hidden_layers": -1}']


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("kind", ["draft", "target"])
def test_broken_configurations(kind: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / kind
    if kind == "draft":
        save_native(folder, random_draft(), None)
    else:
        save_target(folder)
    (folder / "config.json").write_text(text)
    refused(tmp_path, folder, capsys)


@pytest.mark.parametrize("kind", ["draft", "target"])
def test_cut_and_missing_weights(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / kind
    if kind == "draft":
        save_native(folder, random_draft(), None)
    else:
        save_target(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for point in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:point])
        refused(tmp_path, folder, capsys)
    weights.unlink()
    refused(tmp_path, folder, capsys)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../../../etc/passwd"}}')
    refused(tmp_path, folder, capsys)
    (folder / "model.safetensors.index.json").write_text("[1]")
    refused(tmp_path, folder, capsys)


def test_paths_that_lead_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    for name in ("loop", "dangling", "empty", "nowhere"):
        refused(tmp_path, tmp_path / name, capsys)


def test_links_and_folders_that_call_themselves_data(tmp_path: Path) -> None:
    folder = a_file("plain", tmp_path / "d").parent
    (folder / "hs_2.safetensors").symlink_to(folder / "gone")
    (folder / "hs_3.safetensors").mkdir()
    (folder / "hs_4.safetensors").symlink_to(folder / "hs_4.safetensors")
    code, found = inspected(tmp_path, folder)
    assert code == 1 and found["inspected"][0]["items"] == 1
    assert {group["cause"]: group["files"] for group in found["inspected"][0]["skipped"]} == {"foreign": 1, "broken": 2}


def test_names_and_labels_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    tensors = {"hidden_states": torch.randn(3, 2, 4), "token_ids": torch.arange(3)}
    metadata = {"labels": json.dumps(["\x1b[31mred", "a\u202eb"]), "engine": "x\ny\x07"}
    save_file(tensors, folder / "hs_\x1b[2J.safetensors", metadata)
    (folder / "bad\x1b[31m.safetensors").write_bytes(b"x")
    assert run(["inspect", "--norms", str(folder)]) == 1
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert run(["inspect", str(folder / "bad\x1b[31m.safetensors"), str(folder / "n\x1b[31m")]) == 3
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("part", ["config", "nested", "weights", "folder"])
def test_a_target_that_cannot_be_read(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = a_file("plain", tmp_path / "d")
    target = save_target(tmp_path / "target")
    if part in ("config", "nested"):
        (target / "config.json").write_text("{" if part == "config" else "[" * 100000)
    elif part == "weights":
        (target / "model.safetensors").write_bytes(b"short")
    else:
        target = tmp_path / "gone"
    code, found = inspected(tmp_path, file, "--target", target)
    assert code == 3 and target.name in found["next"][0] and "Traceback" not in capsys.readouterr().err


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = a_file("plain", tmp_path / "d")
    assert run(["inspect"]) == 2
    assert run(["inspect", str(file), "--samples", "-1"]) == 2
    assert run(["inspect", str(file), "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "Traceback" not in capsys.readouterr().err
