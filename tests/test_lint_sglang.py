"""The facts about SGLang against SGLang: spoilt checkpoints loaded by its own classes, without a GPU (scripts/env-sglang).

The server's part, above all which layers it captures, is not run: its attention wants a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers import run_recipe
from spoilt import LAYERS
from test_lint_real import NATIVE

from draftscope.consumers import effective
from draftscope.eagle3.checkpoint import load_checkpoint, target_ids

pytestmark = [pytest.mark.peers, pytest.mark.sglang, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def in_sglang(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sglang")
    made = [maker(folder / name) for name, maker in NATIVE.items()]
    out = folder / "answers.json"
    run_recipe("sglang", "consume_sglang.py", out, *made)
    return folder, dict(json.loads(out.read_text()))


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}


def native_names(name: str) -> set[str]:
    """Native names of what a fused parameter of SGLang is made of."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
    fused = next((key for key in FUSED if key in name), None)
    return {name} if fused is None else {name.replace(fused, part) for part in FUSED[fused]}


@pytest.mark.parametrize("name", NATIVE)
def test_sglang_does_what_the_facts_say(in_sglang: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, said = in_sglang
    real = said[name]
    checkpoint = load_checkpoint(folder / name, target_layers=None if "four_slots" in name else LAYERS)
    ours = effective(checkpoint, "sglang@0.5.23", LAYERS)
    assert ours.loads is ("error" not in real), real.get("error", ours.notes)
    if "error" in real:
        return
    for key, value in real["settings"].items():
        assert ours.reading.settings.get(key, False) == value, key
    initial = {part for one in real["initial"] for part in native_names(one)} - {"embed_tokens.weight"}
    tied = {"lm_head.weight"} if real["head_is_embedding"] else set()
    assert set(ours.initial) - {"d2t"} - tied <= initial
    fused = {part for one in real["initial"] if any(kind in one for kind in FUSED) for part in native_names(one)}
    assert initial - fused <= set(ours.initial)
    assert real["head_is_embedding"] is (ours.head == "embedding")
    config = checkpoint.config
    if ours.reading.d2t == "zero" or config.draft_vocab_size == config.vocab_size:
        assert real["map"] is None or real["map"] == list(range(config.draft_vocab_size))
    else:
        assert real["map"] == target_ids(checkpoint.tensors["d2t"], config).tolist()
