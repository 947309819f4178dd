"""The part that runs inside an engine, in vLLM itself with the embedded pair: its files against vLLM's own counters and answers,
and against a replay. `make test-vllm` runs this, in the environment of scripts/env-vllm.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftscope.counterfactual import counterfactuals
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.stages import stages
from draftscope.embedded.pair import DRAFT
from draftscope.engines.counters import Counters, read_counters
from draftscope.states import capture as plain_capture
from draftscope.states.types import Trace, from_trace
from draftscope.target.embedded import cache_directory, ensure_target
from draftscope.target.parts import read_parts

SERVE = Path(__file__).parents[1] / "recipes" / "foreign" / "serve.py"
K = 3

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(report=lambda _: None)


@pytest.fixture(scope="module")
def python() -> Path:
    found = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "vllm" / "bin" / "python"
    if not found.exists():
        pytest.skip("needs the environment of vllm: scripts/env-vllm makes it")
    return found


def offline(python: Path, target: Path, out: Path, *arguments: str) -> list[list[int]]:
    """Run vLLM in one process; returns its answers."""
    run = subprocess.run([python, SERVE, target, DRAFT, out, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    answers: list[list[int]] = json.loads((out / "answers.json").read_text())
    return answers


@pytest.fixture(scope="module")
def captured(python: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    out = tmp_path_factory.mktemp("captured")
    return out, offline(python, target, out, "--prompts", "8", "--tokens", "48")


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "capture.json").read_text())
    assert found["stopped"] is None
    return found


def holds(folder: Path, counters: Counters, target: Path, requests: int) -> list[Trace]:
    """The capture has the counts of vLLM's counters, and a replay of it makes the same drafts from the same states."""
    traces = [trace for trace in plain_capture.open(folder) if isinstance(trace, Trace)]
    assert len(traces) == requests
    counts = torch.cat([trace.accepted_counts for trace in traces if trace.accepted_counts is not None])
    assert counters.drafts == len(counts)
    assert list(counters.accepted) == [int((counts > k).sum()) for k in range(K)]
    told = described(folder)["captured"]
    assert (told["requests"], told["steps"], told["accepted"]) == (requests, len(counts), int(counts.sum()))

    rung = counterfactuals([DRAFT], folder, target=target, consumer="vllm@0.32", readout="engine").rungs[0]
    assert rung.gate is not None and rung.gate.passed, rung.gate
    assert rung.gate.steps == len(counts) - rung.gate.left_out
    parts = read_parts(target)
    draft = build_draft(load_checkpoint(DRAFT, target_layers=parts.layers), parts)
    found = stages(draft, [from_trace(trace, 3) for trace in traces])
    assert found is not None and found.steps == len(counts) - rung.gate.left_out
    assert found.fc_error is not None and found.fc_error < 1e-5
    assert found.layer_error is not None and found.layer_error < 1e-4
    assert found.feedback_error["pre"] < 1e-4
    assert found.head_agreement["offset"] > 0.99
    return traces


def test_offline(captured: tuple[Path, list[list[int]]], target: Path) -> None:
    out, _ = captured
    traces = holds(out / "capture", read_counters(out / "counters.txt"), target, 8)
    assert all(trace.prefix_token_ids is None for trace in traces)
    told = described(out / "capture")
    assert told["layer_ids"] == [2, 15, 27]
    assert told["draft_in_effect"]["fc_applied"] is True and told["draft_in_effect"]["d2t"] is True
    assert told["draft_in_effect"]["embedding_shared"] is True and told["draft_in_effect"]["head_shared"] is False
    assert told["draft_in_effect"]["norm_before_residual"] is False
    assert told["switches"]["prefix_caching"] is False and told["switches"]["enforce_eager"] is True
    # What the draft was given with each row is the text, shifted by one.
    for trace in traces:
        sequence = from_trace(trace, 3)
        assert sequence.inputs is not None
        assert torch.equal(sequence.inputs, sequence.token_ids[1 : sequence.rows + 1])


def test_answers_are_the_same_without_it(
    captured: tuple[Path, list[list[int]]], python: Path, target: Path, tmp_path: Path,
) -> None:
    assert offline(python, target, tmp_path, "--prompts", "8", "--tokens", "48", "--plain") == captured[1]
    assert not (tmp_path / "capture").exists()


def test_chunked_prefill(python: Path, target: Path, tmp_path: Path) -> None:
    offline(python, target, tmp_path, "--prompts", "8", "--tokens", "48", "--engine", '{"max_num_batched_tokens": 32}')
    traces = holds(tmp_path / "capture", read_counters(tmp_path / "counters.txt"), target, 8)
    # vLLM 0.32's V1 runner gives the draft the prompt's last token at the end of a chunk, not the next one
    # (`prepare_next_token_ids_padded` takes `num_tokens_no_spec - 1`); the replay reproduces the counts with those it was given.
    odd = 0
    for trace in traces:
        sequence = from_trace(trace, 3)
        assert sequence.inputs is not None and sequence.answer is not None
        prompt = int(sequence.answer.int().argmax())
        other = (sequence.inputs != sequence.token_ids[1 : sequence.rows + 1]).nonzero().squeeze(-1)
        assert bool((other < prompt - 1).all())
        assert sequence.inputs[other].unique().tolist() in ([], [int(sequence.token_ids[prompt - 1])])
        odd += len(other)
    assert odd > 0


def test_prefix_caching(python: Path, target: Path, tmp_path: Path) -> None:
    """The second time, prompts that fill blocks come from the cache; their rows are those of the first time."""
    offline(python, target, tmp_path, "--prompts", "8", "--tokens", "32", "--rounds", "2",
            "--engine", '{"enable_prefix_caching": true, "block_size": 32}')
    traces = holds(tmp_path / "capture", read_counters(tmp_path / "counters.txt"), target, 16)
    completed = [trace for trace in traces if "prefix_from" in trace.meta]
    assert completed
    assert all(trace.positions is not None and int(trace.positions[0]) == 0 for trace in completed)
    assert described(tmp_path / "capture")["captured"]["prefix_rows_missing"] > 0


def test_asynchronous_scheduling(python: Path, target: Path, tmp_path: Path) -> None:
    """Passes run for requests whose end was not known yet; vLLM does not count them, and they are left out here."""
    offline(python, target, tmp_path, "--prompts", "8", "--tokens", "48", "--ahead")
    holds(tmp_path / "capture", read_counters(tmp_path / "counters.txt"), target, 8)
    told = described(tmp_path / "capture")
    assert told["switches"]["async_scheduling"] is True
    assert told["captured"]["rows_after_end"] > 0


def get(request: urllib.request.Request | str) -> bytes:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as answer:
        body: bytes = answer.read()
    return body


def ask(url: str, number: int) -> str:
    body = {"model": "m", "temperature": 0, "max_tokens": 32,
            "messages": [{"role": "user", "content": f"Name {number} colours of flowers and say why."}]}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return str(json.loads(get(request))["id"])


def test_a_server(python: Path, target: Path, tmp_path: Path) -> None:
    """`capture vllm` around a server that answers several at once, its workers in processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, url = tmp_path / "capture", f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "draftscope", "capture", "vllm", "-o", out, "--keep-free", "0", "--json", tmp_path / "told.json",
        "--",
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--served-model-name", "m", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--speculative-config", json.dumps({"method": "eagle3", "model": str(DRAFT), "num_speculative_tokens": K}),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as server:
        assert server.stdout is not None
        log = []
        for line in server.stdout:
            log.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("".join(log[-30:]))
        with ThreadPoolExecutor(4) as pool:
            ids = list(pool.map(lambda number: ask(url, number), range(2, 8)))
        # The last request's file is written once the engine has told the worker of its end.
        while described(out)["captured"]["requests"] < len(ids):
            get(f"{url}/health")
        (tmp_path / "counters.txt").write_bytes(get(f"{url}/metrics"))
        server.terminate()
        server.communicate(timeout=120)
    traces = holds(out, read_counters(tmp_path / "counters.txt"), target, len(ids))
    assert all(any(str(trace.meta["request"]).startswith(one) for one in ids) for trace in traces)
    assert json.loads((tmp_path / "told.json").read_text())["captures"][0]["captured"]["requests"] == len(ids)


@pytest.mark.parametrize("graphs", [False, True])
def test_the_second_runner(python: Path, tmp_path: Path, graphs: bool) -> None:
    """vLLM's V2 speculator, driven on the CPU: rows of padding, a dummy run and a chunk's end among what it sees."""
    run = subprocess.run([python, SERVE.with_name("second_runner.py"), tmp_path, *(["--graphs"] if graphs else [])],
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    expected = load_file(tmp_path / "expected.safetensors")
    traces = {trace.meta["request"]: trace for trace in plain_capture.open(tmp_path / "capture") if isinstance(trace, Trace)}
    assert set(traces) == {"a", "b"}
    for name, tensor in expected.items():
        request, column = name.split()
        held = getattr(traces[request], column)
        if graphs and column == "draft_states":
            assert held is None, "steps in a graph are not seen"
        else:
            assert held.shape == tensor.shape
            torch.testing.assert_close(held, tensor.to(held.dtype), rtol=1e-5, atol=1e-6)
    for trace in traces.values():
        sequence = from_trace(trace, 3)
        assert sequence.inputs is not None
        assert torch.equal(sequence.inputs, sequence.token_ids[1 : sequence.rows + 1])
    told = described(tmp_path / "capture")["captured"]
    assert told["steps_without_draft_states"] == (4 if graphs else 0)
