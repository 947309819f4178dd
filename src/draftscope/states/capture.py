"""Plain capture: a folder of safetensors files, one served request each (the draft's `fc` input, row by row)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.folder import FileSource, list_files
from draftscope.states.places import Place
from draftscope.states.prefixes import Prefixes
from draftscope.states.tensorfile import TensorFile, parse_json, save_tensors
from draftscope.states.torchsource import described as described_beside
from draftscope.states.types import Trace

NAME = "capture"
SUFFIX = ".safetensors"
KIND = "traces"
DEEP = False
PART = SUFFIX + ".part"
"""What a file is called while it is written; found later, it is what its writer left when it was killed."""

NUMBERS = frozenset({"layer_ids", "num_spec_tokens", "topk", "num_steps", "num_draft_tokens", "temperature"})
"""Metadata that is JSON rather than text."""


def fits(file: Place) -> str | None:
    """Why a file is of this format, by the header alone; None if it is not."""
    try:
        opened = TensorFile(file)
        if not opened.has("fc_input") or len(shape := opened.shape("fc_input")) != 2:
            return None
    except DraftscopeError:
        return None
    if not opened.has("token_ids") or len(opened.shape("token_ids")) != 1:
        return None
    return f"{file.name}: `fc_input` has two axes {list(shape)} (rows, slots x width), with `token_ids` beside it"


def open(path: Place, chosen: str | None = None) -> FileSource[Trace]:
    """Traces of a folder or of one file, lazily, in natural order of the names.

    What `capture.json` says is filled into every trace's `meta` where the file itself says nothing.

    Raises:
        DraftscopeError: nothing there.
    """
    files, others = list_files(path, SUFFIX)
    others = [replace(each, why="cut short: its writer was stopped at it", cause="broken") if each.path.endswith(PART) else each
              for each in others]
    notes: list[str] = []
    described = described_beside(path, "capture.json", notes)
    prefixes = Prefixes(files, lambda file: read_trace(file, []))

    def read(file: Place, said: list[str]) -> Trace:
        trace = prefixes.complete(read_trace(file, said), said)
        trace.meta = {**described, **trace.meta}
        return trace

    meta = dict(described)
    for file in files[:8]:
        try:
            meta |= parse_metadata(TensorFile(file).metadata, [])
            break
        except DraftscopeError:
            continue
    return FileSource(kind="traces", path=path, format=NAME, chosen=chosen, files=files, others=others, meta=meta, read=read,
                      notes=notes)


def parse_metadata(metadata: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """Texts as they are; numbers and lists from JSON, passed over with a note where they are none."""
    parsed: dict[str, Any] = {}
    for key, text in metadata.items():
        if key not in NUMBERS and not text.startswith(("{", "[")):
            parsed[key] = text
            continue
        try:
            parsed[key] = parse_json(text)
        except ValueError:
            notes.append(f"metadata `{key}` is not JSON: passed over")
    return parsed


def read_trace(file: Place, notes: list[str]) -> Trace:
    """One request; its tensors stay mapped. What is absent and has no default stays None.

    Raises:
        DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and tensor.
    """
    opened = TensorFile(file)
    opened.require("fc_input", "token_ids")
    fc_input = opened.floats("fc_input", 2, "[rows, slots x width]")
    token_ids = opened.integers("token_ids", 1, "[rows]").to(torch.int64)
    rows = len(fc_input)

    def fitting(name: str, tensor: Tensor) -> Tensor:
        opened.fit(name, len(tensor), rows, "fc_input")
        return tensor

    def row_numbers(name: str, dtype: torch.dtype, *, booleans: bool = False) -> Tensor | None:
        if not opened.has(name):
            return None
        tensor = fitting(name, opened.integers(name, 1, "[rows]", booleans=booleans))
        return tensor != 0 if dtype == torch.bool else tensor.to(dtype)

    def row_floats(name: str) -> Tensor | None:
        return fitting(name, opened.floats(name, 2, "[rows, width]")) if opened.has(name) else None

    fitting("token_ids", token_ids)
    accepted = row_numbers("accepted", torch.bool, booleans=True)
    trace = Trace(
        name=file.name, fc_input=fc_input, token_ids=token_ids,
        accepted=torch.ones(rows, dtype=torch.bool) if accepted is None else accepted,
        phase=row_numbers("phase", torch.uint8), step=row_numbers("step", torch.int64),
        positions=row_numbers("positions", torch.int64), verified_ids=row_numbers("verified_ids", torch.int64),
        last_hidden=row_floats("last_hidden"), fc_output=row_floats("fc_output"),
        draft_input_ids=row_numbers("draft_input_ids", torch.int64),
        prefix_token_ids=None if not opened.has("prefix_token_ids") else
        opened.integers("prefix_token_ids", 1, "[tokens]").to(torch.int64),
        meta=parse_metadata(opened.metadata, notes),
    )
    _read_steps(opened, trace)
    return trace


def _read_steps(opened: TensorFile, trace: Trace) -> None:
    """Tensors with one row a step: as many rows each, as many columns."""
    counts: dict[str, int] = {}
    if _has_steps(opened, "accepted_counts"):
        trace.accepted_counts = opened.integers("accepted_counts", 1, "[steps]").to(torch.int64)
        counts["accepted_counts"] = len(trace.accepted_counts)
    widths: dict[str, int] = {}
    for name in ("draft_token_ids", "draft_parents"):
        if _has_steps(opened, name):
            tensor = opened.integers(name, 2, "[steps, K]").to(torch.int64)
            counts[name], widths[name] = tensor.shape
            setattr(trace, name, tensor)
    if trace.draft_parents is not None:
        columns = torch.arange(trace.draft_parents.shape[1])
        if bool(((trace.draft_parents < -1) | (trace.draft_parents >= columns)).any()):
            raise opened.fail("names a parent that does not come before its token: a column below its own, or -1, the first row",
                              "draft_parents", "layout")
    if _has_steps(opened, "draft_states"):
        trace.draft_states = opened.floats("draft_states", 3, "[steps, K, width]")
        counts["draft_states"], widths["draft_states"], _ = trace.draft_states.shape
    for said, what in ((counts, "steps"), (widths, "drafted tokens")):
        for name, number in said.items():
            first = next(iter(said))
            if number != said[first]:
                raise opened.fail(f"has {number} {what} where `{first}` has {said[first]}", name, "rows")


def _has_steps(opened: TensorFile, name: str) -> bool:
    """A request may end before its first verify step: zero steps are as good as absent."""
    return opened.has(name) and 0 not in opened.shape(name)[:1]


def write_trace(path: Path, trace: Trace) -> None:
    """Write one request, whole or not at all; `meta` goes to the file's metadata.

    Raises:
        DraftscopeError: rows that do not fit each other, or a disk that refuses.
    """
    rows = len(trace.fc_input)
    by_row = {
        "fc_input": trace.fc_input, "token_ids": trace.token_ids.to(torch.int64), "accepted": trace.accepted.bool(),
        "positions": trace.positions, "phase": None if trace.phase is None else trace.phase.to(torch.uint8),
        "step": trace.step, "verified_ids": trace.verified_ids, "last_hidden": trace.last_hidden, "fc_output": trace.fc_output,
        "draft_input_ids": trace.draft_input_ids,
    }
    for name, tensor in by_row.items():
        if tensor is not None and len(tensor) != rows:
            raise DraftscopeError(f"`{name}` has {len(tensor)} rows for {rows} of `fc_input`", where=str(path))
    by_step = {
        "draft_token_ids": trace.draft_token_ids, "draft_parents": trace.draft_parents,
        "accepted_counts": trace.accepted_counts, "draft_states": trace.draft_states,
    }
    save_tensors(path, {**by_row, **by_step, "prefix_token_ids": trace.prefix_token_ids}, trace.meta)
