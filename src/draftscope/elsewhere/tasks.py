"""The work itself, there: what a pass measures, as plain values and bytes; what it means is judged on this side."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.inspecting.measure import Pass, measure
from draftscope.inspecting.norms import first_norms
from draftscope.scan.scan import scan
from draftscope.states.folder import FileSource
from draftscope.states.opening import open_source, recognised
from draftscope.states.types import Sample, Trace

ROWS = 2048
"""Rows that travel back where a target says what they are; 512 of one sequence."""
LENGTH = 512
SKIPS = 5


def inspect_one(path: str, job: dict[str, Any], advance: Callable[[], None]) -> tuple[dict[str, Any], bytes]:
    """A path as `inspect` takes it: figures of a pass, or the report of what is no states."""
    place = Path(path).expanduser()
    if not place.exists():
        raise DraftscopeError("does not exist", where=path, remedy="Check the path")
    if job["format"] is None and recognised(place) is None:
        from draftscope.inspecting.otherwise import no_states

        other = no_states(place)
        if other is not None:
            return {"path": path, "report": asdict(other[0]), "findings": [one.model_dump() for one in other[1]]}, b""
    source = open_source(place, job["format"], skip_bad=job["skip_bad"])
    found = measure(source, samples=job["samples"], width=job["width"], on_item=advance)
    norms = first_norms(found, job["width"]) if job["norms"] else None
    rows = _rows(found) if job["width"] is not None else b""
    return {"path": path, "measured": _plain(found), "norms": None if norms is None else asdict(norms)}, rows


def scan_one(job: dict[str, Any], advance: Callable[[], None]) -> tuple[dict[str, Any], bytes]:
    """The fingerprint of a source, as its file."""
    source = open_source(Path(job["paths"][0]).expanduser(), job["format"], skip_bad=job["skip_bad"])
    shard = job["shard"] and (int(job["shard"][0]), int(job["shard"][1]))
    result = scan(source, slots=job["slots"], shard=shard, every=job["every"], on_item=lambda rows, size: advance(),
                  skip_odd=job["skip_bad"])
    handle, name = tempfile.mkstemp()
    os.close(handle)
    result.save(Path(name))
    said = {"format": source.format, "chosen": source.chosen, "skipped": [asdict(one) for one in source.skipped[:SKIPS]],
            "skips": len(source.skipped), "notes": source.notes if isinstance(source, FileSource) else []}
    return said, Path(name).read_bytes()


def _plain(found: Pass) -> dict[str, Any]:
    held = {name: getattr(found, name) for name in (
        "compared", "constant", "ranks_agree", "negative_ids", "largest_id", "steps", "accepted", "contradictions",
    )}
    return {**held, "report": asdict(found.report), "same": [[*pair, number] for pair, number in found.same.items()],
            "rows_by_phase": dict(found.rows_by_phase), "claimed": [[side, number] for side, number in found.claimed.items()],
            "kept": [{"name": item.name, "meta": item.meta if isinstance(item, Trace) else {}} for item in found.kept]}


def _rows(found: Pass) -> bytes:
    """Beginnings of the items kept, up to `ROWS` rows, as a safetensors file: `{item}.{name}`."""
    tensors: dict[str, Tensor] = {}
    left = ROWS
    for number, item in enumerate(found.kept):
        end = min(LENGTH, left, len(item.token_ids))
        names = ("states", "loss_mask") if isinstance(item, Sample) else ("fc_input", "accepted", "phase", "last_hidden")
        for name in ("token_ids", *names):
            value = getattr(item, name)
            if value is not None and end:
                tensors[f"{number}.{name}"] = value[:end].clone()
        left -= end
    return save(tensors)
