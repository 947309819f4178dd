"""Files of `torch.save` as data: loaded weights-only, after their zip entries and pickle opcodes were looked at.

What a file of states may hold besides tensors (dicts, lists, tuples, texts, numbers, True, False, None) needs no name in a
pickle; the names that tensors need are listed here, and a file that names anything else is refused unopened.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope import stopping
from draftscope.states.errors import StatesError
from draftscope.states.pickled import Unfolds, names_in
from draftscope.states.places import Place, Remote, local_copy, size_of
from draftscope.states.unpacking import unpacked

TORCH_FILES = (".pt", ".ckpt", ".pth", ".ckpt.gz", ".pt.gz")
PICKLE_LIMIT = 64 * 2**20
REBUILDS = frozenset({"collections OrderedDict", "torch Size", "torch._utils _rebuild_tensor_v2",
                      "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter"})
DTYPES = frozenset(f"torch {name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))
"""Tensors of newer dtypes (float8, wide unsigned) are rebuilt with their dtype by name."""
OTHERS = (*(bytes((0x80, protocol)) for protocol in range(2, 6)), b"\x89HDF\r\n\x1a\n")
"""How files begin that are something else, and whole: pickles (torch before 1.6 among them) and HDF5."""


_last: tuple[tuple[Place, int], Any] | None = None
"""The compressed or remote file read last: several formats look at a file before one of them reads it."""
_looking = False


@contextmanager
def loading_once() -> Iterator[None]:
    """Within this, any file that is asked for again at once is loaded once, for those who look and change nothing."""
    global _looking, _last
    outer, _looking = _looking, True
    try:
        yield
    finally:
        _looking = outer
        if not outer and _last is not None and not _fetched(_last[0][0]):
            _last = None


def _fetched(path: Place) -> bool:
    """Whether opening a file takes all of it."""
    return path.name.endswith(".gz") or isinstance(path, Remote)


def load_tensors(path: Place) -> Any:
    """What `torch.save` wrote, as long as it is tensors in plain containers; mapped, not read.

    A file whose name ends in `.gz` is unpacked first, one behind a URL copied, to a temporary file that is gone before this
    returns.

    torch's weights-only loader still lets a pickle name callables that allocate by a number in the file
    (`bytearray`, tensors without storage), so the names are held against a shorter list first, and what would unfold far
    beyond its own bytes is refused (`states/pickled.py`).

    Raises:
        StatesError: no zip archive of torch, cut short, sizes beyond the file, or a pickle that names anything but
            tensors. Nothing from such a file is executed. What is whole and something else (an optimizer's state, a
            random generator's, arguments) has the cause `foreign`.
    """
    if not path.is_file():
        raise StatesError("is not a file" if path.exists() else "does not exist", cause="broken", where=str(path))
    if isinstance(path, Path) and not _looking and not _fetched(path):
        return _load(path, path)
    global _last
    try:
        key = (path, size_of(path) if isinstance(path, Remote) else path.stat().st_mtime_ns)
        last = _last
        if last is None or last[0] != key:
            last = _last = None
            packed = path.name.endswith(".gz")
            with local_copy(path) as copied, unpacked(copied, path) if packed else nullcontext(copied) as plain:
                last = _last = (key, _load(plain, path))
        return last[1]
    except OSError as error:
        raise StatesError(f"cannot be read ({error.strerror or error})", cause="broken", where=str(path)) from None


def load_record(path: Place, expected: str) -> dict[str, Any]:
    """The dict that `torch.save` wrote.

    Args:
        expected: what should be in it, for the message.

    Raises:
        StatesError: as `load_tensors`, or something else than a dict.
    """
    held = load_tensors(path)
    if not isinstance(held, dict):
        raise StatesError(f"holds a {type(held).__name__} where a dict with {expected} is expected", cause="foreign",
                          where=str(path), remedy="--format names another reading")
    return held


def _load(path: Path, named: Place) -> Any:
    _check(path, named)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, AssertionError,
            RecursionError, MemoryError, OverflowError, pickle.UnpicklingError) as error:
        stopping.heed()
        raise StatesError(f"cannot be loaded as tensors ({_reason(error)})", cause="broken", where=str(named),
                              remedy="Write it again with torch.save") from None
    return held


def owns_its_data(tensor: Tensor) -> bool:
    """False for a view that declares more values than its storage holds."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _check(path: Path, named: Place) -> None:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl") or entry.filename == "data.pkl"]
            if len(pickles) != 1 or len(set(names)) != len(names):
                raise StatesError("is a zip archive, but not of torch.save", cause="foreign", where=str(named))
            if any(entry.file_size > size or entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
                sum(entry.file_size for entry in entries) > size
            ):
                raise StatesError("declares more data than the file holds", cause="broken", where=str(named))
            if pickles[0].file_size > PICKLE_LIMIT:
                raise StatesError(f"has a pickle of {pickles[0].file_size} bytes", cause="broken", where=str(named))
            text = archive.read(pickles[0])
    # zipfile raises NotImplementedError where an entry names a compression that it does not know.
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError, RuntimeError) as error:
        if _begins(path).startswith(OTHERS):
            raise StatesError("is no file of torch.save of 1.6 or newer", cause="foreign", where=str(named),
                              remedy="Write it again with torch.save, as plain tensors") from None
        raise StatesError(f"is not a whole file of torch.save ({_reason(error)})", cause="broken", where=str(named),
                          remedy="Copy or write it again (formats older than torch 1.6 are not read)") from None
    for name in _globals(text, named):
        module, _, attribute = name.partition(" ")
        if name not in REBUILDS | DTYPES and not (module in ("torch", "torch.storage") and attribute.endswith("Storage")):
            raise StatesError(f"its pickle names `{module}.{attribute}`, which is no tensor data; nothing was executed",
                              cause="foreign", where=str(named), remedy="Save plain tensors in dicts and lists")


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max(map(len, OTHERS)))
    except OSError:
        return b""


def _globals(text: bytes, named: Place) -> list[str]:
    try:
        return names_in(text)
    except Unfolds as error:
        raise StatesError(f"its pickle {error}; nothing was executed", cause="foreign", where=str(named),
                          remedy="Save plain tensors in dicts and lists") from None
    except Exception as error:
        raise StatesError(f"has a broken pickle ({_reason(error)})", cause="broken", where=str(named)) from None


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines()[0][:200] if text else "") or type(error).__name__
