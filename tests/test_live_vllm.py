"""A real vLLM server, asked and captured: healthy, and with checkpoints spoilt in the ways that vLLM takes without a word."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftscope import diagnose
from draftscope.boundaries import default_boundaries
from draftscope.embedded.pair import DRAFT, HERE
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Conversation, Rig
from draftscope.findings import Diagnosis
from draftscope.target.embedded import cache_directory, ensure_target
from draftscope.target.model import load_target

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
K = 3
Spoil = Callable[[dict[str, Any], dict[str, torch.Tensor], torch.Tensor], None]


@pytest.fixture(scope="module")
def python() -> Path:
    found = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "vllm" / "bin" / "python"
    if not found.exists():
        pytest.skip("needs the environment of vllm: scripts/env-vllm makes it")
    return found


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(report=lambda _: None)


@pytest.fixture(scope="module")
def train(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of the target's own greedy answers among those that the draft was trained on."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "foreign"))
    from conversations import TRAINING, greedy

    conversations = [Conversation(list(c.token_ids), c.prompt_length) for c in greedy(TRAINING, 8)]
    model = load_target(target)
    folder = tmp_path_factory.mktemp("live") / "train"
    Rig(model, DRAFT, [], conversations).write_training(Plant.healthy(default_boundaries(model.layers)), folder)
    return folder


def spoilt(folder: Path, target: Path, spoil: Spoil | None) -> Path:
    folder.mkdir()
    config, tensors = json.loads((DRAFT / "config.json").read_text()), load_file(DRAFT / "model.safetensors")
    if spoil is not None:
        spoil(config, tensors, load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@contextmanager
def server(python: Path, target: Path, draft: Path, capture: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "draftscope", "capture", "vllm", "-o", capture, "--keep-free", "0", "--quiet", "--",
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--no-enable-prefix-caching",
        "--speculative-config", json.dumps({"method": "eagle3", "model": str(draft), "num_speculative_tokens": K}),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = capture.with_suffix(".log")
    with log.open("w") as sink, subprocess.Popen(list(map(str, command)), env=environment, stdout=sink,
                                                 stderr=subprocess.STDOUT) as running:
        while not healthy(url):
            with suppress(subprocess.TimeoutExpired):
                running.wait(timeout=0.5)
                pytest.fail(log.read_text()[-3000:])
        try:
            yield url
        finally:
            running.terminate()
            running.wait(timeout=120)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def ask(url: str, target: Path, draft: Path, train: Path, **more: Any) -> Diagnosis:
    return diagnose(url=url, draft=draft, train=train, target=target, requests=8, max_new=32, max_tokens=1024, **more)


def test_a_healthy_server(python: Path, target: Path, train: Path, tmp_path: Path) -> None:
    draft, capture = spoilt(tmp_path / "draft", target, None), tmp_path / "capture"
    with server(python, target, draft, capture) as url:
        found = ask(url, target, draft, train, serve=capture, prompts=HERE / "heldout.jsonl")
    assert found.matched["live"]["separates"] in ("sound", "text")
    assert {finding.fault for finding in found.findings} <= {"train-budget"}, [f.says for f in found.findings]
    ladder = found.acceptance
    assert ladder.served is not None and ladder.as_read is not None and ladder.measured is not None
    assert any("in 100.0% of" in step for step in found.steps if step.startswith("gate")), found.steps
    same, of = found.matched["live"]["training prompts"]["same_text"]
    assert same > 0.9 * of


def layer_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [3, 16, 28]


def key_placement(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    """The right ids under a key that vLLM looks at second, others under the one that it looks at first."""
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2, 15]
    config["eagle_config"] = {"layer_ids": [2, 15, 27]}


def norm_flag(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    config["norm_before_residual"] = True


def vocabulary(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def other_embedding(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    tensors["embed_tokens.weight"] = embedding.roll(1, 0).to(tensors["fc.weight"].dtype)


@pytest.mark.parametrize(("spoil", "fault"), [
    (layer_ids, "layer-offset"), (key_placement, "layer-set"), (norm_flag, "config-flag"), (vocabulary, "vocab-map"),
    (other_embedding, "weight-missing"),
])
def test_a_spoilt_checkpoint_is_named(python: Path, target: Path, train: Path, tmp_path: Path, spoil: Spoil, fault: str) -> None:
    draft, capture = spoilt(tmp_path / "draft", target, spoil), tmp_path / "capture"
    blind = None
    with server(python, target, draft, capture) as url:
        found = ask(url, target, draft, train, serve=capture)
        if spoil is key_placement:
            blind = ask(url, target, draft, train)
    named = [(finding.fault, finding.strength, finding.says) for finding in found.findings]
    assert named and named[0][0] == fault, (named, found.next)
    if blind is not None:  # without a capture the counters alone say that no text is to blame
        assert blind.matched["live"]["separates"] == "elsewhere"
        assert any("no other text explains that" in remark for remark in blind.next)


def rope_base(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    if "rope_parameters" in config:
        config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 5e5}
    config["rope_theta"] = 5e5


def window(config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
    config |= {"sliding_window": 24, "layer_types": ["sliding_attention"], "use_sliding_window": True}


@pytest.mark.parametrize(("spoil", "fault"), [(rope_base, "rope"), (window, "attn-mask")])
def test_a_server_that_runs_the_draft_otherwise(
    python: Path, target: Path, train: Path, tmp_path: Path, spoil: Spoil, fault: str
) -> None:
    """The checkpoint at hand is the trainer's; the server runs a copy whose configuration someone changed."""
    served, capture = spoilt(tmp_path / "served", target, spoil), tmp_path / "capture"
    draft = spoilt(tmp_path / "draft", target, None)
    with server(python, target, served, capture) as url:
        found = ask(url, target, draft, train, serve=capture)
    named = [(finding.fault, finding.strength, finding.says) for finding in found.findings]
    assert named and named[0][0] == fault, (named, found.next)
