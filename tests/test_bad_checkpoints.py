"""Broken and hostile draft checkpoints: each is an error that names file and tensor, or a finding; nothing in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import random_draft

from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint, save_native
from draftscope.errors import DraftscopeError

D2T = torch.arange(100) * 2


class Touch:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_native(tmp_path / "draft", random_draft(draft_vocab=100), D2T, dtype=torch.float32)
    return tmp_path / "draft"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    held = tensors_of(folder) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def as_bin(folder: Path, held: Any = None, name: str = "pytorch_model.bin") -> Path:
    held = tensors_of(folder) if held is None else held
    (folder / "model.safetensors").unlink()
    torch.save(held, folder / name)
    return folder / name


def sharded(folder: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Two shards with an index."""
    held = tensors_of(folder)
    stem, index = ("model", "model.safetensors.index.json") if suffix == ".safetensors" else (
        "pytorch_model", "pytorch_model.bin.index.json")
    where = {name: f"{stem}-0000{1 + i % 2}-of-00002{suffix}" for i, name in enumerate(sorted(held))}
    (folder / "model.safetensors").unlink()
    for shard in set(where.values()):
        part = {name: held[name] for name in held if where[name] == shard}
        if suffix == ".bin":
            torch.save(part, folder / shard)
        else:
            save_file(part, folder / shard)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def refused(folder: Path, *says: str) -> None:
    with pytest.raises(DraftscopeError) as caught:
        load_checkpoint(folder)
    for text in says:
        assert text in str(caught.value), (text, str(caught.value))


@pytest.mark.parametrize("layout", ["one", "shards", "nested", "training state"])
def test_bin_files_hold_the_same_draft(folder: Path, layout: str) -> None:
    expected = tensors_of(folder)
    if layout == "shards":
        sharded(folder, ".bin")
    else:
        held: Any = {f"draft_model.{name}": tensor for name, tensor in expected.items()}
        if layout == "nested":
            held = {"state_dict": held, "step": 3}
        if layout == "training state":
            held = {"draft_state_dict": expected, "global_step": 3, "strategy": "eagle3", "world_size": 1}
        as_bin(folder, held, "training_state.pt" if layout == "training state" else "pytorch_model.bin")
    found = load_checkpoint(folder)
    assert not found.missing and not found.unexpected
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())
    assert torch.equal(build_draft(found).fc.weight, expected["fc.weight"])


def test_a_pickle_with_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    file = as_bin(folder, tensors_of(folder) | {"fc.bias": Touch(touched)})
    refused(folder, str(file), "system", "nothing was executed")
    # An old-style pickle, and one behind the names of torch's archive.
    file.write_bytes(pickle.dumps({"fc.weight": Touch(touched)}))
    refused(folder, str(file), "is no file of torch.save of 1.6 or newer")
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"fc.weight": Touch(touched)}))
        archive.writestr("archive/version", "3")
    file.write_bytes(blob.getvalue())
    refused(folder, str(file), "nothing was executed")
    assert not touched.exists()


def test_a_bin_file_that_claims_more_than_it_holds(folder: Path) -> None:
    held = tensors_of(folder)
    small = torch.zeros(1)
    file = as_bin(folder, held | {"lm_head.weight": small.expand(100, 64)})
    refused(folder, str(file), "lm_head.weight", "more values than the file holds")
    torch.save(held | {"fc.weight": [1, 2]}, file)
    refused(folder, str(file), "fc.weight", "list")
    torch.save([1, 2], file)
    refused(folder, str(file), "no tensors by name")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_every_cut_of_a_shard_is_named(folder: Path, suffix: str) -> None:
    shard = folder / sharded(folder, suffix)["fc.weight"]
    whole = shard.read_bytes()
    for point in (0, 4, 8, 60, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:point])
        refused(folder, shard.name)
    shard.unlink()
    refused(folder, shard.name, "not there")


@pytest.mark.parametrize("header", [
    struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 0), struct.pack("<Q", 4) + b"[1]x", struct.pack("<Q", 2) + b"{}",
    struct.pack("<Q", 84) + b'{"fc.weight":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,64]}}   ' + bytes(64),
    struct.pack("<Q", 66) + b'{"fc.weight":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}   ' + bytes(16),
])
def test_headers_that_do_not_add_up(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(header)
    refused(folder, "draft")


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", "..\\x", 7, None])
def test_an_index_does_not_lead_outside(folder: Path, name: Any, tmp_path: Path) -> None:
    where = sharded(folder) | {"fc.weight": name}
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    refused(folder, "model.safetensors.index.json", "fc.weight", "outside the folder")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100000])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


def test_an_index_that_promises_more_is_noted_and_the_tensor_missing(folder: Path) -> None:
    where = sharded(folder)
    shard = folder / where["fc.weight"]
    save_file({name: t for name, t in load_file(shard).items() if name != "fc.weight"}, shard)
    found = load_checkpoint(folder)
    assert found.missing == ("fc.weight",)
    assert any("fc.weight" in note and "index" in note for note in found.notes)


def test_names_that_are_one_after_renaming(folder: Path) -> None:
    norm = torch.ones(64)
    rewrite(folder, layers__0__hidden_norm__weight=norm)
    refused(folder, "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight", "both")
    rewrite(folder, layers__0__hidden_norm__weight=None, model__fc__weight=torch.zeros(64, 192))
    refused(folder, "model.fc.weight", "fc.weight", "both")
    rewrite(folder, model__fc__weight=None)
    save_file({"norm.weight": norm}, folder / "second.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    refused(folder, "second.safetensors", "first.safetensors", "norm.weight")


@pytest.mark.parametrize(("changes", "says"), [
    ({"hidden_size": 32}, "has shape"), ({"num_attention_heads": 8}, "_proj.weight"), ({"draft_vocab_size": 99}, "has shape"),
    ({"intermediate_size": 2**20}, "mlp"), ({"num_hidden_layers": 256}, "the files lack"), ({"num_hidden_layers": 10**9}, "256"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"), ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
    ({"num_aux_hidden_states": 4}, "3 layer ids"), ({"num_aux_hidden_states": 10**12}, "num_aux_hidden_states"),
    ({"vocab_size": 10**12, "draft_vocab_size": 100}, "vocab_size"), ({"head_dim": 10**9}, "head_dim"),
    ({"num_aux_hidden_states": 4, "eagle_config": {}}, "fc.weight"),
    ({"num_aux_hidden_states": 10**12, "eagle_config": {}}, "num_aux_hidden_states"),
    ({"target_hidden_size": 128}, "fc.weight"), ({"target_hidden_size": "wide"}, "target_hidden_size"),
    ({"eagle_config": [1]}, "eagle_config"), ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [[1]]}}, "integers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(range(10**4))}}, "num_aux_hidden_states"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta"), ({"rope_parameters": [1]}, "not an object"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": "x"}}, "rope_parameters"),
    ({"architectures": [{"a": 1}]}, "architecture"), ({"hidden_act": ["silu"]}, "hidden_act"),
    ({"layer_types": {"0": 1}}, "layer_types"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 10**12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
      "v_head_dim": 8}, "kv_lora_rank"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 5,
      "v_head_dim": 8}, "even number"),
    ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
      "transformer_layer_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
      "transformer_layer_config": {"model_type": "llama", "hidden_size": "x"}}, "llama configuration"),
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
      "transformer_layer_config": {"model_type": "gpt2"}}, "gpt2"),
])
def test_a_configuration_that_contradicts_the_weights(folder: Path, changes: dict[str, Any], says: str) -> None:
    edit(folder, **changes)
    refused(folder, says, str(folder))


def test_tensors_of_another_kind(folder: Path) -> None:
    rewrite(folder, d2t=torch.zeros(100))
    refused(folder, "d2t", "float32")
    rewrite(folder, d2t=D2T, fc__weight=torch.zeros(64, 192, dtype=torch.int64))
    refused(folder, "fc.weight", "int64")
    rewrite(folder, fc__weight=torch.zeros(64, 192, dtype=torch.float8_e4m3fn), fc__weight_scale=torch.ones(1))
    refused(folder, "fc.weight_scale", "quantised")


def test_memory_stays_bounded(folder: Path) -> None:
    """A configuration that asks for terabytes, beside files that hold a few kilobytes."""
    rewrite(folder, **{name.replace(".", "__"): None for name in tensors_of(folder) if "mlp" in name or name == "lm_head.weight"})
    edit(folder, intermediate_size=2**20, num_hidden_layers=200, draft_vocab_size=2**24, vocab_size=2**24)
    code = (
        "import resource, sys\nfrom draftscope.eagle3.checkpoint import load_checkpoint\n"
        "from draftscope.errors import DraftscopeError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    load_checkpoint(sys.argv[1])\nexcept DraftscopeError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    said, grown = done.stdout.splitlines()
    assert "d2t has shape" in said or "the files lack" in said
    assert int(grown) < 200 * 1024


def test_inspect_reports_what_is_wrong_without_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(folder, fc__weight=torch.full((64, 192), torch.nan), midlayer__mlp__up_proj__weight=None)
    assert run(["inspect", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "fc.weight" in printed and "midlayer.mlp.up_proj.weight" in printed
    as_bin(folder, {"fc.weight": Touch(folder / "touched")})
    assert run(["inspect", str(folder)]) == 3
    assert "Traceback" not in capsys.readouterr().err and not (folder / "touched").exists()


def read_or_refused(folder: Path) -> str | None:
    """What the refusal says; anything but a refusal or a checkpoint raises."""
    try:
        load_checkpoint(folder)
    except DraftscopeError as error:
        return str(error)
    return None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=5,
)
KEYS = ["hidden_size", "num_hidden_layers", "head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "rope_theta",
        "eagle_config", "layer_types", "sliding_window", "norm_output", "fc_norm", "architectures", "draft_vocab_size",
        "rms_norm_eps", "max_position_embeddings", "num_aux_hidden_states", "attention_bias", "later_norm", "kv_lora_rank",
        "transformer_layer_config", "speculators_model_type", "target_hidden_size", "quantization_config",
        "partial_rotary_factor"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_value_at_any_key_is_read_or_refused(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    before = path.read_text()
    try:
        edit(folder, **changes)
        said = read_or_refused(folder)
    finally:
        path.write_text(before)
    assert said is None or str(folder) in said


def corrupt(folder: Path, change: Callable[[bytearray], None]) -> None:
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    change(data)
    weights.write_bytes(data)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_byte_of_the_header_may_be_wrong(folder: Path, places: list[tuple[int, int]]) -> None:
    weights = folder / "model.safetensors"
    before = weights.read_bytes()

    def change(data: bytearray) -> None:
        for place, value in places:
            data[place] = value

    try:
        corrupt(folder, change)
        said = read_or_refused(folder)
    finally:
        weights.write_bytes(before)
    assert said is None or str(folder) in said
