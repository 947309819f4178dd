"""Captures of vLLM under other conditions, the same prompts: alone, cached prefixes, compiled, twice over."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from draftscope.embedded.pair import DRAFT
from draftscope.inspecting.verify import verify
from draftscope.target.embedded import cache_directory, ensure_target

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
SERVE = Path(__file__).parents[1] / "recipes" / "foreign" / "serve.py"


def served(out: Path, engine: dict[str, object], rounds: int = 1) -> Path:
    python = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the environment of vllm: scripts/env-vllm makes it")
    words = [python, SERVE, ensure_target(report=lambda _: None), DRAFT, out, "--prompts", "4", "--tokens", "24", "--rounds",
             str(rounds), "--engine", json.dumps(engine)]
    run = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return out / "capture"


def test_conditions_do_not_change_a_state(tmp_path: Path) -> None:
    batch = served(tmp_path / "batch", {})
    others = {
        "alone": served(tmp_path / "alone", {"max_num_seqs": 1}),
        "twice, prefixes cached": served(tmp_path / "cached", {"enable_prefix_caching": True, "block_size": 32}, rounds=2),
        "prompts in pieces": served(tmp_path / "pieces", {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}),
    }
    for name, other in others.items():
        result = verify([batch, other])
        assert result.verdict == "clean", (name, [f.says for f in result.findings], result.next)
        compared = result.comparisons[0]
        assert compared.matched == compared.requests and compared.rows > 150, (name, compared)
        assert max(compared.largest_error) < 1e-3, (name, compared)
