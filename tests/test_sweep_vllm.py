"""Every boundary as vLLM gives it, against transformers' own over the same tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from draftscope.cli.main import run
from draftscope.states.opening import open_source
from draftscope.states.types import Sample
from draftscope.target.embedded import ensure_target
from draftscope.target.model import load_target
from draftscope.target.sweep import sweep

pytestmark = pytest.mark.vllm
PYTHON = Path(os.environ.get("DRAFTSCOPE_ENVS", Path.home() / ".cache" / "draftscope" / "envs")) / "vllm" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="scripts/env-vllm has not been run")
def test_every_boundary_is_transformers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
        monkeypatch.setenv(key, value)
    target = load_target(ensure_target(report=lambda _: None))
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 40_000, (length,), generator=draw).tolist() for length in (40, 7)]
    data = tmp_path / "states"
    data.mkdir()
    from draftscope.states import plain

    for i, ids in enumerate(texts):
        sample = Sample("", torch.tensor(ids), torch.zeros(len(ids), 2, 8), None, ())
        plain.write_sample(data / f"hs_{i}.safetensors", sample)
    out = tmp_path / "sweep"
    words = ["capture", "vllm", "--sweep", str(data), "-o", str(out), "--target", str(target.folder), "--python", str(PYTHON),
             "--engine", json.dumps({"dtype": "float32", "max_num_seqs": 4})]
    assert run(words) == 0
    found = {tuple(sample.token_ids.tolist()): sample for sample in open_source(out)}
    assert sorted(found) == sorted(map(tuple, texts))
    for swept in sweep(target, [(str(i), torch.tensor(ids)) for i, ids in enumerate(texts)]):
        states = found[tuple(swept.token_ids.tolist())].states.transpose(0, 1)
        error = (states - swept.stream).norm(dim=-1) / swept.stream.norm(dim=-1)
        assert error.shape == (target.layers + 1, len(swept.token_ids)) and float(error.max()) < 1e-3
