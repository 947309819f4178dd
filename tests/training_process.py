"""A training run in a process of its own: training_process.py FOLDER CHOICES, which may be told to kill, stop or spoil itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from learnable import QUICK, learnable, shape

from draftscope.eagle3.descent import Descent
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.parallel import ALONE, Ranks, joined
from draftscope.eagle3.train import Watch, train
from draftscope.errors import DraftscopeError

SETTINGS = replace(QUICK, epochs=2, noise=0.05)


def trained(folder: Path, choices: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """The run itself; its state is saved after every step."""
    parts, samples = learnable(24)
    examples = load_examples(samples, parts)
    if "spoil" in choices:
        examples[choices["spoil"]].states[9, 1, 5] = torch.nan
    train(examples, parts, shape(24, 24), None, folder, settings=SETTINGS, watch=Watch(save_minutes=-1), ranks=ranks)


def main(folder: Path, choices: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    taken, step = 0, Descent.step

    def counted(self: Descent, rate: float) -> float:
        """In the midst of a step: gradients are there, nothing is changed yet."""
        nonlocal taken
        taken += 1
        if taken == choices.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if taken == choices.get("stop"):
            signal.pause()
        return step(self, rate)

    Descent.step = counted  # type: ignore[method-assign]
    with joined("cpu", choices.get("wait", 120)) as ranks:
        trained(folder, choices, ranks)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except DraftscopeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
