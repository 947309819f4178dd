"""Brings the part that runs inside an engine (`inside.py`) into the processes of a command, whatever environment they run in.

A Python that finds a distribution on its path sees its entry points: a folder with a copy of the file and a `.dist-info`
beside it, put on PYTHONPATH, is a plugin of vLLM in every process that inherits the variable, and nothing is installed.
SGLang has plugins from 0.5.11 on only; for all its versions a `sitecustomize.py` in that folder does the same.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from draftscope.errors import UsageError
from draftscope.states.leftover import save_bytes, sweep_up

MODULE = "draftscope_capture"
VERSION = metadata.version("draftscope")
COPY = "a copy of its engines/inside.py"
DIRECTORY, OPTIONS = "DRAFTSCOPE_CAPTURE", "DRAFTSCOPE_CAPTURE_OPTIONS"


PARTS = (("scan", "sums.py"), ("engines", "served.py"))
"""What follows `engines/inside.py` in its copies: the statistics, each file after those that it needs."""


def source() -> str:
    """The part that runs inside as one file, headed by its version."""
    parts = " and ".join("/".join(part) for part in PARTS)
    said = f"# draftscope {VERSION}: {COPY}, with {parts} (Apache-2.0)"
    texts = [resources.files(f"draftscope.{room}").joinpath(name).read_text(encoding="utf-8") for room, name in (
        ("engines", "inside.py"), *PARTS)]
    return "\n".join([said, texts[0], *map(_following, texts[1:])])


def _following(text: str) -> str:
    """A module as a part of a longer one: without what may stand at a beginning alone, and imports of what stands before it."""
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("__future__", "draftscope"):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return "".join(lines)


def emit(path: Path) -> None:
    """Write the file where the user wants it; its name must be one that Python can import.

    Raises:
        UsageError: a name that is no module's. DraftscopeError: the disk refuses.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UsageError("is no name that Python can import", where=str(path), remedy=f"For example {MODULE}.py")
    path = path.resolve()
    sweep_up(path.parent, path.name)
    save_bytes(path, source().encode())


def is_own(start: bytes) -> bool:
    """Whether a file that starts so is what `emit` wrote, in whatever version."""
    return re.match(rb"# draftscope \S+: " + re.escape(COPY.encode()), start) is not None


def lay_out(folder: Path, engine: str = "vllm") -> None:
    """The copy and what brings it into the engine (`vllm` or `sglang`), in a folder for PYTHONPATH."""
    emit(folder / f"{MODULE}.py")
    if engine == "sglang":
        text = resources.files("draftscope.engines").joinpath("site_sglang.py").read_text(encoding="utf-8")
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
        return
    beside = folder / f"{MODULE}-{VERSION}.dist-info"
    beside.mkdir()
    (beside / "METADATA").write_text(f"Metadata-Version: 2.1\nName: draftscope-capture\nVersion: {VERSION}\n")
    (beside / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{MODULE} = {MODULE}:register\n")


def environment(folder: Path, out: Path, options: str) -> dict[str, str]:
    """The variables of this process, with the plugin and the capture added."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), found.get("PYTHONPATH", "")]))
    found |= {DIRECTORY: str(out.absolute()), OPTIONS: options}
    if "VLLM_PLUGINS" in found:  # a list of those allowed
        found["VLLM_PLUGINS"] = ",".join(filter(None, [found["VLLM_PLUGINS"], MODULE]))
    return found


def run(command: Sequence[str], out: Path, options: str, engine: str = "vllm") -> int:
    """Run a command with the plugin in all its processes; returns its exit code, 128 + n where signal n ended it.

    Ctrl-C reaches the command as it would without us; a request to end (SIGTERM) is passed on.

    Raises:
        UsageError: no such command.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftscope-capture-")))
        lay_out(folder, engine)
        try:
            child = subprocess.Popen(command, env=environment(folder, out, options))
        except OSError as error:
            raise UsageError(f"can't be started ({error.strerror})", where=command[0]) from None
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        passed_on = signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
        stack.callback(signal.signal, signal.SIGTERM, passed_on)
        code = child.wait()
    return code if code >= 0 else 128 - code


def outcome(out: Path) -> dict[str, Any] | None:
    """What `capture.json` says in the end; None where nothing wrote one."""
    try:
        found = json.loads((out / "capture.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("captured"), dict) else None
