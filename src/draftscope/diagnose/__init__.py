"""From a user's files to the cause: measurements, ladder, repair, verdict. `draftscope.diagnose(...)` does it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The room under its name is also the function: `draftscope.diagnose(train=..., serve=..., draft=..., target=...)`."""

    def __call__(self, **given: Any) -> Any:
        """A `findings.Diagnosis` of these inputs; the fields of `diagnose.case.Inputs`, paths as text, URL or Path."""
        from pathlib import Path

        from draftscope.diagnose.case import Inputs
        from draftscope.diagnose.run import diagnose
        from draftscope.states.places import place

        kinds: dict[str, Any] = dict.fromkeys(("train", "train_heldout", "serve", "draft", "target", "sweep"), place)
        kinds |= {"prompts": Path, "absorb": Path, "conversations": Path}
        inputs: dict[str, Any] = {k: kinds[k](v) if k in kinds and v is not None else v for k, v in given.items()}
        return diagnose(Inputs(**inputs))


sys.modules[__name__].__class__ = _Room
