"""Files whose content is known, for the tests of inspect: made from a transformers model's own hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import LAYERS, WIDTH, random_target
from torch import Tensor

from draftscope.cli.main import run
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample

ROWS = 90


class Places:
    """Token ids and every boundary of a random target over them, from transformers' own hidden states."""

    def __init__(self, folder: Path) -> None:
        model = random_target(3, tied=False)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():  # a final norm that does something
            model.model.norm.weight.copy_(torch.rand(WIDTH, generator=draw) + 0.5)
        model.save_pretrained(folder)
        self.folder = folder
        self.ids = torch.randint(3, 40, (4, ROWS), generator=draw)
        last: list[Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
        with torch.no_grad():
            states = model(self.ids, output_hidden_states=True).hidden_states
        hook.remove()
        self.stream = [*states[:LAYERS], last[0] if isinstance(last[0], Tensor) else last[0][0]]
        self.post = states[LAYERS]

    def entries(self, *places: int) -> list[Tensor]:
        return [self.stream[b] for b in places]


@pytest.fixture(scope="module", name="places")
def places_fixture(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("target") / "whole")


@pytest.fixture(scope="module", name="parts")
def parts_fixture(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target's parts alone."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "config.json").write_text((places.folder / "config.json").read_text())
    held = load_file(places.folder / "model.safetensors")
    kept = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    save_file({name: held[name] for name in kept}, folder / "model.safetensors")
    return folder


def write(folder: Path, places: Places, entries: list[Tensor], labels: tuple[str, ...] = (), dtype: torch.dtype = torch.bfloat16,
          mask: Tensor | None = None) -> Path:
    for i in range(len(places.ids)):
        states = torch.stack([entry[i] for entry in entries], 1).to(dtype)
        answers = torch.arange(ROWS) >= 20 if mask is None else mask
        write_sample(folder / f"hs_{i}.safetensors", Sample("", places.ids[i], states, answers, labels))
    return folder


Inspect = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(name="inspect")
def inspect_fixture(tmp_path: Path) -> Inspect:
    """Run `inspect`: exit code and JSON."""
    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "inspect-out.json"
        out.unlink(missing_ok=True)
        code = run(["inspect", *map(str, arguments), "--json", str(out)])
        return code, json.loads(out.read_text()) if out.exists() else {}
    return call
