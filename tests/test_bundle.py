"""The archive for upstream: what is in it, what must not be, the same bytes twice, within its limit."""

from __future__ import annotations

import json
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from full_disk import disk_of
from safetensors.torch import load
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.bundling import FOLDER, Scrubber, _without_tokens, write_bundle
from draftscope.cli.main import run
from draftscope.cli.outputs import own_json
from draftscope.diagnose.case import Inputs
from draftscope.errors import DraftscopeError
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.findings import Diagnosis, Evidence, Finding, Fix
from draftscope.states.opening import open_source
from draftscope.viewing.runs import Runs

TEXT = ("token_ids", "verified_ids", "draft_input_ids", "draft_token_ids")


def unpacked(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.removeprefix(f"{FOLDER}/"): archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with another layer in each slot, its files under a path that nobody else should read."""
    folder = tmp_path_factory.mktemp("acme secret project")
    rig = tiny_rig(8, 32)
    known = fault("layer-offset")
    made = rig.run(known.make(Plant.healthy((2, 4, 5)), next(iter(known.variants))), folder / "run")
    config = json.loads((made.draft / "config.json").read_text())
    (made.draft / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/alice/drafts/v3"}))
    return folder / "run"


def diagnosed(case: Path, out: Path, *options: str) -> dict[str, bytes]:
    code = run(["diagnose", "--train", str(case / "train"), "--serve", str(case / "capture"), "--draft", str(case / "draft"),
                "--target", str(TARGET), "--metrics", str(case / "counters.json"), "--quiet", "--bundle", str(out), *options])
    assert code == 1
    return unpacked(out)


def test_a_bundle_holds_the_case_and_nothing_private(case: Path, tmp_path: Path) -> None:
    files = diagnosed(case, tmp_path / "one.zip")
    assert {"README.txt", "diagnosis.json", "report.html", "report.txt", "config/draft.json", "config/target.json",
            "config/draft-tensors.json", "config/capture.json", "counters.json", "rows/train.safetensors",
            "rows/serve.safetensors"} == set(files)
    found = Diagnosis.model_validate_json(files["diagnosis.json"])
    assert found.findings[0].fault == "layer-offset"
    assert "layer-offset" in files["report.txt"].decode()
    assert json.loads(files["counters.json"])["verify_steps"] > 0
    assert json.loads(files["config/draft-tensors.json"])["fc.weight"]["shape"] == [64, 192]
    for name, content in files.items():
        for private in (b"acme", b"alice", str(tmp_path).encode(), b"/root/", b"/home/"):
            assert private not in content, f"{name} tells {private!r}"
    for side in ("train", "serve"):
        held = load(files[f"rows/{side}.safetensors"])
        assert held
        assert not [name for name in held if name.partition(".")[2] in TEXT]
        assert all(len(tensor) <= 16 for tensor in held.values())


def test_the_same_case_gives_the_same_bytes(case: Path, tmp_path: Path) -> None:
    diagnosed(case, tmp_path / "one.zip")
    diagnosed(case, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_rows_are_those_of_the_files_and_text_goes_in_when_asked_for(case: Path, tmp_path: Path) -> None:
    files = diagnosed(case, tmp_path / "one.zip", "--bundle-text", "--bundle-rows", "5")
    held = load(files["rows/train.safetensors"])
    first = next(iter(open_source(case / "train")))
    assert torch.equal(held["0.states"], first.states[:5])
    assert torch.equal(held["0.token_ids"], first.token_ids[:5])
    assert "as was asked for" in files["README.txt"].decode()
    assert not [name for name in diagnosed(case, tmp_path / "two.zip", "--bundle-rows", "0") if name.startswith("rows/")]


def test_what_is_too_large_is_left_out_in_the_order_of_its_worth(case: Path, tmp_path: Path) -> None:
    inputs = Inputs(train=case / "train")
    diagnosis = Diagnosis(verdict="undecided", next=["give --serve"])
    whole = write_bundle(tmp_path / "whole.zip", diagnosis, inputs)
    assert "rows/train.safetensors" in whole.files and set(whole.files) == set(unpacked(whole.path))
    less = write_bundle(tmp_path / "less.zip", diagnosis, inputs, limit=whole.size - 2000)
    assert (tmp_path / "less.zip").stat().st_size == less.size <= whole.size - 2000
    least = write_bundle(tmp_path / "least.zip", diagnosis, inputs, limit=4000)
    assert least.files == ("README.txt", "diagnosis.json", "report.txt")
    assert any("report.html" in one for one in least.left_out)
    with pytest.raises(DraftscopeError, match="are allowed"):
        write_bundle(tmp_path / "none.zip", diagnosis, inputs, limit=100)
    assert not (tmp_path / "none.zip").exists()


def test_quoted_text_and_token_lists_stay_out(tmp_path: Path) -> None:
    evidence = Evidence(hypothesis="h", prediction="p", measurement="m", decides="d", result="training: begin “You are ACME's”",
                        figures={"train": {"head": [5, 9, 11], "count": 8}})
    finding = Finding(fault="template", where=["serve:samples"], says="begins with “You are ACME's bot”", strength="proven",
                      recovery="needs-serving", fix=Fix(says="render as trained"), evidence=[evidence])
    diagnosis = Diagnosis(verdict="data", findings=[finding])
    write_bundle(tmp_path / "a.zip", diagnosis, Inputs())
    for name, content in unpacked(tmp_path / "a.zip").items():
        assert b"ACME" not in content, name
        assert b"11" not in content or name != "diagnosis.json"
    write_bundle(tmp_path / "b.zip", diagnosis, Inputs(), text=True)
    assert b"ACME" in unpacked(tmp_path / "b.zip")["report.html"]


@pytest.mark.parametrize(("given", "wanted"), [
    ("/data/alice/run 7/states holds nothing", "<train> holds nothing"),
    ("see /mnt/nfs/x/config.json, row 3", "see <path>/config.json, row 3"),
    ("~/models/llama/config.json", "<path>/config.json"),
    (r"C:\Users\alice\draft\model.safetensors", r"<path>/model.safetensors"),
    ("http://gpu7.acme.local:8000/metrics answers", "http://<place> answers"),
    ("s3://key:secret@bucket/states", "s3://<place>"),
    ("meta-llama/Llama-3.1-8B-Instruct, 3/4 of the rows, and/or", "meta-llama/Llama-3.1-8B-Instruct, 3/4 of the rows, and/or"),
    ("“layer 2” is boundary 15", "“layer 2” is boundary 15"),
    ("the sample has “hello”", "the sample has “(5 characters of text)”"),
])
def test_what_tells_of_the_machine_is_replaced(given: str, wanted: str) -> None:
    assert Scrubber({"/data/alice/run 7/states": "<train>"}, ["layer 2"], text=False).string(given) == wanted


def test_only_a_bundle_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "photos.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "mine")
    before = other.read_bytes()
    assert run(["diagnose", "--draft", str(DRAFT), "--bundle", str(other)]) == 2
    assert "no earlier result" in capsys.readouterr().err
    assert other.read_bytes() == before
    run(["diagnose", "--draft", str(DRAFT), "--quiet", "--bundle", str(tmp_path / "a.zip")])
    first = (tmp_path / "a.zip").read_bytes()
    run(["diagnose", "--draft", str(DRAFT), "--quiet", "--bundle", str(tmp_path / "a.zip")])
    assert (tmp_path / "a.zip").read_bytes() == first


def test_an_unpacked_bundle_is_a_run(case: Path, tmp_path: Path) -> None:
    """What looks for diagnoses reads the beginning of a file; the evidence may be longer than that."""
    diagnosed(case, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path)
    held = (tmp_path / FOLDER / "diagnosis.json").read_bytes()
    assert len(held) > 4096 and own_json("diagnosis")(held[:4096])
    (found,) = Runs(tmp_path).all()
    assert found.name == f"{FOLDER}/diagnosis.json" and found.diagnosis is not None
    keys = list(json.loads(held))
    assert keys[0] == "schema" and keys[1:] == sorted(keys[1:])


def test_a_full_disk_leaves_the_earlier_bundle(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    write_bundle(path, Diagnosis(verdict="clean"), Inputs())
    before = path.read_bytes()
    with disk_of(1000), pytest.raises(DraftscopeError, match="cannot be written"):
        write_bundle(path, Diagnosis(verdict="undecided"), Inputs())
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
    (tmp_path / "link.zip").symlink_to("b.zip")
    write_bundle(tmp_path / "link.zip", Diagnosis(verdict="clean"), Inputs())
    assert (tmp_path / "b.zip").read_bytes() == before and (tmp_path / "link.zip").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reading:
        read = reading.submit((tmp_path / "pipe").read_bytes)
        write_bundle(tmp_path / "pipe", Diagnosis(verdict="clean"), Inputs())
        assert read.result(20) == before


def test_tokens_of_what_the_report_draws_stay_out() -> None:
    request = {"name": "r", "ids": [5, 9], "text": ["AC", "ME"], "status": ["prompt", "instead"], "drafted": [-1, 7],
               "drafted_text": ["", "bot"], "cosines": [[1.0, 0.5]]}
    views = _without_tokens({"requests": [dict(request)], "channels": []})
    bare = {"ids": [-1, -1], "text": [], "drafted": [-1, -1], "drafted_text": []}
    assert views == {"channels": [], "requests": [request | bare]}
