"""The work itself, there: what a pass measures, as plain values and bytes; what it means is judged on this side."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.inspecting.measure import Pass, measure
from draftscope.inspecting.norms import first_norms
from draftscope.scan.inputs import UNKNOWN, stamp_of
from draftscope.scan.rich import share_of
from draftscope.scan.scan import Course, Settings
from draftscope.states.folder import FileSource
from draftscope.states.opening import ABSENT, open_source, recognised
from draftscope.states.types import Sample, Source, Trace

ROWS = 2048
"""Rows that travel back where a target says what they are; 512 of one sequence."""
LENGTH = 512
SKIPS = 5


def inspect_one(path: str, job: dict[str, Any], advance: Callable[[], None]) -> tuple[dict[str, Any], bytes]:
    """A path as `inspect` takes it: figures of a pass, or the report of what is no states."""
    place = Path(path).expanduser()
    if not place.exists():
        raise DraftscopeError(ABSENT, where=path, remedy="Check the path")
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


def scan_parts(job: dict[str, Any], begun: Callable[[dict[str, Any]], None],
               advance: Callable[[], None]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The fingerprint of a source in parts, each of the files that were taken in some seconds, as its file.

    Args:
        begun: told how many files there are and what they are, before the first is read; advance: told of each file.

    Raises:
        DraftscopeError: they are others than those that the job goes on with, or as `scan`.
    """
    source = open_source(Path(job["paths"][0]).expanduser(), job["format"], skip_bad=job["skip_bad"])
    chosen = list(range(len(source)))
    part = ""
    if job["shard"]:
        first, step = map(int, job["shard"])
        chosen, part = chosen[first::step], f"{first} of {step}"
    listing = _listing(source)
    if job["listing"] is not None and not listing.startswith(job["listing"]):
        raise DraftscopeError("holds other files than when this scan was begun, or they were changed", where=job["paths"][0],
                              remedy="Remove the .partial file beside the output to begin again")
    begun({"of": len(chosen), "listing": listing})
    every = share_of(len(source)) if job["every"] is None else int(job["every"])
    settings = Settings(slots=job["slots"], skip_odd=job["skip_bad"], every=every)
    next, seen, found = int(job["start"]), 0, False
    known: dict[str, str] = {}
    while next < len(chosen):
        course = Course(source, settings, chosen, None, next, _after(float(job["seconds"])), known)
        for _ in course.run(on_progress=lambda progress: advance()):
            pass
        next, fresh = course.next, source.skipped[seen:]
        seen = len(source.skipped)
        said = {"next": next, "format": source.format, "chosen": source.chosen, "skipped": [asdict(one) for one in fresh[:SKIPS]],
                "skips": len(fresh), "notes": source.notes if isinstance(source, FileSource) else []}
        if course.total is None:
            # None of these files can be read, which is no error where others can.
            if next == len(chosen) and not found and not job["start"]:
                course.finish()
            yield {**said, "bad": [[one.path, one.why] for one in fresh]}, b""
            continue
        found = True
        made = course.finish("scan --on", part)
        made.origins = (replace(made.origins[0], skipped=len({one.path for one in fresh})),)
        handle, name = tempfile.mkstemp()
        os.close(handle)
        made.save(Path(name))
        yield said, Path(name).read_bytes()
        os.unlink(name)


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since."""
    since = time.monotonic()
    return lambda: time.monotonic() - since > seconds


def _listing(source: Source) -> str:
    """A hash of the names, sizes and times of a source's files, in order."""
    found = hashlib.blake2b(str(len(source)).encode(), digest_size=16)
    for file in source.files if isinstance(source, FileSource) else ():
        try:
            stamp = stamp_of(file)
        except OSError:
            stamp = UNKNOWN
        found.update(json.dumps([str(file), stamp.size, stamp.time, stamp.etag]).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


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
