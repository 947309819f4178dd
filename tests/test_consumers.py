"""Effective readings, against what the sources of vLLM 0.32 and SGLang 0.5.23 do step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import random_draft

from draftscope.consumers import config_for, consumer, effective
from draftscope.eagle3.checkpoint import Checkpoint, build_draft, load_checkpoint, save_native
from draftscope.errors import UsageError

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = 30
CONFIG = random_draft(width=16, vocab=20).config


def checkpoint(
    folder: Path, config: dict[str, Any] | None = None, drop: tuple[str, ...] = (), extra: dict[str, Any] | None = None,
    **switches: Any,
) -> Checkpoint:
    """A saved draft whose files were then meddled with: config keys merged, tensors dropped or added."""
    draft = random_draft(3, width=16, vocab=20, **{"draft_vocab": 12} | switches)
    draft.target_ids = torch.arange(len(draft.target_ids)) + 8 * (draft.config.draft_vocab_size < 20)
    own = draft.config.draft_vocab_size == 20
    save_native(folder, draft, None if own else draft.target_ids - torch.arange(12), target_layers=LAYERS)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("eagle_config", None)
    raw |= config or {}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "drop"}))
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.startswith(drop)} if drop else load_file(
        folder / "model.safetensors")
    save_file(tensors | (extra or {}), folder / "model.safetensors")
    return load_checkpoint(folder)


def speculators(folder: Path, **keys: Any) -> Checkpoint:
    """The same draft as speculators saves it."""
    made = checkpoint(folder)
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "rms_norm_eps",
    )
    layer = {key: made.raw[key] for key in kept}
    raw = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 12,
           "transformer_layer_config": layer | {"model_type": "llama", "num_hidden_layers": 1}} | keys
    (folder / "config.json").write_text(json.dumps(raw))
    return load_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "vllm", "vllm_v1", "sglang"),
    [
        ({}, (2, 15, 27), (2, 15, 27), (2, 15, 27)),
        ({IDS: [2, 15, 27]}, (2, 15, 27), (2, 15, 27), (2, 15, 27)),
        ({IDS: [4, 10, 20]}, (4, 10, 20), (4, 10, 20), (2, 15, 27)),
        ({"eagle_config": {IDS: [3, 9, 19]}}, (2, 15, 27), (3, 9, 19), (4, 10, 20)),
        ({IDS: [4, 10, 20], "eagle_config": {IDS: [3, 9, 19]}}, (4, 10, 20), (4, 10, 20), (4, 10, 20)),
        ({"eagle_config": {}}, (2, 15, 27), (2, 15, 27), (2, 15, 27)),
        ({IDS: [27, 2, 15]}, (2, 15, 27), (2, 15, 27), (2, 15, 27)),
    ],
)
def test_boundaries_by_key_place(tmp_path: Path, config: dict, vllm: tuple, vllm_v1: tuple, sglang: tuple) -> None:
    made = checkpoint(tmp_path, config)
    assert effective(made, "vllm", LAYERS).boundaries == vllm
    assert effective(made, "vllm@0.32:v1", LAYERS).boundaries == vllm_v1
    assert effective(made, "vllm@0.32", LAYERS).runners == {"v2": vllm, "v1": vllm_v1}
    assert effective(made, "sglang@0.5.23", LAYERS).boundaries == sglang


def test_a_nested_key_is_reported_for_what_each_runner_makes_of_it(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, {"eagle_config": {IDS: [3, 9, 19]}})
    assert made.config.boundaries == (4, 10, 20)
    vllm = effective(made, "vllm", LAYERS)
    assert vllm.boundaries_from == "default" and any("not read" in n and "eagle3_utils.py" in n for n in vllm.notes)
    assert any("v1 model runner takes boundaries {3, 9, 19}" in n for n in vllm.notes)
    assert effective(made, "sglang", LAYERS).boundaries_from == f"eagle_config.{IDS}"
    assert effective(checkpoint(tmp_path / "plain"), "vllm").boundaries is None


def test_boundaries_that_an_engine_never_reaches_are_dropped_and_said(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, {"eagle_config": {IDS: [1, 14, 29]}})
    found = effective(made, "sglang", LAYERS)
    assert found.boundaries == (2, 15) and any("{30} can't be captured" in n for n in found.notes)
    assert effective(made, "sglang", LAYERS, "gpt_oss").boundaries == (2, 15, 30)
    assert effective(checkpoint(tmp_path / "raw", {IDS: [2, 15, 30]}), "vllm", LAYERS).boundaries == (2, 15, 30)


@pytest.mark.parametrize(
    ("model_type", "ids", "boundaries"),
    [("deepseek_v3", [2, 15, 27], (2, 15, 27)), ("kimi_k2", [1, 14, 26], (2, 15, 27)), ("llama", [1, 14, 26], (2, 15, 27)),
     ("gpt_oss", [2, 15, 30], (2, 15, 30)), ("gpt_oss", [1, 14, 26], (2, 15, 27))],
)
def test_sglang_ids_depend_on_the_target(tmp_path: Path, model_type: str, ids: list[int], boundaries: tuple) -> None:
    made = checkpoint(tmp_path, {"eagle_config": {IDS: ids}})
    assert effective(made, "sglang", LAYERS, model_type).boundaries == boundaries


def test_norm_before_residual(tmp_path: Path) -> None:
    native = checkpoint(tmp_path / "n", norm_before_residual=True)
    assert effective(native, "vllm", LAYERS).reading.settings["norm_before_residual"] is True
    assert not effective(native, "vllm", LAYERS).changed
    sglang = effective(native, "sglang", LAYERS)
    assert sglang.reading.settings["norm_before_residual"] is False and sglang.changed == {"norm_before_residual": (True, False)}
    assert any("does not implement norm_before_residual" in note and "llama_eagle3.py" in note for note in sglang.notes)
    assert build_draft(native, None, sglang.reading).midlayer.norm_before_residual is False
    unsaid = speculators(tmp_path / "s")
    found = effective(unsaid, "vllm", LAYERS)
    assert unsaid.config.norm_before_residual is False and found.changed == {"norm_before_residual": (False, True)}
    assert effective(speculators(tmp_path / "f", norm_before_residual=False), "vllm", LAYERS).changed == {}


def test_sglang_does_not_load_the_speculators_dialect(tmp_path: Path) -> None:
    found = effective(speculators(tmp_path), "sglang", LAYERS)
    assert not found.loads and any("speculators dialect" in note for note in found.notes)
    assert effective(speculators(tmp_path / "v"), "vllm", LAYERS).loads


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_where_switches_are_looked_up(tmp_path: Path, name: str) -> None:
    nested = checkpoint(tmp_path / "a", {"norm_before_fc": "drop", "eagle_config": {"norm_before_fc": True}}, norm_before_fc=True)
    assert effective(nested, name, LAYERS).reading.settings["norm_before_fc"] is True
    both = checkpoint(tmp_path / "b", {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, norm_before_fc=True)
    off = effective(both, name, LAYERS)
    assert off.reading.settings["norm_before_fc"] is False and off.ignored == ("input_norm.weight", "t2d")
    assert build_draft(both, None, off.reading).config.norm_before_fc is False
    post = checkpoint(tmp_path / "c", norm_output=True, fc_norm=True)
    assert effective(post, name, LAYERS).reading.settings["norm_output"] is True and effective(post, name, LAYERS).changed == {}


def test_legacy_and_nested_fc_norm(tmp_path: Path) -> None:
    legacy = checkpoint(tmp_path / "a", {"fc_norm": "drop", "use_aux_norm": True}, fc_norm=True)
    assert effective(legacy, "sglang", LAYERS).changed == {} and effective(legacy, "sglang", LAYERS).loads
    vllm = effective(legacy, "vllm", LAYERS)
    assert vllm.changed == {"fc_norm": (True, False)} and not vllm.loads
    assert any("refuses tensor fc_norm.0.weight" in note for note in vllm.notes)


def test_query_and_key_norms(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, qk_norm=True)
    assert made.raw["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert effective(made, "vllm", LAYERS).changed == {} and effective(made, "vllm", LAYERS).loads
    named = checkpoint(tmp_path / "b", {"architectures": ["LlamaForCausalLMEagle3"]}, qk_norm=True)
    sglang = effective(named, "sglang", LAYERS)
    assert sglang.loads and sglang.changed == {"qk_norm": (True, False)}
    assert {n for n in sglang.ignored if "norm" in n} == {f"midlayer.self_attn.{x}_norm.weight" for x in "qk"}
    assert not effective(named, "vllm", LAYERS).loads
    assert not effective(made, "sglang", LAYERS).loads


def test_sliding_window_is_a_flag_in_sglang(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, sliding_window=64)
    assert effective(made, "sglang", LAYERS).changed == {"sliding_window": (64, None)}
    assert "sliding_window" not in effective(made, "vllm", LAYERS).changed


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_missing_tensors(tmp_path: Path, name: str) -> None:
    no_map = effective(checkpoint(tmp_path / "a", drop=("d2t",)), name, LAYERS)
    assert no_map.reading.d2t == "zero" and no_map.initial == ("d2t",) and no_map.loads
    made = checkpoint(tmp_path / "b", drop=("fc.",))
    no_fc = effective(made, name, LAYERS)
    assert no_fc.initial == ("fc.weight",) and any("fc.weight is missing" in n for n in no_fc.notes)
    assert build_draft(made, None, no_fc.reading).fc.weight.std() < 0.05
    no_head = effective(checkpoint(tmp_path / "c", drop=("lm_head.",)), name, LAYERS)
    assert no_head.initial == (() if name == "vllm" else ("lm_head.weight",))
    assert any("lm_head.weight is missing" in n for n in no_head.notes)


def test_tensors_without_a_use(tmp_path: Path) -> None:
    odd = checkpoint(tmp_path, extra={"midlayer.extra.weight": torch.zeros(3)})
    vllm, sglang = effective(odd, "vllm", LAYERS), effective(odd, "sglang", LAYERS)
    assert not vllm.loads and sglang.loads and "midlayer.extra.weight" in sglang.ignored
    equal = checkpoint(tmp_path / "e", draft_vocab=20, extra={"d2t": torch.zeros(20, dtype=torch.int64)})
    assert not effective(equal, "vllm", LAYERS).loads and effective(equal, "sglang", LAYERS).loads


def test_whose_embedding(tmp_path: Path) -> None:
    own = {"embed_tokens.weight": torch.ones(20, 16)}
    made = checkpoint(tmp_path, extra=own)
    vllm, sglang = effective(made, "vllm", LAYERS), effective(made, "sglang", LAYERS)
    assert (vllm.embedding, sglang.embedding) == ("own", "target") and "embed_tokens.weight" in sglang.ignored
    assert build_draft(made, None, sglang.reading).embedding is not None
    assert effective(checkpoint(tmp_path / "none"), "vllm", LAYERS).embedding == "target"


def test_a_tied_head_in_sglang(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, {"tie_word_embeddings": True})
    found = effective(made, "sglang", LAYERS)
    assert found.initial == ("lm_head.weight",) and found.reading.lost == ("lm_head.",)
    assert effective(made, "vllm", LAYERS).reading.lost == ()


def test_unknown_consumers_are_refused_with_the_known_ones() -> None:
    for name in ("vllm@0.19", "trtllm", "sglang@0.5.23:v1", "vllm@new", "vllm:eagle", ""):
        with pytest.raises(UsageError, match=r"Known: vllm@0\.33 .* sglang@0\.5\.23"):
            consumer(name)
    assert [consumer(n)[0].id for n in ("vLLM", "vllm@0.32.0", "sglang")] == ["vllm@0.33", "vllm@0.32", "sglang@0.5.23"]


@settings(deadline=None, max_examples=40)
@given(
    boundaries=st.lists(st.integers(0, LAYERS), min_size=1, max_size=4, unique=True).map(sorted),
    name=st.sampled_from(["vllm", "vllm:v1", "sglang"]), model_type=st.sampled_from([None, "llama", "deepseek_v3", "gpt_oss"]),
)
def test_config_for_comes_back_to_the_same_boundaries(boundaries: list[int], name: str, model_type: str | None) -> None:
    keys = config_for(name, boundaries, LAYERS, model_type)
    if "not_possible" in keys:
        assert name == "sglang" and (LAYERS in boundaries or boundaries == [1])
        return
    made = Checkpoint(Path("x"), CONFIG, {"architectures": ["LlamaForCausalLMEagle3"]} | keys,
                      {}, (), ())
    assert effective(made, name, LAYERS, model_type).boundaries == tuple(boundaries)


def test_config_for_in_each_convention() -> None:
    assert config_for("vllm@0.32", (2, 15, 27), LAYERS) == {IDS: [2, 15, 27]}
    assert config_for("sglang@0.5.23", (2, 15, 27), LAYERS) == {"eagle_config": {IDS: [1, 14, 26]}}
    assert config_for("sglang", (0, 15, 27)) == {"eagle_config": {IDS: [-1, 14, 26]}}
    assert "ascending" in config_for("vllm", (27, 15, 2), LAYERS)["not_possible"]
    assert "boundaries 0 to 29" in config_for("sglang", (2, 15, 30), LAYERS)["not_possible"]
