"""The facts against the real thing: spoilt checkpoints loaded by vLLM's and by speculators' own code (`make test-foreign`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import run_recipe
from spoilt import IDS, LAYERS, VOCAB, WIDTH, change, healthy, speculators, target_config
from support import save_target

from draftscope.consumers import effective
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.config import LatentAttention

Maker = Callable[[Path], Path]
MLA = LatentAttention(q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=24)

pytestmark = pytest.mark.timeout(3600)


def unsaid(folder: Path) -> Path:
    return change(speculators(folder), {"norm_before_residual": None})


def no_query_latent(folder: Path) -> Path:
    """The key is there, and null: without it the configuration's class has one of its own."""
    healthy(folder, mla=MLA.model_copy(update={"q_lora_rank": None}))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"q_lora_rank": None}))
    return folder


NATIVE: dict[str, Maker] = {
    "healthy": healthy,
    "nested": lambda d: change(healthy(d), {"eagle_config": {IDS: [3, 9, 19]}}),
    "nested_short": lambda d: change(healthy(d), {"eagle_config": {"layer_ids": [3, 9, 19]}}),
    "top": lambda d: change(healthy(d), {IDS: [19, 4, 10]}),
    "switches": lambda d: healthy(d, norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True),
    "overruled": lambda d: change(healthy(d, norm_before_fc=True), {"eagle_config": {"norm_before_fc": False}}),
    "legacy_norms": lambda d: change(healthy(d, fc_norm=True), {"fc_norm": None, "use_aux_norm": True}),
    "no_map_no_fc": lambda d: change(healthy(d), drop=("d2t", "fc.")),
    "no_head": lambda d: change(healthy(d), drop=("lm_head.",)),
    "no_mlp": lambda d: change(healthy(d), drop=("midlayer.mlp.down_proj",)),
    "prefixed": lambda d: change(healthy(d), prefix="model."),
    "draft_model": lambda d: change(healthy(d), prefix="draft_model."),
    "layers": lambda d: change(healthy(d), rename={"midlayer.": "layers.0."}),
    "unknown": lambda d: change(healthy(d), put={"extra.weight": torch.zeros(3)}),
    "whole_with_map": lambda d: change(healthy(d, draft_vocab=VOCAB), put={"d2t": torch.zeros(VOCAB, dtype=torch.int64)}),
    "whole_unsaid": lambda d: change(healthy(d, draft_vocab=VOCAB), {"draft_vocab_size": None}),
    "four_slots": lambda d: change(healthy(d, slots=4), {IDS: [2, 10, 20, 27], "num_aux_hidden_states": None}),
    "rope_old": lambda d: change(healthy(d), {"rope_theta": 5e5, "rope_parameters": None}),
    "rope_new": lambda d: change(healthy(d), {"rope_theta": None,
                                              "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "rope_both": lambda d: change(healthy(d), {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 2e4}),
    "qwen": lambda d: healthy(d, qk_norm=True),
    "qwen_as_llama": lambda d: change(healthy(d, qk_norm=True), {"architectures": ["LlamaForCausalLMEagle3"]}),
    "biases": lambda d: healthy(d, attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "stray_biases": lambda d: change(healthy(d, attention_bias=True, attention_output_bias=True, mlp_bias=True, fc_bias=True),
                                     {"attention_bias": None, "mlp_bias": None, "bias": None}),
    "qwen_biases": lambda d: healthy(d, qk_norm=True, attention_bias=True, attention_output_bias=True),
    "mla": lambda d: healthy(d, mla=MLA),
    "mla_switches": lambda d: healthy(d, mla=MLA, norm_before_residual=True, fc_norm=True, norm_output=True, layers=2),
    "mla_before_fc": lambda d: healthy(d, mla=MLA, norm_before_fc=True),
    "mla_said_before_fc": lambda d: change(healthy(d, mla=MLA), {"norm_before_fc": True}),
    "mla_biases": lambda d: healthy(d, mla=MLA, attention_bias=True, attention_output_bias=True),
    "mla_no_query_latent": no_query_latent,
    "mla_fc_bias": lambda d: healthy(d, mla=MLA, fc_bias=True),
    "mla_as_v3": lambda d: change(healthy(d, mla=MLA), {"architectures": ["Eagle3DeepseekV3ForCausalLM"]}),
    "mla_four_slots": lambda d: change(healthy(d, slots=4, mla=MLA), {IDS: [2, 10, 20, 27], "num_aux_hidden_states": None}),
    "mla_lost_latent": lambda d: change(healthy(d, mla=MLA), drop=("midlayer.self_attn.kv_b_proj",)),
    "tied": lambda d: change(healthy(d), {"tie_word_embeddings": True}),
}
SPECULATORS: dict[str, Maker] = {
    "plain": speculators, "unsaid": unsaid,
    "said": lambda d: speculators(d, norm_before_residual=True, norm_output=True),
    "ids": lambda d: speculators(d, **{IDS: [3, 9, 19]}),
    "lost_fc": lambda d: change(speculators(d), drop=("fc.",)),
    "lost_head": lambda d: change(speculators(d), drop=("lm_head.",)),
    "lost_embedding": lambda d: change(speculators(d), drop=("embed_tokens.",)),
    "no_map": lambda d: change(speculators(d), drop=("d2t", "t2d")), "no_d2t": lambda d: change(speculators(d), drop=("d2t",)),
    "extra": lambda d: change(speculators(d), put={"extra.weight": torch.zeros(3)}),
    "midlayer": lambda d: change(speculators(d), rename={"layers.0.": "midlayer."}),
    "model": lambda d: change(speculators(d), prefix="model."),
    "model_but_head": lambda d: change(change(speculators(d), prefix="model."), rename={
        "model.lm_head": "lm_head", "model.d2t": "d2t", "model.t2d": "t2d"}),
    "draft_model": lambda d: change(speculators(d), prefix="draft_model."),
    "both_norms": lambda d: speculators(d, norm_before_fc=True, fc_norm=True),
    "no_verifier": lambda d: speculators(d, verifier=None),
    "four_slots": lambda d: change(speculators(d, **{IDS: [2, 10, 20, 27]}),
                                   put={"fc.weight": torch.randn(WIDTH, 4 * WIDTH).bfloat16()}),
}


def answers(stack: str, recipe: str, arguments: list[Path], out: Path) -> dict[str, Any]:
    run_recipe(stack, recipe, *arguments, filled=True)
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def in_vllm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("vllm")
    made = [maker(folder / name) for name, maker in NATIVE.items()]
    made += [maker(folder / f"s_{name}") for name, maker in SPECULATORS.items() if name != "both_norms"]
    out = folder / "answers.json"
    return folder, answers("vllm", "consume_vllm.py", [target_config(folder / "target"), out, *made], out)


def native_names(name: str) -> set[str]:
    """Native names of what a fused parameter of vLLM is made of."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.").replace("draft_id_to_target_id", "d2t")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
             "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
    fused = next((key for key in parts if key in name), None)
    return {name} if fused is None else {name.replace(fused, part) for part in parts[fused]}


@pytest.mark.vllm
@pytest.mark.parametrize("name", [*NATIVE, *(f"s_{name}" for name in SPECULATORS if name != "both_norms")])
def test_vllm_does_what_the_facts_say(in_vllm: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, said = in_vllm
    real = said[name]
    if name == "four_slots":
        checkpoint = load_checkpoint(folder / name)
    else:
        checkpoint = load_checkpoint(folder / name, target_layers=LAYERS)
    ours = effective(checkpoint, "vllm@0.32", LAYERS)
    if name == "no_head":  # with fewer rows than the target's, vLLM's share of the target's head ends up here
        assert real["own"]["head"] is False and ours.head == "target"
    assert ours.loads is ("error" not in real), real.get("error", ours.notes)
    if "error" in real:
        return
    default = (2, LAYERS // 2, LAYERS - 3)
    for runner in ("v1", "v2"):
        assert ours.runners[runner] == (default if real[runner] is None else tuple(sorted(set(real[runner])))), runner
    for key, value in real["settings"].items():
        assert ours.reading.settings[key] == value, key
    assert ours.rope["rope_theta"] == real["rope"]["rope_theta"]
    assert ours.rope.get("rope_type", "default") == real["rope"].get("rope_type", "default")
    initial = {part for one in real["initial"] for part in native_names(one)} - {"embed_tokens.weight"}
    if not real["own"]["head"]:
        initial.discard("lm_head.weight")
    initial -= {f"layers.{i}.hidden_norm.weight" for i in range(1, 4)}  # there in every layer, used in the first
    assert {n for n in ours.initial if n in initial} == set(ours.initial)
    fused = {part for one in real["initial"] if "_proj" in one for part in native_names(one)}
    assert initial - fused <= set(ours.initial)


@pytest.fixture(scope="module")
def in_speculators(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("speculators")
    target = save_target(folder / "target", layers=LAYERS, width=WIDTH, vocab=VOCAB, tied=False)
    made = [maker(folder / name) for name, maker in SPECULATORS.items()] + [healthy(folder / "native")]
    for one in made:
        raw = json.loads((one / "config.json").read_text())
        if raw.get("speculators_config", {}).get("verifier", {}).get("name_or_path") is not None:
            raw["speculators_config"]["verifier"]["name_or_path"] = str(target)
            (one / "config.json").write_text(json.dumps(raw))
    out = folder / "answers.json"
    return folder, answers("speculators", "consume_speculators.py", [out, *made], out)


@pytest.mark.peers
@pytest.mark.parametrize("name", [*SPECULATORS, "native"])
def test_speculators_does_what_the_facts_say(in_speculators: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, said = in_speculators
    real = said[name]
    if name == "both_norms":
        assert "mutually exclusive" in real["error"]
        return
    ours = effective(load_checkpoint(folder / name, target_layers=LAYERS), "speculators", LAYERS)
    assert ours.loads is ("error" not in real), real.get("error", ours.notes)
    if "error" in real:
        return
    for key, value in real["settings"].items():
        assert ours.reading.settings[key] == value, key
    assert ours.reading.settings["qk_norm"] is real["qk_norm"]
    assert ours.boundaries == tuple(sorted(real["layer_ids"]))
    assert ours.rope["rope_theta"] == real["rope"]["rope_theta"]
    assert real["head_of_verifier"] is (ours.head == "target")
    assert not real["nan"] and {one.replace("layers.0.", "midlayer.") for one in real["initial"]} == set(ours.initial)
    ignored = {one.replace("layers.0.", "midlayer.") for one in ours.ignored} - {"t2d"}
    assert {one.replace("layers.0.", "midlayer.").removeprefix("draft_model.") for one in real["unused"]} == ignored
