"""Checkpoints converted between forms: round trips lose nothing, consumers read what was meant, the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_files import write_one
from support import WIDTH, random_draft, save_target
from test_draft_model import MLA
from torch import Tensor

from draftscope.cli.main import run
from draftscope.consumers import effective
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint, save_native
from draftscope.eagle3.config import LatentAttention
from draftscope.eagle3.dialects import LAYER_IDS
from draftscope.eagle3.model import Draft, StepMask
from draftscope.errors import DraftscopeError, UsageError
from draftscope.inspecting.checkpoints import is_draft
from draftscope.pipeline.convert_drafts import convert_draft

D = 100
D2T = torch.arange(D) * 2
NOT_IN_FILES = {"dialect", "double_norm"}

BOTH: dict[str, dict[str, Any]] = {
    "plain": {}, "residual": {"norm_before_residual": True}, "fc": {"norm_before_fc": True}, "slots": {"fc_norm": True},
    "feedback": {"norm_output": True}, "qwen": {"qk_norm": True, "norm_before_residual": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "layers": {"layers": 3, "sliding_window": 7, "sliding_layers": (0, 2)}, "window": {"sliding_window": 7},
    "four": {"slots": 4, "boundaries": (0, 2, 4, 5)}, "tied": {"tie_word_embeddings": True},
    "rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "max_position_embeddings": 4096},
}
NATIVE: dict[str, dict[str, Any]] = BOTH | {
    "mla": {"mla": LatentAttention(**MLA), "layers": 2}, "mla plain": {"mla": LatentAttention(**MLA | {"q_lora_rank": None})},
    "head": {"norm_before_head": False}, "head and feedback": {"norm_before_head": False, "norm_output": True},
    "fc bias": {"fc_bias": True}, "uneven biases": {"attention_bias": True}, "width": {"target_hidden_size": 48},
    "no fc": {"use_aux_hidden_state": False, "slots": 1, "boundaries": None},
    "hidden": {"layers": 2, "later_norm": "hidden_norm"}, "norms": {"norm_before_fc": True, "fc_norm": True},
}


def a_checkpoint(folder: Path, config: dict[str, Any] | None = None, **switches: Any) -> Draft:
    """In bfloat16, with an embedding of its own and keys that no form speaks for."""
    draft = random_draft(draft_vocab=D, **switches)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    draft.target_ids = torch.arange(D) + D2T
    save_native(folder, draft, D2T, extra={"transformers_version": "5.0.0", "bos_token_id": 1, **(config or {})})
    assert draft.embedding is not None
    add(folder, {"embed_tokens.weight": draft.embedding.bfloat16()})
    return draft


def add(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    held = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")


def raw_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def same_tensors(one: Path, two: Path) -> None:
    mine, theirs = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", NATIVE)
def test_native_again_is_the_same(name: str, tmp_path: Path) -> None:
    draft = a_checkpoint(tmp_path / "a", **NATIVE[name])
    before = load_checkpoint(tmp_path / "a")
    convert_draft(tmp_path / "a", "native", tmp_path / "b")
    after = load_checkpoint(tmp_path / "b")
    assert after.config == before.config
    assert before.config.model_dump(exclude=NOT_IN_FILES) == draft.config.model_dump(exclude=NOT_IN_FILES)
    assert raw_of(tmp_path / "b") == raw_of(tmp_path / "a")
    same_tensors(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4)])
def test_tensors_that_nothing_asks_for_may_have_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", **NATIVE[next(iter(NATIVE))])
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    save_file(tensors | {"midlayer.self_attn.k_scale": torch.ones(shape)}, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    for to in ("native", "speculators"):
        convert_draft(tmp_path / "a", to, tmp_path / to)
        assert load_checkpoint(tmp_path / to).tensors.keys() >= tensors.keys() - {"t2d"}


@pytest.mark.parametrize("name", BOTH)
def test_through_speculators_and_back_loses_nothing(name: str, tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", {"eagle_config": {"note": 7}} if name == "plain" else None, **BOTH[name])
    made = convert_draft(tmp_path / "a", "speculators", tmp_path / "b")
    assert made.tensors == len(load_file(tmp_path / "a" / "model.safetensors"))
    there = load_checkpoint(tmp_path / "b")
    assert there.config.dialect == "speculators" and not there.missing and not there.unexpected
    convert_draft(tmp_path / "b", "native", tmp_path / "c")
    before, after = load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "c")
    assert there.config.model_dump(exclude={"dialect"}) == before.config.model_dump(exclude={"dialect"})
    assert after.config == before.config
    same_tensors(tmp_path / "a", tmp_path / "c")
    first, last = raw_of(tmp_path / "a"), raw_of(tmp_path / "c")
    last.pop("draftscope", None)
    assert last == first
    # And the other way round: what only speculators has words for is there again.
    raw = raw_of(tmp_path / "b") | {"speculators_version": "0.9.0", "embed_requires_grad": True}
    (tmp_path / "b" / "config.json").write_text(json.dumps(raw))
    convert_draft(tmp_path / "b", "native", tmp_path / "d")
    convert_draft(tmp_path / "d", "speculators", tmp_path / "e")
    assert {k: v for k, v in raw_of(tmp_path / "e").items() if k != "draftscope"} == {
        k: v for k, v in raw.items() if k != "draftscope"}
    same_tensors(tmp_path / "b", tmp_path / "e")


@pytest.mark.parametrize(("name", "says"), [
    ("mla", "mla"), ("head", "norm_before_head: false"), ("fc bias", "fc_bias"), ("uneven biases", "attention_bias"),
    ("width", "target_hidden_size: 48"), ("no fc", "use_aux_hidden_state"), ("hidden", "later_norm"), ("norms", "norm_before_fc"),
])
def test_speculators_has_no_place_for(name: str, says: str, tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", **NATIVE[name])
    with pytest.raises(DraftscopeError, match=f"can't honour .*{says}"):
        convert_draft(tmp_path / "a", "speculators", tmp_path / "b")
    assert not (tmp_path / "b").exists() and [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("switches", "consumer", "says"), [
    ({"norm_before_residual": True}, "sglang@0.5.23", "norm_before_residual: true"), ({"qk_norm": True}, "sglang", "qk_norm"),
    ({"layers": 2, "sliding_window": 5, "sliding_layers": (1,)}, "sglang", "sliding_window: 5"),
    ({"boundaries": (5, 4, 2)}, "vllm@0.32", "ascending"), ({"norm_before_head": False}, "vllm", "norm_before_head"),
    ({"mla": LatentAttention(**MLA | {"rope_interleave": False})}, "sglang", "rope_interleave|architecture"),
])
def test_what_a_consumer_cannot_honour_is_refused_by_name(
    switches: dict[str, Any], consumer: str, says: str, tmp_path: Path,
) -> None:
    a_checkpoint(tmp_path / "a", **switches)
    with pytest.raises(DraftscopeError, match=says):
        convert_draft(tmp_path / "a", consumer, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_ids_come_in_the_consumers_convention_and_place(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", boundaries=(1, 3, 6))
    convert_draft(tmp_path / "a", "vllm@0.32", tmp_path / "v")
    convert_draft(tmp_path / "v", "sglang@0.5.23", tmp_path / "s")
    convert_draft(tmp_path / "s", "speculators", tmp_path / "p")
    convert_draft(tmp_path / "p", "vllm", tmp_path / "w")
    vllm, sglang = raw_of(tmp_path / "v"), raw_of(tmp_path / "s")
    assert vllm[LAYER_IDS] == [1, 3, 6] and LAYER_IDS not in vllm.get("eagle_config", {})
    assert sglang["eagle_config"][LAYER_IDS] == [0, 2, 5] and LAYER_IDS not in sglang
    assert raw_of(tmp_path / "p")[LAYER_IDS] == [1, 3, 6]
    assert {k: v for k, v in raw_of(tmp_path / "w").items() if k != "draftscope"} == vllm
    for folder, consumer in (("v", "vllm@0.32"), ("s", "sglang@0.5.23"), ("w", "vllm")):
        assert effective(load_checkpoint(tmp_path / folder), consumer, 8).boundaries == (1, 3, 6)
        same_tensors(tmp_path / "a", tmp_path / folder)


def test_a_target_that_is_counted_otherwise(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", boundaries=(3, 5, 8))
    add(tmp_path / "a", {"embed_tokens.weight": None})
    target = save_target(tmp_path / "target")
    config = raw_of(target)
    (target / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss", "rms_norm_eps": 1e-5}))
    for name in ("model.safetensors", "generation_config.json"):
        (target / name).unlink()
    convert_draft(tmp_path / "a", "sglang", tmp_path / "s", target=target)
    assert raw_of(tmp_path / "s")["eagle_config"][LAYER_IDS] == [3, 5, 8]
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftscopeError, match="boundaries"):
        convert_draft(tmp_path / "a", "sglang", tmp_path / "t", target=target)


def test_default_places_stay_unsaid(tmp_path: Path) -> None:
    draft = a_checkpoint(tmp_path / "a")
    save_native(tmp_path / "d", draft, D2T, target_layers=8)
    target = save_target(tmp_path / "target")
    for to in ("native", "speculators", "vllm", "sglang"):
        convert_draft(tmp_path / "d", to, tmp_path / to, target=target)
        raw = raw_of(tmp_path / to)
        assert LAYER_IDS not in raw and LAYER_IDS not in raw.get("eagle_config", {})


def test_further_layers_norm_gets_the_name_that_the_engine_applies(tmp_path: Path) -> None:
    draft = a_checkpoint(tmp_path / "a", layers=2)
    made = convert_draft(tmp_path / "a", "sglang", tmp_path / "s")
    names = load_file(tmp_path / "s" / "model.safetensors").keys()
    assert "layers.1.hidden_norm.weight" in names and "layers.1.input_layernorm.weight" not in names
    assert any("hidden_norm" in step for step in made.steps)
    assert load_checkpoint(tmp_path / "s").config.later_norm == "hidden_norm"
    convert_draft(tmp_path / "s", "vllm", tmp_path / "v")
    same_tensors(tmp_path / "a", tmp_path / "v")
    one, two = (build_draft(load_checkpoint(tmp_path / name)) for name in ("a", "s"))
    hidden, embeds = torch.randn(2, 1, 5, draft.config.hidden_size)
    positions = torch.arange(5)[None]
    assert torch.equal(one(hidden, embeds, positions, StepMask()), two(hidden, embeds, positions, StepMask()))


def test_the_targets_embedding_is_compared_and_lent(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", tied=False)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    a_checkpoint(tmp_path / "a")
    with pytest.raises(DraftscopeError, match=r"embed_tokens\.weight"):
        convert_draft(tmp_path / "a", "sglang", tmp_path / "s", target=target)
    assert any("embedding" in c for c in convert_draft(tmp_path / "a", "sglang", tmp_path / "unknown").caveats)
    add(tmp_path / "a", {"embed_tokens.weight": embedding})
    assert not convert_draft(tmp_path / "a", "sglang", tmp_path / "s", target=target).caveats
    add(tmp_path / "a", {"embed_tokens.weight": None})
    made = convert_draft(tmp_path / "a", "speculators", tmp_path / "p", target=target)
    assert not made.caveats and torch.equal(load_file(tmp_path / "p" / "model.safetensors")["embed_tokens.weight"], embedding)
    assert raw_of(tmp_path / "p")["speculators_config"]["verifier"] == {
        "name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}


def test_what_engines_trip_over_is_put_right_and_said(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", tie_word_embeddings=True)
    add(tmp_path / "a", {"stray.weight": torch.zeros(2)})
    made = convert_draft(tmp_path / "a", "sglang", tmp_path / "s")
    assert raw_of(tmp_path / "s")["tie_word_embeddings"] is False
    assert "stray.weight" not in load_file(tmp_path / "s" / "model.safetensors")
    assert any("stray.weight" in step for step in made.steps) and any("tie_word_embeddings" in step for step in made.steps)
    convert_draft(tmp_path / "a", "native", tmp_path / "n")
    assert "stray.weight" in load_file(tmp_path / "n" / "model.safetensors") and raw_of(tmp_path / "n")["tie_word_embeddings"]
    # ModelOpt saves no t2d, and orders its vocabulary by frequency.
    add(tmp_path / "a", {"t2d": None, "d2t": D2T.flip(0) + torch.arange(D).flip(0) - torch.arange(D), "stray.weight": None})
    made = convert_draft(tmp_path / "a", "speculators", tmp_path / "p")
    assert int(load_file(tmp_path / "p" / "model.safetensors")["t2d"].sum()) == D
    assert any("ascending" in caveat for caveat in made.caveats)


def test_specforges_meaning_of_norm_output(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a", {"norm_output": True})
    assert load_checkpoint(tmp_path / "a").config.norm_output
    convert_draft(tmp_path / "a", "vllm", tmp_path / "b", writer="specforge")
    assert not load_checkpoint(tmp_path / "b").config.norm_output and "norm_output" not in raw_of(tmp_path / "b")
    a_checkpoint(tmp_path / "c", {"norm_output": False})
    with pytest.raises(DraftscopeError, match="norm_before_head"):
        convert_draft(tmp_path / "c", "vllm", tmp_path / "d", writer="specforge")
    held = load_file(tmp_path / "c" / "model.safetensors")
    save_file({f"draft_model.{name}": tensor for name, tensor in held.items()}, tmp_path / "c" / "model.safetensors")
    assert not load_checkpoint(tmp_path / "c").config.norm_before_head
    add(tmp_path / "c", {"draft_model.norm.weight": torch.ones(WIDTH)})
    held = load_file(tmp_path / "c" / "model.safetensors")
    save_file({n.removeprefix("draft_model."): t for n, t in held.items()}, tmp_path / "c" / "model.safetensors")
    found = load_checkpoint(tmp_path / "c")
    assert not found.config.norm_before_head and any("SpecForge" in note for note in found.notes)


def test_modelopts_export_is_read(tmp_path: Path) -> None:
    """Keys of modelopt 0.47.0 `export/plugins/hf_spec_configs.py`, names `layers.0.*`, no t2d."""
    draft = a_checkpoint(tmp_path / "a", {"eagle_config": {
        LAYER_IDS: [1, 3, 4], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }, "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 32.0,
                                                                      "original_max_position_embeddings": 2048}})
    add(tmp_path / "a", {"t2d": None})
    held = load_file(tmp_path / "a" / "model.safetensors")
    save_file({n.replace("midlayer.", "layers.0."): t for n, t in held.items()}, tmp_path / "a" / "model.safetensors")
    found = load_checkpoint(tmp_path / "a")
    assert not found.missing and found.config.boundaries == draft.config.boundaries
    assert found.config.rope_parameters["rope_type"] == "yarn"
    assert found.spelt["midlayer.mlp.up_proj.weight"] == "layers.0.mlp.up_proj.weight"
    convert_draft(tmp_path / "a", "sglang", tmp_path / "b")
    assert raw_of(tmp_path / "b")["rope_scaling"]["factor"] == 32.0 == raw_of(tmp_path / "b")["rope_parameters"]["factor"]
    assert raw_of(tmp_path / "b")["eagle_config"]["parallel_draft_step"] == 1


def test_nothing_written_before_is_lost(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "a")
    with pytest.raises(UsageError, match="there already"):
        convert_draft(tmp_path / "a", "native", tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("x")
    with pytest.raises(UsageError, match="there already"):
        convert_draft(tmp_path / "a", "native", tmp_path / "b")
    with pytest.raises(UsageError, match=r"native, speculators, .*sglang"):
        convert_draft(tmp_path / "a", "onnx", tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text("x")
    out = tmp_path / "out.json"
    words = ["convert", str(tmp_path / "a"), "--to", "vllm@0.32", "-o", str(tmp_path / "b"), "--json", str(out)]
    assert run(words) == 0
    said = json.loads(out.read_text())
    assert said["schema"] == "draftscope.convert/1" and said["what"] == "checkpoint" and said["left"] == ["README.md"]
    assert any("boundaries [2, 4, 5]" in step for step in said["steps"])
    assert load_checkpoint(tmp_path / "b").config.boundaries == (2, 4, 5)
    assert run(words) == 2
    assert run([*words[:3], "plain", "-o", str(tmp_path / "c")]) == 2
    assert run(["convert", str(tmp_path), "--to", "native", "-o", str(tmp_path / "c")]) == 2
    a_checkpoint(tmp_path / "q", qk_norm=True)
    assert run(["convert", str(tmp_path / "q"), "--to", "sglang@0.5.23", "-o", str(tmp_path / "c")]) == 3
    assert "qk_norm: true" in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_inspect_and_convert_agree_on_what_is_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by its tensors, by its configuration, or by neither; a target and data are none, whatever lies beside them."""
    a_checkpoint(tmp_path / "native")
    for name in ("bare", "torch"):  # nothing but the tensors tells; then, not even these before they are unpickled
        a_checkpoint(tmp_path / name)
        raw = raw_of(tmp_path / name)
        raw["architectures"] = ["LlamaForCausalLM"]
        raw.pop("draft_vocab_size")
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    torch.save(load_file(tmp_path / "torch" / "model.safetensors"), tmp_path / "torch" / "pytorch_model.bin")
    (tmp_path / "torch" / "model.safetensors").unlink()
    save_target(tmp_path / "target")
    for name, note in (("data", {"model": "x"}), ("beside", raw_of(tmp_path / "target"))):
        write_one("plain", tmp_path / name, 0)
        (tmp_path / name / "config.json").write_text(json.dumps(note))
    drafts = {name: is_draft(tmp_path / name) for name in ("native", "bare", "torch", "target", "data", "beside")}
    assert drafts == {"native": True, "bare": True, "torch": True, "target": False, "data": False, "beside": False}
    for name, draft in drafts.items():
        run(["convert", str(tmp_path / name), "--to", "native", "-o", str(tmp_path / f"{name}-out")])
        assert ("holds no draft checkpoint" in capsys.readouterr().err) == (not draft), name
    assert run(["convert", str(tmp_path / "beside"), "--to", "plain", "-o", str(tmp_path / "made")]) == 0
