"""Files behind URLs: the same as on a disk, for every format; what travels, what is refused, and that no secret is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from places import Places, places_fixture, write  # noqa: F401 (fixtures)
from safetensors.torch import save_file
from state_files import a_sample, write_one
from support import random_draft

from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import load_checkpoint, save_native
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.opening import FORMATS, open_source
from draftscope.states.places import Remote, Unreachable, local_copy, place
from draftscope.states.plain import write_sample
from draftscope.states.ranged import Ranged
from draftscope.states.tensorfile import TensorFile
from draftscope.states.types import Sample, Trace
from draftscope.target.parts import read_parts

ODD = ["a b", "50%", "a%20b", "ä–字", "a#b", "a+b&c", "it's", "a@b:c"]


@pytest.fixture(name="bucket")
def bucket_fixture(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Puts a local folder into memory://, and says its URL."""
    memory = fsspec.filesystem("memory")

    def put(folder: Path) -> str:
        url = f"memory://{folder.name}"
        for file in folder.rglob("*"):
            if file.is_file():
                memory.pipe_file(f"/{folder.name}/{file.relative_to(folder)}", file.read_bytes())
        return url

    yield put
    memory.rm("/", recursive=True)


def same(one: Sample | Trace, other: Sample | Trace) -> bool:
    if type(one) is not type(other):
        return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in type(one).__slots__]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_folder_behind_a_url_is_the_source_it_is_on_disk(name: str, tmp_path: Path, bucket: Callable[[Path], str]) -> None:
    if name == "speculators":
        pytest.importorskip("pyarrow")
    folder = tmp_path / "data"
    for number in (10, 2, 1):
        write_one(name, folder, number)
    (folder / "README.md").write_text("hello")
    near, far = open_source(folder), open_source(bucket(folder))
    assert (far.format, far.kind, len(far), far.chosen) == (near.format, near.kind, len(near), near.chosen.replace(
        str(folder), "memory://data"))
    assert [str(file) for file in far.files] == [f"memory://data/{file.relative_to(folder)}" for file in near.files]  # type: ignore[attr-defined]
    assert {skip.path for skip in far.skipped} == {skip.path.replace(str(folder), "memory://data") for skip in near.skipped}
    here, there = list(near), list(far)
    assert len(here) == len(there) == 3
    for one, other in zip(here, there, strict=True):
        assert same(one, other)


def test_one_file_behind_a_url_is_a_source(tmp_path: Path, bucket: Callable[[Path], str]) -> None:
    folder = tmp_path / "data"
    write_one("plain", folder, 3)
    (sample,) = open_source(f"{bucket(folder)}/hs_3.safetensors")
    assert torch.equal(sample.states, a_sample(seed=3).states)


@pytest.mark.parametrize("odd", ODD)
def test_odd_names_are_names(odd: str, tmp_path: Path, bucket: Callable[[Path], str]) -> None:
    folder = tmp_path / odd / odd
    write_sample(folder / f"{odd}_2.safetensors", a_sample())
    (near,) = open_source(folder)
    (far,) = open_source(bucket(tmp_path / odd) + f"/{odd}")
    assert near.name == far.name == f"{odd}_2.safetensors"


def test_only_the_bytes_of_the_rows_asked_for_travel(tmp_path: Path, bucket: Callable[[Path], str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    states = torch.randn(4000, 4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"hidden_states": states, "token_ids": torch.arange(4000)}, folder / "hs_0.safetensors")
    path = place(f"{bucket(folder)}/hs_0.safetensors")
    assert isinstance(path, Remote)
    asked: list[int] = []
    plain = Remote.read_range
    monkeypatch.setattr(Remote, "read_range", lambda self, a, b: asked.append(b - a) or plain(self, a, b))
    opened = TensorFile(path)
    assert opened.shape("hidden_states") == (4000, 4, 64) and sum(asked) <= 2**16
    asked.clear()
    assert torch.equal(opened.rows("hidden_states", 100, 110), states[100:110])
    assert torch.equal(opened.rows("hidden_states", 3990, 5000), states[3990:])
    assert asked == [10 * 4 * 64 * 2, 10 * 4 * 64 * 2]
    assert torch.equal(TensorFile(folder / "hs_0.safetensors").rows("hidden_states", 100, 110), states[100:110])


HEADERS: list[tuple[str, Any]] = [
    ("gap", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
    ("bytes for shape", {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
    ("not described", {"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 8]}}),
    ("not described", {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
    ("not described", {"a": 3}), ("no JSON object", [1]), ("no texts", {"__metadata__": {"a": 1}}),
    ("describes", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
]


@pytest.mark.parametrize(("says", "header"), HEADERS)
def test_headers_that_do_not_add_up_are_refused_here_as_by_the_library(says: str, header: Any, tmp_path: Path,
                                                                      bucket: Callable[[Path], str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    text = json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(DraftscopeError, match="is not a whole safetensors file"):
        TensorFile(folder / "x.safetensors")
    with pytest.raises(DraftscopeError, match=says):
        TensorFile(place(f"{bucket(folder)}/x.safetensors"))


def test_a_large_tensor_of_a_url_lies_on_disk(tmp_path: Path, bucket: Callable[[Path], str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    states = torch.randn(300, 4, 64, generator=torch.Generator().manual_seed(0))
    save_file({"x": states}, folder / "x.safetensors")
    for name in ("mapped.LARGE", "ranged.LARGE"):
        monkeypatch.setattr(f"draftscope.states.{name}", 1)
    monkeypatch.setattr("draftscope.states.ranged.PIECE", 1000)
    path = place(f"{bucket(folder)}/x.safetensors")
    assert isinstance(path, Remote)
    held = Ranged(path).tensor("x")
    assert torch.equal(held, states)
    with open("/proc/self/maps") as maps:
        assert any("draftscope-" in line and int(line.split("-")[0], 16) <= held.data_ptr() < int(
            line.split("-")[1].split()[0], 16) for line in maps)


def test_a_checkpoint_and_a_target_behind_urls(places: Places, tmp_path: Path, bucket: Callable[[Path], str],
                                               capsys: pytest.CaptureFixture[str]) -> None:
    save_native(tmp_path / "draft", random_draft(), None)
    url = bucket(tmp_path / "draft")
    near, far = load_checkpoint(tmp_path / "draft"), load_checkpoint(url)
    assert near.config == far.config and near.tensors.keys() == far.tensors.keys()
    assert all(torch.equal(tensor, far.tensors[name]) for name, tensor in near.tensors.items())
    target = place(bucket(places.folder))
    parts = read_parts(target)
    assert torch.equal(parts.head, read_parts(places.folder).head)
    assert run(["inspect", url]) in (0, 1)
    assert "draft checkpoint" in capsys.readouterr().out
    data = write(tmp_path / "states", places, places.entries(0, 3, 6, 8))
    assert run(["inspect", bucket(data), "--target", str(target), "--json", str(tmp_path / "out.json")]) == 1
    entries = json.loads((tmp_path / "out.json").read_text())["inspected"][0]["entries"]
    assert entries[0]["inferred"] == "embedding (boundary 0)"


def test_scan_and_compare_take_urls(tmp_path: Path, bucket: Callable[[Path], str], capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        write_one("plain", tmp_path / "data", number)
    url = bucket(tmp_path / "data")
    assert run(["scan", url, "-o", str(tmp_path / "far.fp"), "-q"]) == 0
    assert run(["compare", str(tmp_path / "data"), url, "--json", str(tmp_path / "c.json"), "-q"]) == 0
    assert run(["compare", str(tmp_path / "far.fp"), url, "-q"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(("url", "secret"), [
    ("s3://AKIAEXAMPLE:s3cr/et%2B@bucket/x", "s3cr"), ("ftp://me:hunter2@127.0.0.1:1/x", "hunter2"),
    ("https://127.0.0.1:1/x.safetensors?X-Amz-Signature=abcdef0123", "abcdef0123"),
])
def test_secrets_in_urls_are_never_shown(url: str, secret: str, capfd: pytest.CaptureFixture[str], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    code = run(["inspect", url, "--json", str(tmp_path / "out.json")])
    out, err = capfd.readouterr()
    assert code == 3 and secret not in out + err + (tmp_path / "out.json").read_text()


def test_what_is_no_url_is_a_path_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    assert place("a:b") == Path("a:b") and place("c/d") == Path("c/d") and place(f"file://{tmp_path}") == tmp_path
    with pytest.raises(UsageError, match="no kind of URL"):
        place("gopher9://x/y")
    assert place(".") == Path() and place(" ") == Path(" ")
    for empty in ("", "file://"):
        with pytest.raises(UsageError, match="an empty path"):
            place(empty)
    assert run(["inspect", ""]) == 2 and run(["scan", "", "-o", str(tmp_path / "x.fp")]) == 2
    with pytest.raises(DraftscopeError, match="does not exist"):
        open_source("memory://nothing/here")


def test_a_connection_that_fails_midway_ends_the_reading(tmp_path: Path, bucket: Callable[[Path], str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write_one("plain", tmp_path / "data", number)
    source = open_source(bucket(tmp_path / "data"))
    items = iter(source)
    next(items)

    def broken(*_: object, **__: object) -> bytes:
        raise TimeoutError("too slow")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", broken)
    with pytest.raises(Unreachable, match="too slow"):
        list(items)
    assert not source.skipped


def test_a_local_copy_is_gone_afterwards(tmp_path: Path, bucket: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"abc")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with local_copy(place(f"{bucket(tmp_path / 'data')}/x")) as copied:
        assert copied.read_bytes() == b"abc" and copied.is_relative_to(tmp_path / "tmp")
    assert not list((tmp_path / "tmp").iterdir())
    monkeypatch.setattr("draftscope.states.places.RESERVE", 2**62)
    with pytest.raises(DraftscopeError, match="TMPDIR"), local_copy(place("memory://data/x")):
        pass
