"""Training states as vLLM extracts them: OUT/{request}.safetensors and OUT/requests.json (conversation of each request).

    python recipes/foreign/extract.py TARGET OUT [--conversations 60]

Needs the environment of scripts/env-vllm. Runs vLLM in worker processes: in process the last write would wait for an engine
step that never comes.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

SWEEP = Path(__file__).resolve().parents[2] / "src" / "draftscope" / "engines" / "vllm_sweep.py"
os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
# vLLM imports the connector by name, here and in its workers: the file alone, since its neighbours have names of packages.
SHELF = tempfile.mkdtemp()
atexit.register(shutil.rmtree, SHELF, ignore_errors=True)
shutil.copy(SWEEP, SHELF)
sys.path.append(SHELF)
os.environ["PYTHONPATH"] = os.pathsep.join([SHELF, *filter(None, [os.environ.get("PYTHONPATH")])])

from conversations import TRAINING, greedy  # noqa: E402

BOUNDARIES = [2, 15, 27, 30]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--conversations", type=int, default=60)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    conversations = greedy(TRAINING, options.conversations)
    options.out.mkdir(parents=True, exist_ok=True)
    llm = LLM(
        str(options.target), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": BOUNDARIES}},
        },
        kv_transfer_config={
            "kv_connector": "SweepConnector", "kv_connector_module_path": "vllm_sweep", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(options.out.resolve())},
        },
    )
    outputs = llm.generate([{"prompt_token_ids": c.token_ids} for c in conversations],
                           SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    names = [Path(output.kv_transfer_params["hidden_states_path"]).name for output in outputs]
    deadline = time.monotonic() + 120
    while missing := [name for name in names if not (options.out / name).exists()]:
        if time.monotonic() > deadline:
            raise SystemExit(f"vLLM never wrote {', '.join(missing)}")
        time.sleep(0.2)
    prompts = {name: conversation.prompt_length for name, conversation in zip(names, conversations, strict=True)}
    (options.out / "requests.json").write_text(json.dumps(prompts, indent=1))
    print(f"{len(names)} requests, {sum(len(c.token_ids) for c in conversations)} tokens, in {options.out}")


if __name__ == "__main__":
    main()
