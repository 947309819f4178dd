"""Open whatever holds states: the format is found from the shapes in the files, never from a file's name alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, cast

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states import (
    angelslim,
    capture,
    modelopt,
    plain,
    sglang_dump,
    sglang_dumper,
    sglang_response,
    specforge,
    speculators,
    speculators_v0,
    speculators_v1,
    torchspec,
    trtllm,
    vllm_extract,
)
from draftscope.states.folder import FileSource, list_files, listing_once
from draftscope.states.places import Place, Remote, Unreachable, listing, place, spread
from draftscope.states.tensorfile import TensorFile
from draftscope.states.torchfile import TORCH_FILES, load_tensors, loading_once
from draftscope.states.types import Skipped, Source

Kind = Literal["samples", "traces"]

FORMATS: dict[str, ModuleType] = {module.NAME: module for module in (
    plain, capture, speculators_v1, speculators, specforge, angelslim, modelopt, torchspec, trtllm, speculators_v0, vllm_extract,
    sglang_dump, sglang_dumper, sglang_response,
)}
SUFFIXES = (".safetensors", *TORCH_FILES, ".json", ".jsonl")
PROBES = 24
"""Files of a suffix that are looked at to find the format."""
LOOKED_INTO = 16
"""Folders of one without states that are looked into, for the message."""
AUTO = "auto"
ABSENT = "does not exist"
"""What is said of a path at which there is nothing: passing over what is unreadable does not cover it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A format that fits, why, and how many of the files it fits by those looked at."""

    name: str
    why: str
    files: float


def open_source(path: Place | str, format: str | None = None, *, kind: Kind | None = None, skip_bad: bool = False) -> Source:
    """Samples or traces of a folder or of one file.

    Args:
        path: a folder, or one file of it (then anything unreadable is an error, not a skip).
        format: a name of `FORMATS`, for some with a choice behind it (`sglang-dump@2,15,27`); None = found from the content.
        kind: what is wanted where the content may be read as either (states that vLLM extracted).
        skip_bad: what is unreadable is counted as passed over even where it was named directly.

    Raises:
        DraftscopeError: nothing readable there, or files of two formats in equal number.
        UsageError: no such format.
    """
    path = place(path)
    if not path.exists():
        raise DraftscopeError(ABSENT, where=str(path), remedy="Check the path")
    with listing_once():
        source = _named(path, format, kind) if format not in (None, AUTO) else _found(path, kind)
    if isinstance(source, FileSource):
        source.skip_bad = skip_bad
    return source


def format_kind(format: str) -> Kind:
    """What a format yields.

    Raises:
        UsageError: no such format.
    """
    name = format.partition("@")[0]
    if name not in FORMATS:
        raise UsageError(f"no format `{name}`", remedy=f"Known: {', '.join(FORMATS)}")
    return cast(Kind, FORMATS[name].KIND)


def _named(path: Place, format: str | None, kind: Kind | None) -> Source:
    assert format is not None
    format_kind(format)
    name, _, choice = format.partition("@")
    said = f"named: {format}"
    try:
        other = recognised(path, kind)
    except Unreachable:
        raise
    except DraftscopeError:
        other = None
    if other is not None:
        said += f" ({other.why})" if other.name == name else f"; by its content it would be read as {other.name} ({other.why})"
    return _open(path, name, choice, said)


def _found(path: Place, kind: Kind | None) -> Source:
    found = recognised(path, kind)
    if found is None:
        raise _unreadable(path)
    return _open(path, found.name, "", found.why)


def _open(path: Place, name: str, choice: str, chosen: str) -> Source:
    module = FORMATS[name]
    if not choice:
        return cast(Source, module.open(path, chosen))
    if "choice" not in module.open.__annotations__:
        raise UsageError(f"format {name} leaves nothing to choose", remedy=f"--format {name}")
    return cast(Source, module.open(path, chosen, choice))


def recognised(path: Place, kind: Kind | None = None) -> Found | None:
    """The format of a file, or that of most files of a folder; None if none fits.

    Only `PROBES` files of each suffix are opened, evenly spread, so that a folder of many is known at once.

    Raises:
        DraftscopeError: two formats fit as many files.
    """
    found = _candidates(path, kind, deep=False) or (_candidates(path, kind, deep=True) if path.is_dir() else [])
    if kind is not None and any(kind == FORMATS[one.name].KIND for one in found):
        found = [one for one in found if kind == FORMATS[one.name].KIND]
    beaten = {name for one in found for name in getattr(FORMATS[one.name], "OVER", ())}
    found = [one for one in found if one.name not in beaten]
    if len(found) < 2:
        return found[0] if found else None
    best = max(found, key=lambda one: one.files)
    if sum(one.files == best.files for one in found) > 1:
        raise DraftscopeError(f"holds files of several formats: {', '.join(f'{f.name} ({f.files:.0f} files)' for f in found)}",
                              where=str(path), remedy="Say which with --format, or keep them in folders of their own")
    return best


def _candidates(path: Place, kind: Kind | None, *, deep: bool) -> list[Found]:
    files = list_files(path, SUFFIXES, deep=deep)[0]
    if not deep:
        inner = speculators.files_of(path)
        files = list_files(inner, SUFFIXES)[0] + files if inner != path else files
    by_suffix: dict[str, list[Place]] = {}
    for file in files:
        by_suffix.setdefault(next((s for s in SUFFIXES if str(file).endswith(s)), file.suffix), []).append(file)
    formats = {name: module for name, module in FORMATS.items() if module.DEEP or not deep}
    counts: dict[str, float] = {}
    whys: dict[str, str] = {}
    with loading_once():
        for suffix, held in by_suffix.items():
            probes = spread(held, 1 if _costly(held[0], suffix) else PROBES)
            fitting: Counter[str] = Counter()
            for file in probes:  # all formats look at a file before the next one is opened
                for name, module in formats.items():
                    if not suffix.endswith(module.SUFFIX) and not path.is_file():
                        continue
                    said = module.fits(file)
                    if said is not None and (kind == module.KIND or not hasattr(module, "claims") or module.claims(file)):
                        fitting[name] += 1
                        whys.setdefault(name, said)
            for name, number in fitting.items():
                counts[name] = counts.get(name, 0.0) + len(held) * number / len(probes)
    return [Found(name, whys[name], counts[name]) for name in formats if name in counts]


def _costly(file: Place, suffix: str) -> bool:
    """Whether a look into the file takes all of it."""
    return suffix.endswith(".gz") or (isinstance(file, Remote) and suffix != ".safetensors")


def _unreadable(path: Place) -> DraftscopeError:
    """Why no format fits, from the first file that could have been one."""
    expected = ("Expected: `hidden_states` [tokens, entries, width] with `token_ids` (training data), `fc_input` [rows, width] "
                "with `token_ids` (capture), or a torch file with `input_ids`, the slots and the last state. --format takes "
                f"{', '.join(FORMATS)}")
    entries = list(listing(path)) if path.is_dir() else []
    inside = sorted(entry.name for entry in entries if entry.folder)
    if any(entry.name == "config.json" for entry in entries):
        return DraftscopeError("holds a model (config.json), no states", where=str(path),
                               remedy="A draft goes to --draft, a target to --target; folders of states go to the others")
    if below := [name for name in inside[:LOOKED_INTO] if recognised(path / name) is not None]:
        return DraftscopeError("holds no states itself", where=str(path),
                               remedy=f"Name one of its folders: {', '.join(below[:6])}")
    files = list_files(path, SUFFIXES)[0] or (list_files(path, SUFFIXES, deep=True)[0] if path.is_dir() else [])
    if not files:
        return DraftscopeError("holds no file with states", where=str(path),
                               remedy=f"Name one of its folders: {', '.join(inside[:6])}" if inside else expected)
    first = files[0]
    if first.name.endswith(TORCH_FILES):
        return _unreadable_torch(first, expected)
    if first.suffix in (".json", ".jsonl"):
        try:
            sglang_response.read_traces(first, [])
        except DraftscopeError as error:
            return error
        return DraftscopeError("is JSON without a server's responses (`meta_info` with `hidden_states`)", where=str(first),
                               remedy=expected)
    try:
        opened = TensorFile(first)
        held = ", ".join(f"{name} {list(opened.shape(name))}" for name in sorted(opened.names)[:8]) or "no tensor"
    except DraftscopeError as error:
        if first.suffix != ".safetensors":
            return DraftscopeError("is no file that holds states", where=str(first), remedy=expected)
        return error
    return DraftscopeError(f"holds {held}: no known layout of states", where=str(first), remedy=expected)


def _unreadable_torch(file: Place, expected: str) -> DraftscopeError:
    """The complaint of the format whose names the file has most of."""
    try:
        held = load_tensors(file)
    except DraftscopeError as error:
        return error
    if isinstance(held, list) and held and isinstance(held[0], dict):
        bad = [item for item in trtllm.read_samples(file, []) if isinstance(item, Skipped)]
        return DraftscopeError(bad[0].why if bad else "is not readable", where=f"{file}, row {bad[0].row if bad else 0}")
    if isinstance(held, dict):
        names = set(held)
        pairs = (specforge, angelslim, modelopt, speculators_v0)
        readers = [module.read_sample for module in pairs if {module.LAYOUT.features, module.LAYOUT.last} <= names]
        if isinstance(held.get("batch"), dict) or "last_hidden_states" in held:
            readers.append(torchspec.read_samples)
        if "hidden_states" in held:
            readers.append(speculators_v1.read_sample)
        readers += [module.read_sample for module in pairs if {module.LAYOUT.features, module.LAYOUT.last} & names]
        for read in readers[:1]:
            try:
                read(file, [])
            except DraftscopeError as error:
                return error
        keys = ", ".join(sorted(str(key) for key in held)[:8]) or "nothing"
        return DraftscopeError(f"holds {keys}: no known layout of states", where=str(file), remedy=expected)
    try:
        speculators_v1.read_sample(file, [])
    except DraftscopeError as error:
        return error
    return DraftscopeError("no known layout of states", where=str(file), remedy=expected)
