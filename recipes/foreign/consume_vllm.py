"""What vLLM makes of draft checkpoints, without serving: layers, settings, rope, and which parameters were loaded.

    python recipes/foreign/consume_vllm.py TARGET OUT.json DRAFT...

Needs the environment of scripts/env-vllm. TARGET needs no weights. Every parameter is filled with a mark first, so that what
still bears it was never loaded. Each draft's answer stands under its folder's name; `error` where vLLM raised.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_LEVEL": "ERROR"})

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

MARK = 12345


def engine_config(target: Path, draft: Path, **more: Any) -> Any:
    """vLLM's whole configuration for serving `target` with `draft`; `more` are arguments of the engine."""
    return EngineArgs(
        model=str(target), dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3},
        **more,
    ).create_engine_config()


def begin(target: Path, draft: Path, out: Path) -> None:
    """The groups of processes that vLLM's layers ask for: this one alone. Their meeting point lies beside `out`."""
    with set_current_vllm_config(engine_config(target, draft)):
        init_distributed_environment(1, 0, f"file://{out.absolute()}.rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def consume(target: Path, draft: Path) -> dict[str, Any]:
    config = engine_config(target, draft)
    speculative = config.speculative_config
    hf = speculative.draft_model_config.hf_config
    layers_v1 = GPUModelRunner._get_eagle3_aux_layers_from_config(SimpleNamespace(speculative_config=speculative))
    layers_v2 = get_eagle3_aux_layers_from_config(speculative)
    answer: dict[str, Any] = {
        "v1": None if layers_v1 is None else list(layers_v1), "v2": None if layers_v2 is None else list(layers_v2),
        "architecture": hf.architectures[0], "rope": getattr(hf, "rope_parameters", None),
        "quantised": speculative.draft_model_config.quantization,
    }
    # vLLM keeps layers by name in the configuration, so each draft is built under one of its own.
    with set_current_vllm_config(config):
        model = initialize_model(config, model_config=speculative.draft_model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(MARK)
    inner = model.model
    attention = inner.layers[0].self_attn
    answer["settings"] = {
        "norm_before_fc": bool(getattr(inner, "norm_before_fc", False)), "fc_norm": getattr(inner, "fc_norm", None) is not None,
        "norm_output": bool(inner.norm_output), "use_aux_hidden_state": bool(getattr(inner, "use_aux_hidden_state", True)),
        "norm_before_residual": inner.layers[0]._residual_norm.__name__ == "_norm_before_residual",
        "attention_bias": getattr(getattr(attention, "qkv_proj", None), "bias", None) is not None,
        "qk_norm": hasattr(attention, "q_norm"), "layers": len(inner.layers),
    }
    answer["fc_inputs"] = inner.fc.input_size if hasattr(inner, "fc") else None
    model.load_weights(load_file(draft / "model.safetensors").items())
    answer["initial"] = sorted(name for name, parameter in model.named_parameters() if bool((parameter == MARK).any()))
    answer["own"] = {"embedding": getattr(model, "has_own_embed_tokens", False), "head": getattr(model, "has_own_lm_head", False)}
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    asked = parser.parse_args()
    answers: dict[str, Any] = {}
    ready = False
    for draft in asked.drafts:
        try:
            if not ready:
                begin(asked.target, draft, asked.out)
                ready = True
            answers[draft.name] = consume(asked.target, draft)
        except Exception as error:  # whatever vLLM raises is the answer
            answers[draft.name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    asked.out.write_text(json.dumps(answers, indent=1, default=str))


if __name__ == "__main__":
    main()
