"""The viewer: what lies in a folder and nothing else, for those who have its token and for nobody else."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from diagnoses import case, clean, hostile
from state_files import write_one
from support import within

pytest.importorskip("starlette", reason="the viewer's extra is not installed")

from starlette.testclient import TestClient

from draftscope.cli.common import Noted
from draftscope.cli.main import run
from draftscope.viewing.app import viewer
from draftscope.viewing.pairs import beside
from draftscope.viewing.runs import Runs
from draftscope.viewing.work import working

TOKEN = "a-token-of-the-test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    (root / "monday").mkdir(parents=True)
    (root / "monday" / "found.json").write_text(case().json_text())
    (root / "clean.json").write_text(clean().json_text())
    (root / "other.json").write_text('{"schema": "draftscope.lint/1"}')
    (root / "broken.json").write_text('{"schema": "draftscope.diagnosis/1", "verdict": "of no kind"}')
    (tmp_path / "secret.json").write_text(hostile().json_text())
    return root


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(viewer(folder, TOKEN), base_url="http://127.0.0.1:8765") as found:
        yield found


def ids(folder: Path) -> dict[str, str]:
    return {run.name: run.id for run in Runs(folder).all()}


def test_the_list_holds_what_can_be_read_and_says_what_cannot(client: TestClient) -> None:
    answer = client.get(f"/{TOKEN}/")
    assert answer.status_code == 200
    assert "monday/found.json" in answer.text
    assert "layer-set, proven" in answer.text
    assert "other.json" not in answer.text
    assert re.search(r"broken\.json.*?cannot be read: ", answer.text, re.DOTALL)
    assert "1.31" in answer.text
    assert "2.24" in answer.text


def test_a_run_is_its_report(client: TestClient, folder: Path) -> None:
    answer = client.get(f"/{TOKEN}/run/{ids(folder)['monday/found.json']}")
    assert answer.status_code == 200
    assert "The largest drop, 1.00, is from trained" in answer.text
    assert "<script" not in answer.text
    assert client.get(f"/{TOKEN}/run/{ids(folder)['broken.json']}").status_code == 422


def test_two_runs_stand_side_by_side(client: TestClient, folder: Path) -> None:
    known = ids(folder)
    answer = client.get(f"/{TOKEN}/pair", params={"a": known["monday/found.json"], "b": known["clean.json"]})
    assert answer.status_code == 200
    assert answer.text.count("<iframe") == 2
    assert f'src="run/{known["clean.json"]}"' in answer.text
    rows = {row.name: row for row in beside(case(), clean())}
    assert rows["verdict"].differs
    assert (rows["as read"].first, rows["as read"].second, rows["as read"].change) == ("1.31", "2.30", "+0.99")
    assert rows["trained"].first == "2.31 [2.22, 2.40]"
    assert "reference" not in rows
    assert client.get(f"/{TOKEN}/pair", params={"a": known["clean.json"]}).status_code == 404
    assert client.get(f"/{TOKEN}/pair", params={"a": known["clean.json"], "b": known["broken.json"]}).status_code == 404


@pytest.mark.parametrize("path", [
    "/", "/wrong/", f"/{TOKEN}x/", f"/{TOKEN}/../secret.json", f"/{TOKEN}/run/../../secret.json",
    f"/{TOKEN}/run/..%2f..%2fsecret.json",
    f"/{TOKEN}/run/%2e%2e%2fsecret.json", f"/{TOKEN}/run//etc/passwd", f"/{TOKEN}/run/secret.json", f"/{TOKEN}/run/%00",
    f"/{TOKEN}/pair?a=../secret.json&b=../secret.json", "/clean.json", f"/{TOKEN}/run/monday%2Ffound.json",
])
def test_no_address_leads_anywhere_else(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "alert" not in answer.text
    assert answer.headers["cache-control"] == "no-store"


def test_links_lead_nowhere(folder: Path) -> None:
    outside = folder.parent / "secret.json"
    (folder / "link.json").symlink_to(outside)
    (folder / "below").symlink_to(folder.parent)
    (folder / "inside.json").symlink_to(folder / "clean.json")
    os.mkfifo(folder / "pipe.json")
    (folder / ".hidden.json").write_text(case().json_text())
    assert {run.name for run in Runs(folder).all()} == {"monday/found.json", "clean.json", "broken.json"}
    found = Runs(folder)
    known = {run.name: run.id for run in found.all()}
    (folder / "clean.json").unlink()
    (folder / "clean.json").symlink_to(outside)
    assert found.get(known["clean.json"]) is None


def test_only_its_own_name_is_answered(folder: Path) -> None:
    for host, status in (("127.0.0.1:1", 200), ("localhost:2", 200), ("evil.example", 404), ("127.0.0.1.evil.example", 404)):
        with TestClient(viewer(folder, TOKEN), base_url=f"http://{host}") as client:
            assert client.get(f"/{TOKEN}/").status_code == status
    with TestClient(viewer(folder, TOKEN, "node7"), base_url="http://node7:80") as client:
        assert client.get(f"/{TOKEN}/").status_code == 200


def test_only_reading_is_possible(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, f"/{TOKEN}/").status_code in (404, 405)


def test_every_answer_forbids_the_rest(client: TestClient, folder: Path) -> None:
    for path in ("", f"run/{ids(folder)['clean.json']}", "work", "nothing"):
        headers = client.get(f"/{TOKEN}/{path}").headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "script-src" not in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'self'" in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "server" not in headers


def test_hostile_names_are_inert(folder: Path) -> None:
    name = "<img src=x onerror=alert(1)>\u202e\x1b[31m.json"
    (folder / name).write_text(hostile().json_text())
    with TestClient(viewer(folder, TOKEN), base_url="http://127.0.0.1") as client:
        text = client.get(f"/{TOKEN}/").text
        assert "<img" not in text
        assert "\u202e" not in text
        known = ids(folder)
        text = client.get(f"/{TOKEN}/pair", params={"a": known[name], "b": known["clean.json"]}).text
        assert "<img" not in text
        assert "<script" not in text


def test_a_run_that_changes_is_read_again(client: TestClient, folder: Path) -> None:
    assert "of no kind" not in client.get(f"/{TOKEN}/").text
    (folder / "clean.json").write_text(case().json_text().replace('"layer-set"', '"layer-offset"'))
    assert "layer-offset, proven" in client.get(f"/{TOKEN}/").text
    (folder / "new.json").write_text(clean().json_text())
    assert "new.json" in client.get(f"/{TOKEN}/").text


def test_work_in_progress_is_told(client: TestClient, folder: Path) -> None:
    assert "Nothing is being scanned" in client.get(f"/{TOKEN}/work").text
    with Noted(folder / "train.fingerprint", "scanning states/", 400, "sequences") as noted:
        noted.held["started"] -= 10
        noted._written = -1e9
        noted.add(100, None)
        text = client.get(f"/{TOKEN}/work").text
        assert "scanning states/" in text
        assert "100 of 400 sequences" in text
        assert 'value="0.2500"' in text
        (work,) = working(folder.resolve(), now=noted.held["updated"] + 5)
        assert (work.share, work.ago) == (0.25, 5)
        assert work.says.endswith("about 30 s left")
        assert working(folder.resolve(), now=noted.held["updated"] + 3600) == []
    assert not list(folder.glob("*.progress.json"))
    (folder / "capture").mkdir()
    for i in range(3):
        (folder / "capture" / f"request-{i}.safetensors").write_bytes(b"x" * 500_000)
    (work,) = working(folder.resolve())
    assert (work.what, work.says, work.share) == ("written to capture", "3 files, 1.5 MB", None)
    assert working(folder.resolve(), now=time.time() + 1000) == []


@pytest.mark.parametrize("held", [
    "[]", "{", "{}", '{"schema": "draftscope.progress/1"}', '{"schema": "draftscope.progress/1", "done": "9", "updated": 1e30}',
    '{"schema": "draftscope.progress/1", "done": true, "updated": null}', "[" * 9000,
])
def test_notes_that_are_none_are_passed_over(folder: Path, held: str) -> None:
    (folder / "x.progress.json").write_text(held)
    assert working(folder.resolve()) == []


def test_a_scan_notes_how_far_it_is_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    write = Noted.add

    def add(self: Noted, amount: float, total: float | None) -> None:
        self._written = -1e9
        write(self, amount, total)
        seen.append(json.loads(self.path.read_text()))

    monkeypatch.setattr(Noted, "add", add)
    for number in range(5):
        write_one("plain", tmp_path / "states", number)
    assert run(["scan", str(tmp_path / "states"), "-o", str(tmp_path / "f.fingerprint"), "--quiet"]) == 0
    assert seen[0]["done"] == 0
    assert seen[-1]["done"] == seen[-1]["total"] == len(seen) - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.fingerprint", "states"]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert run(["serve", str(tmp_path), "--host", "192.0.2.77"]) == 2
    assert "cannot listen there" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_everywhere_answers_addresses_and_its_own_name_alone(host: str, folder: Path) -> None:
    own = socket.gethostname()
    for name, status in (("127.0.0.1:1", 200), ("localhost:2", 200), ("192.0.2.7:3", 200), ("[2001:db8::7]:4", 200), (own, 200),
                         (own.upper(), 200), ("evil.example", 404), ("192.0.2.7.evil.example", 404)):
        with TestClient(viewer(folder, TOKEN, host), base_url=f"http://{name}") as client:
            assert client.get(f"/{TOKEN}/").status_code == status, name
    with TestClient(viewer(folder, TOKEN, "192.0.2.7"), base_url="http://192.0.2.8") as client:
        assert client.get(f"/{TOKEN}/").status_code == 404


@pytest.mark.parametrize(("number", "code", "says"), [(signal.SIGINT, 0, ""), (signal.SIGTERM, 143, "interrupted")])
def test_ctrl_c_is_how_the_command_ends(number: int, code: int, says: str, folder: Path) -> None:
    # Whoever started the tests in the background has SIGINT ignored, and children inherit that.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from draftscope.cli.main import main; "
    command = [sys.executable, "-c", f"{start}sys.argv = ['draftscope', 'serve', {str(folder)!r}, '--host', '0.0.0.0']; main()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = urlsplit(serving.stdout.readline().strip())
        assert address.hostname == socket.gethostname().lower()
        with within(30):
            while True:
                try:
                    with urlopen(f"http://127.0.0.1:{address.port}{address.path}") as answer:
                        assert answer.status == 200
                    break
                except URLError:
                    time.sleep(0.05)
        serving.send_signal(number)
        out, err = serving.communicate(timeout=30)
    assert (serving.returncode, out) == (code, "")
    assert [line for line in err.splitlines() if line != "Ctrl-C ends it"][:1] == [
        f"draftscope: {says}; files already complete are kept"][: bool(says)]
