"""One vLLM for `bench_capture.py`: answers the same prompts each time a line comes in, and says how fast.

Run with the Python of scripts/env-vllm; with DRAFTSCOPE_CAPTURE set the recorder is in.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
sys.path.insert(0, str(HERE.parent / "recipes" / "foreign"))


def main() -> None:
    target, draft, count, tokens, k = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints stays away from the answers
    if os.environ.get("DRAFTSCOPE_CAPTURE"):
        spec = importlib.util.spec_from_file_location("inside", HERE.parent / "src" / "draftscope" / "engines" / "inside.py")
        assert spec is not None and spec.loader is not None
        sys.modules["inside"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from conversations import SERVED, greedy
    from vllm import LLM, SamplingParams

    llm = LLM(target, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8, distributed_executor_backend="uni",
              enable_prefix_caching=False, disable_log_stats=False,
              speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": k})
    prompts = [{"prompt_token_ids": c.token_ids[: c.prompt_length]} for c in greedy(SERVED, count)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        answers = [list(done.outputs[0].token_ids) for done in llm.generate(prompts, sampling, use_tqdm=False)]
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, answers)), "answers": answers}), file=out, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
