"""Copied as `sitecustomize.py` into a folder on PYTHONPATH: the part that runs inside comes into SGLang's processes with it.

Python imports that name by itself when it starts, in the scheduler processes too, which SGLang spawns. It needs the standard
library alone, and leaves every process as it is until SGLang's speculative decoding is imported there.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

MODULE = "draftscope_capture"
TRIGGER = "sglang.srt.speculative"


class Trigger(importlib.abc.MetaPathFinder):
    """Finds nothing: brings the capture in when the package that it is for is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == TRIGGER and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                importlib.import_module(MODULE)
            except Exception as error:
                print(f"draftscope captures nothing: {type(error).__name__}: {error}", file=sys.stderr)


def hidden() -> None:
    """Run the `sitecustomize` that this one stands in front of, as Debian's Python and some companies' images have one."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        if os.path.abspath(folder) != here:
            spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [folder])
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
                return


if __name__ == "sitecustomize":
    if os.environ.get("DRAFTSCOPE_CAPTURE", "").strip():
        sys.meta_path.insert(0, Trigger())
    hidden()
