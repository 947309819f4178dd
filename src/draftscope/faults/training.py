"""A draft trained anew for its log, with what befalls a real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.runstate import LOG, STATE
from draftscope.eagle3.train import Settings, train
from draftscope.states import plain
from draftscope.states.tensorfile import save_tensors

if TYPE_CHECKING:
    from draftscope.faults.plant import Plant
    from draftscope.faults.rig import Rig

CONVERSATIONS = 16
STOPPED = 60
"""The step after which a run is stopped that goes on without its optimizer's state."""


def train_again(rig: Rig, plant: Plant, folder: Path) -> Path:
    """Train a draft of the pair's shape on the pair's conversations and return the run's log; its draft is beside it.

    `next state seen`: the trainer hands it the state of the token that it is to predict, whatever the files hold.
    """
    checkpoint = load_checkpoint(rig.checkpoint, target_layers=rig.target.layers)
    seen = replace(plant, dump="")
    if plant.training == "next state seen":
        seen = replace(seen, train=replace(plant.train, shift=1))
    replace(rig, conversations=rig.conversations[:CONVERSATIONS]).write_training(seen, folder / "data")
    examples = load_examples(plain.open(folder / "data"), rig.target.parts)
    settings = {
        "no learning": Settings(epochs=6, batch_tokens=512, learning_rate=1e-7, warmup=4),
        "next state seen": Settings(epochs=20, batch_tokens=512, learning_rate=3e-3, warmup=8, head_rate=1.0),
        "optimizer state lost": Settings(epochs=16, batch_tokens=512, learning_rate=1e-2, warmup=8, head_rate=1.0,
                                         schedule="constant"),
    }[plant.training]
    stop = STOPPED if plant.training == "optimizer state lost" else None

    def interrupt(event: Any) -> None:
        if event.get("step") == stop:
            raise KeyboardInterrupt

    for go_on in (False, True) if stop is not None else (False,):
        train(examples, rig.target.parts, checkpoint.config, checkpoint.tensors.get("d2t"), folder / "run", settings=settings,
              on_event=None if go_on else interrupt)
        if stop is not None and not go_on:
            _forget(folder / "run" / STATE)
    return folder / "run" / LOG


def _forget(state: Path) -> None:
    """The optimizer's moments of a saved run put back to where they began, as a resume without them does."""
    with safe_open(state, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = dict(file.metadata() or {})
    for name, tensor in tensors.items():
        if name.startswith(("exp_avg", "step.")):
            tensors[name] = torch.zeros_like(tensor)
    save_tensors(state, tensors, metadata)
