"""s3:// URLs against a real server: every format, odd names, what travels, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bucket import Bucket, endpoint_fixture, s3_fixture  # noqa: F401 (fixtures)
from safetensors.torch import save_file
from state_files import a_sample, write_one
from test_places import ODD, same

from draftscope.cli.main import run
from draftscope.errors import DraftscopeError
from draftscope.states.opening import FORMATS, open_source
from draftscope.states.places import Remote, Unreachable, place
from draftscope.states.plain import write_sample
from draftscope.states.tensorfile import TensorFile

pytestmark = pytest.mark.remote


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_folder_in_a_bucket_is_the_source_it_is_on_disk(name: str, s3: Bucket, tmp_path: Path) -> None:
    if name == "speculators":
        pytest.importorskip("pyarrow")
    folder = tmp_path / "data"
    for number in (10, 2, 1):
        write_one(name, folder, number)
    near, far = open_source(folder), open_source(s3.put(folder))
    assert (far.format, len(far)) == (near.format, len(near))
    assert [file.name for file in far.files] == [file.name for file in near.files]  # type: ignore[attr-defined]
    for one, other in zip(near, far, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("odd", [*ODD, "a?b", "versionId=x", "ends in ?"])
def test_odd_names_are_names(odd: str, s3: Bucket, tmp_path: Path) -> None:
    write_sample(tmp_path / odd / odd / f"{odd}_2.safetensors", a_sample())
    url = s3.put(tmp_path / odd)
    (far,) = open_source(f"{url}/{odd}")
    assert far.name == f"{odd}_2.safetensors" and torch.equal(far.states, a_sample().states)
    assert len(list(open_source(f"{url}/{odd}/{odd}_2.safetensors"))) == 1


def test_rows_travel_alone(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    states = torch.randn(3000, 4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"hidden_states": states, "token_ids": torch.arange(3000)}, folder / "hs_0.safetensors")
    path = place(f"{s3.put(folder)}/hs_0.safetensors")
    assert isinstance(path, Remote)
    came: list[int] = []
    plain = Remote.read_range

    def counted(self: Remote, start: int, end: int) -> bytes:
        held = plain(self, start, end)
        came.append(len(held))
        return held

    monkeypatch.setattr(Remote, "read_range", counted)
    assert torch.equal(TensorFile(path).rows("hidden_states", 2000, 2005), states[2000:2005])
    assert sum(came) <= 2**16 + 5 * 4 * 64 * 2


def test_inspect_scan_and_compare(s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        write_one("plain", tmp_path / "data", number)
    url = s3.put(tmp_path / "data")
    results = []
    for path in (str(tmp_path / "data"), url):
        code = run(["inspect", path, "--norms", "--json", str(tmp_path / "out.json"), "-q"])
        held = json.loads((tmp_path / "out.json").read_text())
        held["inspected"][0]["path"] = ""
        results.append((code, held))
    assert results[0] == results[1]
    assert run(["scan", url, "-o", str(tmp_path / "fp"), "-q"]) == 0
    assert run(["compare", str(tmp_path / "fp"), url, "-q"]) == 0
    capsys.readouterr()


def test_credentials_in_the_url_are_used_and_not_shown(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capfd: pytest.CaptureFixture[str]) -> None:
    write_one("plain", tmp_path / "data", 1)
    url = s3.put(tmp_path / "data").replace("s3://", "s3://AKIAME:open/sesame@")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert run(["inspect", url, "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert "open/sesame" not in out + err and "AKIAME" not in out + err and "s3://states/data" in out


def test_no_bucket_no_server_and_no_credentials_are_named(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DraftscopeError, match=r"s3://nowhere/x: does not exist"):
        open_source("s3://nowhere/x")
    with pytest.raises(DraftscopeError, match=r"s3://states/nothing: does not exist"):
        open_source("s3://states/nothing")
    type(s3.fs).clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Unreachable, match=r"s3://states/x: cannot be reached .*AWS_ENDPOINT_URL"):
        open_source("s3://states/x")
    type(s3.fs).clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Unreachable, match="AWS_ACCESS_KEY_ID"):
        open_source("s3://states/x")


def test_many_objects_are_listed_by_few_requests(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,200 objects: two pages of a listing, and a look into a few dozen of them."""
    write_one("plain", tmp_path, 0)
    content = next(tmp_path.rglob("*.safetensors")).read_bytes()
    s3.fs.pipe({f"states/many/hs_{number}.safetensors": content for number in range(1200)})
    s3.fs.invalidate_cache()
    type(s3.fs).clear_instance_cache()
    asked: list[str] = []
    reached = Remote.reached
    monkeypatch.setattr(Remote, "reached", lambda self, call, *more, **options: asked.append(call.__name__) or reached(
        self, call, *more, **options))
    source = open_source("s3://states/many")
    assert len(source) == 1200 and [file.name for file in source.files[:3]] == [  # type: ignore[attr-defined]
        "hs_0.safetensors", "hs_1.safetensors", "hs_2.safetensors"]
    assert len(asked) <= 80
