"""The capture inside SGLang, on workers written here with SGLang's signatures: who is recorded, what fails, how it gets in.

What real releases do is in test_inside_sglang_releases.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_driver import (
    DRAFT_WIDTH,
    MODES,
    WIDTH,
    Algorithm,
    Batch,
    Draft,
    Request,
    Target,
    following,
    guesses,
    state_of,
)

import draftscope
from draftscope.cli.main import run as cli
from draftscope.engines import inside, launching

NODES = 4


class EagleDraftWorker:
    """V2's draft worker in small: the calls that are wrapped, with SGLang's names for what they take."""

    def __init__(self, **named: Any) -> None:
        self.server_args = SimpleNamespace(tp_size=1, dp_size=1, enable_dp_attention=False)
        self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens = 1, NODES - 1, NODES
        self.speculative_algorithm, self.tp_rank = Algorithm(), 0
        self.target_worker, self.draft_runner = Target(), Draft()
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        self.__dict__.update(named)

    def _draft_extend_for_prefill(self, batch: Any, target_hidden_states: Any, next_token_ids: Any,
                                  mm_input_embeds: Any = None) -> Any:
        self.draft_runner.model.model.fc(target_hidden_states)
        at = 0
        for i, n in enumerate(batch.extend_lens):
            batch.input_ids[at : at + n] = torch.cat([batch.input_ids[at + 1 : at + n], next_token_ids[i : i + 1]])
            at += n
        target_hidden_states.fill_(-9.0)  # a graph's buffer, used again
        return "prefilled"

    def draft(self, batch: Any) -> Any:
        return "drafted"

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> Any:
        self.draft_runner.model.model.fc(batch_result.logits_output.hidden_states)
        batch.seq_lens.add_(NODES)
        batch_result.logits_output.hidden_states.fill_(-9.0)
        if batch.__dict__.get("fail"):
            raise RuntimeError("SGLang's own trouble")
        return "extended"


class Server:
    """Serves requests through a worker, one pass at a time."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def prefill(self, *spans: tuple[Request, int, int]) -> Any:
        texts = [(request.origin_input_ids + request.output_ids)[start:stop] for request, start, stop in spans]
        ids = [token for text in texts for token in text]
        places = [place for _, start, stop in spans for place in range(start, stop)]
        batch = Batch(
            [request for request, _, _ in spans], forward_mode=MODES.EXTEND, extend_lens=[len(text) for text in texts],
            prefix_lens=[start for _, start, _ in spans], seq_lens=torch.tensor([stop for _, _, stop in spans]),
            seq_lens_cpu=torch.tensor([stop for _, _, stop in spans]), input_ids=torch.tensor(ids))
        hidden = torch.tensor([state_of(*pair) for pair in zip(ids, places, strict=True)])
        chosen = torch.tensor([following(text[-1], stop - 1) for text, (_, _, stop) in zip(texts, spans, strict=True)])
        for request, _, stop in spans:
            text = request.origin_input_ids + request.output_ids
            if stop == len(text):
                request.output_ids.append(following(text[-1], stop - 1))
        return self.worker._draft_extend_for_prefill(batch, hidden, chosen)

    def verify(self, *requests: Request, fail: bool = False, **missing: Any) -> Any:
        starts = [len(request.origin_input_ids) + len(request.output_ids) - 1 for request in requests]
        trees, kept, chosen = [], [], []
        for request, start in zip(requests, starts, strict=True):
            root = request.output_ids[-1]
            drafts = [root]
            for j in range(NODES - 1):
                drafts.append(guesses(drafts[-1], start - 1 + j)[0])
            after = [following(token, start + j) for j, token in enumerate(drafts)]
            right = next((j for j in range(NODES - 1) if drafts[j + 1] != after[j]), NODES - 1)
            trees += drafts
            chosen += after
            kept.append(right + 1)
            request.output_ids += after[: right + 1]
        places = [start + j for start in starts for j in range(NODES)]
        batch = Batch(list(requests), forward_mode=MODES.DECODE, seq_lens=torch.tensor(starts), seq_lens_cpu=torch.tensor(starts),
                      spec_info=SimpleNamespace(draft_token=torch.tensor(trees), draft_token_num=NODES, topk=1), fail=fail)
        batch.__dict__.update(missing)
        hidden = torch.tensor([state_of(*pair) for pair in zip(trees, places, strict=True)])
        return self.worker._draft_extend_for_decode(batch, SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=hidden), accept_lens=torch.tensor(kept, dtype=torch.int32),
            next_token_ids=torch.tensor(chosen, dtype=torch.int32)))


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a server whose worker is wrapped; `.done()` ends its capture and gives traces and capture.json."""
    made: list[Any] = []

    def make(options: str = "", **named: Any) -> Any:
        monkeypatch.setenv("DRAFTSCOPE_CAPTURE", str(tmp_path / "out"))
        monkeypatch.setenv("DRAFTSCOPE_CAPTURE_OPTIONS", options)
        module = types.ModuleType("sglang.srt.speculative.eagle_worker_v2")
        kind = type("EagleDraftWorker", (), {
            name: value for name, value in vars(EagleDraftWorker).items() if name not in ("__dict__", "__weakref__")})
        module.EagleDraftWorker = kind  # type: ignore[attr-defined]
        inside.wrap_sglang(module)
        inside.wrap_sglang(module)  # twice is once
        server = Server(kind(**named))
        made.append(server.worker)

        def done() -> tuple[dict[str, Any], dict[str, Any]]:
            vars(server.worker)[inside._MARK].close()
            folder = next(path.parent for path in (tmp_path / "out").rglob("capture.json"))
            traces = list(draftscope.open(folder)) if list(folder.glob("*.safetensors")) else []
            return {trace.meta["request"]: trace for trace in traces}, json.loads((folder / "capture.json").read_text())

        server.done = done  # type: ignore[attr-defined]
        return server

    yield make
    for worker in made:
        if vars(worker).get(inside._MARK) is not None:
            vars(worker)[inside._MARK].close()


def request_of(name: str, length: int = 6, answer: int = 30, seed: int = 0) -> Request:
    return Request(name, torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist(), answer)


def check(trace: Any, request: Request) -> None:
    want = [state_of(*pair) for pair in zip(trace.token_ids.tolist(), trace.positions.tolist(), strict=True)]
    assert torch.equal(trace.fc_input, torch.tensor(want))
    text = request.origin_input_ids + request.output_ids
    assert trace.token_ids[trace.accepted].tolist() == [text[place] for place in trace.positions[trace.accepted].tolist()]
    assert sorted(trace.positions[trace.accepted].tolist()) == list(range(int(trace.accepted.sum())))


def test_a_share_of_the_requests(serve: Any) -> None:
    server = serve("share=0.5")
    requests = [request_of(f"r{i}", 4 + i, seed=i) for i in range(6)]
    assert server.prefill(*((r, 0, len(r.origin_input_ids)) for r in requests)) == "prefilled"
    for _ in range(3):
        assert server.verify(*requests) == "extended"
    traces, about = server.done()
    assert 0 < len(traces) < 6 and about["captured"]["requests_left_out"] == {"share": 6 - len(traces)}
    for name, trace in traces.items():
        check(trace, requests[int(name[1:])])
        assert trace.draft_token_ids.shape == (3, NODES - 1)


def test_taken_back_and_computed_again_in_pieces(serve: Any) -> None:
    server, request = serve(), request_of("r", 7)
    server.prefill((request, 0, 4))
    server.prefill((request, 4, 7))
    server.verify(request)
    server.verify(request)
    known = 7 + len(request.output_ids)
    server.prefill((request, 0, 5))
    server.prefill((request, 5, known))
    server.verify(request)
    traces, about = server.done()
    check(traces["r"], request)
    assert about["captured"]["rows_recomputed"] == known - 1 and about["stopped"] is None
    assert (traces["r"].step[traces["r"].positions == known - 1] == -1).sum() == 1  # the bonus token came again in the prefill


def test_an_id_used_again_is_another_request(serve: Any) -> None:
    server = serve()
    for seed in (1, 2):
        request = request_of("mine", 5, seed=seed)
        server.prefill((request, 0, 5))
        server.verify(request)
    _, about = server.done()
    assert about["captured"]["requests"] == 2


def test_ended_requests_are_written_while_others_run(serve: Any, tmp_path: Path) -> None:
    server, first, second = serve(), request_of("first", seed=1), request_of("second", seed=2)
    server.prefill((first, 0, 6), (second, 0, 6))
    server.verify(first, second)
    first.finished_reason = "stop string"
    server.verify(second)
    attached = vars(server.worker)[inside._MARK]
    assert list(attached.following) == ["second"]
    del second  # taken back for good: nobody holds it any more
    attached.poll()
    assert not attached.following
    _, about = server.done()
    assert about["captured"]["requests"] == 2 and about["captured"]["unfinished"] == 0


def test_copies_that_come_late_find_what_was_there(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device copies on a stream of its own, while SGLang goes on rotating ids in place and overwriting its graphs' buffers."""
    monkeypatch.setattr(inside.Carrier, "carry", lambda self, tensor, fresh=False: tensor.detach())
    take = inside.Recorder._take
    gate = threading.Event()

    def late(self: Any, given: Any) -> None:
        gate.wait(60)
        take(self, given)

    monkeypatch.setattr(inside.Recorder, "_take", late)
    server, request, other = serve(), request_of("r", seed=1), request_of("s", 4, seed=2)
    server.prefill((request, 0, 6), (other, 0, 4))
    for _ in range(3):
        server.verify(request, other)
    gate.set()
    traces, _ = server.done()
    for name, one in (("r", request), ("s", other)):
        check(traces[name], one)
        assert (traces[name].draft_input_ids[traces[name].accepted] == torch.tensor(
            (one.origin_input_ids + one.output_ids)[1 : int(traces[name].accepted.sum()) + 1])).all()


def test_a_pass_scheduled_ahead_belongs_to_its_request(serve: Any) -> None:
    server, request = serve(), request_of("r", answer=2)
    server.prefill((request, 0, 6))
    server.verify(request)
    request.finished_reason = "length"
    server.verify(request)  # was under way when the end came out
    server.prefill((request_of("next", seed=3), 0, 6))
    traces, about = server.done()
    assert about["captured"]["requests_left_out"] == {} and about["captured"]["rows_after_end"] == NODES
    assert len(traces["r"].accepted_counts) == 1 and about["captured"]["requests"] == 2


def test_health_checks_are_not_served_text(serve: Any) -> None:
    server, request = serve(), request_of("r")
    server.prefill((request_of("HEALTH_CHECK_1", 1), 0, 1), (request, 0, 6))
    server.verify(request)
    traces, about = server.done()
    assert set(traces) == {"r"} and about["captured"]["requests_left_out"] == {}
    check(traces["r"], request)


def test_what_runs_in_graphs_is_left_out_and_named(serve: Any) -> None:
    server, request = serve(cuda_graph_runner=object(), cuda_graph_runner_for_draft_extend=object()), request_of("r")
    server.prefill((request, 0, 6))
    server.verify(request)
    traces, about = server.done()
    assert traces["r"].fc_output is None and traces["r"].draft_states is None
    assert [note.split(":")[0] for note in about["notes"] if "left out" in note] == [
        "fc_output is left out", "draft_states are left out"]


def test_fc_output_needs_all_passes(serve: Any) -> None:
    """`fc` runs eagerly in a prefill, and from a graph in some verify steps: half a column is none."""
    server, request = serve(), request_of("r")
    server.prefill((request, 0, 6))
    server.worker.draft_runner.model.model.fc = torch.nn.Identity()  # the hooked module is not called any more
    server.verify(request)
    traces, _ = server.done()
    assert traces["r"].fc_output is None and len(traces["r"].fc_input) == 6 + NODES


def test_trouble_of_ours_is_not_sglang_s(serve: Any) -> None:
    server, request = serve(), request_of("r")
    server.prefill((request, 0, 6))
    assert server.verify(request, reqs=None) == "extended"
    assert server.verify(request) == "extended"
    traces, about = server.done()
    assert "SGLANG_ENABLE_SPEC_V2=0" in about["stopped"] and not traces


def test_trouble_of_sglang_s_is_its_own(serve: Any) -> None:
    server, request = serve(), request_of("r")
    server.prefill((request, 0, 6))
    with pytest.raises(RuntimeError, match="own trouble"):
        server.verify(request, fail=True)
    _, about = server.done()
    assert about["stopped"] is None and about["captured"]["rows"] == 6


def test_idle_batches_are_passed_over(serve: Any) -> None:
    server = serve()
    empty = torch.zeros(0, dtype=torch.long)
    batch = Batch([], forward_mode=MODES.IDLE, seq_lens=empty, seq_lens_cpu=empty, input_ids=empty, extend_lens=[],
                  prefix_lens=[])
    assert server.worker._draft_extend_for_prefill(batch, torch.zeros(0, 3 * WIDTH), empty) == "prefilled"
    traces, about = server.done()
    assert not traces and about["stopped"] is None


@pytest.mark.parametrize(("change", "why"), [
    ({"speculative_algorithm": SimpleNamespace(name="STANDALONE")}, "standalone"),
    ({"server_args": SimpleNamespace(tp_size=8, dp_size=1, attn_cp_size=2)}, "context parallelism"),
    ({"draft_runner": SimpleNamespace(model=torch.nn.Linear(1, 1))}, "no `fc`"),
])
def test_where_there_is_nothing_to_capture(serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any,
                                           why: str) -> None:
    server, request = serve(**change), request_of("r")
    assert server.worker.draft(Batch([request], forward_mode=MODES.DECODE, seq_lens=torch.tensor([1]))) == "drafted"
    assert why in caplog.text and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "rank", "place"), [
    ({"tp_size": 4}, 0, (0, None)),
    ({"tp_size": 4}, 3, (3, None)),
    ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, 6, (0, 3)),
    ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, 5, (1, 2)),
    ({"tp_size": 2, "dp_size": 3}, 1, (1, 2)),
])
def test_places_in_parallel_servers(arguments: dict[str, Any], rank: int, place: tuple[int, int | None]) -> None:
    assert inside._place(SimpleNamespace(server_args=SimpleNamespace(**arguments), tp_rank=rank, dp_rank=2)) == place


def test_groups_capture_apart(serve: Any) -> None:
    server = serve(server_args=SimpleNamespace(tp_size=2, dp_size=2, enable_dp_attention=True), tp_rank=1)
    request = request_of("r")
    server.prefill((request, 0, 6))
    _, about = server.done()
    assert about["options"]["folder"].endswith("dp1")


def test_eagle_in_place_of_eagle3_shows(serve: Any) -> None:
    """Then the target hands out its last state alone, and the draft leaves `fc` out by its width."""
    target = Target()
    target.model_runner.model.model.layers_to_capture = []
    server = serve(speculative_algorithm=SimpleNamespace(name="EAGLE"), target_worker=target)
    request = request_of("r")
    batch = Batch([request], forward_mode=MODES.EXTEND, extend_lens=[2], prefix_lens=[0], seq_lens=torch.tensor([2]),
                  seq_lens_cpu=torch.tensor([2]), input_ids=torch.tensor([1, 2]))
    server.worker.draft_runner.model.model.fc = torch.nn.Linear(DRAFT_WIDTH, DRAFT_WIDTH)
    server.worker._draft_extend_for_prefill(batch, torch.zeros(2, DRAFT_WIDTH), torch.tensor([3]))
    traces, about = server.done()
    assert about["layer_ids"] is None and about["draft_in_effect"]["fc_applied"] is False
    assert traces["r"].fc_input.shape == (2, DRAFT_WIDTH)


def test_settled_arguments_go_before_what_was_asked_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = types.ModuleType("sglang.srt.runtime_context")
    world.get_context = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        resolved_server_args_dict=lambda: {"attention_backend": "fa3", "page_size": 64})
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", world)
    server = serve(server_args=SimpleNamespace(tp_size=1, attention_backend=None, disable_radix_cache=True))
    server.prefill((request_of("r"), 0, 6))
    switches = server.done()[1]["switches"]
    assert (switches["attention_backend"], switches["page_size"], switches["disable_radix_cache"]) == ("fa3", 64, True)


PACKAGE = '''
import sys
sys.path[:0] = [{tests!r}]
from test_inside_sglang import EagleDraftWorker
'''
SCRIPT = '''
import multiprocessing, sys

def scheduler():
    import sglang.srt.speculative.eagle_worker_v2 as workers
    from test_inside_sglang import Server, request_of
    server, request = Server(workers.EagleDraftWorker()), request_of("r")
    server.prefill((request, 0, 6))
    for _ in range(4):
        server.verify(request)
    import atexit
    atexit._run_exitfuncs()  # multiprocessing's children leave without

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=scheduler)
    child.start()
    child.join()
    sys.exit(child.exitcode + 7)
'''


def made_up_sglang(folder: Path) -> None:
    package = folder / "sglang/srt/speculative"
    package.mkdir(parents=True)
    (folder / "sglang/__init__.py").write_text("__version__ = '0.5.5'\n")
    (folder / "sglang/srt/__init__.py").write_text("")
    (package / "eagle_worker_v2.py").write_text(PACKAGE.format(tests=str(Path(__file__).parent)))


def test_the_command_reaches_spawned_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    made_up_sglang(site)
    (site / "sitecustomize.py").write_text(f"open({str(tmp_path / 'theirs')!r}, 'a').write('x')\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    source = Path(draftscope.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(source)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = tmp_path / "report.json"
    code = cli(["capture", "sglang", "-o", str(tmp_path / "out"), "--quiet", "--json", str(report), "--",
                sys.executable, str(tmp_path / "script.py")])
    assert code == 7  # the command's own
    (about,) = json.loads(report.read_text())["captures"]
    assert about["engine"] == "sglang" and about["captured"]["requests"] == 1 and about["captured"]["steps"] == 4
    assert about["layer_ids"] == [2, 5, 8]
    (trace,) = draftscope.open(tmp_path / "out")
    want = [state_of(*pair) for pair in zip(trace.token_ids.tolist(), trace.positions.tolist(), strict=True)]
    assert torch.equal(trace.fc_input, torch.tensor(want))
    assert len((tmp_path / "theirs").read_text()) >= 2  # the hidden sitecustomize ran in both


def test_the_file_alone(tmp_path: Path) -> None:
    """As SGLANG_EXTERNAL_MODEL_PACKAGE brings it in: imported as a package of models, of which it holds none."""
    site = tmp_path / "site"
    made_up_sglang(site)
    launching.emit(site / "capture_alone.py")
    program = (
        "import sglang, importlib, pkgutil\n"
        "package = importlib.import_module('capture_alone')\n"
        "assert not list(pkgutil.iter_modules(package.__path__, 'capture_alone.'))\n"
        "import sglang.srt.speculative.eagle_worker_v2 as workers\n"
        "print(package._MARK in vars(workers.EagleDraftWorker))\n")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(Path(draftscope.__file__).parents[1])]),
                          "DRAFTSCOPE_CAPTURE": str(tmp_path / "out")})
    assert done.stdout.strip() == "True", done.stderr
    assert not (tmp_path / "out").exists()  # nothing was served
