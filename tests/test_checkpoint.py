"""Draft checkpoints: both dialects, what is refused, what is initial, and that saving and opening agree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import WIDTH, random_draft
from transformers import LlamaConfig, Qwen3Config

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint, save_native
from draftscope.eagle3.model import Draft, StepMask
from draftscope.eagle3.reading import Reading
from draftscope.errors import DraftscopeError

D2T = torch.arange(100) * 2  # target id 3i


@dataclass
class Parts:
    """As much of a target's parts as the loader looks at."""

    embedding: torch.Tensor
    head: torch.Tensor


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Draft]:
    draft = random_draft(draft_vocab=100)
    draft.target_ids = torch.arange(100) + D2T
    save_native(tmp_path / "draft", draft, D2T, dtype=torch.float32, target_layers=8)
    return tmp_path / "draft", draft


def edit(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor | None] | None = None) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    if tensors:
        held = {**load_file(folder / "model.safetensors"), **tensors}
        save_file({n: t for n, t in held.items() if t is not None}, folder / "model.safetensors")


def output(draft: Draft, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(1, 7, 3, draft.config.target_hidden_size, generator=draw)
    embeds = torch.randn(1, 7, draft.config.hidden_size, generator=draw)
    with torch.no_grad():
        return draft.logits(draft(draft.project(features), embeds, torch.arange(7)[None], StepMask()))


def as_speculators(folder: Path, layer: Any, **keys: Any) -> None:
    """Rewrite a native checkpoint as speculators 0.9.0 saves it: names `layers.0.*`, and only what differs from the defaults."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    tensors["embed_tokens.weight"] = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(5))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 100,
        "transformer_layer_config": layer.to_diff_dict(), **keys,
    }))


def test_round_trip_is_exact(saved: tuple[Path, Draft]) -> None:
    folder, draft = saved
    checkpoint = load_checkpoint(folder, target_layers=8)
    assert (checkpoint.missing, checkpoint.unexpected, checkpoint.layer_ids) == ((), (), None)
    assert checkpoint.config == draft.config
    again = build_draft(checkpoint)
    for (name, a), (_, b) in zip(draft.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(again.target_ids, torch.arange(100) * 3)
    assert checkpoint.tensors["t2d"].nonzero().squeeze(-1).tolist() == list(range(0, 300, 3))
    assert torch.equal(output(draft), output(again))


def test_default_boundaries_are_unsaid_and_others_one_above_the_nested_ids(saved: tuple[Path, Draft], tmp_path: Path) -> None:
    folder, draft = saved
    raw = json.loads((folder / "config.json").read_text())
    assert "eagle_config" not in raw and "eagle_aux_hidden_state_layer_ids" not in raw
    assert load_checkpoint(folder).config.boundaries is None
    save_native(tmp_path / "other", draft, D2T, target_layers=12)
    checkpoint = load_checkpoint(tmp_path / "other")
    assert checkpoint.layer_ids == (1, 3, 4) and checkpoint.layer_ids_key == "eagle_config.eagle_aux_hidden_state_layer_ids"
    assert checkpoint.config.boundaries == (2, 4, 5)


def test_rope_is_said_twice_and_alike(saved: tuple[Path, Draft]) -> None:
    raw = json.loads((saved[0] / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm"])
def test_switches_survive_saving(tmp_path: Path, switch: str) -> None:
    draft = random_draft(draft_vocab=100, **{switch: True})
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_native(tmp_path, draft, D2T, dtype=torch.float32, target_layers=8)
    checkpoint = load_checkpoint(tmp_path, target_layers=8)
    assert checkpoint.config == draft.config and not checkpoint.missing
    again = build_draft(checkpoint)
    assert torch.equal(output(draft), output(again))
    assert torch.equal(draft.feedback(output_states := torch.randn(2, WIDTH)), again.feedback(output_states))


@pytest.mark.parametrize("spelling", ["nested", "top"])
def test_norm_before_fc_is_read_in_both_places(saved: tuple[Path, Draft], spelling: str) -> None:
    folder, _ = saved
    edit(folder, {"eagle_config": {"norm_before_fc": True}} if spelling == "nested" else {"norm_before_fc": True})
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.norm_before_fc and checkpoint.missing == ("input_norm.weight",)
    assert torch.equal(build_draft(checkpoint).input_norm.weight, torch.ones(3 * WIDTH))


def test_prefixes_legacy_names_and_layers_0_are_understood(saved: tuple[Path, Draft]) -> None:
    folder, draft = saved
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"draft_model.{n.replace('midlayer.', 'layers.0.')}": t for n, t in tensors.items()}
    renamed |= {f"model.aux_norm_{place}.weight": torch.full((WIDTH,), 1.0 + i) for i, place in enumerate(("low", "mid", "high"))}
    save_file(renamed | {"stray.weight": torch.zeros(2)}, folder / "model.safetensors")
    edit(folder, {"use_aux_norm": True, "architectures": ["Eagle3LlamaForCausalLM"]})
    checkpoint = load_checkpoint(folder)
    assert checkpoint.missing == () and checkpoint.unexpected == ("stray.weight",)
    assert len(checkpoint.notes) == 2
    again = build_draft(checkpoint)
    assert torch.equal(again.midlayer.mlp.up_proj.weight, draft.midlayer.mlp.up_proj.weight)
    assert float(again.fc_norm[2].weight[0]) == 3.0


def test_speculators_dialect_with_llama_layers(saved: tuple[Path, Draft]) -> None:
    folder, draft = saved
    layer = LlamaConfig(
        vocab_size=300, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
    )
    as_speculators(folder, layer, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    assert config.dialect == "speculators" and config.norm_before_residual and not config.norm_output
    assert config.boundaries == checkpoint.layer_ids == (2, 4, 5)
    assert checkpoint.missing == ()
    again = build_draft(checkpoint, reading=Reading(settings={"norm_before_residual": False}))
    assert torch.equal(output(again), output(draft))
    assert again.embedding is not None and again.embedding.shape == (300, WIDTH)


def test_speculators_defaults_are_those_of_the_layer_class(saved: tuple[Path, Draft]) -> None:
    folder, _ = saved
    layer = Qwen3Config(
        vocab_size=300, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=["sliding_attention"], sliding_window=32, use_sliding_window=True,
    )
    edit(folder, tensors={f"midlayer.self_attn.{n}_norm.weight": torch.ones(16) for n in "qk"})
    as_speculators(folder, layer, norm_output=True)
    config = load_checkpoint(folder).config
    assert config.qk_norm and config.sliding_window == 32 and config.norm_output
    assert config.rms_norm_eps == Qwen3Config().rms_norm_eps == 1e-6
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_legacy_rope_scaling_is_read(saved: tuple[Path, Draft]) -> None:
    folder, _ = saved
    edit(folder, {"rope_parameters": None, "rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert load_checkpoint(folder).config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_hidden_layers": 257}, "num_hidden_layers"), ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "kv_lora_rank"), ({"architectures": ["Eagle2"]}, "Eagle2"),
        ({"hidden_act": "gelu"}, "gelu"), ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"), ({"architectures": "Llama"}, "not a list"),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "use_input_layernorm_in_first_layer: false"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step"), ({"head_dim": 15}, "15 rotated channels"),
        ({"num_key_value_heads": 3}, "3 key heads"), ({"rope_parameters": {"rope_type": "yarn"}}, "lacks"),
        ({"rope_parameters": None, "rope_theta": "wide"}, "rope_theta"), ({"rope_parameters": {"rope_type": ["x"]}}, "rope type"),
        ({"layer_types": 3}, "layer_types"), ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"speculators_model_type": "dflash"}, "dflash"), ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"), ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}, "rope_parameters": None}, "mrope_section"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,2,3"}}, "not a list"), ({"hidden_size": "wide"}, "wide"),
        ({"hidden_size": 2**40}, "hidden_size"), ({"vocab_size": 2**40}, "vocab_size"),
        ({"intermediate_size": 2**40}, "intermediate_size"),
        ({"num_aux_hidden_states": 10**9}, "num_aux_hidden_states"), ({"head_dim": 2**30}, "head_dim"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(saved: tuple[Path, Draft], config: dict[str, Any], says: str) -> None:
    edit(saved[0], config)
    with pytest.raises(DraftscopeError, match=says):
        load_checkpoint(saved[0])


def test_a_shape_that_does_not_fit_is_named(saved: tuple[Path, Draft]) -> None:
    edit(saved[0], tensors={"fc.weight": torch.zeros(WIDTH, 4 * WIDTH)})
    with pytest.raises(DraftscopeError, match=r"fc\.weight has shape \[64, 256\].*\[64, 192\]"):
        load_checkpoint(saved[0])


def test_unreadable_files_are_refused(saved: tuple[Path, Draft], tmp_path: Path) -> None:
    folder, _ = saved
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DraftscopeError, match="truncated"):
        load_checkpoint(folder)
    weights.write_bytes(b"not a tensor in sight")
    with pytest.raises(DraftscopeError, match="truncated, or not safetensors"):
        load_checkpoint(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(DraftscopeError, match=r"pytorch_model\.bin: is not a whole file of torch\.save"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(DraftscopeError, match="not a JSON object"):
        load_checkpoint(folder)
    with pytest.raises(DraftscopeError, match="nowhere: does not exist"):
        load_checkpoint(tmp_path / "nowhere")


def test_sharded_weights_are_read_and_a_lost_shard_is_named(saved: tuple[Path, Draft]) -> None:
    folder, draft = saved
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(output(build_draft(load_checkpoint(folder))), output(draft))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DraftscopeError, match="model-00002"):
        load_checkpoint(folder)


def test_missing_and_lost_tensors_stay_at_the_same_initial_value(saved: tuple[Path, Draft]) -> None:
    folder, draft = saved
    lost = build_draft(load_checkpoint(folder), reading=Reading(lost=("midlayer.",), seed=3))
    edit(folder, tensors={n: None for n, _ in draft.named_parameters() if n.startswith("midlayer.")})
    checkpoint = load_checkpoint(folder)
    assert len(checkpoint.missing) == 10 and all(n.startswith("midlayer.") for n in checkpoint.missing)
    missing = build_draft(checkpoint, reading=Reading(seed=3))
    assert torch.equal(output(lost), output(missing))
    assert torch.equal(missing.midlayer.hidden_norm.weight, torch.ones(WIDTH))
    assert 0.018 < float(missing.midlayer.mlp.up_proj.weight.std()) < 0.022
    other = build_draft(checkpoint, reading=Reading(seed=4))
    assert not torch.equal(other.midlayer.mlp.up_proj.weight, missing.midlayer.mlp.up_proj.weight)
    assert torch.equal(other.fc.weight, draft.fc.weight)


def test_the_reading_decides_map_feedback_and_settings(saved: tuple[Path, Draft]) -> None:
    checkpoint = load_checkpoint(saved[0])
    readings = (Reading(d2t="offset"), Reading(d2t="absolute"), Reading(d2t="zero"))
    ids = {reading.d2t: build_draft(checkpoint, reading=reading).target_ids for reading in readings}
    assert torch.equal(ids["offset"], torch.arange(100) * 3)
    assert torch.equal(ids["absolute"], D2T)
    assert torch.equal(ids["zero"], torch.arange(100))
    assert build_draft(checkpoint, reading=Reading(feedback="post")).config.norm_output
    assert build_draft(checkpoint, reading=Reading(settings={"fc_norm": True})).config.fc_norm
    with pytest.raises(DraftscopeError, match="no_such_key"):
        build_draft(checkpoint, reading=Reading(settings={"no_such_key": 1}))
    with pytest.raises(DraftscopeError, match=r"fc\.weight"):
        build_draft(checkpoint, reading=Reading(settings={"slots": 4}))


def test_a_map_of_absolute_ids_read_as_offsets_does_not_leave_the_vocabulary(saved: tuple[Path, Draft]) -> None:
    edit(saved[0], tensors={"d2t": torch.arange(100) * 3})
    ids = build_draft(load_checkpoint(saved[0])).target_ids
    assert int(ids.max()) == 299 and int(ids[10]) == 40


def test_embedding_and_whole_head_come_from_the_target_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    draft = random_draft()
    save_native(tmp_path, draft, None, dtype=torch.float32, target_layers=8)
    edit(tmp_path, tensors={"lm_head.weight": None})
    parts = Parts(torch.randn(300, WIDTH), torch.randn(300, WIDTH))
    again = build_draft(load_checkpoint(tmp_path), parts)  # type: ignore[arg-type]
    assert torch.equal(again.lm_head.weight, parts.head) and again.embedding is not None
    assert torch.equal(again.embedding, parts.embedding)
    narrow = Parts(torch.randn(300, 32), torch.randn(300, 32))
    with pytest.raises(DraftscopeError, match="32 wide"):
        build_draft(load_checkpoint(tmp_path), narrow)  # type: ignore[arg-type]


def test_saving_over_an_older_checkpoint_leaves_only_the_two_files(saved: tuple[Path, Draft]) -> None:
    folder, draft = saved
    save_native(folder, draft, D2T, target_layers=8, extra={"model_max_length": 512})
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["model_max_length"] == 512
    assert load_checkpoint(folder).tensors["fc.weight"].dtype == torch.bfloat16
