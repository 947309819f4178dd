"""vLLM, read in the Python sources of the release wheels 0.20.2, 0.32.0 and 0.33.0 (all paths below `vllm/`).

0.32 and 0.33 differ in none of these rows; 0.20 is 0.32 with the rows that differ.
"""

from __future__ import annotations

from dataclasses import replace

from draftscope.consumers.facts import (
    LAYER,
    Consumer,
    IdRule,
    LayerIds,
    Naming,
    Positions,
    Quantisation,
    Rope,
    SlotCount,
    Switch,
    TensorFact,
    raw_ids,
    several_layers,
)

_MODEL = "model_executor/models/llama_eagle3.py"
_QWEN = "model_executor/models/qwen3_eagle3.py"
_LATENT = "model_executor/models/deepseek_eagle3.py"
_LAYER = "model_executor/models/llama.py LlamaDecoderLayer"
_ADAPTER = "transformers_utils/configs/speculators/algos.py update_eagle3"
_LOADER = "model_executor/models/utils.py AutoWeightsLoader"
_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = f"eagle_config.{_IDS}"
_QWEN3 = "Eagle3Qwen3ForCausalLM"
_LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")


def _layer(prefix: str) -> tuple[Switch, ...]:
    """Settings of the decoder layers; `prefix` is where the dialect keeps their keys."""
    return (
        Switch("norm_before_head", (), True, f"{_MODEL} LlamaModel.forward"),
        Switch("layers", (f"{prefix}num_hidden_layers",), 1, f"{_MODEL} LlamaModel"),
        Switch("later_norm", (), "input_layernorm", f"{_MODEL} LlamaDecoderLayer.forward", matters=several_layers),
        Switch("attention_bias", (f"{prefix}attention_bias",), False, f"{_MODEL} LlamaDecoderLayer"),
        Switch("attention_output_bias", (f"{prefix}attention_bias", f"{prefix}bias"), False, _LAYER, truthy=True),
        Switch("mlp_bias", (f"{prefix}mlp_bias",), False, _LAYER),
        Switch("fc_bias", (), False, f"{_MODEL} LlamaModel"),
    )


_BIAS = TensorFact("", "idle", "ignores", "a bias that no module has is dropped without a word", _LOADER, suffix=".bias")
# Its layers have no biases, its model neither the norm over all slots nor a switch for `fc` (_LATENT).
_LATENT_SETS = {"qk_norm": False, "norm_before_fc": False, "use_aux_hidden_state": True, "sliding_window": None,
                "attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
_AUX = Switch("use_aux_hidden_state", ("eagle_config.use_aux_hidden_state",), True, f"{_MODEL} LlamaModel")

VLLM_0_33 = Consumer(
    name="vllm",
    versions=("0.33", "0.33.0"),
    kind="engine",
    architectures=(*_LLAMA, _QWEN3, *_MLA),
    architecture_source="model_executor/models/registry.py",
    dialects=("native", "speculators"),
    sets={"": {"qk_norm": False}, _QWEN3: {"qk_norm": True, "attention_output_bias": False, "mlp_bias": False},
          **dict.fromkeys(_MLA, _LATENT_SETS)},
    switches={
        "native": (
            Switch("norm_before_residual", ("norm_before_residual",), False, f"{_MODEL} LlamaDecoderLayer"),
            Switch("norm_before_fc", ("eagle_config.norm_before_fc", "norm_before_fc"), False, f"{_MODEL} LlamaModel"),
            Switch("fc_norm", ("fc_norm",), False, f"{_MODEL} LlamaModel"),
            Switch("norm_output", ("norm_output",), False, f"{_MODEL} LlamaModel"),
            _AUX,
            *_layer(""),
        ),
        "speculators": (
            Switch("norm_before_residual", ("norm_before_residual",), True, _ADAPTER),
            Switch("norm_before_fc", ("norm_before_fc",), False, _ADAPTER),
            Switch("fc_norm", ("fc_norm",), False, _ADAPTER),
            Switch("norm_output", ("norm_output",), False, _ADAPTER),
            replace(_AUX, keys=()),
            *_layer(LAYER),
        ),
    },
    layer_ids=(
        LayerIds(
            (_IDS, "eagle_config.layer_ids"),
            "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py get_eagle3_aux_layers_from_config", "v2",
        ),
        LayerIds((_IDS, _NESTED), "v1/worker/gpu_model_runner.py _get_eagle3_aux_layers_from_config", "v1"),
    ),
    id_rules=(
        IdRule("id i is boundary i", raw_ids, raw_ids, "model_executor/models/interfaces.py EagleModelMixin",
               last_boundary=True),
    ),
    tensors=(
        TensorFact("d2t", "missing", "initial", "the map stays all zero, so draft id i is taken for target id i",
                   f"{_MODEL} Eagle3LlamaForCausalLM.__init__"),
        TensorFact("lm_head.", "missing", "target", "the target's head stands in, of which a smaller draft vocabulary sees the "
                   "first rows", "v1/spec_decode/llm_base_proposer.py _maybe_share_lm_head"),
        TensorFact("embed_tokens.", "missing", "target", "the target's embedding stands in",
                   "v1/spec_decode/llm_base_proposer.py _maybe_share_embeddings"),
        TensorFact("", "missing", "initial", "nothing checks that it was loaded", f"{_MODEL} load_weights"),
        TensorFact("input_norm.", "idle", "refuses", "no module of that name", _LOADER, architectures=_MLA),
        TensorFact("input_norm.", "idle", "ignores", "dropped while norm_before_fc is off", f"{_MODEL} load_weights"),
        TensorFact("fc.", "idle", "ignores", "dropped while use_aux_hidden_state is false", f"{_MODEL} load_weights"),
        TensorFact("t2d", "idle", "ignores", "not used", f"{_MODEL} load_weights"),
        TensorFact("d2t", "idle", "refuses", "no place for a map while the vocabularies are equal", _LOADER),
        _BIAS,
        TensorFact("", "idle", "refuses", "no module of that name", _LOADER),
    ),
    naming=Naming((("midlayer.", "layers.0."),), "", "layers.", exact=True, source=f"{_MODEL} load_weights"),
    latent_naming=Naming((("midlayer.", "layers.0."),), "", "layers.", exact=True, source=f"{_LATENT} load_weights"),
    slots={
        "": SlotCount(("num_aux_hidden_states",), (_NESTED,), f"{_MODEL} LlamaModel"),
        _QWEN3: SlotCount(("num_aux_layers", "num_aux_hidden_states"), (_IDS, _NESTED), f"{_QWEN} Qwen3Eagle3Model"),
    },
    rope=Rope(new=True, legacy=True, first="rope_scaling", source="transformers_utils/config.py patch_rope_parameters, over "
              "transformers 5's convert_rope_params_to_dict"),
    quantisation=Quantisation(False, "the draft's own quantization_config alone counts",
                              "model_executor/models/utils.py get_draft_quant_config"),
    positions=Positions("stops", "requests are no longer drafted for beyond it, without a word",
                        "config/speculative.py _maybe_override_draft_max_model_len, v1/worker/gpu_model_runner.py"),
    query_latent=f"{_LATENT} DeepseekV2Eagle3Model (the keys' and values' latent is loaded into the queries' projection only)",
    keeps_embedding=True,
    embedding_source="v1/spec_decode/llm_base_proposer.py _maybe_share_embeddings",
    write_key=_IDS,
)

VLLM_0_32 = replace(VLLM_0_33, versions=("0.32", "0.32.0"))

_UNKNOWN_0_20 = ("fc_norm", "norm_output")
VLLM_0_20 = replace(
    VLLM_0_32, versions=("0.20", "0.20.2"), architectures=(*_LLAMA, *_MLA),
    sets={name: rows for name, rows in VLLM_0_32.sets.items() if name != _QWEN3},
    switches={
        dialect: tuple(
            replace(row, keys=()) if row.field in _UNKNOWN_0_20
            else replace(row, keys=("norm_before_fc",)) if row.field == "norm_before_fc"
            else row for row in rows
        ) for dialect, rows in VLLM_0_32.switches.items()
    },
    layer_ids=(
        LayerIds((_IDS,), "v1/worker/gpu_model_runner.py _get_eagle3_aux_layers_from_config", "v1"),
        LayerIds((_IDS,), "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py get_eagle3_aux_layers_from_config", "v2"),
    ),
    tensors=tuple(
        replace(fact, then="ignores", says="kept and added, though the vocabularies are equal",
                source=f"{_MODEL} Eagle3LlamaForCausalLM")
        if (fact.prefix, fact.when) == ("d2t", "idle") else fact for fact in VLLM_0_32.tensors if fact is not _BIAS
    ),
    slots={"": SlotCount((), (), f"{_MODEL} LlamaModel")},
)

VLLM = (VLLM_0_33, VLLM_0_32, VLLM_0_20)
"""Newest first."""
