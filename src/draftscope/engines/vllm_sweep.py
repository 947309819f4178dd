"""Every boundary of a target over given tokens, by vLLM itself: for targets that nothing else can run.

    PYTHON draftscope_sweep.py MODEL TOKENS.json OUT [--engine JSON]

Run by `draftscope capture vllm --sweep` with vLLM's Python, as a file on its own: torch, safetensors and vLLM. TOKENS.json is a
list of token id lists; OUT gets hs_{i}.safetensors with `hidden_states` [T, n+1, H] and `token_ids` [T]. vLLM's
`extract_hidden_states` hands the states to a connector; its example copies through pinned CUDA memory and fails without a
GPU, hence the one here (0.32, `example_hidden_states_connector.py`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONNECTOR = "SweepConnector"
WAIT = 120.0


class Written:
    """Stands where vLLM expects the event of a copy in flight."""

    def query(self) -> bool:
        return True


def _connector() -> type[Any]:
    stock = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector")

    def submit(self: Any, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        cache = self._kv_cache
        blocks = torch.tensor(pending.block_ids)
        places = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = stock.extract_from_kv_cache(cache, places.to(cache.device), len(pending.token_ids))
        path = Path(pending.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        save_file({"hidden_states": states.cpu().contiguous(), "token_ids": pending.token_ids.cpu().clone()}, part)
        part.replace(path)
        self._req_copy_events[pending.req_id] = Written()
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)
            Path(f"{path}.lock").unlink(missing_ok=True)

    return type(CONNECTOR, (stock.ExampleHiddenStatesConnector,), {"_submit_async_write": submit})


def __getattr__(name: str) -> Any:
    """vLLM looks the connector up in this module; without vLLM there is none to be had."""
    if name == CONNECTOR:
        globals()[CONNECTOR] = _connector()
        return globals()[CONNECTOR]
    raise AttributeError(name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", type=json.loads, default={})
    options = parser.parse_args()
    here = Path(__file__).resolve()
    # The workers import the connector by its module's name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    sequences: list[list[int]] = json.loads(options.tokens.read_text())
    vllm = importlib.import_module("vllm")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(options.model).get_text_config()
    scratch = options.out.resolve() / ".sweep"
    longest = max(map(len, sequences))
    engine = {"enforce_eager": True, "enable_prefix_caching": False, "max_model_len": longest + 8, **options.engine}
    llm = vllm.LLM(
        options.model, **engine,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(range(config.num_hidden_layers + 1))}},
        },
        kv_transfer_config={
            "kv_connector": CONNECTOR, "kv_connector_module_path": here.stem, "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(scratch)},
        },
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences],
                           vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
    until = time.monotonic() + WAIT
    for number, output in enumerate(outputs):
        written = Path(output.kv_transfer_params["hidden_states_path"])
        while not written.exists():
            if time.monotonic() > until:
                sys.exit(f"vLLM never wrote {written.name}")
            time.sleep(0.1)
        written.replace(options.out / f"hs_{number}.safetensors")


if __name__ == "__main__":
    main()
