"""Which of our modules the other machine needs, and their sources as one block of bytes."""

from __future__ import annotations

import ast
import json
import zlib
from collections.abc import Iterator
from importlib import resources
from typing import Any

ENTRY = "draftscope.elsewhere.far"
OLDEST = [3, 11]
TOO_OLD = 71
"""Exit code of a Python there that is older than `OLDEST`."""


def packed(mark: str, job: dict[str, Any]) -> bytes:
    """What goes to stdin of the other side: the first program, then the sources with the job; lengths before both."""
    first = _source("draftscope.elsewhere.bootstrap")[0].encode()
    rest = {"oldest": OLDEST, "too_old": TOO_OLD, "mark": mark, "job": job, "modules": sources()}
    held = zlib.compress(json.dumps(rest).encode(), 6)
    return b"%d\n%b%d\n%b" % (len(first), first, len(held), held)


def sources(entry: str = ENTRY) -> dict[str, dict[str, Any]]:
    """The module and all of ours that it can come to import: source and whether it is a package, by name."""
    found: dict[str, dict[str, Any]] = {}
    wanted = [entry]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        text, package = _source(name)
        if not text and not package:
            continue
        found[name] = {"source": text, "package": package}
        wanted += [name.rpartition(".")[0]] if "." in name else []
        wanted += imported(text)
    return found


def imported(text: str) -> Iterator[str]:
    """Names of ours that a source imports, wherever in it, those for type checkers alone left out."""
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "draftscope")
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "draftscope":
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # a module, or else nothing
        pending += ast.iter_child_nodes(node)


def _source(name: str) -> tuple[str, bool]:
    """Source of a module and whether it is a package; ("", False) where there is none of that name."""
    parts = name.split(".")[1:]
    place = resources.files("draftscope").joinpath(*parts)
    if place.joinpath("__init__.py").is_file():
        return place.joinpath("__init__.py").read_text(encoding="utf-8"), True
    file = resources.files("draftscope").joinpath(*parts[:-1], f"{parts[-1]}.py") if parts else place
    return (file.read_text(encoding="utf-8"), False) if file.is_file() else ("", False)
