"""SGLang 0.5.23, read in the Python sources of the release wheel (all paths below `sglang/srt/`)."""

from __future__ import annotations

from collections.abc import Sequence

from draftscope.consumers.facts import Consumer, IdRule, LayerIds, Switch, TensorFact, minus_one, plus_one

_MODEL = "models/llama_eagle3.py"
_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"


def _deepseek(ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
    return plus_one(ids, layers) if ids and ids[0] == 1 else tuple(ids)


def _deepseek_ids(boundaries: Sequence[int], layers: int | None) -> tuple[int, ...] | None:
    """Boundaries themselves, but never with 1 in front: the layers are captured in their own order, so another may lead."""
    ids = tuple(boundaries)
    if ids[:1] != (1,):
        return ids
    return (*ids[1:], ids[0]) if len(ids) > 1 else None


def _gpt_oss(ids: Sequence[int], layers: int | None) -> tuple[int, ...]:
    return tuple(ids) if ids and max(ids) == layers else plus_one(ids, layers)


def _gpt_oss_ids(boundaries: Sequence[int], layers: int | None) -> tuple[int, ...] | None:
    return tuple(boundaries) if boundaries and max(boundaries) == layers else minus_one(boundaries, layers)


SGLANG = Consumer(
    name="sglang",
    versions=("0.5.23",),
    architectures=("LlamaForCausalLMEagle3",),
    dialects=("native",),
    switches={
        "native": (
            Switch("norm_before_residual", (), False, f"{_MODEL} LlamaDecoderLayer.forward"),
            Switch("norm_before_fc", ("eagle_config.norm_before_fc", "norm_before_fc"), False, f"{_MODEL} LlamaModel"),
            Switch("fc_norm", ("fc_norm", "use_aux_norm"), False, f"{_MODEL} LlamaModel", truthy=True),
            Switch("norm_output", ("norm_output",), False, f"{_MODEL} LlamaModel"),
            Switch("qk_norm", (), False, f"{_MODEL} load_weights"),
            Switch("sliding_window", (), None, f"{_MODEL} LlamaForCausalLMEagle3 (--speculative-draft-window-size)"),
        ),
    },
    layer_ids=(
        LayerIds((_IDS,), "model_executor/model_runner_components/spec_aux_hidden_state.py _resolve_eagle_aux_hidden_state"),
    ),
    id_rules=(
        IdRule("id i is the output of layer i, boundary i + 1", plus_one, minus_one,
               "models/llama.py set_eagle3_layers_to_capture"),
        IdRule("id i is boundary i + 1 if the first id is 1, else boundary i", _deepseek, _deepseek_ids,
               "models/deepseek_v2.py set_eagle3_layers_to_capture",
               ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite")),
        IdRule("id i is boundary i if the highest id is the number of layers, else boundary i + 1", _gpt_oss, _gpt_oss_ids,
               "models/gpt_oss.py set_eagle3_layers_to_capture", ("gpt_oss",), last_boundary=True),
    ),
    tensors=(
        TensorFact("d2t", "missing", "initial", "no map is set, so draft id i is taken for target id i",
                   "speculative/eagle_worker_v2.py init_lm_head"),
        TensorFact("embed_tokens.", "missing", "target", "the target's embedding is always taken",
                   "models/llama.py set_embed"),
        TensorFact("", "missing", "initial", "nothing checks that it was loaded", f"{_MODEL} load_weights"),
        TensorFact("", "idle", "ignores", "a name without a parameter is skipped without a word", f"{_MODEL} load_weights"),
    ),
    keeps_embedding=False,
    embedding_source="models/llama.py set_embed",
    tied_head=f"{_MODEL} LlamaForCausalLMEagle3.__init__",
    write_key=_IDS,
)
