"""The target's forward pass against transformers' own hidden states, against its layers run one by one, and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, family_target
from support import random_target, save_target

from draftscope.boundaries import Boundary
from draftscope.errors import DraftscopeError, UsageError
from draftscope.target.model import Target, load_target
from draftscope.target.parts import read_parts


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("target")))


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(mine, theirs.detach(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_against_transformers(name: str, tmp_path: Path) -> None:
    target = family_target(name, tmp_path)
    ids = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(1))
    n = target.layers
    taps = [*(Boundary(b) for b in range(n + 1)), Boundary(n, "post"), *(Boundary(b, kind="branch") for b in range(1, n + 1)),
            *(Boundary(b, kind="partial") for b in range(1, n + 1))]
    found = target.forward(ids, taps)
    reference = target.model(ids, output_hidden_states=True)
    for b in range(n):
        close(found.taps[:, :, b], reference.hidden_states[b])
    close(found.taps[:, :, n + 1], reference.hidden_states[n])  # transformers' last entry is after the norm
    close(found.taps[:, :, n], found.last)
    close(found.post, reference.hidden_states[n])
    close(target.logits(found.post), reference.logits)
    parts = read_parts(tmp_path)
    close(parts.final_norm(found.last), found.post)
    close(parts.embed(ids), found.taps[:, :, 0])
    close(parts.logits(parts.final_norm(found.last)), reference.logits)
    for b in range(1, n + 1):
        close(found.taps[:, :, n + 1 + b], found.taps[:, :, b] - found.taps[:, :, b - 1])
        assert not torch.allclose(found.taps[:, :, 2 * n + 1 + b], found.taps[:, :, b], atol=1e-2)

    # Rows of different lengths, rejected tokens taken back, one row run alone, windows narrower than the text.
    cache = target.new_cache(2, 32)
    sought = [Boundary(2), Boundary(n), Boundary(3, kind="partial")]
    columns = [2, n, 2 * n + 1 + 3]
    first = target.forward(ids[:, :8], sought, cache=cache)
    close(first.taps, found.taps[:, :8, columns])
    cache.commit(torch.tensor([8, 3]))
    second = target.forward(torch.stack([ids[0, 8:12], ids[1, 3:7]]), sought, cache=cache)
    close(second.taps[0], found.taps[0, 8:12, columns])
    close(second.taps[1], found.taps[1, 3:7, columns])
    cache.commit(torch.tensor([1, 4]))
    third = target.forward(ids[1:, 7:], sought, cache=cache, rows=torch.tensor([1]))
    close(third.taps[0], found.taps[1, 7:, columns])
    close(third.post[0], found.post[1, 7:])


def test_layers_run_one_by_one(llama: Target) -> None:
    ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(2))
    body = llama.model.model
    stream = body.embed_tokens(ids)
    rotary = body.rotary_emb(stream, torch.arange(12)[None])
    found = llama.forward(ids, [*(Boundary(b) for b in range(9)), *(Boundary(b, kind="partial") for b in range(1, 9))])
    for b, layer in enumerate(body.layers):
        close(found.taps[:, :, b], stream)
        between = stream + layer.self_attn(layer.input_layernorm(stream), position_embeddings=rotary, attention_mask=None)[0]
        close(found.taps[:, :, 9 + b], between)
        stream = between + layer.mlp(layer.post_attention_layernorm(between))
    close(found.last, stream)
    close(found.post, body.norm(stream))


def test_padding_and_leftover_hooks(llama: Target) -> None:
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(3))
    padded = ids.clone()
    padded[1, 5:] = 0
    close(llama.forward(padded, [Boundary(5)]).taps[1, :5], llama.forward(ids, [Boundary(5)]).taps[1, :5])
    assert not any(module._forward_pre_hooks for module in llama.model.modules())
    assert llama.forward(ids, []).taps.shape == (2, 12, 0, 64)
    assert not llama.forward(ids, [Boundary(1)]).taps.requires_grad


@pytest.mark.parametrize("tap", [
    Boundary(9), Boundary(-1), Boundary(3, "post"), Boundary(0, kind="branch"), Boundary(0, kind="partial"),
    Boundary(8, "post", "branch"),
])
def test_taps_that_do_not_exist(llama: Target, tap: Boundary) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        llama.forward(torch.tensor([[5, 6]]), [tap])


def test_bfloat16(tmp_path: Path) -> None:
    target = load_target(save_target(tmp_path), torch.bfloat16)
    found = target.forward(torch.tensor([[5, 6, 7]]), [Boundary(4)])
    assert found.taps.dtype == torch.bfloat16 and target.logits(found.post).dtype == torch.float32


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "whole")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DraftscopeError, match=r"model\.safetensors"):
        load_target(folder)
    from safetensors.torch import load, save_file

    tensors = load(whole)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DraftscopeError, match=r"layers\.3\.mlp\.up_proj\.weight is missing"):
        load_target(folder)
    save_file({k: v for k, v in tensors.items() if "layers." not in k}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DraftscopeError, match="not its layers"):
        load_target(folder)
    with pytest.raises(DraftscopeError, match="no such folder"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(DraftscopeError, match="tokenizer"):
        _ = Target(random_target(), folder).tokenizer


def test_a_family_that_is_not_what_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    family_target("gemma", folder)
    from draftscope.target import families

    gemma = families.FAMILIES.pop("gemma")
    try:
        with pytest.raises(DraftscopeError, match=r"embedding of model_type 'gemma' does not work as in Llama"):
            load_target(folder)
    finally:
        families.FAMILIES["gemma"] = gemma
