"""The part that runs inside an engine, driven by an engine made here: what comes out, its bounds, and what goes wrong."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import disk_of
from safetensors.torch import load_file
from torch import Tensor

from draftscope.cli.main import run as cli
from draftscope.engines import inside, launching
from draftscope.engines.inside import About, Options, Recorder, Refused
from draftscope.states import capture as plain_capture
from draftscope.states.types import from_trace

K, WIDTH, H, VOCAB = 3, 12, 5, 50


class Served:
    """A request of the made engine: its text is drawn in advance, and how much of each draft is accepted."""

    def __init__(self, name: str, seed: int, prompt: int, steps: int, **about: Any) -> None:
        self.name, self.draw = name, torch.Generator().manual_seed(seed)
        self.counts = torch.randint(0, K + 1, (steps,), generator=self.draw).tolist()
        self.text = torch.randint(0, VOCAB, (prompt + sum(self.counts) + steps + 1,), generator=self.draw).tolist()
        self.about = About(self.text[:prompt], **about)
        self.prompt, self.at = prompt, 0  # `at`: tokens that have states
        self.passes: list[dict[str, Any]] = []
        self.drafts = [0] * K

    def take(self, chunk: int | None = None, *, start: int | None = None) -> dict[str, Any]:
        """The next pass over this request: a piece of the prompt, or a verify step."""
        self.at = self.at if start is None else start
        if self.at < self.prompt:
            count = min(chunk or self.prompt, self.prompt - self.at)
            ids, rejected, verified = self.text[self.at : self.at + count], 0, 0
        else:
            accepted = self.counts[sum(p["verified"] > 0 for p in self.passes)]
            right = self.text[self.at + 1 : self.at + 1 + accepted]
            wrong = [(self.text[self.at + 1 + accepted] + 1) % VOCAB, *[0] * K][: K - accepted]
            assert right + wrong == self.drafts
            ids, rejected, verified = [self.text[self.at], *self.drafts], K - accepted, K
        kept = len(ids) - rejected
        state = {name: torch.randn(len(ids), width, generator=self.draw).bfloat16()
                 for name, width in (("fc_input", WIDTH), ("fc_output", H))}
        made = {"ids": ids, "positions": list(range(self.at, self.at + len(ids))), "rejected": rejected, "verified": verified,
                "following": self.text[self.at + kept], "states": torch.randn(K, H, generator=self.draw).bfloat16(), **state}
        self.at += kept
        done = sum(p["verified"] > 0 for p in self.passes) + (verified > 0)
        if self.at >= self.prompt and done < len(self.counts):
            accepted = self.counts[done]
            self.drafts = [*self.text[self.at + 1 : self.at + 1 + accepted],
                           *[(self.text[self.at + 1 + accepted] + 1) % VOCAB, *[0] * K][: K - accepted]]
        made["drafts"] = list(self.drafts)
        self.passes.append(made)
        return made


def give(recorder: Recorder, passes: list[tuple[Served, dict[str, Any]]]) -> bool:
    """One pass over several requests, as an attachment hands it on; says whether anything was recorded."""
    bounds = [0]
    for _, made in passes:
        bounds.append(bounds[-1] + len(made["ids"]))
    opened = recorder.begin([one.name for one, _ in passes], bounds, [made["verified"] for _, made in passes])
    if opened is None:
        return False
    for name in ("fc_input", "fc_output"):
        opened.rows(name, torch.cat([made[name] for _, made in passes]))
    opened.rows("token_ids", torch.tensor([i for _, made in passes for i in made["ids"]], dtype=torch.int32))
    opened.rows("positions", torch.tensor([p for _, made in passes for p in made["positions"]]))
    for name in ("rejected", "following", "drafts"):
        opened.each(name, torch.tensor([made[name] for _, made in passes]))
    opened.each("draft_states", torch.stack([made["states"] for _, made in passes]))
    recorder.commit(opened)
    return True


def serve(recorder: Recorder, requests: list[Served], *, chunk: int | None = None) -> None:
    """All requests in one batch, each to its end."""
    for one in requests:
        recorder.started(one.name, one.about)
    running = list(requests)
    while running:
        give(recorder, [(one, one.take(chunk)) for one in running])
        for one in [one for one in running if one.at >= len(one.text) - 1]:
            recorder.finished(one.name)
            running.remove(one)


def options(folder: Path, **given: Any) -> Options:
    return Options(str(folder), **{"keep_free": 0, **given})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def recorder(folder: str = "capture", **given: Any) -> Recorder:
        made.append(Recorder(options(tmp_path / folder, **given), {"engine": "made here", "num_spec_tokens": K}, k=K))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def files(recorder: Recorder) -> dict[str, dict[str, Tensor]]:
    """By request, what the safetensors library reads from the files."""
    found = {}
    for path in sorted(Path(recorder.options.folder).glob("*.safetensors")):
        trace = plain_capture.read_trace(path, [])
        found[trace.meta["request"]] = load_file(path)
    return found


def said(recorder: Recorder) -> dict[str, Any]:
    text = (Path(recorder.options.folder) / "capture.json").read_text()
    return json.loads(text)["captured"]


def some(count: int, **about: Any) -> list[Served]:
    return [Served(f"request {i}", i, prompt=3 + 4 * i, steps=5 + i, **about) for i in range(count)]


@pytest.mark.parametrize("chunk", [None, 4])
def test_files_hold_what_went_in(make: Callable[..., Recorder], chunk: int | None) -> None:
    recorder, requests = make(), some(3)
    serve(recorder, requests, chunk=chunk)
    recorder.close()
    found = files(recorder)
    assert set(found) == {one.name for one in requests}
    for one in requests:
        held = found[one.name]
        for name in ("fc_input", "fc_output"):
            assert torch.equal(held[name], torch.cat([made[name] for made in one.passes]))
        assert held["token_ids"].tolist() == [i for made in one.passes for i in made["ids"]]
        assert held["positions"].tolist() == [p for made in one.passes for p in made["positions"]]
        assert held["token_ids"][held["accepted"]].tolist() == one.text[:-1]
        assert held["phase"].tolist() == [int(p >= one.prompt) for p in held["positions"].tolist()]
        assert held["accepted_counts"].tolist() == one.counts
        steps = [i for i, made in enumerate(one.passes) if made["verified"]]
        assert held["draft_token_ids"].tolist() == [one.passes[i]["ids"][1:] for i in steps]
        # A step's drafts and the states behind them were made in the pass before.
        assert torch.equal(held["draft_states"], torch.stack([one.passes[i - 1]["states"] for i in steps]))
        # The target chose what follows the rows that stand, from the last row of the prompt on.
        chosen = held["verified_ids"][held["accepted"]].tolist()
        assert chosen == [-1] * (one.prompt - 1) + one.text[one.prompt :]
        assert held["verified_ids"][~held["accepted"]].unique().tolist() in ([-1], [])
    counted = said(recorder)
    assert counted["requests"] == 3
    assert counted["steps"] == sum(len(one.counts) for one in requests)
    assert counted["accepted"] == sum(sum(one.counts) for one in requests)
    assert counted["bytes"] == sum(p.stat().st_size for p in Path(recorder.options.folder).glob("*.safetensors"))


def test_steps_are_placed_by_the_reader(make: Callable[..., Recorder]) -> None:
    recorder, (one,) = make(), some(1)
    serve(recorder, [one])
    recorder.close()
    (trace,) = list(plain_capture.open(Path(recorder.options.folder)))
    sequence = from_trace(trace, 3)
    assert sequence.token_ids.tolist() == one.text
    assert sequence.steps is not None and sequence.steps.left_out == 0
    ends = torch.tensor([0, *one.counts]).cumsum(0)[:-1] + torch.arange(len(one.counts))
    assert sequence.steps.start.tolist() == (one.prompt - 1 + ends).tolist()
    assert trace.meta["engine"] == "made here"


def test_a_cached_prefix_is_named(make: Callable[..., Recorder]) -> None:
    recorder, one = make(), Served("a", 1, prompt=9, steps=4)
    recorder.started(one.name, one.about)
    give(recorder, [(one, one.take(start=6))])
    while one.at < len(one.text) - 1:
        give(recorder, [(one, one.take())])
    recorder.finished(one.name)
    recorder.close()
    held = files(recorder)["a"]
    assert held["prefix_token_ids"].tolist() == one.text[:6]
    assert held["positions"][0] == 6
    assert said(recorder)["prefix_rows_missing"] == 6


def test_rows_computed_again_are_held_once(make: Callable[..., Recorder]) -> None:
    """A preempted request starts over: prompt and answer so far come as one prefill, and no drafts were left to verify."""
    recorder, one = make(), Served("a", 1, prompt=5, steps=6)
    recorder.started(one.name, one.about)
    for _ in range(4):
        give(recorder, [(one, one.take())])
    again = {"ids": one.text[: one.at + 1], "positions": list(range(one.at + 1)), "rejected": 0, "verified": 0,
             "following": one.text[one.at + 1], "drafts": one.drafts, "states": torch.zeros(K, H).bfloat16(),
             "fc_input": torch.full((one.at + 1, WIDTH), 7.0).bfloat16(), "fc_output": torch.zeros(one.at + 1, H).bfloat16()}
    rows = sum(len(made["ids"]) for made in one.passes)
    give(recorder, [(one, again)])
    recorder.finished(one.name)
    recorder.close()
    held = files(recorder)["a"]
    assert held["token_ids"][held["accepted"]].tolist() == one.text[: one.at + 1]
    assert len(held["fc_input"]) == rows + 1
    assert held["fc_input"][-1].unique().tolist() == [7.0]
    assert held["step"][-1] == -1, "nothing was verified there"
    assert held["accepted_counts"].tolist() == one.counts[:3]
    assert said(recorder)["rows_recomputed"] == one.at


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_rows_after_the_end_are_left_out(make: Callable[..., Recorder], ends: str) -> None:
    """An engine that schedules ahead runs a pass more for a request than its text has."""
    plain = Served("a", 3, prompt=4, steps=6)
    upto = plain.prompt + sum(c + 1 for c in plain.counts[:3]) + 1
    known = plain.text[plain.prompt : upto]
    about = {"max_tokens": len(known)} if ends == "length" else {
        "stop_ids": frozenset({known[-1]}), "min_tokens": len(known)}
    recorder, one = make(), Served("a", 3, prompt=4, steps=6, **about)
    serve(recorder, [one])
    recorder.close()
    held = files(recorder)["a"]
    assert held["accepted_counts"].tolist() == one.counts[:3]
    assert said(recorder)["rows_after_end"] == 3 * (K + 1)


def test_drafts_that_are_handed_on_without_rejected_rows(make: Callable[..., Recorder]) -> None:
    recorder, one = make(), Served("a", 2, prompt=4, steps=5)
    recorder.started(one.name, one.about)
    while one.at < len(one.text) - 1:
        made = one.take()
        stands = len(made["ids"]) - made["rejected"]
        give(recorder, [(one, {**made, "rejected": 0, "ids": made["ids"][:stands], "positions": made["positions"][:stands],
                               **{name: made[name][:stands] for name in ("fc_input", "fc_output")}})])
    recorder.finished(one.name)
    recorder.close()
    held = files(recorder)["a"]
    assert held["accepted_counts"].tolist() == one.counts
    assert held["accepted"].all()
    assert held["draft_token_ids"].tolist() == [made["ids"][1:] for made in one.passes if made["verified"]]
    assert len(held["draft_states"]) == len(one.counts)


def test_states_of_other_drafts_are_not_taken_for_these(make: Callable[..., Recorder]) -> None:
    recorder, one = make(), Served("a", 2, prompt=4, steps=5)
    recorder.started(one.name, one.about)
    while one.at < len(one.text) - 1:
        made = one.take()
        give(recorder, [(one, {**made, "drafts": [VOCAB - 1] * K})])
    recorder.finished(one.name)
    recorder.close()
    held = files(recorder)["a"]
    assert "draft_states" not in held
    assert held["accepted_counts"].tolist() == one.counts
    assert said(recorder)["steps_without_draft_states"] == len(one.counts)


def whole_or_cut(recorder: Recorder, requests: list[Served]) -> None:
    """No request has a gap: what is held is a beginning of its text."""
    for name, held in files(recorder).items():
        (one,) = [one for one in requests if one.name == name]
        kept = held["token_ids"][held["accepted"]].tolist()
        assert kept == one.text[: len(kept)]
        assert kept


@pytest.mark.parametrize("budget", [9_000, 15_000, 22_000])
def test_bytes_are_bounded(make: Callable[..., Recorder], budget: int) -> None:
    recorder, requests = make(max_bytes=budget), some(6)
    for one in requests:
        serve(recorder, [one])
    recorder.close()
    written = [p.stat().st_size for p in Path(recorder.options.folder).glob("*.safetensors")]
    assert 0 < sum(written) <= budget
    counted = said(recorder)
    assert counted["requests"] + sum(counted["requests_left_out"].values()) == 6
    assert counted["requests_left_out"].get("max_bytes", 0) >= 1
    whole_or_cut(recorder, requests)


def test_rows_and_requests_are_bounded(make: Callable[..., Recorder]) -> None:
    recorder, requests = make(max_rows=40), some(4)
    serve(recorder, requests)
    recorder.close()
    assert 0 < said(recorder)["rows"] <= 40
    assert said(recorder)["tails_cut"] > 0
    whole_or_cut(recorder, requests)
    other = make("other", max_requests=2)
    serve(other, some(4))
    other.close()
    assert said(other)["requests"] == 2
    assert said(other)["requests_left_out"] == {"max_requests": 2}


def test_seconds_are_bounded(make: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(inside.time, "monotonic", lambda: now[0])
    recorder, (first, second, _) = make(max_seconds=10), some(3)
    recorder.started(first.name, first.about)
    assert give(recorder, [(first, first.take())])
    now[0] = 11.0
    assert not give(recorder, [(first, first.take())])
    recorder.started(second.name, second.about)
    assert not give(recorder, [(second, second.take())])
    recorder.finished(first.name)
    recorder.close()
    assert len(files(recorder)[first.name]["token_ids"]) == first.prompt
    assert said(recorder)["requests_left_out"] == {"max_seconds": 1}


def test_a_share_of_the_requests_is_always_the_same(make: Callable[..., Recorder]) -> None:
    chosen = []
    for folder in ("one", "two"):
        recorder = make(folder, share=0.4)
        serve(recorder, [Served(f"request {i}", i, prompt=3, steps=2) for i in range(60)])
        recorder.close()
        chosen.append(set(files(recorder)))
        left = said(recorder)["requests_left_out"]["share"]
        assert left + len(chosen[-1]) == 60
    assert chosen[0] == chosen[1]
    assert 12 <= len(chosen[0]) <= 36
    whole_or_cut(recorder, [Served(f"request {i}", i, prompt=3, steps=2) for i in range(60)])


def test_a_slow_disk_costs_rows_not_time(make: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer stands still until all passes were given: giving must not wait for it, nor hold more than allowed."""
    go = threading.Event()
    write = inside.write_safetensors

    def slow(*args: Any) -> int:
        assert go.wait(60)
        return write(*args)

    monkeypatch.setattr(inside, "write_safetensors", slow)
    recorder, requests = make(max_held=12_000), some(8)
    for one in requests:
        serve(recorder, [one])
        assert recorder._held <= 12_000
    go.set()
    recorder.close()
    counted = said(recorder)
    assert counted["requests"] >= 1
    assert counted["rows_cut"] + counted["requests_left_out"]["max_held"] > 0
    assert counted["requests"] + counted["requests_left_out"]["max_held"] == 8
    whole_or_cut(recorder, requests)


def test_a_full_disk_ends_the_capture_alone(make: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, requests = make(), some(4)
    serve(recorder, [requests[0]])
    replace = os.replace

    def full(source: str, to: str) -> None:
        if to.endswith("000001.safetensors"):
            raise OSError(28, "No space left on device")
        replace(source, to)

    monkeypatch.setattr(inside.os, "replace", full)
    serve(recorder, [requests[1]])
    recorder._thread.join(60)
    assert recorder.stopped is not None and "No space left" in recorder.stopped
    serve(recorder, requests[2:])
    assert set(files(recorder)) == {requests[0].name}
    assert "No space left" in json.loads((Path(recorder.options.folder) / "capture.json").read_text())["stopped"]
    assert not list(Path(recorder.options.folder).glob("*.part"))


def test_room_is_left_on_the_disk(make: Callable[..., Recorder]) -> None:
    recorder = make(keep_free=1 << 60)
    serve(recorder, some(1))
    recorder.close()
    assert recorder.stopped is not None and "keep_free" in recorder.stopped
    assert not files(recorder)


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from draftscope.engines import inside
from test_inside import Recorder, options, serve, some
replace = os.replace
def held(source, to):
    if to.endswith("000002.safetensors"):
        print("writing", flush=True)
        sys.stdin.read()
    replace(source, to)
inside.os.replace = held
recorder = Recorder(options(Path({folder!r})), {{}}, k=3)
serve(recorder, some(3))
recorder._thread.join()
"""


def test_killed_while_it_writes(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    source = plain_capture.open(folder)
    assert len(list(source)) == 2
    cut = [skip for skip in source.skipped if skip.path.endswith("request-000002.safetensors.part")]
    assert len(cut) == 1 and cut[0].cause == "broken" and "cut short" in cut[0].why


def test_a_directory_is_for_one_server(make: Callable[..., Recorder], tmp_path: Path) -> None:
    recorder = make()
    code = ("import sys; from draftscope.engines.inside import *\n"
            f"try: Recorder(Options({str(tmp_path / 'capture')!r}, keep_free=0), {{}}, k=3)\n"
            "except Refused as error: print(error)")
    said_there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "another server captures" in said_there
    serve(recorder, some(1))
    recorder.close()
    with pytest.raises(Refused, match="holds a capture already"):
        make()
    assert len(files(recorder)) == 1


def test_options() -> None:
    found = Options.from_environment({"DRAFTSCOPE_CAPTURE": "x", "DRAFTSCOPE_CAPTURE_OPTIONS":
                                      "max_bytes=2GiB, share=0.25,max_rows=5k,draft_states=no"})
    assert found is not None
    assert (found.folder, found.max_bytes, found.share, found.max_rows, found.draft_states) == (
        os.path.abspath("x"), 2 << 30, 0.25, 5000, False)
    assert Options.from_environment({"DRAFTSCOPE_CAPTURE": ""}) is None
    for wrong in ("speed=1", "max_bytes=many", "fc_output=2GB", "share"):
        with pytest.raises(ValueError, match="option"):
            Options.parse("x", wrong)


def test_the_file_is_whole_in_itself() -> None:
    tree = ast.parse(Path(inside.__file__).read_text(), feature_version=(3, 10))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"torch"}


# A stand-in for vLLM's worker and V1 runner: the attributes that the attachment reads, nothing of vLLM.


class Draft(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(WIDTH, H, bias=False)
        self.fc.weight.data = torch.randn(H, WIDTH, generator=torch.Generator().manual_seed(0))

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def forward(self, input_ids: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, hidden_states * 2


class Drafter:
    def __init__(self) -> None:
        self.model = Draft()

    def propose(self, num_speculative_tokens: int, target_token_ids: Tensor, target_positions: Tensor,
                target_hidden_states: Tensor, next_token_ids: Tensor, token_indices_to_sample: Tensor | None,
                common_attn_metadata: Any, num_rejected_tokens_gpu: Tensor | None = None) -> Tensor:
        hidden = self.model.combine_hidden_states(target_hidden_states)
        for _ in range(num_speculative_tokens):
            hidden, _ = self.model(input_ids=target_token_ids, hidden_states=hidden)
        common_attn_metadata.query_start_loc_cpu = None  # vLLM too writes over it
        target_positions += 1
        return next_token_ids[:, None].repeat(1, num_speculative_tokens)


class OtherDrafter(Drafter):
    """Of a version that nobody has seen."""

    def propose(self, everything: Any) -> Tensor:  # type: ignore[override]
        return torch.zeros(1, K)


def fake_worker(*, method: str | None = "eagle3", drafter: type[Drafter] = Drafter, rank: int = 0, tensor: int = 1,
                data: tuple[int, int] = (0, 1), mrope: bool = False) -> Any:
    config = types.SimpleNamespace(
        speculative_config=None if method is None else types.SimpleNamespace(method=method, num_speculative_tokens=K),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=1,
                                              data_parallel_rank=data[0], data_parallel_size=data[1]),
        model_config=types.SimpleNamespace(max_model_len=100, hf_text_config=types.SimpleNamespace(eos_token_id=49)))
    runner = types.SimpleNamespace(
        vllm_config=config, drafter=drafter(), model=None, input_batch=None, execute_model=lambda output: "executed",
        uses_mrope=mrope)
    return types.SimpleNamespace(model_runner=runner, vllm_config=config, rank=rank, shutdown=lambda: "shut down")


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("DRAFTSCOPE_CAPTURE", str(tmp_path / "capture"))
    monkeypatch.setenv("DRAFTSCOPE_CAPTURE_OPTIONS", "keep_free=0")
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setattr(inside.atexit, "register", lambda call: None)
    monkeypatch.setattr(inside.multiprocessing.util, "Finalize", lambda *args, **named: None)
    made = []

    def attach(**given: Any) -> Any:
        made.append(fake_worker(**given))
        inside._attach(made[-1])
        return made[-1]

    yield attach
    for worker in made:
        worker.shutdown()


def engine_step(worker: Any, ids: list[int], start: int, following: int, drafted: int, rejected: int, new: bool) -> Tensor:
    runner = worker.model_runner
    sampling = types.SimpleNamespace(max_tokens=50, min_tokens=0, temperature=0.5, ignore_eos=False, stop_token_ids=[])
    request = types.SimpleNamespace(req_id="a", sampling_params=sampling, prompt_token_ids=ids)
    output = types.SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[request] if new else [],
                                   scheduled_spec_decode_tokens={"a": [0] * drafted} if drafted else {})
    assert runner.execute_model(output) == "executed"
    runner.input_batch = types.SimpleNamespace(req_ids=["a"], num_reqs=1)
    bounds = torch.tensor([0, len(ids)])
    return runner.drafter.propose(
        K, target_token_ids=torch.tensor(ids), target_positions=torch.arange(start, start + len(ids)),
        target_hidden_states=torch.ones(len(ids), WIDTH) * following, next_token_ids=torch.tensor([following]),
        token_indices_to_sample=None if not drafted else torch.tensor([len(ids) - 1 - rejected]),
        common_attn_metadata=types.SimpleNamespace(query_start_loc=bounds, query_start_loc_cpu=bounds),
        num_rejected_tokens_gpu=torch.tensor([rejected]) if drafted else None)


def test_attached_to_a_runner(attached: Callable[..., Any], tmp_path: Path) -> None:
    worker = attached()
    plain = fake_worker()
    for given in ([5, 6, 7], 0, 8, 0, 0, True), ([8, 8, 8, 8], 3, 9, 3, 1, False):
        assert torch.equal(engine_step(worker, *given), engine_step(plain, *given))
    assert worker.shutdown() == "shut down"
    (trace,) = list(plain_capture.open(tmp_path / "capture"))
    assert trace.token_ids.tolist() == [5, 6, 7, 8, 8, 8, 8]
    assert trace.positions is not None and trace.positions.tolist() == list(range(7))
    assert trace.accepted.tolist() == [True] * 6 + [False]
    assert trace.accepted_counts is not None and trace.accepted_counts.tolist() == [2]
    draft = worker.model_runner.drafter.model
    assert trace.fc_output is not None
    torch.testing.assert_close(trace.fc_output, draft.fc(trace.fc_input).detach())
    # The first step's state is that of the prompt's last row; the made draft doubles what it hands back, and feeds the other.
    assert trace.draft_states is not None
    assert torch.equal(trace.draft_states[0], (trace.fc_output[2] * 2).expand(K, -1))
    assert trace.draft_input_ids is not None and trace.draft_input_ids.tolist() == trace.token_ids.tolist()
    assert trace.meta["temperature"] == 0.5 and trace.meta["finished"] == "false"


def test_an_error_inside_ends_the_capture_not_the_engine(attached: Callable[..., Any], tmp_path: Path) -> None:
    worker = attached()
    engine_step(worker, [5, 6, 7], 0, 8, 0, 0, True)
    worker.model_runner.input_batch = None
    runner = worker.model_runner
    bounds = torch.tensor([0, 1])
    out = runner.drafter.propose(
        K, target_token_ids=torch.tensor([8]), target_positions=torch.tensor([3]), target_hidden_states=torch.ones(1, WIDTH),
        next_token_ids=torch.tensor([9]), token_indices_to_sample=None,
        common_attn_metadata=types.SimpleNamespace(query_start_loc=bounds, query_start_loc_cpu=bounds))
    assert out.tolist() == [[9, 9, 9]]
    worker.shutdown()
    assert "AttributeError in begin" in json.loads((tmp_path / "capture" / "capture.json").read_text())["stopped"]


@pytest.mark.parametrize(("given", "says"), [
    ({"method": None}, "without speculative decoding"), ({"method": "mtp"}, "not eagle3"), ({"mrope": True}, "several axes"),
    ({"drafter": OtherDrafter}, "takes ['everything']: another interface"),
])
def test_nothing_to_capture_is_said(attached: Callable[..., Any], tmp_path: Path, given: dict[str, Any], says: str) -> None:
    worker = attached(**given)
    assert says in json.loads((tmp_path / "capture" / "capture.json").read_text())["stopped"]
    assert "propose" not in vars(worker.model_runner.drafter)


def test_one_rank_records_and_each_replica_has_its_folder(attached: Callable[..., Any], tmp_path: Path) -> None:
    attached(tensor=2, rank=1)
    assert not (tmp_path / "capture").exists()
    attached(tensor=2, rank=0, data=(1, 2))
    assert json.loads((tmp_path / "capture" / "dp1" / "capture.json").read_text())["stopped"] is None


def test_enabled_twice_is_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    class WorkerBase:
        def __init__(self) -> None:
            made.append(self)

        def load_model(self) -> str:
            return "loaded"

    module = types.ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase = WorkerBase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", module)
    before = WorkerBase.__init__
    monkeypatch.delenv("DRAFTSCOPE_CAPTURE", raising=False)
    inside.register()
    assert WorkerBase.__init__ is before, "not asked for"
    monkeypatch.setenv("DRAFTSCOPE_CAPTURE", str(tmp_path / "x"))
    inside.register()
    once = WorkerBase.__init__
    inside.register()
    assert WorkerBase.__init__ is once and once is not before
    attached: list[Any] = []
    monkeypatch.setattr(inside, "_attach", attached.append)
    worker = WorkerBase()
    assert worker.load_model() == "loaded"
    assert made == attached == [worker]


def test_a_command_finds_the_plugin_without_us(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What vLLM does to find its plugins, by a Python that has no draftscope on its path."""
    script = ("import os, sys; from importlib.metadata import entry_points\n"
              "sys.path = [p for p in sys.path if 'draftscope' in p or 'site-packages' in p or 'lib/python' in p]\n"
              "(point,) = [p for p in entry_points(group='vllm.general_plugins') if p.module == 'draftscope_capture']\n"
              "point.load(); print(os.environ['DRAFTSCOPE_CAPTURE_OPTIONS'], os.environ['VLLM_PLUGINS']); sys.exit(7)")
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "mine")
        code = cli(["capture", "vllm", "-o", str(out), "--share", "0.5", "--", sys.executable, "-c", script])
    assert code == 7
    assert "nothing was captured" in capsys.readouterr().err


def test_the_file_can_be_written_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    assert cli(["capture", "vllm", "--emit", str(path)]) == 0
    assert path.read_text() == launching.source()
    code = "import sys; sys.modules['draftscope'] = None; import mine; print(mine.VERSION, mine.Extension)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == inside.VERSION
    assert cli(["capture", "vllm", "--emit", str(tmp_path / "no-module.py")]) == 2
    assert cli(["capture", "vllm", "-o", str(tmp_path), "--", "true"]) == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_writing_it_out_overwrites_no_other_program(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    for text in ("print('mine')\n", "# draftscope 1.0: what I think of it\n"):
        path.write_text(text)
        assert cli(["capture", engine, "--emit", str(path)]) == 2
        assert "no earlier result" in capsys.readouterr().err
        assert path.read_text() == text
    path.write_text(launching.source().replace(launching.VERSION, "0.0.1", 1))
    assert cli(["capture", engine, "--emit", str(path)]) == 0
    assert path.read_text() == launching.source()
    assert cli(["capture", engine, "--emit", str(path), "--json", str(path)]) == 2
    with disk_of(1000):
        assert cli(["capture", engine, "--emit", str(path)]) == 3
    assert path.read_text() == launching.source() and [*tmp_path.iterdir()] == [path]
    assert cli(["capture", engine, "--emit", str(tmp_path / "no" / "mine.py")]) == 2
