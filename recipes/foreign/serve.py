"""The draft at work in vLLM: a plain capture of what it receives, the engine's own counters, and what it answered.

    python recipes/foreign/serve.py TARGET DRAFT OUT [--prompts 12] [--tokens 64] [--k 3] [--rounds 1] [--engine JSON] [--ahead]

Needs the environment of scripts/env-vllm. Writes OUT/capture (by the part of draftscope that runs inside an engine),
OUT/answers.json and OUT/counters.txt (Prometheus text). With --plain nothing is captured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

from conversations import SERVED, greedy
from safetensors import safe_open

INSIDE = Path(__file__).parents[2] / "src" / "draftscope" / "engines" / "inside.py"


def capture_into(folder: Path) -> None:
    """What the plugin does in a server: the file alone, without draftscope. What an earlier run left there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ |= {"DRAFTSCOPE_CAPTURE": str(folder), "DRAFTSCOPE_CAPTURE_OPTIONS": "keep_free=0"}
    spec = importlib.util.spec_from_file_location("inside", INSIDE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["inside"] = module
    spec.loader.exec_module(module)


def schedule_ahead() -> None:
    """vLLM switches asynchronous scheduling off on CPUs; its V1 runner does it there all the same."""
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config

    def settled(config: Any) -> None:
        settle(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(settled)


def check(folder: Path, said: list[list[int]]) -> None:
    """Every request's tokens, as its rows have them, are a prompt and an answer that vLLM gave."""
    paths = sorted(folder.glob("*.safetensors"))
    if len(paths) != len(said):
        raise SystemExit(f"{folder} has {len(paths)} requests of {len(said)}: {(folder / 'capture.json').read_text()}")
    for path in paths:
        with safe_open(path, "pt") as file:
            kept = file.get_tensor("token_ids")[file.get_tensor("accepted")].tolist()
            if "prefix_token_ids" in file.keys():  # noqa: SIM118
                kept = file.get_tensor("prefix_token_ids").tolist() + kept
        if not any(kept[: len(text)] == text[: len(kept)] for text in said):
            raise SystemExit(f"{path.name}: its rows' tokens are none of vLLM's answers")


def prometheus(metrics: list[Any]) -> str:
    """The speculative counters as a scrape of a server would show them."""
    lines = []
    for metric in metrics:
        if metric.name.startswith("vllm:spec_decode"):
            labels = ",".join(f'{key}="{value}"' for key, value in metric.labels.items())
            lines.append(f"# TYPE {metric.name} counter")
            if hasattr(metric, "values"):
                lines += [f'{metric.name}_total{{{labels},position="{i}"}} {value}' for i, value in enumerate(metric.values)]
            else:
                lines.append(f"{metric.name}_total{{{labels}}} {metric.value}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="ask for all answers so many times")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vLLM's LLM")
    parser.add_argument("--ahead", action="store_true", help="schedule a step before the last one is known")
    parser.add_argument("--plain", action="store_true", help="capture nothing")
    options = parser.parse_args()
    if not options.plain:
        capture_into(options.out / "capture")

    if options.ahead:
        schedule_ahead()
    from vllm import LLM, SamplingParams

    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8, "disable_log_stats": False,
              "distributed_executor_backend": "uni", "enable_prefix_caching": False, **options.engine}
    llm = LLM(str(options.target), **engine, speculative_config={
        "method": "eagle3", "model": str(options.draft), "num_speculative_tokens": options.k})
    prompts = [{"prompt_token_ids": c.token_ids[: c.prompt_length]} for c in greedy(SERVED, options.prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, detokenize=False)
    outputs = [output for _ in range(options.rounds) for output in llm.generate(prompts, sampling)]
    counters = prometheus(llm.get_metrics())
    llm.llm_engine.engine_core.shutdown()
    options.out.mkdir(parents=True, exist_ok=True)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    (options.out / "answers.json").write_text(json.dumps(answers))
    if not options.plain:
        check(options.out / "capture", [list(o.prompt_token_ids) + a for o, a in zip(outputs, answers, strict=True)])
    (options.out / "counters.txt").write_text(counters)
    print(counters)


if __name__ == "__main__":
    main()
