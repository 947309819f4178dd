"""The sweep of all boundaries for every family, against hooks on the decoder layers and against layers without their MLP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import CACHELESS, COMMON, FAMILIES, FOREIGN, VOCAB, build, family_target, randomised
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.errors import DraftscopeError, UsageError
from draftscope.target.model import Target, load_target
from draftscope.target.parts import read_parts
from draftscope.target.sweep import Swept, sweep

IDS = torch.randint(3, VOCAB, (3, 14), generator=torch.Generator().manual_seed(1))


def layer_outputs(target: Target, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """What the decoder layers give out, and the logits, of a plain forward pass of transformers with hooks of our own."""
    found: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            found[index] = (output[0] if isinstance(output, tuple) else output).clone()
        return hook

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(target.model.get_decoder().layers)]
    with torch.no_grad():
        logits = target.model(ids).logits
    for handle in handles:
        handle.remove()
    return [found[i] for i in range(len(found))], logits


def without_mlp(target: Target, ids: Tensor, layer: int) -> Tensor:
    """The output of a layer whose MLP gives zeros: the stream between attention and MLP, whatever norms lie around it."""
    def nothing(module: Any, args: Any, output: Any) -> Any:
        return tuple(torch.zeros_like(o) for o in output) if isinstance(output, tuple) else torch.zeros_like(output)

    block = target.model.get_decoder().layers[layer]
    (name,) = [n for n, _ in block.named_children() if n in ("mlp", "block_sparse_moe")]
    handle = getattr(block, name).register_forward_hook(nothing)
    outputs, _ = layer_outputs(target, ids)
    handle.remove()
    return outputs[layer]


def embedded(target: Target, ids: Tensor) -> Tensor:
    """What the first layer receives."""
    seen: list[Tensor] = []
    handle = target.model.get_decoder().layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).clone()), with_kwargs=True)
    with torch.no_grad():
        target.model(ids)
    handle.remove()
    return seen[0]


def close(mine: Tensor, theirs: Tensor, tolerance: float = 3e-4) -> None:
    torch.testing.assert_close(mine, theirs.detach(), rtol=tolerance, atol=tolerance)


def swept_alone(target: Target, ids: Tensor) -> Swept:
    return next(sweep(target, [("alone", ids)], partial=True))


@pytest.mark.parametrize("name", [*FAMILIES, *CACHELESS])
def test_sweep_against_hooks_on_the_layers(name: str, tmp_path: Path) -> None:
    target = family_target(name, tmp_path)
    n = target.layers
    outputs, logits = layer_outputs(target, IDS)
    items = [("whole", IDS[0]), ("cut", IDS[1, :11]), ("third", IDS[2]), ("one", IDS[2, :1])]
    found = list(sweep(target, iter(items), partial=True))
    first = embedded(target, IDS)
    for row, swept in enumerate(found[:3]):
        end = len(swept.token_ids)
        assert (swept.partial is not None) == (name != "minimax")
        close(swept.stream[0], first[row, :end])
        for b in range(1, n + 1):
            close(swept.stream[b], outputs[b - 1][row, :end])
        # The sum of all branches leads from the embedding to the last state, each from one boundary to the next.
        close(swept.stream[0] + sum(swept.branch(b) for b in range(1, n + 1)), swept.stream[n])
        # Rows are the same whatever they share a batch with.
        alone = swept_alone(target, swept.token_ids)
        close(alone.stream, swept.stream)
        if swept.partial is not None:
            assert alone.partial is not None
            close(alone.partial, swept.partial)
    for b in range(1, n + 1):
        if found[0].partial is None:
            continue
        between = without_mlp(target, IDS, b - 1)
        close(found[0].partial[b - 1], between[0])
        assert not torch.allclose(between[0], outputs[b - 1][0], atol=1e-2), "the MLP adds something"
    parts = read_parts(tmp_path)
    close(parts.embed(IDS), first)
    close(parts.final_norm(found[0].stream[n]), found[0].post)
    close(parts.logits(found[0].post), logits[0], 1e-3)
    assert (parts.layers, parts.width, parts.vocab) == (4, 32, VOCAB)


def test_a_softcap_is_applied() -> None:
    capped = Target(build("gemma3_text", final_logit_softcapping=2.0), Path())
    _, logits = layer_outputs(capped, IDS)
    assert float(logits.abs().max()) <= 2.0
    close(capped.logits(capped.forward(IDS, []).post), logits, 1e-3)
    gemma2 = Target(build("gemma2"), Path()).parts
    assert (gemma2.softcap, gemma2.norm_offset, gemma2.embed_scale) == (30.0, 1.0, math.sqrt(32))


def test_layers_that_norm_their_own_stream_have_no_partials(tmp_path: Path) -> None:
    """MiniMax adds to a normed copy of the stream: what enters the MLP's side is not the stream without the MLP."""
    target = family_target("minimax", tmp_path)
    with pytest.raises(UsageError, match="no stream between attention and MLP"):
        target.forward(IDS, [Boundary(2, kind="partial")])
    target.check_taps([Boundary(2, kind="branch")])


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_scale_in_bfloat16_is_the_models_own(name: str, tmp_path: Path) -> None:
    """Boundary 0 as the model applies it, its factor rounded to bfloat16; the parts' factor is exact."""
    target = family_target(name, tmp_path, torch.bfloat16, hidden_size=48)
    found = target.forward(IDS, [Boundary(0)]).taps[:, :, 0]
    assert torch.equal(found, embedded(target, IDS))
    rounded = target.parts.embedding[IDS] * torch.tensor(math.sqrt(48), dtype=torch.bfloat16)
    torch.testing.assert_close(found, rounded, rtol=1e-2, atol=0)
    torch.testing.assert_close(read_parts(tmp_path).embed(IDS), found.float(), rtol=1.5e-2, atol=0)
    assert read_parts(tmp_path).embed_scale == pytest.approx(math.sqrt(48))


def test_a_language_model_inside_one_that_sees(tmp_path: Path) -> None:
    """Gemma 3 with its vision tower: the text model's boundaries, its sizes under `text_config`."""
    text = COMMON | FAMILIES["gemma3_text"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5)
    randomised(transformers.Gemma3ForConditionalGeneration(config).eval()).save_pretrained(tmp_path)
    target = load_target(tmp_path)
    ids = IDS.clamp(min=7)
    outputs, logits = layer_outputs(target, ids)
    swept = swept_alone(target, ids[0])
    for b in range(1, target.layers + 1):
        close(swept.stream[b], outputs[b - 1][0])
    parts = read_parts(tmp_path)
    close(parts.logits(parts.final_norm(swept.stream[-1])), logits[0], 1e-3)
    close(parts.embed(ids[0]), swept.stream[0])


@pytest.mark.parametrize("name", FOREIGN)
def test_families_that_are_not_built_like_llama_are_refused(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    with pytest.raises(DraftscopeError, match=r"lacks .*rms_norm_eps|where Llama-like targets have it"):
        load_target(tmp_path)


@pytest.mark.parametrize("name", CACHELESS)
def test_families_that_keep_more_than_keys_and_values_do_not_generate(name: str, tmp_path: Path) -> None:
    target = family_target(name, tmp_path)
    with pytest.raises(DraftscopeError, match=rf"model_type '{name}' can't generate here: its .*Generate in the engine"):
        target.new_cache(1, 8)


def test_windows_of_a_family_that_is_not_known(tmp_path: Path) -> None:
    from draftscope.target import families

    target = family_target("qwen2", tmp_path)
    qwen2 = families.FAMILIES.pop("qwen2")
    try:
        with pytest.raises(DraftscopeError, match="how its windows are masked is not known"):
            target.new_cache(1, 8)
    finally:
        families.FAMILIES["qwen2"] = qwen2


@pytest.mark.embedded
def test_the_embedded_target() -> None:
    """All of its boundaries against hooks on its layers, at the depths where states are largest."""
    from draftscope.target.embedded import ensure_target

    target = load_target(ensure_target(report=lambda text: None))
    ids = torch.randint(3, target.parts.vocab, (2, 24), generator=torch.Generator().manual_seed(2))
    outputs, logits = layer_outputs(target, ids)
    first, second = sweep(target, [("whole", ids[0]), ("cut", ids[1, :19])], partial=True)
    for b in range(1, target.layers + 1):
        scale = float(outputs[b - 1].abs().max())
        close(first.stream[b] / scale, outputs[b - 1][0] / scale)
        close(second.stream[b] / scale, outputs[b - 1][1, :19] / scale)
    close(first.stream[0], embedded(target, ids)[0])
    assert first.partial is not None
    for b in (1, 15, target.layers):
        close(first.partial[b - 1], without_mlp(target, ids, b - 1)[0], 2e-3)
    parts = read_parts(target.folder)
    close(parts.logits(parts.final_norm(first.stream[-1])), logits[0], 2e-3)


@pytest.mark.parametrize(("name", "adds"), [
    ("llama", True), ("qwen3", True), ("mistral", True), ("gemma", True), ("granite", False), ("gemma2", False), ("olmo2", False),
    ("qwen3_moe", False),
])
def test_ranks_parts_are_taken_where_a_layer_just_adds_them(name: str, adds: bool, tmp_path: Path) -> None:
    """Not behind a norm or a factor of the MLP's output, and not of experts."""
    target = family_target(name, tmp_path)
    assert target.adds_shares(2) is adds
