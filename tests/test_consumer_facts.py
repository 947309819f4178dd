"""The tables of facts, row by row and version by version, and the names by which a consumer is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spoilt import DRAFT_VOCAB, IDS, LAYERS, VOCAB, WIDTH, change, healthy, speculators

from draftscope.consumers import CONSUMERS, ask, config_for, effective, everybody, names, setting_for
from draftscope.consumers.facts import Consumer
from draftscope.consumers.naming import naming_of, reaches
from draftscope.eagle3.checkpoint import Checkpoint, load_checkpoint
from draftscope.eagle3.config import DraftConfig, LatentAttention

BASE = {"hidden_size": WIDTH, "target_hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
SGLANG = ("sglang@0.5.5", "sglang@0.5.10", "sglang@0.5.14", "sglang@0.5.23")
VLLM = ("vllm@0.20", "vllm@0.32", "vllm@0.33")


def described(raw: dict[str, Any], **config: Any) -> Checkpoint:
    """A checkpoint without files: its configuration, and as meant what `config` says."""
    return Checkpoint(Path("x"), DraftConfig(**BASE | config), {"architectures": ["LlamaForCausalLMEagle3"],
                                                                "draft_vocab_size": DRAFT_VOCAB} | raw, {}, (), ())


def setting(name: str, field: str, raw: dict[str, Any], **config: Any) -> Any:
    return effective(described(raw, **config), name, LAYERS).reading.settings.get(field)


@pytest.mark.parametrize(("field", "raw", "on"), [
    ("norm_before_residual", {"norm_before_residual": True}, {*VLLM}),
    ("norm_before_fc", {"norm_before_fc": True}, {*VLLM, "sglang@0.5.23"}),
    ("norm_before_fc", {"eagle_config": {"norm_before_fc": True}}, {"vllm@0.32", "vllm@0.33", "sglang@0.5.23"}),
    ("fc_norm", {"fc_norm": True}, {"vllm@0.32", "vllm@0.33", "sglang@0.5.14", "sglang@0.5.23", "specforge@0.2"}),
    ("fc_norm", {"use_aux_norm": True}, {"sglang@0.5.14", "sglang@0.5.23"}),
    ("norm_output", {"norm_output": True}, {"vllm@0.32", "vllm@0.33", "sglang@0.5.14", "sglang@0.5.23"}),
    ("norm_before_head", {"norm_output": False}, {*VLLM, *SGLANG}),
    ("norm_before_head", {}, {*VLLM, *SGLANG, "specforge@0.2"}),
    ("use_aux_hidden_state", {"eagle_config": {"use_aux_hidden_state": False}}, {"sglang@0.5.5", "specforge@0.2"}),
    ("use_aux_hidden_state", {}, {*VLLM, *SGLANG, "specforge@0.2"}),
    ("attention_bias", {"attention_bias": True}, {*VLLM}),
    ("attention_output_bias", {"attention_bias": True}, {*VLLM, *SGLANG}),
    ("mlp_bias", {"mlp_bias": True}, {*VLLM}),
    ("fc_bias", {"bias": True}, {*SGLANG}),
])
def test_switches_by_version(field: str, raw: dict, on: set[str]) -> None:
    assert {name for name in (*VLLM, *SGLANG, "specforge@0.2") if setting(name, field, raw)} == on


def test_layers_and_their_norms() -> None:
    two = {"num_hidden_layers": 2}
    taken = {name: setting(name, "layers", two, layers=2) for name in (*VLLM, *SGLANG, "specforge@0.2")}
    assert {name for name, value in taken.items() if value == 2} == {*VLLM, "sglang@0.5.14", "sglang@0.5.23",
                                                                     "sglang@0.5.5", "sglang@0.5.10"}
    for name in SGLANG[:2]:
        found = effective(described(two, layers=2), name, LAYERS)
        assert not found.loads and any("refuses a draft of 2 layers" in note for note in found.notes)
    for name in SGLANG[2:]:
        assert setting(name, "later_norm", two, layers=2) == "hidden_norm"
        assert "later_norm" in effective(described(two, layers=2), name, LAYERS).changed
        assert setting(name, "later_norm", {}) is None
    for name in VLLM:
        assert setting(name, "later_norm", two, layers=2) == "input_layernorm"
    assert "layers" in effective(described(two, layers=2), "specforge", LAYERS).changed


def test_speculators_dialect() -> None:
    layer = {"transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}}
    made = described(layer | {"speculators_model_type": "eagle3"}, dialect="speculators", layers=2, attention_bias=True,
                     qk_norm=True, norm_before_residual=True)
    vllm, old, trainer = (effective(made, name, LAYERS).reading.settings for name in ("vllm@0.33", "vllm@0.20", "speculators"))
    assert vllm["norm_before_residual"] and old["norm_before_residual"] and not trainer["norm_before_residual"]
    assert vllm["qk_norm"] and trainer["qk_norm"] and not old["qk_norm"]
    assert vllm["layers"] == trainer["layers"] == 2 and vllm["attention_bias"] and trainer["attention_bias"]


@pytest.mark.parametrize(("version", "model_type", "ids", "boundaries"), [
    ("0.5.5", "deepseek_v3", [2, 15, 27], (3, 16, 28)), ("0.5.10", "kimi_k2", [2, 15, 27], (3, 16, 28)),
    ("0.5.14", "deepseek_v3", [2, 15, 27], (2, 15, 27)), ("0.5.23", "kimi_k25", [1, 14, 26], (2, 15, 27)),
    ("0.5.14", "gpt_oss", [2, 15, 30], (3, 16)), ("0.5.23", "gpt_oss", [2, 15, 30], (2, 15, 30)),
    ("0.5.23", "gpt_oss", [1, 14, 29], (2, 15, 30)), ("0.5.14", "gemma3_text", [1, 14, 29], (2, 15, 30)),
    ("0.5.10", "gemma3_text", [1, 14, 29], (2, 15)), ("0.5.23", "minimax_m3_vl", [1, 14, 29], (2, 15, 30)),
])
def test_sglang_ids_by_version_and_target(version: str, model_type: str, ids: list[int], boundaries: tuple) -> None:
    made = described({"eagle_config": {IDS: ids}})
    assert effective(made, f"sglang@{version}", LAYERS, model_type).boundaries == boundaries


def test_ids_past_the_last_layer_end_the_start_of_some_targets() -> None:
    made = described({"eagle_config": {IDS: [1, 14, 29]}})
    assert not effective(made, "sglang@0.5.5", LAYERS, "qwen2_moe").loads
    assert effective(made, "sglang@0.5.5", LAYERS, "qwen3").loads
    assert not effective(described({IDS: [2, 15, 15]}, dialect="speculators"), "speculators", LAYERS).loads
    assert not effective(described({"eagle_config": {IDS: [1, 14]}}), "specforge", LAYERS).loads


def test_runners_of_each_version() -> None:
    nested, spelt = described({"eagle_config": {IDS: [3, 9, 19]}}), described({"eagle_config": {"layer_ids": [3, 9, 19]}})
    default = (2, 15, 27)
    assert effective(nested, "vllm@0.20", LAYERS).runners == {"v1": default, "v2": default}
    for version in ("0.32", "0.33"):
        assert effective(nested, f"vllm@{version}", LAYERS).runners == {"v2": default, "v1": (3, 9, 19)}
        assert effective(spelt, f"vllm@{version}", LAYERS).runners == {"v2": (3, 9, 19), "v1": default}
        assert list(effective(nested, f"vllm@{version}:v1", LAYERS).runners) == ["v1", "v2"]


@pytest.mark.parametrize(("own", "native", "known"), [
    ("fc.weight", "fc.weight", {"sglang@0.5.5", "sglang@0.5.23", "vllm@0.33", "specforge@0.2", "speculators@0.9"}),
    ("model.fc.weight", "fc.weight", {"sglang@0.5.5", "sglang@0.5.23", "speculators@0.9"}),
    ("draft_model.fc.weight", "fc.weight", set()),
    ("midlayer.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight",
     {"sglang@0.5.5", "sglang@0.5.23", "vllm@0.33", "specforge@0.2"}),
    ("layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight", {"sglang@0.5.23", "vllm@0.33", "speculators@0.9"}),
    ("midlayer.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight", set()),
    ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", {"sglang@0.5.23", "vllm@0.33", "speculators@0.9"}),
    ("aux_norm_low.weight", "fc_norm.0.weight", {"sglang@0.5.23"}),
    ("lm_head.weight", "lm_head.weight", {"sglang@0.5.5", "sglang@0.5.23", "vllm@0.33", "specforge@0.2", "speculators@0.9"}),
    ("draft_model.d2t", "d2t", {"sglang@0.5.5", "sglang@0.5.23"}),
])
def test_names_that_reach_a_parameter(own: str, native: str, known: set[str]) -> None:
    asked = ("sglang@0.5.5", "sglang@0.5.23", "vllm@0.33", "specforge@0.2", "speculators@0.9")
    assert {name for name in asked if reaches(naming_of(CONSUMERS[name], False), own) == native} == known


def test_a_latent_draft_has_names_of_its_own() -> None:
    naming = naming_of(CONSUMERS["sglang@0.5.23"], True)
    assert reaches(naming, "layers.0.self_attn.kv_b_proj.weight") == "midlayer.self_attn.kv_b_proj.weight"
    assert reaches(naming, "model.fc.weight") is None
    raw = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "norm_before_fc": True}
    for name, loads in (("sglang@0.5.10", False), ("sglang@0.5.14", True), ("vllm@0.20", True)):
        found = effective(described(raw), name, LAYERS)
        assert (found.architecture in CONSUMERS[name].architectures) is loads
    assert setting("sglang@0.5.23", "norm_before_fc", raw) is False and setting("vllm@0.33", "norm_before_fc", raw) is False


LATENT = LatentAttention(q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)


def test_a_latent_draft_in_vllm() -> None:
    raw = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "norm_before_residual": True, "fc_norm": True, "norm_output": True,
           "attention_bias": True, "eagle_config": {"use_aux_hidden_state": False}}
    taken = {name: effective(described(raw, mla=LATENT), name, LAYERS).reading.settings for name in VLLM}
    assert all(found["norm_before_residual"] and found["use_aux_hidden_state"] for found in taken.values())
    assert not any(found["attention_bias"] or found["norm_before_fc"] for found in taken.values())
    assert {name for name, found in taken.items() if found["fc_norm"] and found["norm_output"]} == {"vllm@0.32", "vllm@0.33"}
    for name in (*VLLM, "sglang@0.5.23"):
        for rank, loads in ((8, True), (None, False)):
            found = effective(described(raw, mla=LATENT.model_copy(update={"q_lora_rank": rank})), name, LAYERS)
            assert any("without q_lora_rank" in note for note in found.notes) is not loads


@pytest.mark.parametrize(("name", "loads"), [("vllm@0.20", False), ("vllm@0.32", True), ("vllm@0.33", True)])
def test_a_bias_that_no_module_has(name: str, loads: bool, tmp_path: Path) -> None:
    folder = change(healthy(tmp_path, attention_bias=True, attention_output_bias=True), {"attention_bias": None})
    found = effective(load_checkpoint(folder, target_layers=LAYERS), name, LAYERS)
    assert found.loads is loads and "midlayer.self_attn.q_proj.bias" in found.ignored
    assert {point.fault for point in found.points if point.question.endswith(".bias")} == {"config-flag"}


def test_the_norm_over_all_slots_of_a_latent_draft(tmp_path: Path) -> None:
    folder = healthy(tmp_path, mla=LATENT, norm_before_fc=True)
    found = effective(load_checkpoint(folder, target_layers=LAYERS), "vllm@0.32", LAYERS)
    assert not found.loads and "input_norm.weight" in found.ignored


def test_speculators_opens_a_draft_with_its_target_only(tmp_path: Path) -> None:
    for verifier, loads in (("a", True), (None, False)):
        made = speculators(tmp_path / str(verifier), verifier=verifier)
        assert effective(load_checkpoint(made, target_layers=LAYERS), "speculators", LAYERS).loads is loads
    lost = change(speculators(tmp_path / "lost"), drop=("lm_head.", "embed_tokens."), prefix="model.")
    found = effective(load_checkpoint(lost, target_layers=LAYERS), "speculators", LAYERS)
    assert found.loads and found.head == "initial" and set(found.initial) == {"lm_head.weight", "embed_tokens.weight"}


def test_yarn_of_specforge_wants_all_its_keys() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    whole = yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    said = {False: effective(described({"rope_parameters": yarn}, rope_parameters=yarn), "specforge", LAYERS).notes,
            True: effective(described({"rope_parameters": whole}, rope_parameters=whole), "specforge", LAYERS).notes}
    assert any("beta_fast and beta_slow and mscale" in note for note in said[False])
    assert not any("yarn rope without" in note for note in said[True])


@pytest.mark.parametrize(("asked", "known"), [
    ("sglang@0.5.12", "sglang@0.5.10"), ("sglang@0.5.12:eagle", "sglang@0.5.10:eagle"), ("sglang@0.5.14:EAGLE3", "sglang@0.5.14"),
    ("sglang@0.5.10.post1", "sglang@0.5.10"), ("sglang@0.6", "sglang@0.5.23"), ("vllm@0.25.1", "vllm@0.20"),
    ("vllm@0.33:v1", "vllm@0.33"), ("speculators@0.9.0", "speculators@0.9"), ("SpecForge", "specforge@0.2"),
])
def test_names(asked: str, known: str) -> None:
    found = ask(asked)
    assert found.known.id == known
    exact = asked.lower().split("@")[-1].split(":")[0] in (*found.known.versions, found.known.name)
    assert bool(found.note) is not exact
    assert ask(found.name).known is found.known and ask(found.name).runner == found.runner


def test_everybody_is_known() -> None:
    assert len(everybody()) == 16 and len(set(everybody())) == 16
    assert all(ask(name).name for name in everybody()) and set(names()) == set(CONSUMERS)
    assert {f"sglang@{v}{flag}" for v in ("0.5.5", "0.5.10", "0.5.14", "0.5.23") for flag in ("", ":eagle")} <= set(CONSUMERS)


def sources(known: Consumer) -> list[str]:
    found = [row.source for table in known.switches.values() for row in table]
    found += [row.source for row in (*known.layer_ids, *known.id_rules, *known.tensors, *known.required)]
    found += [known.naming.source, known.rope.source, known.quantisation.source, known.positions.source]
    found += [row.source for row in known.slots.values()]
    return [*found, known.embedding_source, known.architecture_source]


def test_every_fact_names_its_source() -> None:
    for known in CONSUMERS.values():
        assert all(".py" in source for source in sources(known)), known.id
        fields = [row.field for table in known.switches.values() for row in table]
        assert set(fields) <= set(DraftConfig.model_fields)
        general = [fact.when for fact in known.tensors if not (fact.prefix or fact.suffix or fact.architectures)]
        assert general == ["missing", "idle"], "every tensor has a row"


def test_keys_that_put_a_setting_into_effect() -> None:
    assert setting_for("vllm@0.33", "native", "norm_before_fc", True) == {"eagle_config": {"norm_before_fc": True}}
    assert setting_for("vllm@0.20", "native", "norm_before_fc", True) == {"norm_before_fc": True}
    assert "not_possible" in setting_for("sglang@0.5.10", "native", "fc_norm", True)
    assert setting_for("sglang@0.5.10", "native", "fc_norm", False) == {}
    assert "not_possible" in setting_for("vllm@0.33", "native", "qk_norm", True)
    assert config_for("sglang@0.5.12", (2, 15, 27), LAYERS) == {"eagle_config": {IDS: [1, 14, 26]}}
    assert "EAGLE3" in config_for("sglang@0.5.14:eagle", (2, 15, 27), LAYERS)["not_possible"]
    assert "exactly three" in config_for("specforge", (2, 15), LAYERS)["not_possible"]
    assert config_for("speculators", (2, 15, 30), LAYERS) == {IDS: [2, 15, 30]}


def test_whose_map_a_trainer_goes_on_with(tmp_path: Path) -> None:
    made = load_checkpoint(healthy(tmp_path / "d"))
    assert any("makes a map of its own" in note for note in effective(made, "specforge", LAYERS).notes)
    bare = load_checkpoint(change(healthy(tmp_path / "e"), drop=("t2d",)))
    assert not effective(bare, "specforge", LAYERS).loads
    assert effective(bare, "sglang", LAYERS).loads and effective(bare, "vllm", LAYERS).loads
