"""Our draft model against the peers' own, step by step, on checkpoints that `convert` wrote for them.

Each peer runs in the environment of scripts/env-speculators, once for all its switches (recipes/foreign/draft_steps.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peers import assert_close, run_recipe, trained
from safetensors.torch import load_file, save_file
from support import VOCAB, save_target
from torch import Tensor

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.loss import ttt_outputs
from draftscope.eagle3.model import Draft
from draftscope.pipeline.convert_drafts import convert_draft

ROWS, STEPS = 24, 3
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 64}

# Not shared. speculators: a target of another width, biases of fc, both norms before fc, the head without norm, no fc, latent
# attention (`convert` refuses these by name), and rope of a part of the head, whose key its trainer takes out. SpecForge: norms
# before the residual or over all slots, post-norm feedback, norms per head, biases, further layers, windows, other slots than
# three, no fc, latent attention, and dynamic rope, whose base it takes for 20 rows more than the context.
SPECULATORS: dict[str, dict[str, Any]] = {
    "plain": {}, "norm_before_residual": {"norm_before_residual": True}, "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}, "qk_norm": {"qk_norm": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "layers": {"layers": 3, "norm_output": True}, "qwen layers": {"layers": 2, "qk_norm": True, "norm_before_residual": True},
    "window": {"sliding_window": 6}, "windows": {"layers": 3, "sliding_window": 6, "sliding_layers": (0, 2)},
    "slots": {"slots": 4, "boundaries": (1, 2, 4, 5)}, "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_parameters": LINEAR}, "llama3": {"rope_parameters": LLAMA3}, "dynamic": DYNAMIC,
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 64}, "head width": {"head_dim": 24},
    "whole vocabulary": {"draft_vocab": VOCAB},
    "qwen biases": {"qk_norm": True, "attention_bias": True, "attention_output_bias": True},
    "many": {"layers": 2, "norm_before_residual": True, "fc_norm": True, "norm_output": True, "attention_bias": True,
             "attention_output_bias": True, "mlp_bias": True, "slots": 5, "boundaries": (0, 1, 2, 4, 5)},
    "others": {"qk_norm": True, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "layers": 3},
}
SPECFORGE: dict[str, dict[str, Any]] = {
    "plain": {}, "fc_norm": {"fc_norm": True}, "head without norm": {"norm_before_head": False},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_parameters": LINEAR}, "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0},
             "max_position_embeddings": 64},
    "head width": {"head_dim": 24},
    "many": {"fc_norm": True, "norm_before_head": False, "target_hidden_size": 48},
    "target width": {"target_hidden_size": 48},
}

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


def run_peer(stack: str, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, tuple[Path, Draft, Tensor, Any]]:
    """Per case: the folder given to the peer, our draft, the features, and what the peer made of them."""
    target = save_target(folder / "target")
    draw = torch.Generator().manual_seed(0)
    token_ids = torch.randint(VOCAB, (ROWS + 1,), generator=draw)
    drafts: list[Draft] = []
    features: list[Tensor] = []
    for seed, (name, switches) in enumerate(cases.items()):
        drafts.append(trained(folder / name / "native", seed, **switches))
        form = "speculators" if stack == "speculators" else "native"
        convert_draft(folder / name / "native", form, folder / name / "theirs", target=target)
        config = drafts[-1].config
        features.append(torch.randn(ROWS, config.slots, config.target_hidden_size, generator=draw))
    source, out = folder / "in.safetensors", folder / "out.safetensors"
    save_file({"token_ids": token_ids} | {f"{i}.features": x for i, x in enumerate(features)}, source)
    run_recipe("speculators", "draft_steps.py", stack, source, out, *(folder / name / "theirs" for name in cases), needs=(stack,))
    theirs = load_file(out)
    return {
        name: (folder / name / "theirs", drafts[i], torch.cat([features[i].flatten(1), token_ids[1:, None]], 1),
               {key.removeprefix(f"{i}."): tensor for key, tensor in theirs.items() if key.startswith(f"{i}.")})
        for i, name in enumerate(cases)
    }


@pytest.fixture(scope="module")
def of_speculators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_peer("speculators", SPECULATORS, tmp_path_factory.mktemp("speculators"))


@pytest.fixture(scope="module")
def of_specforge(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_peer("specforge", SPECFORGE, tmp_path_factory.mktemp("specforge"))


def ours(draft: Draft, given: Tensor) -> dict[str, Tensor]:
    config = draft.config
    features = given[:, :-1].unflatten(1, (config.slots, config.target_hidden_size))[None]
    tokens = torch.nn.functional.pad(given[:, -1].long(), (1, 0))[None]
    rows = torch.arange(ROWS)[None]
    with torch.no_grad():
        outputs = list(ttt_outputs(draft, torch.nn.functional.pad(features, (0, 0, 0, 0, 0, 1)), tokens, rows, STEPS))
        found = {"input": draft.project(features)[0]}
        for k, output in enumerate(outputs):
            found |= {f"output.{k}": output[0], f"logits.{k}": draft.logits(output)[0]}
    return found


def compare(mine: dict[str, Tensor], theirs: dict[str, Tensor], steps: int) -> None:
    for name, tensor in mine.items():
        kind, _, step = name.partition(".")
        if step and int(step) >= steps:
            continue
        whole = ROWS - int(step or 0)  # rows beyond embed padding, which stacks fill differently
        assert_close(tensor[:whole], theirs[name][:whole], (kind, step))


@pytest.mark.parametrize("name", SPECULATORS)
def test_every_step_is_that_of_speculators(name: str, of_speculators: dict[str, Any]) -> None:
    folder, draft, given, theirs = of_speculators[name]
    # Its trainer leaves the window where it was at step 0, while a serving draft's moves on with it.
    steps = 1 if draft.config.sliding_window else STEPS
    compare(ours(draft, given), theirs, steps)
    compare(ours(build_draft(load_checkpoint(folder)), given), theirs, steps)


@pytest.mark.parametrize("name", SPECFORGE)
def test_every_step_is_that_of_specforge(name: str, of_specforge: dict[str, Any]) -> None:
    folder, draft, given, theirs = of_specforge[name]
    compare(ours(draft, given), theirs, STEPS)
    compare(ours(build_draft(load_checkpoint(folder)), given), theirs, STEPS)


def test_the_pair_differs_where_a_switch_is_missed(of_speculators: dict[str, Any]) -> None:
    for _, draft, given, theirs in of_speculators.values():
        for switch in ("norm_before_residual", "norm_output"):
            if not getattr(draft.config, switch):
                continue
            other = Draft(draft.config.model_copy(update={switch: False})).eval()
            other.load_state_dict(draft.state_dict())
            other.embedding, other.target_ids = draft.embedding, draft.target_ids
            with pytest.raises(AssertionError):
                compare(ours(other, given), theirs, STEPS)
