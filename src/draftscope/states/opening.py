"""Open whatever holds states: the format is found from the shapes in the files, never from a file's name alone."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import cast

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states import capture, plain, speculators_v1
from draftscope.states.folder import list_files
from draftscope.states.tensorfile import TensorFile
from draftscope.states.types import Source

FORMATS: dict[str, ModuleType] = {module.NAME: module for module in (plain, capture, speculators_v1)}


def open_source(path: Path | str, format: str | None = None) -> Source:
    """Samples or traces of a folder or of one file.

    Args:
        path: a folder, or one file of it (then anything unreadable is an error, not a skip).
        format: a name of `FORMATS`; None = found from the content.

    Raises:
        DraftscopeError: nothing readable there, or files of two formats in equal number.
        UsageError: no such format.
    """
    path = Path(path)
    if not path.exists():
        raise DraftscopeError("does not exist", where=str(path), remedy="Check the path")
    if format is not None:
        if format not in FORMATS:
            raise UsageError(f"no format `{format}`", remedy=f"Known: {', '.join(FORMATS)}")
        return cast(Source, FORMATS[format].open(path))
    whys = {name: why for name, module in FORMATS.items() if (why := module.sniff(path)) is not None}
    if not whys:
        raise _unreadable(path)
    name = next(iter(whys)) if len(whys) == 1 else _most(path, list(whys))
    return cast(Source, FORMATS[name].open(path, whys[name]))


def _most(path: Path, names: list[str]) -> str:
    """The format that most files have; the others are then skipped as foreign."""
    counts = {name: sum(FORMATS[name].fits(file) is not None for file in list_files(path, FORMATS[name].SUFFIX)[0])
              for name in names}
    best = max(counts, key=lambda name: counts[name])
    if sum(count == counts[best] for count in counts.values()) > 1:
        raise DraftscopeError(f"holds files of several formats: {', '.join(f'{n} ({c} files)' for n, c in counts.items())}",
                              where=str(path), remedy="Say which with format=, or keep them in folders of their own")
    return best


def _unreadable(path: Path) -> DraftscopeError:
    """Why no format fits, from the first file that could have been one."""
    expected = ("Expected: `hidden_states` [tokens, entries, width] with `token_ids` (training data), `fc_input` [rows, width] "
                "with `token_ids` (capture), or a .pt file with `input_ids` and a list `hidden_states`")
    files = [file for module in FORMATS.values() for file in list_files(path, module.SUFFIX)[0]]
    if not files:
        inside = [entry.name for entry in sorted(path.iterdir()) if entry.is_dir()] if path.is_dir() else []
        return DraftscopeError("holds no file with states", where=str(path),
                               remedy=f"Name one of its folders: {', '.join(inside[:6])}" if inside else expected)
    first = files[0]
    if first.suffix == speculators_v1.SUFFIX:
        try:
            speculators_v1.read_sample(first, [])
        except DraftscopeError as error:
            return error
    try:
        opened = TensorFile(first)
        held = ", ".join(f"{name} {list(opened.shape(name))}" for name in sorted(opened.names)[:8]) or "no tensor"
    except DraftscopeError as error:
        return error
    return DraftscopeError(f"holds {held}: no known layout of states", where=str(first), remedy=expected)
