"""Work in progress below a folder: what long commands note of themselves, and captures while they grow."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftscope.text import count, visible
from draftscope.viewing.runs import files, opened

SUFFIX, SCHEMA, BYTES = ".progress.json", "draftscope.progress/1", 1 << 16
FRESH, LOST = 120.0, 600.0
"""Seconds: a capture that grew within the first is being written; of a command without news for the second no more is said."""
CAPTURES = 50


@dataclass(frozen=True, slots=True)
class Work:
    """What is being done: how much of it (`share` None = not known), and how long ago that was told."""

    what: str
    says: str
    share: float | None
    ago: float


def working(root: Path, now: float | None = None) -> list[Work]:
    """Scans and other long commands that note their progress, then captures that grow."""
    now = time.time() if now is None else now
    found = [work for path in files(root, SUFFIX) if (work := _noted(path, root, now)) is not None]
    return found + _captures(root, now)


def _noted(path: Path, root: Path, now: float) -> Work | None:
    try:
        with opened(path, root) as file:
            held: Any = json.loads(file.read(BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(held, dict) or held.get("schema") != SCHEMA:
        return None
    done, total, updated, started = (_figure(held.get(name)) for name in ("done", "total", "updated", "started"))
    if done is None or updated is None or now - updated > LOST:
        return None
    unit = visible(held.get("unit") or "steps", 24)
    says = f"{done:,.0f}{'' if not total else f' of {total:,.0f}'} {unit}"
    seconds = updated - (started or updated)
    if seconds > 0 and done:
        says += f", {done / seconds:,.1f} a second"
        if total and total > done:
            says += f", about {_duration((total - done) * seconds / done)} left"
    share = min(done / total, 1.0) if total else None
    return Work(visible(held.get("what") or path.name, 120), says, share, max(now - updated, 0.0))


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15 else None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _captures(root: Path, now: float) -> list[Work]:
    """Folders whose requests were written a moment ago."""
    folders: dict[Path, tuple[int, int, float]] = {}
    for path in files(root, ".safetensors"):
        try:
            held = path.stat()
        except OSError:
            continue
        number, size, last = folders.get(path.parent, (0, 0, 0.0))
        folders[path.parent] = (number + 1, size + held.st_size, max(last, held.st_mtime))
    growing = sorted(((last, folder, number, size) for folder, (number, size, last) in folders.items() if now - last < FRESH),
                     reverse=True)
    return [
        Work(f"written to {visible(folder.relative_to(root).as_posix(), 120)}", f"{count(number, 'file')}, {size / 1e6:,.1f} MB",
             None, max(now - last, 0.0)) for last, folder, number, size in growing[:CAPTURES]
    ]
