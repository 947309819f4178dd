"""Safetensors files: reads that name what is wrong, writes that are whole or not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftscope import stopping
from draftscope.errors import DraftscopeError
from draftscope.states.dtypes import is_floats
from draftscope.states.errors import Cause, StatesError
from draftscope.states.leftover import temporary
from draftscope.states.places import Place, Remote, size_of
from draftscope.states.ranged import Ranged
from draftscope.text import visible

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64})

INDEX_BYTES = 256 * 2**20
"""Largest index: that of a trillion parameters in 384 experts a layer has 16 MB."""


class _Mapped:
    """A file on a local disk, as the library maps it."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self.names = frozenset(self._file.keys())
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._file.get_slice(name)[start:stop]


class TensorFile:
    """An open safetensors file: shapes come from the header, tensors are mapped from the disk when asked for.

    Args:
        path: file to open; of a URL the header is read, then the ranges of what is asked for.

    Raises:
        DraftscopeError: it does not exist, is not safetensors, is cut short, or its header does not add up.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        if not path.is_file():
            raise StatesError("is not a file" if path.exists() else "does not exist", cause="broken", where=str(path))
        try:
            self._file = Ranged(path) if isinstance(path, Remote) else _Mapped(path)
            self._names = self._file.names
            self.metadata: dict[str, str] = self._file.metadata
        except (SafetensorError, OSError, ValueError) as error:
            if not _is_text(path):
                raise StatesError("has a name that is not UTF-8, and safetensors files are opened by such alone", cause="foreign",
                                  where=str(path), remedy="Rename the file, or the folder whose name it is") from None
            raise StatesError(f"is not a whole safetensors file ({_reason(error)})", cause="broken", where=str(path),
                              remedy="Copy or write it again") from None

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        with self._named(name):
            return self._file.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped: a page is read when it is touched. Of a URL it is fetched."""
        with self._named(name):
            return self._file.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of the first axis; no more is read of a URL."""
        with self._named(name):
            return self._file.rows(name, start, stop)

    def has(self, name: str) -> bool:
        return name in self._names

    def fail(self, what: str, name: str = "", cause: Cause = "layout") -> StatesError:
        return StatesError(what, cause=cause, where=f"{self.path}, tensor {name}" if name else str(self.path))

    def require(self, *names: str) -> None:
        """Raise for the first name that is not there; a file that has none of them is foreign."""
        lacking = [name for name in names if name not in self._names]
        if lacking:
            held = ", ".join(sorted(self._names)[:8]) or "no tensor at all"
            raise self.fail(f"has no tensor `{lacking[0]}` (it holds {held})",
                            cause="foreign" if len(lacking) == len(names) else "layout")

    def fit(self, name: str, count: int, rows: int, of: str) -> None:
        """Raise unless a tensor has as many rows as `of`."""
        if count != rows:
            raise self.fail(f"has {count} rows for {rows} of `{of}`", name, "rows")

    def floats(self, name: str, rank: int, layout: str) -> Tensor:
        """A floating tensor of the given rank; `layout` (such as `[T, L, H]`) is for the message."""
        tensor = self._ranked(name, rank, layout)
        if not is_floats(tensor.dtype):
            raise self.fail(f"has dtype {_short(tensor.dtype)} where floating values are expected", name)
        return tensor

    def integers(self, name: str, rank: int, layout: str, *, booleans: bool = False) -> Tensor:
        """An integer tensor (or bool, where allowed) of the given rank, in the dtype stored."""
        tensor = self._ranked(name, rank, layout)
        if tensor.dtype not in INTEGERS and not (booleans and tensor.dtype == torch.bool):
            raise self.fail(f"has dtype {_short(tensor.dtype)} where integers are expected", name)
        return tensor

    def _ranked(self, name: str, rank: int, layout: str) -> Tensor:
        self.require(name)
        shape = self.shape(name)
        if len(shape) != rank:
            raise self.fail(f"has shape {list(shape)} where {layout} is expected", name)
        if 0 in shape:
            raise self.fail(f"is empty: shape {list(shape)}", name)
        return self.tensor(name)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
            stopping.heed()
            raise self.fail(f"cannot be read ({_reason(error)})", name, "broken") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor | None], metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file under a temporary name and rename it; metadata that is no text is written as JSON.

    Raises:
        DraftscopeError: the disk refuses.
    """
    held: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        plain = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory.
        if plain.untyped_storage().data_ptr() in storages or plain.untyped_storage().nbytes() != plain.nbytes:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        held[name] = plain
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items() if value is not None}
    if path.exists() and not path.is_file():
        raise DraftscopeError("is no regular file, and a device or folder is not replaced by one", where=str(path),
                              remedy="Name a file")
    part = temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode & 0o777
        save_file(held, part, metadata=texts or None)
        part.chmod(mode)  # safetensors writes 0600, whatever the umask says
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise DraftscopeError(f"cannot be written ({_reason(error)})", where=str(path)) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def read_json(path: Place, limit: int = 16 * 2**20) -> Any:
    """A JSON document of at most `limit` bytes.

    Raises:
        DraftscopeError: missing, no regular file (a pipe would never end), too large, or not JSON.
    """
    try:
        if path.exists() and not path.is_file():
            raise DraftscopeError("is not a file", where=str(path))
        if size_of(path) > limit:
            raise DraftscopeError(f"is larger than {limit} bytes", where=str(path))
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DraftscopeError(f"is not readable JSON ({_reason(error)})", where=str(path)) from None


def read_index(path: Place) -> dict[str, str]:
    """An index of shards: tensor name to file name. Shards lie beside their index; one that leads elsewhere is refused.

    Raises:
        DraftscopeError: not readable, no `weight_map`, or a file outside the folder.
    """
    raw = read_json(path, INDEX_BYTES)
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise DraftscopeError("is no index of shards: it has no weight_map", where=str(path))
    for tensor, name in listed.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
            raise DraftscopeError(f"the index places tensor {visible(tensor, 200)} outside the folder: {visible(name, 200)}",
                                  where=str(path), remedy="Shards lie beside their index")
    return listed


def parse_json(text: str | bytes) -> Any:
    """`json.loads` whose every failure is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_list(metadata: Mapping[str, Any], key: str, length: int, notes: list[str]) -> list[Any] | None:
    """The list of `length` that a metadata entry holds; anything else is passed over with a note."""
    if key not in metadata:
        return None
    value = metadata[key]
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            notes.append(f"metadata `{key}` is not JSON: passed over")
            return None
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        notes.append(f"metadata `{key}` is no list of names or numbers: passed over")
        return None
    if len(value) != length:
        notes.append(f"metadata `{key}` has {len(value)} items for {length} entries: passed over")
        return None
    return value


def entry_labels(metadata: Mapping[str, Any], length: int, notes: list[str]) -> tuple[str, ...]:
    """What the file calls its entries: `labels`, else its layer ids, else `entry i`."""
    labels = json_list(metadata, "labels", length, notes)
    if labels is not None:
        return tuple(str(label) for label in labels)
    ids = json_list(metadata, "layer_ids", length, notes)
    return tuple(f"entry {i}" for i in range(length)) if ids is None else tuple(f"layer {i}" for i in ids)


def _is_text(path: Place) -> bool:
    """Whether a name can be written as UTF-8; others come with surrogates from the system."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()).removeprefix("Error while deserializing header: ")
    return text[:200] or type(error).__name__
