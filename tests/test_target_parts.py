"""Target parts read from every layout of files, against the loaded model, and refusals that name the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import random_target, save_target

from draftscope.errors import DraftscopeError
from draftscope.target.parts import read_parts


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
    with pytest.raises(DraftscopeError, match="cannot be read as JSON"):
        read_parts(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DraftscopeError, match=r"config\.json is missing"):
        read_parts(folder)
