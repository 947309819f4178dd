"""Rows of states against tokens, file by file, from the headers alone: for sources whose files do not fit themselves."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from draftscope.errors import DraftscopeError
from draftscope.faults.facts_rows import Counted
from draftscope.states.folder import list_files
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile

MOST = 256
"""Files whose headers are read, evenly spread."""


def count_rows(path: Place, kind: Literal["samples", "traces"]) -> Counted | None:
    """Files of plain training data, or of a plain capture, whose rows do not fit their tokens; None where all do."""
    name, axes = ("hidden_states", 3) if kind == "samples" else ("fc_input", 2)
    unlike, turned, of = [], 0, 0
    files, _ = list_files(path, ".safetensors")
    for at in range(min(len(files), MOST)):
        file = files[at * len(files) // min(len(files), MOST)]
        with suppress(DraftscopeError):
            opened = TensorFile(file)
            if not (opened.has(name) and opened.has("token_ids")) or len(opened.shape(name)) != axes:
                continue
            of += 1
            shape, tokens = opened.shape(name), opened.shape("token_ids")[0]
            if shape[0] != tokens:
                unlike.append((file.name, shape[0], tokens))
                turned += kind == "samples" and shape[1] == tokens
    return Counted(tuple(unlike), of, turned) if unlike else None
