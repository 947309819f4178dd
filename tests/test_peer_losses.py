"""Our presets against the trainers' own code: each step's loss on the same weights and data (recipes/foreign/train_loss.py)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import VOCAB, WIDTH, random_draft, save_target

from draftscope.eagle3.checkpoint import save_native
from draftscope.eagle3.collate import Collate
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.loss import ttt_loss
from draftscope.eagle3.recipes import PRESETS
from draftscope.eagle3.settings import Settings
from draftscope.eagle3.start import draft_vocabulary
from draftscope.pipeline.convert_drafts import convert_draft
from draftscope.states.types import Sample
from draftscope.target.embedded import cache_directory
from draftscope.target.parts import read_parts

RECIPE = Path(__file__).parents[1] / "recipes" / "foreign" / "train_loss.py"
D = 200

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


def their_loss(stack: str, *arguments: Path) -> None:
    python = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "speculators" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the environment of speculators: scripts/env-speculators makes it")
    there = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({stack!r}) is None)"
    if subprocess.run([python, "-c", there], capture_output=True, check=False).returncode:
        pytest.skip(f"the environment of speculators lacks {stack}: scripts/env-speculators brings it up to date")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([python, RECIPE, stack, *arguments], capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("stack", ["speculators", "specforge"])
def test_every_step_s_loss_is_the_trainer_s_own(stack: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    parts = read_parts(target)
    preset = PRESETS[stack]
    draft = random_draft(7, draft_vocab=D, **preset.shaped)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    draft.embedding = parts.embedding.float()
    d2t, _, _ = draft_vocabulary((torch.arange(VOCAB) + 6) % 7, D)
    draft.target_ids = torch.arange(D) + d2t
    save_native(tmp_path / "native", draft, d2t, dtype=torch.float32, target_layers=config["num_hidden_layers"])
    held = load_file(tmp_path / "native" / "model.safetensors")
    save_file(held | {"embed_tokens.weight": draft.embedding}, tmp_path / "native" / "model.safetensors")
    form: Any = "speculators" if stack == "speculators" else "native"
    convert_draft(tmp_path / "native", form, tmp_path / "theirs", target=target)
    draw = torch.Generator().manual_seed(0)
    samples, data = [], dict[str, torch.Tensor]()
    for i, (length, prompt, closed) in enumerate(((24, 6, 0), (17, 5, 3), (20, 8, 1))):
        ids = torch.randint(0, VOCAB, (length,), generator=draw)
        states = torch.randn(length, 4, WIDTH, generator=draw)
        mask = (torch.arange(length) >= prompt) & (torch.arange(length) < length - closed)
        samples.append(Sample(f"{i}", ids, states, mask, ("",) * 4, i))
        data |= {f"{i}.token_ids": ids, f"{i}.states": states, f"{i}.loss_mask": mask}
    save_file(data, tmp_path / "data.safetensors")
    their_loss(stack, tmp_path / "theirs", target, tmp_path / "data.safetensors", tmp_path / "out.json")
    *steps, total = json.loads((tmp_path / "out.json").read_text())
    settings = Settings(**preset.chosen)
    batch = Collate.of(parts, draft.target_ids, settings)(load_examples(samples, parts))
    found = ttt_loss(draft, batch, settings.decay, kind=settings.loss, normaliser=settings.normaliser,
                     first_position=settings.first_position, window_moves=settings.window_moves)
    assert len(found.steps) == len(steps) == settings.ttt_steps
    assert found.steps == pytest.approx(steps, rel=1e-4)
    assert float(found.total.detach()) == pytest.approx(total, rel=1e-4)
