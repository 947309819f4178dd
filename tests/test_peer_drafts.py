"""Our draft model against the peers' own, step by step, on checkpoints that `convert` wrote for them.

Each peer runs in the environment of scripts/env-speculators, once for all its switches (recipes/foreign/draft_steps.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import VOCAB, random_draft, save_target
from torch import Tensor

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint, save_native
from draftscope.eagle3.loss import ttt_outputs
from draftscope.eagle3.model import Draft
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.target.embedded import cache_directory

RECIPE = Path(__file__).parents[1] / "recipes" / "foreign" / "draft_steps.py"
ROWS, STEPS, D = 24, 3, 100
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

SPECULATORS: dict[str, dict[str, Any]] = {
    "plain": {}, "norm_before_residual": {"norm_before_residual": True}, "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}, "qk_norm": {"qk_norm": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "layers": {"layers": 3, "norm_output": True}, "qwen layers": {"layers": 2, "qk_norm": True, "norm_before_residual": True},
    "window": {"sliding_window": 6}, "windows": {"layers": 3, "sliding_window": 6, "sliding_layers": (0, 2)},
    "slots": {"slots": 4, "boundaries": (1, 2, 4, 5)}, "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 64},
    "whole vocabulary": {"draft_vocab": VOCAB},
}
SPECFORGE: dict[str, dict[str, Any]] = {
    "plain": {}, "fc_norm": {"fc_norm": True}, "head without norm": {"norm_before_head": False},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "target width": {"target_hidden_size": 48},
}

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


def trained(folder: Path, seed: int, **switches: Any) -> Draft:
    """A random draft on disk, no tensor of which is at its initial value."""
    draft = random_draft(seed, **{"draft_vocab": D} | switches)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    d2t = None
    if draft.config.draft_vocab_size < VOCAB:
        d2t = torch.arange(D) * 2
        draft.target_ids = torch.arange(D) + d2t
    save_native(folder, draft, d2t, dtype=torch.float32)
    held = load_file(folder / "model.safetensors")
    assert draft.embedding is not None
    save_file(held | {"embed_tokens.weight": draft.embedding}, folder / "model.safetensors")
    return draft


def run_peer(stack: str, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, tuple[Path, Draft, Tensor, Any]]:
    """Per case: the folder given to the peer, our draft, the features, and what the peer made of them."""
    environments = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs"))
    python = environments / "speculators" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the environment of speculators: scripts/env-speculators makes it")
    there = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({stack!r}) is None)"
    if subprocess.run([python, "-c", there], capture_output=True, check=False).returncode:
        pytest.skip(f"the environment of speculators lacks {stack}: scripts/env-speculators brings it up to date")
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
    command = [python, RECIPE, stack, source, out, *(folder / name / "theirs" for name in cases)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
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
        error = (tensor[:whole] - theirs[name][:whole]).norm() / theirs[name][:whole].norm()
        assert float(error) < 1e-4, (kind, step)


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
