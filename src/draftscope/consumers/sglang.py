"""SGLang, read in the Python sources of the release wheels 0.5.5, 0.5.10, 0.5.14 and 0.5.23 (all paths below `sglang/srt/`).

The newest version is written out; an older one is the next newer with the rows that differ. `:eagle` is the same server
started with `--speculative-algorithm EAGLE` in place of `EAGLE3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftscope.boundaries import default_boundaries
from draftscope.consumers.facts import (
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
    several_layers,
)

_MODEL = "models/llama_eagle3.py"
_LATENT = "models/kimi_k25_eagle3.py"
_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
_LLAMA, _MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"


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


def _one_later(layers: int) -> tuple[int, ...]:
    return tuple(b + 1 for b in default_boundaries(layers))


_SETTER = "set_eagle3_layers_to_capture"
_PLUS = "id i is the output of layer i, boundary i + 1"
_GENERAL = IdRule(_PLUS, plus_one, minus_one, f"models/llama.py {_SETTER}")
_MARKED = IdRule(_PLUS, plus_one, minus_one, f"models/qwen2_moe.py {_SETTER}", ("qwen2_moe", "qwen3_moe"), beyond_raises=True)
_NEXT = replace(_MARKED, source=f"models/qwen3_next.py {_SETTER}", model_types=("qwen3_next",))
_GEMMA = replace(_GENERAL, source=f"models/gemma3_causal.py {_SETTER}, Gemma3TextModel.forward", last_boundary=True,
                 model_types=("gemma3", "gemma3_text", "gemma4", "gemma4_text"))
_DEEPSEEK = IdRule(
    "id i is boundary i + 1 if the first id is 1, else boundary i", _deepseek, _deepseek_ids,
    f"models/deepseek_v2.py {_SETTER}",
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "glm_moe_dsa"),
)
_GPT_OSS = IdRule("id i is boundary i if the highest id is the number of layers, else boundary i + 1", _gpt_oss, _gpt_oss_ids,
                  f"models/gpt_oss.py {_SETTER}", ("gpt_oss",), last_boundary=True)
_MINIMAX = IdRule("id i is boundary i + 1, and so are the default ids", plus_one, minus_one,
                  f"models/minimax_m3_vl.py {_SETTER}", ("minimax_m3", "minimax_m3_vl"), last_boundary=True, default=_one_later)

_SWITCHES = (
    Switch("norm_before_residual", (), False, f"{_MODEL} LlamaDecoderLayer.forward"),
    Switch("norm_before_fc", ("eagle_config.norm_before_fc", "norm_before_fc"), False, f"{_MODEL} LlamaModel"),
    Switch("fc_norm", ("fc_norm", "use_aux_norm"), False, f"{_MODEL} LlamaModel", truthy=True),
    Switch("norm_output", ("norm_output",), False, f"{_MODEL} LlamaModel"),
    Switch("norm_before_head", (), True, f"{_MODEL} LlamaModel.forward"),
    Switch("qk_norm", (), False, f"{_MODEL} load_weights"),
    Switch("sliding_window", (), None, f"{_MODEL} LlamaForCausalLMEagle3 (--speculative-draft-window-size)"),
    Switch("layers", ("num_hidden_layers",), 1, f"{_MODEL} LlamaModel"),
    Switch("later_norm", (), "hidden_norm", f"{_MODEL} LlamaDecoderLayer.forward", matters=several_layers),
    Switch("use_aux_hidden_state", ("eagle_config.use_aux_hidden_state",), True,
           "model_executor/model_runner_components/spec_aux_hidden_state.py _resolve_eagle_aux_hidden_state"),
    Switch("attention_bias", (), False, f"{_MODEL} LlamaDecoderLayer (qkv_proj without bias)"),
    Switch("attention_output_bias", ("attention_bias", "bias"), False, "models/llama.py LlamaDecoderLayer", truthy=True),
    Switch("mlp_bias", (), False, "models/llama.py LlamaMLP"),
    Switch("fc_bias", ("bias",), False, f"{_MODEL} LlamaModel"),
)


def _rows(switches: tuple[Switch, ...], *changed: Switch, without: tuple[str, ...] = ()) -> dict[str, tuple[Switch, ...]]:
    """A table with some rows replaced and some left out."""
    new = {row.field: row for row in changed}
    return {"native": tuple(new.get(row.field, row) for row in switches if row.field not in without)}


def _of(switches: tuple[Switch, ...], field: str) -> Switch:
    return next(row for row in switches if row.field == field)


SGLANG_0_5_23 = Consumer(
    name="sglang",
    versions=("0.5.23",),
    kind="engine",
    architectures=(_LLAMA, _MLA),
    architecture_source=f"{_MODEL} EntryClass, {_LATENT} EntryClass",
    dialects=("native",),
    switches=_rows(_SWITCHES),
    sets={_MLA: {"norm_before_fc": False, "attention_output_bias": False}},
    layer_ids=(
        LayerIds((_IDS,), "model_executor/model_runner_components/spec_aux_hidden_state.py _resolve_eagle_aux_hidden_state"),
    ),
    id_rules=(_GENERAL, _MARKED, _NEXT, replace(_NEXT, source=f"models/qwen3_5_text.py {_SETTER}",
                                               model_types=("qwen3_5", "qwen3_5_text")),
              _GEMMA, _DEEPSEEK, _GPT_OSS, _MINIMAX),
    tensors=(
        TensorFact("d2t", "missing", "initial", "no map is set, so draft id i is taken for target id i",
                   "speculative/eagle_worker_v2.py init_lm_head"),
        TensorFact("embed_tokens.", "missing", "target", "the target's embedding is always taken",
                   "models/llama.py set_embed"),
        TensorFact("", "missing", "initial", "nothing checks that it was loaded", f"{_MODEL} load_weights"),
        TensorFact("", "idle", "ignores", "a name without a parameter is skipped without a word", f"{_MODEL} load_weights"),
    ),
    naming=Naming(
        (("midlayer", "layers.0"), ("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"), ("aux_norm_high", "fc_norm.2")),
        "model.", "layers.", exact=False, source=f"{_MODEL} load_weights",
    ),
    latent_naming=Naming((("layers.0.", "midlayer."),), "", "", exact=False, source=f"{_LATENT} load_weights"),
    slots={
        "": SlotCount(("num_aux_hidden_states",), (_IDS,), f"{_MODEL} LlamaModel"),
        _MLA: SlotCount((), (_IDS, "eagle_aux_hidden_state_layer_ids"), f"{_LATENT} _get_eagle_aux_layer_count"),
    },
    rope=Rope(new=True, legacy=True, first="rope_scaling", source="models/llama.py LlamaDecoderLayer, over transformers 5's "
              "convert_rope_params_to_dict"),
    quantisation=Quantisation(
        True, "a --quantization given for the target is applied to the draft too, unless --speculative-draft-model-quantization "
        "says otherwise (`unquant` for none)", "configs/model_config.py from_server_args, arg_groups/serving_hook.py",
    ),
    positions=Positions(
        "refuses", "the server does not start where the target's context is longer, unless "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1", "configs/model_config.py _derive_context_length, "
        "speculative/eagle_worker_v2.py",
    ),
    keeps_embedding=False,
    embedding_source="models/llama.py set_embed",
    tied_head=f"{_MODEL} LlamaForCausalLMEagle3.__init__",
    write_key=_IDS,
    most_layers={_MLA: 1},
    layers_source=f"{_LATENT} Eagle3MLAModel",
    query_latent=f"{_LATENT} (an error that says so)",
    required=(Required("draft_vocab_size", f"{_MODEL} LlamaForCausalLMEagle3.__init__ (an attribute error without it)"),),
)

SGLANG_0_5_14 = replace(
    SGLANG_0_5_23, versions=("0.5.14",),
    switches=_rows(_SWITCHES, replace(_of(_SWITCHES, "norm_before_fc"), keys=()),
                   replace(_of(_SWITCHES, "use_aux_hidden_state"), source="model_executor/model_runner.py ModelRunner.__init__")),
    layer_ids=(LayerIds((_IDS,), "model_executor/model_runner.py ModelRunner.__init__"),),
    id_rules=(_GENERAL, _MARKED, _NEXT, _GEMMA, _DEEPSEEK),
    quantisation=replace(SGLANG_0_5_23.quantisation, source="configs/model_config.py from_server_args, server_args.py"),
)

_ROWS_14 = SGLANG_0_5_14.switches["native"]
SGLANG_0_5_10 = replace(
    SGLANG_0_5_14, versions=("0.5.10", "0.5.10.post1"), architectures=(_LLAMA,), sets={},
    architecture_source=f"{_MODEL} EntryClass",
    switches=_rows(_ROWS_14, replace(_of(_ROWS_14, "fc_norm"), keys=()), replace(_of(_ROWS_14, "norm_output"), keys=()),
                   replace(_of(_ROWS_14, "sliding_window"), source=f"{_MODEL} LlamaForCausalLMEagle3"),
                   without=("later_norm",)),
    id_rules=(_GENERAL, _MARKED, _NEXT),
    naming=Naming((), "model.", "", exact=False, source=f"{_MODEL} load_weights (the layer is called midlayer)"),
    latent_naming=None,
    slots={"": SlotCount((), (), f"{_MODEL} LlamaModel")},
    most_layers={"": 1}, layers_source=f"{_MODEL} LlamaForCausalLMEagle3.__init__",
    graph_defaults="model_executor/cuda_graph_runner.py CudaGraphRunner.__init__, before model_runner.py sets the configured ids",
    late_positions="speculative/eagle_worker.py draft_forward (positions.add_(1) ahead of the forward pass)",
)

_ROWS_10 = SGLANG_0_5_10.switches["native"]
SGLANG_0_5_5 = replace(
    SGLANG_0_5_10, versions=("0.5.5",),
    switches=_rows(_ROWS_10, replace(_of(_ROWS_10, "use_aux_hidden_state"), keys=())),
    id_rules=(_GENERAL, _MARKED),
    rope=Rope(new=False, legacy=True, first="rope_scaling", source="models/llama.py LlamaDecoderLayer"),
    quantisation=Quantisation(True, "a --quantization given for the target is applied to the draft too",
                              "configs/model_config.py from_server_args"),
)


def _with_eagle(known: Consumer) -> Consumer:
    return replace(
        known, flag="eagle", captures=False, flag_source="speculative/spec_info.py is_eagle3, "
        f"{_MODEL} LlamaModel.forward (fc by width), speculative/eagle_worker_v2.py init_lm_head",
    )


EAGLE3 = (SGLANG_0_5_23, SGLANG_0_5_14, SGLANG_0_5_10, SGLANG_0_5_5)
SGLANG = (*EAGLE3, *map(_with_eagle, EAGLE3))
"""Newest first."""
