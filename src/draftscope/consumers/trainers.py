"""Trainers that go on from a checkpoint: speculators 0.9.0 and SpecForge 0.2.0, read in the release wheels."""

from __future__ import annotations

from collections.abc import Sequence

from draftscope.consumers.facts import (
    LAYER,
    Consumer,
    IdRule,
    LayerIds,
    Naming,
    Positions,
    Quantisation,
    Required,
    Rope,
    SlotCount,
    Switch,
    TensorFact,
    minus_one,
    plus_one,
    raw_ids,
    several_layers,
)

_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = f"eagle_config.{_IDS}"


def _distinct(ids: Sequence[int], layers: int | None) -> str:
    if len(set(ids)) != len(ids) or min(ids) < 0 or (layers is not None and max(ids) > layers):
        return f"layer ids have to be distinct and within 0 to {'n' if layers is None else layers}"
    return ""


def _three(ids: Sequence[int], layers: int | None) -> str:
    return "" if len(ids) == 3 and min(ids) >= 0 else "there have to be exactly three layer ids, none negative"


_CORE = "speculators/models/eagle3/core.py"
_LAYERS = "speculators/models/eagle3/model_definitions.py"
_CONFIG = "speculators/models/eagle3/config.py Eagle3SpeculatorConfig"
_LOAD = "speculators/model.py from_pretrained"
_VOCAB = "speculators/model.py DraftVocabMixin"
_QWEN3 = "Eagle3Qwen3ForCausalLM"
# Its constructor marks what is to come from the verifier with NaN, and its maps with zeros, but from_pretrained of transformers 5
# constructs without memory: what no file fills is then whatever the memory held.
_UNSET = "its values are those that the memory held"

SPECULATORS = Consumer(
    name="speculators",
    versions=("0.9", "0.9.0"),
    kind="trainer",
    architectures=("Eagle3LlamaForCausalLM", _QWEN3),
    architecture_source=f"{_LAYERS} model_classes",
    dialects=("speculators",),
    sets={"": {"qk_norm": False}, _QWEN3: {"qk_norm": True, "mlp_bias": False}},
    switches={
        "speculators": (
            *(Switch(name, (name,), False, _CONFIG) for name in
              ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")),
            Switch("norm_before_head", (), True, f"{_CORE} Eagle3DraftModel.forward"),
            Switch("use_aux_hidden_state", (), True, f"{_CORE} Eagle3DraftModel.__init__"),
            Switch("layers", (f"{LAYER}num_hidden_layers",), 1, f"{_CORE} Eagle3DraftModel.__init__"),
            Switch("later_norm", (), "input_layernorm", f"{_CORE} Eagle3DraftModel.__init__", matters=several_layers),
            Switch("attention_bias", (f"{LAYER}attention_bias",), False, f"{_LAYERS} Eagle3FirstLayerMixin"),
            Switch("attention_output_bias", (f"{LAYER}attention_bias",), False, f"{_LAYERS} Eagle3FirstLayerMixin"),
            Switch("mlp_bias", (f"{LAYER}mlp_bias",), False, f"{_LAYERS} Eagle3FirstLayerMixin"),
            Switch("fc_bias", (), False, f"{_CORE} Eagle3DraftModel.__init__"),
        ),
    },
    layer_ids=(LayerIds((_IDS,), "speculators/models/utils.py resolve_target_layer_ids"),),
    id_rules=(IdRule("id i is boundary i", raw_ids, raw_ids, "speculators/models/utils.py resolve_target_layer_ids",
                     last_boundary=True, refuses=_distinct),),
    tensors=(
        TensorFact("d2t", "missing", "initial", f"{_UNSET}, unless a map is given with the data", f"{_VOCAB}._init_vocab"),
        TensorFact("t2d", "missing", "refuses", f"{_UNSET}, and the verifier's head is cut by it, which ends in an error but by "
                   "chance, unless a map is given with the data", f"{_VOCAB}._load_verifier_weights"),
        TensorFact("lm_head.", "missing", "initial", f"{_UNSET}; the verifier's rows stand in only where that is NaN",
                   f"{_VOCAB}._load_verifier_weights"),
        TensorFact("embed_tokens.", "missing", "initial", f"{_UNSET}; the verifier's embedding stands in only where that is NaN",
                   f"{_VOCAB}._load_verifier_weights"),
        TensorFact("input_norm.", "missing", "initial", "newly initialised, without a warning",
                   f"{_CORE} _keys_to_ignore_on_load_missing"),
        TensorFact("", "missing", "initial", "newly initialised, with a warning in the log", _LOAD),
        TensorFact("", "idle", "ignores", "not used, with a warning in the log", _LOAD),
    ),
    naming=Naming((), "model.", "layers.", exact=True, everywhere=True,
                  source=f"{_CORE} Eagle3DraftModel, over transformers 5's from_pretrained"),
    slots={"": SlotCount((), (_IDS,), f"{_CORE} Eagle3DraftModel.__init__")},
    rope=Rope(new=True, legacy=True, first="rope_scaling", source=f"{_CONFIG}.validate_transformer_config, over transformers 5's "
              "convert_rope_params_to_dict"),
    quantisation=Quantisation(False, "training goes on in the checkpoint's own precision", _LOAD),
    positions=Positions("ignores", "rotary positions go on beyond it", f"{_CORE} rotary_emb"),
    keeps_embedding=True,
    embedding_source=f"{_VOCAB}._load_verifier_weights",
    write_key=_IDS,
    needs={"t2d": "smaller"},
    own_width=(f"{_CORE} Eagle3DraftModel.load_verifier_weights"),
    required=(Required("speculators_config.verifier.name_or_path", f"{_CORE} Eagle3DraftModel.load_verifier_weights",
                       null=True),),
)

_DRAFT = "specforge/modeling/draft/llama3_eagle.py"
_START = "specforge/training/model_loading.py warm_start_draft_model"
_CLASS = f"{_DRAFT} LlamaForCausalLMEagle3"

SPECFORGE = Consumer(
    name="specforge",
    versions=("0.2", "0.2.0"),
    kind="trainer",
    architectures=("LlamaForCausalLMEagle3",),
    architecture_source="specforge/modeling/draft/registry.py DRAFT_REGISTRY",
    dialects=("native",),
    switches={
        "native": (
            Switch("norm_before_residual", (), False, f"{_DRAFT} LlamaDecoderLayer"),
            Switch("norm_before_fc", (), False, _CLASS),
            Switch("fc_norm", ("fc_norm",), False, _CLASS),
            Switch("norm_output", (), False, "specforge/algorithms/eagle3/model.py (the state before the norm is fed back)"),
            Switch("norm_before_head", ("norm_output",), True, f"{_CLASS}.compute_logits"),
            Switch("qk_norm", (), False, f"{_DRAFT} LlamaAttention"),
            Switch("sliding_window", (), None, f"{_DRAFT} LlamaAttention"),
            Switch("use_aux_hidden_state", (), True, _CLASS),
            Switch("layers", (), 1, _CLASS),
            Switch("attention_bias", (), False, f"{_DRAFT} LlamaAttention"),
            Switch("attention_output_bias", (), False, f"{_DRAFT} LlamaAttention"),
            Switch("mlp_bias", (), False, f"{_DRAFT} LlamaMLP"),
            Switch("fc_bias", (), False, _CLASS),
        ),
    },
    layer_ids=(LayerIds((_NESTED,), "specforge/algorithms/model_providers.py resolve_eagle_capture_layers"),),
    id_rules=(IdRule("id i is the output of layer i, boundary i + 1", plus_one, minus_one,
                     "specforge/algorithms/model_providers.py resolve_eagle_capture_layers", refuses=_three),),
    tensors=(
        TensorFact("embed_tokens.", "missing", "target", "the target's embedding is loaded",
                   "specforge/algorithms/model_providers.py build_eagle3_draft"),
        TensorFact("", "missing", "refuses", "a needed tensor is missing", _START),
        TensorFact("", "idle", "ignores", "not used, with a warning in the log", _START),
    ),
    naming=Naming((), "", "", exact=True, source=_CLASS),
    slots={"": SlotCount((), (), _CLASS)},
    rope=Rope(new=True, legacy=True, first="rope_scaling", source=f"{_DRAFT} get_rope_config and LlamaAttention._init_rope, over "
              "transformers 5's convert_rope_params_to_dict", needs={"linear": ("factor",), "dynamic": ("factor",), "yarn": (
                  "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}),
    quantisation=Quantisation(False, "training goes on in the precision of the run", _START),
    positions=Positions("ignores", "the rotary table grows", f"{_DRAFT} LlamaRotaryEmbedding"),
    keeps_embedding=False,
    embedding_source="specforge/algorithms/model_providers.py build_eagle3_draft (load_target_embedding)",
    write_key=_NESTED,
    needs={"d2t": "always", "t2d": "always"},
    new_map=("the run makes a map of its own from its data, unless model.vocab_mapping_path names one: the head's rows then "
             "stand for other tokens", "specforge/training/assembly.py"),
)

TRAINERS = (SPECULATORS, SPECFORGE)
