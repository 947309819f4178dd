"""Has an engine run a target over the tokens of a capture and keep every boundary (`vllm_sweep.py`, in the engine's Python)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.types import Sample, Trace

MODULE = "draftscope_sweep"


def tokens_of(items: Iterable[Sample | Trace], most: int) -> list[list[int]]:
    """Token ids of sequences from their first on, up to so many in all; one that begins another of them is left out."""
    found: list[list[int]] = []
    left = most
    for item in items:
        if isinstance(item, Trace):
            kept = item.accepted.nonzero().squeeze(-1)
            if item.positions is not None and len(kept) and int(item.positions[kept[0]]) != 0:
                continue
            ids = item.token_ids[kept].tolist()
        else:
            ids = item.token_ids.tolist()
        if left <= 0:
            break
        found.append(ids[:left])
        left -= len(ids)
    unique: list[list[int]] = []
    for ids in sorted(found, reverse=True):
        if ids and not (unique and unique[-1][: len(ids)] == ids):
            unique.append(ids)
    return unique


def sweep_by_vllm(python: str, model: str, sequences: Sequence[Sequence[int]], out: Path, engine: str = "{}") -> int:
    """Write the sweep; returns the number of files.

    Args:
        python: the interpreter of an environment with vLLM.
        engine: further arguments of vLLM's `LLM`, as a JSON object.

    Raises:
        UsageError: no such interpreter. DraftscopeError: vLLM ended with an error; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="draftscope-sweep-") as folder:
        script, tokens = Path(folder) / f"{MODULE}.py", Path(folder) / "tokens.json"
        script.write_text(resources.files("draftscope.engines").joinpath("vllm_sweep.py").read_text(encoding="utf-8"))
        tokens.write_text(json.dumps(sequences))
        out.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTSCOPE_CAPTURE")}
        try:
            done = subprocess.run([python, str(script), model, str(tokens), str(out), "--engine", engine], env=environment,
                                  stdout=2, check=False)
        except OSError as error:
            raise UsageError(f"can't be started ({error.strerror})", where=python, remedy="--python names vLLM's") from None
        finally:
            shutil.rmtree(out / ".sweep", ignore_errors=True)
    files = len(list(out.glob("hs_*.safetensors")))
    if done.returncode or files != len(sequences):
        raise DraftscopeError(f"ended with code {done.returncode} and {files} of {len(sequences)} sequences", where=python,
                              remedy="What vLLM said of it stands above")
    return files
