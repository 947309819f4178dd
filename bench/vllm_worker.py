"""One vLLM beside the benchmarks: answers the prompts of each line that comes in, and says how fast.

    python bench/vllm_worker.py TARGET DRAFT ROWS K

Run with the Python of scripts/env-vllm. K = 0 is plain decoding; ROWS is how many requests are served at once. A line is
{"prompts": [[token id, ...], ...], "max_new": N, "stop_ids": [...]}, every answer of N tokens where `stop_ids` is null; the
reply is {"seconds", "tokens", "answers"}. With DRAFTSCOPE_CAPTURE set the recorder is in, read from DRAFTSCOPE_CAPTURE_FILE.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Engine:
    """A worker process, from the side of the benchmark."""

    def __init__(self, target: Path, draft: Path, rows: int, k: int, **environment: str) -> None:
        envs = Path(os.environ.get("DRAFTSCOPE_ENVS", Path.home() / ".cache" / "draftscope" / "envs"))
        python = envs / "vllm" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{python} is not there: run scripts/env-vllm")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTSCOPE_CAPTURE")}
        self.process = subprocess.Popen(
            [str(python), str(HERE / "vllm_worker.py"), str(target), str(draft), str(rows), str(k)], env=clean | environment,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if self._line().strip() != "ready":
            raise SystemExit(f"{python} does not serve the pair: run scripts/env-vllm")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def run(self, prompts: list[list[int]], max_new: int, stop_ids: list[int] | None = None) -> dict[str, Any]:
        """One round over the prompts."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "max_new": max_new, "stop_ids": stop_ids}), file=self.process.stdin, flush=True)
        told: dict[str, Any] = json.loads(self._line())
        return told

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    target, draft, rows, k = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                       "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints stays away from the answers
    if os.environ.get("DRAFTSCOPE_CAPTURE"):
        spec = importlib.util.spec_from_file_location("inside", os.environ["DRAFTSCOPE_CAPTURE_FILE"])
        assert spec is not None and spec.loader is not None
        sys.modules["inside"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from vllm import LLM, SamplingParams

    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": k} if k else None
    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=rows, enable_prefix_caching=False,
              distributed_executor_backend="uni", disable_log_stats=False, speculative_config=speculative)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["max_new"], detokenize=False,
                                  ignore_eos=asked["stop_ids"] is None, stop_token_ids=asked["stop_ids"])
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        begun = time.perf_counter()
        answers = [list(done.outputs[0].token_ids) for done in llm.generate(prompts, sampling, use_tqdm=False)]
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, answers)), "answers": answers}), file=out, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
