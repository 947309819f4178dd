"""What SGLang makes of draft checkpoints, without serving and without a GPU: settings, and which parameters were loaded.

    python recipes/foreign/consume_sglang.py OUT.json DRAFT...

Needs the environment of scripts/env-sglang. The model class is built and filled by its own `load_weights`; every parameter bears
a mark first, so that what still bears it was never loaded. Each draft's answer stands under its folder's name; `error` where
SGLang raised. Layer ids are read by the server, not by this class: they are not asked for here.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.update({"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
warnings.simplefilter("ignore")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoProcessor  # noqa: E402, F401  # before torchvision seems to be there

MARK = 12345
ABSENT = {"IPython", "torchvision", "vllm"}  # for notebooks, for pictures, and for a kernel of rope on CPUs


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of ABSENT whose every attribute is a mock."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, StandIn())

from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from sglang.srt.models import kimi_k25_eagle3, llama_eagle3  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

CLASSES = {"LlamaForCausalLMEagle3": llama_eagle3.LlamaForCausalLMEagle3,
           "Eagle3DeepseekV2ForCausalLM": kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM}


def begin(out: Path) -> None:
    """The server's arguments and the groups of processes that the layers ask for: this one alone."""
    get_context().override_server_args().install()
    init_distributed_environment(1, 0, f"file://{out.absolute()}.rendezvous", 0, "gloo")
    initialize_model_parallel("gloo")
    get_parallel().override_permanently(tp_rank=0, attn_tp_rank=0)


def consume(draft: Path) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(draft)
    name = (config.architectures or ["none"])[0]
    if name not in CLASSES:
        raise ValueError(f"no EAGLE-3 draft class of the name {name}")
    with torch.no_grad():
        model = CLASSES[name](config)
        for parameter in model.parameters():
            parameter.fill_(MARK)
        model.load_weights(iter(load_file(draft / "model.safetensors").items()))
    inner = model.model
    layers = list(inner.layers) if hasattr(inner, "layers") else [inner.midlayer]
    attention = layers[0].self_attn
    answer: dict[str, Any] = {
        "settings": {
            "norm_before_fc": getattr(inner, "input_norm", None) is not None,
            "fc_norm": getattr(inner, "fc_norm", None) is not None,
            "norm_output": bool(getattr(inner, "norm_output", False)), "layers": len(layers),
            "fc_bias": inner.fc.bias is not None, "qk_norm": hasattr(attention, "q_norm"),
            "attention_bias": getattr(getattr(attention, "qkv_proj", None), "bias", None) is not None,
            "attention_output_bias": attention.o_proj.bias is not None,
        },
        "fc_inputs": inner.fc.weight.shape[1],
        "initial": sorted(own for own, tensor in model.named_parameters() if bool((tensor == MARK).any())),
        "map": None if getattr(model, "hot_token_id", None) is None else model.hot_token_id.tolist(),
        "head_is_embedding": model.lm_head is getattr(inner, "embed_tokens", None),
        "head_of_target": bool(getattr(model, "load_lm_head_from_target", False)),
    }
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    asked = parser.parse_args()
    begin(asked.out)
    answers: dict[str, Any] = {}
    for draft in asked.drafts:
        try:
            answers[draft.name] = consume(draft)
        except Exception as error:  # whatever SGLang raises is the answer
            answers[draft.name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    asked.out.write_text(json.dumps(answers, indent=1, default=str))


if __name__ == "__main__":
    main()
