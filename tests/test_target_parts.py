"""Target parts read from every layout of files, against the loaded model, and refusals that name the file."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import family_target
from safetensors.torch import load_file, save_file
from support import random_target, save_target

from draftscope.errors import DraftscopeError
from draftscope.target.model import load_target
from draftscope.target.parts import read_parts, tensor_files


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    random_target(5, tied=False).save_pretrained(folder)
    return folder


def alter_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "drop"}))


def copy(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    return folder


def test_head_and_norm_against_the_model(untied: Path) -> None:
    parts = read_parts(untied)
    model = random_target(5, tied=False)
    torch.testing.assert_close(parts.head, model.lm_head.weight.detach())
    torch.testing.assert_close(parts.embedding, model.model.embed_tokens.weight.detach())
    assert (parts.layers, parts.width, parts.vocab, parts.norm_offset, parts.embed_scale) == (8, 64, 300, 0.0, 1.0)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 3
    wide = x.double()
    by_hand = wide / (wide.square().mean(-1, keepdim=True) + parts.norm_eps).sqrt() * parts.norm_weight.double()
    torch.testing.assert_close(parts.final_norm(x).double(), by_hand, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.logits(x).double(), wide @ parts.head.double().T, rtol=1e-5, atol=1e-4)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    parts = read_parts(save_target(tmp_path))
    assert parts.head is parts.embedding


def test_shards_of_which_only_those_needed_are_there(untied: Path, tmp_path: Path) -> None:
    random_target(5, tied=False).save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[n] for n in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    assert len(set(index.values())) > len(needed)
    for file in set(index.values()) - needed:
        (tmp_path / file).unlink()
    parts, whole = read_parts(tmp_path), read_parts(untied)
    assert torch.equal(parts.head, whole.head) and torch.equal(parts.norm_weight, whole.norm_weight)
    (tmp_path / index["lm_head.weight"]).unlink()
    with pytest.raises(DraftscopeError, match=rf"{index['lm_head.weight']}: missing, and it holds .*Copy this shard"):
        read_parts(tmp_path)


@pytest.mark.parametrize(("prefix", "head"), [
    ("", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
])
def test_parts_alone_under_other_names(untied: Path, tmp_path: Path, prefix: str, head: str) -> None:
    whole = load_file(untied / "model.safetensors")
    shutil.copy(untied / "config.json", tmp_path)
    named = {f"{prefix}{n}": whole[f"model.{n}"].bfloat16() for n in ("embed_tokens.weight", "norm.weight")}
    named[head] = whole["lm_head.weight"].bfloat16()
    named["model.layers.61.embed_tokens.weight"] = torch.zeros(2, 2)
    save_file(named, tmp_path / "parts.safetensors")
    parts = read_parts(tmp_path)
    assert parts.embedding.dtype == torch.bfloat16
    assert torch.equal(parts.head, whole["lm_head.weight"].bfloat16())
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(parts.logits(x), x @ parts.head.float().T, rtol=1e-5, atol=1e-4)


def test_text_config_and_defaults_left_out(untied: Path, tmp_path: Path) -> None:
    folder = copy(untied, tmp_path / "nested")
    flat = json.loads((folder / "config.json").read_text())
    inner = {k: flat[k] for k in ("model_type", "hidden_size", "num_hidden_layers")}
    (folder / "config.json").write_text(json.dumps({"model_type": "wrapped", "text_config": inner, "tie_word_embeddings": False}))
    parts = read_parts(folder)
    assert (parts.model_type, parts.norm_eps) == ("llama", 1e-6)  # LlamaConfig's default
    alter_config(folder, text_config={**inner, "model_type": "never-heard-of"})
    with pytest.raises(DraftscopeError, match="lacks rms_norm_eps"):
        read_parts(folder)


@pytest.mark.parametrize(("change", "says"), [
    ({"hidden_size": 32}, r"has shape \[300, 64\], but hidden_size is 32"),
    ({"hidden_size": None}, "lacks hidden_size"),
    ({"text_config": 7}, "text_config is not"),
])
def test_configs_that_contradict(untied: Path, tmp_path: Path, change: dict[str, object], says: str) -> None:
    folder = copy(untied, tmp_path / "x")
    alter_config(folder, **change)
    with pytest.raises(DraftscopeError, match=says):
        read_parts(folder)


def test_files_missing_truncated_or_of_another_kind(untied: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftscopeError, match="no such folder"):
        read_parts(tmp_path / "nowhere")
    folder = copy(untied, tmp_path / "x")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    whole = weights.read_bytes()
    for end in (3, 200, len(whole) - 1):
        weights.write_bytes(whole[:end])
        with pytest.raises(DraftscopeError, match=r"model\.safetensors"):
            read_parts(folder)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, weights)
        with pytest.raises(DraftscopeError, match=name.removeprefix("model.")):
            read_parts(folder)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}, weights)
    with pytest.raises(DraftscopeError, match="stored as int8"):
        read_parts(folder)
    save_file(tensors | {"model.norm.weight": torch.ones(65)}, weights)
    with pytest.raises(DraftscopeError, match=r"norm\.weight has shape \[65\]"):
        read_parts(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(DraftscopeError, match=r"no safetensors file; it holds pytorch_model\.bin"):
        read_parts(folder)
    (folder / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(DraftscopeError, match="no index"):
        read_parts(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DraftscopeError, match="is not readable JSON"):
        read_parts(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DraftscopeError, match=r"config\.json is missing"):
        read_parts(folder)


# -- configs that lie ------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A quarter of a gigabyte more than what is in use: allocating what a lying config names fails at once."""
    before, held = resource.getrlimit(resource.RLIMIT_AS), Path("/proc/self/statm")
    if not held.exists():
        pytest.skip("how much is in use is told by /proc")
    used = int(held.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


HUGE = 10**12
PARTS_LIES: dict[str, tuple[dict[str, object], str]] = {
    "width": ({"hidden_size": HUGE}, "hidden_size is 1000000000000, not a whole number"),
    "width, wrong": ({"hidden_size": 128}, r"has shape \[300, 64\], but hidden_size is 128|asks for model\.embed_tokens"),
    "negative width": ({"hidden_size": -64}, "hidden_size is -64"),
    "width in words": ({"hidden_size": "64"}, "hidden_size is 64, not a whole number"),
    "width as truth": ({"hidden_size": True}, "hidden_size is True"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not"),
    "layers, wrong": ({"num_hidden_layers": 9}, "num_hidden_layers is 9, but the files hold 8 layers"),
    "fewer layers": ({"num_hidden_layers": 7}, "num_hidden_layers is 7, but the files hold 8 layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "vocabulary": ({"vocab_size": HUGE}, "vocab_size is 1000000000000, not"),
    "eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, not a number above 0"),
    "eps, infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
    "eps, nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "softcap": ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
    "tie": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is yes, not true or false"),
    "type": ({"model_type": ["llama"]}, "model_type is .*, not a name"),
    "type with escapes": ({"model_type": 7}, "model_type is 7, not a name"),
    "code to fetch": ({"attn_implementation": "someone/kernel"}, "attn_implementation names code to fetch"),
}
LOAD_LIES: dict[str, tuple[dict[str, object], str]] = {
    "vocabulary, wrong": ({"vocab_size": 320}, "vocab_size is 320, but model.embed_tokens.weight has 300 rows"),
    "huge vocabulary": ({"vocab_size": 2_000_000_000}, "vocab_size is 2,000,000,000, but model.embed_tokens.weight has 300 rows"),
    "heads": ({"num_attention_heads": HUGE}, "num_attention_heads is 1,000,000,000,000, but no tensor"),
    "head width": ({"head_dim": HUGE}, "head_dim is 1,000,000,000,000, but no tensor"),
    "negative head width": ({"head_dim": -HUGE}, "head_dim is -1,000,000,000,000, but no tensor"),
    "negative heads": ({"num_attention_heads": -4}, "transformers cannot load|asks for"),
    "mlp": ({"intermediate_size": 10**10}, "intermediate_size is 10,000,000,000, but no tensor"),
    "mlp, wrong": ({"intermediate_size": 136}, r"asks for model\.layers\.0\.mlp\.\w+\.weight of shape .*136.*, the files hold"),
    "mlp in words": ({"intermediate_size": "many"}, "transformers cannot load"),
    "kv heads, wrong": ({"num_key_value_heads": 4}, "asks for model.layers.0.self_attn.k_proj.weight of shape"),
    "zero heads": ({"num_attention_heads": 0, "num_key_value_heads": 0}, "transformers cannot load|asks for"),
    "far down": ({"vision_config": {"a": [{"hidden_size": HUGE}]}}, r"vision_config\.a\.hidden_size is 1,000,000,000,000"),
    "architecture of others": ({"model_type": "their-own", "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
                               "transformers cannot load"),
}


@pytest.mark.parametrize("name", PARTS_LIES)
def test_parts_under_a_config_that_lies(name: str, untied: Path, tmp_path: Path, little_memory: None) -> None:
    change, says = PARTS_LIES[name]
    folder = copy(untied, tmp_path / "x")
    alter_config(folder, **change)
    for read in (read_parts, load_target):
        with pytest.raises(DraftscopeError, match=says):
            read(folder)


@pytest.mark.parametrize("name", LOAD_LIES)
def test_a_target_under_a_config_that_lies(
    name: str, untied: Path, tmp_path: Path, little_memory: None, monkeypatch: pytest.MonkeyPatch,
) -> None:
    change, says = LOAD_LIES[name]
    folder = copy(untied, tmp_path / "x")
    (folder / "evil.py").write_text("raise SystemExit('run')")
    alter_config(folder, **change)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code of others"))
    with pytest.raises(DraftscopeError, match=says) as refused:
        load_target(folder)
    assert "memory" not in str(refused.value)


@pytest.mark.parametrize("key", ["num_local_experts", "moe_intermediate_size"])
def test_experts_that_are_not_in_the_files(key: str, tmp_path: Path, little_memory: None) -> None:
    """Files hold experts one by one, transformers keeps them together: told by how many values there are in all."""
    family_target("qwen3_moe", tmp_path)
    too_many = r"describes a target of .* values, the files hold|asks for model\.layers\.0\.mlp\.gate\.weight"
    for value, says in ((10**9, f"{key} is 1,000,000,000, but no tensor"), (4000, too_many)):
        alter_config(tmp_path, **{key: value})
        with pytest.raises(DraftscopeError, match=says):
            load_target(tmp_path)


def test_layers_that_predict_further_tokens_are_no_contradiction(untied: Path, tmp_path: Path) -> None:
    folder = copy(untied, tmp_path / "x")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"model.layers.8.embed_tokens.weight": torch.zeros(300, 64)}, weights)
    with pytest.raises(DraftscopeError, match="num_hidden_layers is 8, but the files hold 9 layers"):
        read_parts(folder)
    alter_config(folder, num_nextn_predict_layers=1)
    assert read_parts(folder).layers == 8


@pytest.mark.parametrize("place", [
    "../x/model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "a\\b.safetensors", "", "x\0y", 7, None, ["model"],
])
def test_an_index_that_leads_out_of_the_folder(untied: Path, tmp_path: Path, place: object) -> None:
    folder = copy(untied, tmp_path / "y")
    copy(untied, tmp_path / "x")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    names["model.norm.weight"] = place  # type: ignore[assignment]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for read in (tensor_files, read_parts, load_target):
        with pytest.raises(DraftscopeError, match=r"the index places tensor model\.norm\.weight outside the folder"):
            read(folder)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 100_000, "{"])
def test_what_is_no_index(untied: Path, tmp_path: Path, text: str) -> None:
    folder = copy(untied, tmp_path / "x")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DraftscopeError, match=r"no index of shards|not readable JSON"):
        read_parts(folder)


def test_a_config_without_end(untied: Path, tmp_path: Path) -> None:
    folder = copy(untied, tmp_path / "x")
    for text, says in (("[" * 100_000, "not readable JSON"), ('{"hidden_size": ' + "9" * 5000 + "}", "not readable JSON"),
                       (" " * (17 << 20), "is larger than"), ("[]", "not a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(DraftscopeError, match=says):
            read_parts(folder)
