"""Other stacks in environments of their own (scripts/env-vllm, env-speculators, env-sglang), reached through recipes/foreign."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import VOCAB, random_draft
from torch import Tensor

from draftscope.eagle3.checkpoint import save_native
from draftscope.eagle3.model import Draft
from draftscope.target.embedded import cache_directory

RECIPES = Path(__file__).parents[1] / "recipes" / "foreign"
D = 100


@cache
def python_of(stack: str, *needs: str) -> Path:
    """The Python of a stack's environment; skips the test where it is not there, or lacks a package."""
    python = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / stack / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs the environment of {stack}: scripts/env-{stack} makes it")
    for need in needs:
        there = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({need!r}) is None)"
        if subprocess.run([python, "-c", there], capture_output=True, check=False).returncode:
            pytest.skip(f"the environment of {stack} lacks {need}: scripts/env-{stack} brings it up to date")
    return python


def run_recipe(stack: str, recipe: str, *arguments: str | Path, needs: tuple[str, ...] = (), threads: int = 1,
               filled: bool = False) -> str:
    """Run a recipe in a stack's environment; what it printed. Fails with the end of its errors.

    Args:
        filled: memory comes filled with one byte (glibc), at a price: what nothing initialises is the same in every run, and
            neither zero nor NaN.
    """
    memory = {"MALLOC_PERTURB_": "90"} if filled else {}
    run = subprocess.run([python_of(stack, *needs), RECIPES / recipe, *arguments], capture_output=True, text=True, check=False,
                         env=os.environ | {"OMP_NUM_THREADS": str(threads)} | memory)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def trained(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **switches: Any) -> Draft:
    """A random draft on disk, in the native form, no tensor of which is at its initial value."""
    draft = random_draft(seed, **{"draft_vocab": D} | switches)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    d2t = None
    if draft.config.draft_vocab_size < VOCAB:
        d2t = torch.arange(D) * 2
        draft.target_ids = torch.arange(D) + d2t
    save_native(folder, draft, d2t, dtype=dtype)
    held = load_file(folder / "model.safetensors")
    assert draft.embedding is not None
    save_file(held | {"embed_tokens.weight": draft.embedding.to(dtype)}, folder / "model.safetensors")
    return draft


def assert_close(mine: Tensor, theirs: Tensor, what: object, limit: float = 1e-4) -> None:
    """Relative to the whole, and shape for shape."""
    assert mine.shape == theirs.shape, what
    error = float((mine - theirs).norm() / theirs.norm())
    assert error < limit, (what, error)
