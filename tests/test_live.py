"""A running server asked: what training prompts and fresh ones separate, and the ladder where it captures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from live_server import K, LiveServer
from tiny import DRAFT, TARGET, tiny_prompts, tiny_rig, tiny_target

from draftscope import diagnose
from draftscope.boundaries import default_boundaries
from draftscope.cli.main import run
from draftscope.diagnose import live as living
from draftscope.diagnose.live import Group, Live, separated
from draftscope.engines.counted import Counters
from draftscope.engines.server import Server, connect
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.plant import Plant
from draftscope.findings import Diagnosis, Rung
from draftscope.target.wiring import Wiring

SERVED = default_boundaries(tiny_target().layers)
HEALTHY = Wiring.of(SERVED)
Start = Callable[..., LiveServer]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(living, "SETTLE", 0.01)
    servers: list[LiveServer] = []

    def make(wiring: Wiring, **options: object) -> LiveServer:
        servers.append(LiveServer(wiring, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "train"
    tiny_rig().write_training(Plant.healthy(SERVED), folder)
    return folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("live") / "fresh.jsonl"
    file.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in tiny_prompts()["heldout"][:8]))
    return file


def ask(server: LiveServer, train: Path, **more: object) -> Diagnosis:
    return diagnose(url=server.url, train=train, draft=DRAFT, target=TARGET, requests=8, max_new=24, **more)


def said(found: Diagnosis) -> str:
    return next(step for step in found.steps if step.startswith("asked: "))


def test_a_sound_server(start: Start, train: Path, fresh: Path) -> None:
    server = start(HEALTHY)
    found = ask(server, train, prompts=fresh)
    told = found.matched["live"]
    assert told["separates"] == "sound" and "cost nothing that shows" in said(found)
    measured = found.acceptance.measured
    assert measured is not None and measured.k == K and measured.interval is not None
    assert told["training prompts"]["same_text"][0] == told["training prompts"]["same_text"][1] > 100
    rounds = sum(told[name]["acceptance"]["rounds"] for name in ("training prompts", "fresh prompts"))
    assert rounds == server.steps, "every verify step of the server was counted once"
    assert not found.findings


def test_no_text_explains_a_server_that_is_wired_wrongly(start: Start, train: Path, fresh: Path) -> None:
    found = ask(start(Wiring.of((0, *SERVED[:2]))), train, prompts=fresh)
    assert found.matched["live"]["separates"] == "elsewhere" and found.verdict == "undecided"
    assert any("no other text explains that" in remark for remark in found.next)


def test_fresh_prompts_alone_lose(start: Start, train: Path, tmp_path: Path) -> None:
    """Prompts of random tokens: the draft never met what the target writes after them."""
    draw = torch.Generator().manual_seed(0)
    file = tmp_path / "random.jsonl"
    ids = [torch.randint(8, tiny_target().parts.vocab, (24,), generator=draw).tolist() for _ in range(8)]
    file.write_text("".join(json.dumps({"token_ids": one}) + "\n" for one in ids))
    found = ask(start(HEALTHY), train, prompts=file)
    told = found.matched["live"]
    if told["fresh prompts"]["acceptance"]["length"] > 0.8 * told["training prompts"]["acceptance"]["length"]:
        pytest.fail(f"the prompts are not hard enough to test anything: {told}")
    assert told["separates"] == "text" and found.verdict == "training"
    assert found.findings[0].fault == "train-budget"


def test_with_a_capture_the_ladder_names_the_cause(start: Start, train: Path, fresh: Path, tmp_path: Path) -> None:
    server = start(Wiring.of((0, *SERVED[1:])), capture=tmp_path / "capture")
    found = ask(server, train, prompts=fresh, serve=tmp_path / "capture")
    assert found.findings[0].fault == "layer-set" and found.findings[0].strength == "proven"
    assert found.acceptance.served is not None and found.acceptance.measured is not None
    assert found.matched["live"]["separates"] == "elsewhere"


def test_sglang_counts_by_answer(start: Start, train: Path) -> None:
    server = start(HEALTHY, engine="sglang")
    found = ask(server, train)
    assert not any("other requests" in step for step in found.steps), "it has no metrics page that could have moved"
    assert found.matched["live"]["engine"] == "sglang" and found.matched["live"]["separates"] == "sound"
    measured = found.acceptance.measured
    assert measured is not None and measured.rounds == server.steps


def test_the_command(start: Start, train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(HEALTHY)
    words = ["diagnose", "--url", server.url, "--train", str(train), "--draft", str(DRAFT), "--target", str(TARGET), "--requests",
             "8", "--max-new", "16", "--json", str(tmp_path / "d.json")]
    assert run(words) == 5
    assert json.loads((tmp_path / "d.json").read_text())["matched"]["live"]["url"] == server.url
    assert run(["diagnose", "--url", server.url, "--draft", str(DRAFT)]) == 2
    assert "no prompt to ask" in capsys.readouterr().err
    assert run(["diagnose", "--draft", str(DRAFT), "--prompts", "x"]) == 2


def test_counters_that_others_move_are_told(start: Start, train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(HEALTHY)
    page = server.metrics

    def moving() -> str:
        server.steps += 1
        return page()

    monkeypatch.setattr(server, "metrics", moving)
    monkeypatch.setattr(living, "SETTLED", 3)
    found = ask(server, train)
    assert any("other requests are counted too" in step for step in found.steps)


def test_who_is_no_server(start: Start) -> None:
    server = start(HEALTHY)
    assert connect(server.url + "/metrics") == connect(server.url + "/v1") == connect(server.url)
    assert (connect(server.url).engine, connect(server.url).version) == ("vllm", "0.32.0")
    with pytest.raises(UsageError):
        connect("127.0.0.1:8000")
    with pytest.raises(DraftscopeError, match="answers 404"):
        connect(server.url + "/elsewhere")
    server.close()
    with pytest.raises(DraftscopeError, match="can't be reached"):
        connect(server.url, seconds=2)


def group(name: str, accepted: list[tuple[int, int]]) -> Group:
    parts = [Counters(steps, (hits,), hits, "made up") for steps, hits in accepted]
    return Group(name, [[1]] * len(parts), parts=parts)


@pytest.mark.parametrize(("training", "fresh", "trained", "kind"), [
    (0.6, 0.6, 0.6, "sound"), (0.6, 0.2, 0.6, "text"), (0.1, 0.1, 0.6, "elsewhere"), (0.1, 0.1, None, "unknown"),
    (0.6, 0.2, None, "text"), (0.6, None, 0.6, "sound"), (None, 0.6, 0.6, "unknown"), (0.58, 0.57, 0.6, "sound"),
])
def test_what_separates(training: float | None, fresh: float | None, trained: float | None, kind: str) -> None:
    draw = torch.Generator().manual_seed(1)

    def parts(share: float) -> list[tuple[int, int]]:
        return [(100, int((torch.rand(100, generator=draw) < share).sum())) for _ in range(8)]

    live = Live(Server("u", "m"), None if training is None else group("training prompts", parts(training)),
                None if fresh is None else group("fresh prompts", parts(fresh)))
    rung = None if trained is None else Rung(k=1, length=1 + trained, interval=(0.97 + trained, 1.03 + trained), joint=[trained],
                                             conditional=[trained], rounds=800, rows=800, readout="walk")
    assert separated(live, rung)[0] == kind
