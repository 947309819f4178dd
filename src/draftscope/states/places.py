"""Where files lie: a local path, or a URL that fsspec can open (`s3://bucket/prefix`, `memory://`), as one kind of thing.

`place` turns what the user gave into a `Path` or a `Remote`, which has the part of `Path` that readers of states use. Credentials
in a URL are used and never shown.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.leftover import lasting_workspace, workspace

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
BUCKETS = frozenset({"s3", "s3a"})
PIECE = 2**20
RESERVE = 256 * 2**20
"""Of the disk's free space, never filled by copies."""
MODEL_FILES = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja")
Result = TypeVar("Result")

_secrets: set[str] = set()


class Unreachable(DraftscopeError):
    """A URL that cannot be reached: no such host or bucket, refused, interrupted, or no package for its kind."""


class Remote:
    """A file or folder behind a URL. Two of the same URL are equal; `str` is the URL without credentials and query."""

    __slots__ = ("_fs", "_info", "_path", "_shown")

    def __init__(self, fs: Any, path: str, shown: str, info: dict[str, Any] | None = None) -> None:
        self._fs, self._path, self._shown, self._info = fs, path, shown, info

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"Remote({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and (self._fs, self._path) == (other._fs, other._path)

    def __hash__(self) -> int:
        return hash(self._shown)

    def __lt__(self, other: Remote) -> bool:
        return self._shown < other._shown

    def __truediv__(self, name: str) -> Remote:
        return Remote(self._fs, f"{self._path.rstrip('/')}/{name}", f"{self._shown.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self._shown.partition("://")[2]).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> Remote:
        return Remote(self._fs, self._path.rstrip("/").rpartition("/")[0], self._shown.rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> Remote:
        return self.parent / name

    def expanduser(self) -> Remote:
        return self

    def exists(self) -> bool:
        return self._type() != ""

    def is_file(self) -> bool:
        return self._type() == "file"

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def size(self) -> int:
        """Bytes of the file.

        Raises:
            FileNotFoundError: there is none.
            Unreachable: that cannot be found out.
        """
        self._type()
        if not self._info:
            raise FileNotFoundError(2, "No such file", self._shown)
        return int(self._info.get("size") or 0)

    def tag(self) -> str:
        """What the store says of this version of the file (its ETag, else when it was changed); empty where it says nothing."""
        self._type()
        held = self._info or {}
        return next((str(held[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if held.get(key)), "")

    def _type(self) -> str:
        if self._info is None:
            try:
                self._info = dict(self.reached(self._fs.info, self._path))
            except FileNotFoundError:
                self._info = {}
        return str(self._info.get("type", ""))

    def read_range(self, start: int, end: int) -> bytes:
        """Bytes start .. end - 1, fewer at the end of the file.

        Raises:
            FileNotFoundError: there is no such file.
            Unreachable: they cannot be had.
        """
        return b"" if end <= start else bytes(self.reached(self._fs.cat_file, self._path, start=start, end=end))

    def read_bytes(self) -> bytes:
        return bytes(self.reached(self._fs.cat_file, self._path))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """The file as bytes, read by ranges.

        Raises:
            OSError: there is no such file.
            Unreachable: it cannot be had; reading may raise it too.
        """
        assert mode == "rb"
        return io.BufferedReader(_Ranges(self), PIECE)

    def entries(self) -> list[Entry]:
        """What lies in the folder, listed by one call."""
        found = []
        for info in self.reached(self._fs.ls, self._path, detail=True):
            path = str(info["name"])
            name = path.rstrip("/").rpartition("/")[2]
            if path.strip("/") == self._path.strip("/") or not name:
                continue  # the marker of the folder itself
            own = Remote(self._fs, path, f"{self._shown.rstrip('/')}/{name}", dict(info))
            found.append(Entry(name, own, info.get("type") == "directory", False))
        return found

    def reached(self, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Call fsspec; whatever it raises but absence becomes `Unreachable`."""
        try:
            return call(*arguments, **options)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except PermissionError as error:
            raise Unreachable(f"access is refused ({scrubbed(error)})", where=self._shown, remedy=_remedy(self._shown)) from None
        except Exception as error:
            raise Unreachable(f"cannot be reached ({scrubbed(error)})", where=self._shown, remedy=_remedy(self._shown)) from None


Place = Path | Remote


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a folder."""

    name: str
    place: Place
    folder: bool
    link: bool


class _Ranges(io.RawIOBase):
    def __init__(self, of: Remote) -> None:
        self._of, self._at, self._size = of, 0, of.size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, into: Any) -> int:
        held = self._of.read_range(self._at, min(self._size, self._at + len(into)))
        into[: len(held)] = held
        self._at += len(held)
        return len(held)


def place(given: str | Place) -> Place:
    """The path or URL that a user gave.

    Raises:
        Unreachable: a URL of a kind for which a package is missing, or a host that does not answer.
        UsageError: a URL of no kind that fsspec knows, or nothing at all.
    """
    if isinstance(given, Path | Remote):
        return given
    found = URL.match(given)
    kind = "local" if found is None else found.group(1).lower()
    if kind in ("file", "local"):
        path = given if found is None else given[found.end() :]
        if not path:
            raise UsageError("an empty path", remedy="Name a file, a folder or a URL; `.` is the folder you are in")
        return Path(path)
    clean, shown, options = _without_secrets(kind, given)
    try:
        import fsspec

        if kind not in fsspec.available_protocols():
            raise UsageError(f"no kind of URL is called {kind}", where=shown,
                             remedy="Paths, s3://, https:// and what fsspec knows")
        fs, path = fsspec.url_to_fs(clean, **options)
    except ImportError as error:
        raise Unreachable(f"needs a package that is not installed ({scrubbed(error)})", where=shown,
                          remedy="pip install 'draftscope[s3]'" if kind in (*BUCKETS, "http", "https") else "") from None
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"is no URL that can be opened ({scrubbed(error)})", where=shown) from None
    except Exception as error:  # some kinds connect already
        raise Unreachable(f"cannot be reached ({scrubbed(error)})", where=shown, remedy=_remedy(shown)) from None
    return Remote(fs, path, shown)


def _without_secrets(kind: str, given: str) -> tuple[str, str, dict[str, str]]:
    """The URL to open, the one to show, and credentials that go apart."""
    start = given.index("://") + 3
    # A key's secret may hold slashes; elsewhere the user's part ends before the first.
    user = re.match(r"([^/@:]+):([^@]*)@" if kind in BUCKETS else r"([^/@:]*):?([^/@]*)@", given[start:])
    rest = given[start + (user.end() if user else 0) :]
    shown = f"{given[:start]}{rest}"
    options: dict[str, str] = {}
    if user is not None:
        _secrets.update({user.group(1), user.group(2), unquote(user.group(2))} - {""})
    if kind in BUCKETS:
        if user is not None:
            options = {"key": unquote(user.group(1)), "secret": unquote(user.group(2))}
        return shown, shown, options
    if kind in ("http", "https") and "?" in shown:
        shown, _, query = shown.partition("?")
        _secrets.add(query)
    return given, shown, options


def scrubbed(error: BaseException) -> str:
    """What an error says, on one line, without the secrets of any URL."""
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text[:300]


def _remedy(shown: str) -> str:
    if shown.startswith("s3"):
        return ("Check bucket and credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY); AWS_ENDPOINT_URL "
                "names a store of your own")
    return "Check the URL, and that this machine may reach it"


def listing(folder: Place) -> list[Entry]:
    """What lies in a folder, from one listing, in no order; links to folders count as folders.

    Raises:
        OSError: no folder there.
        Unreachable: it cannot be listed.
    """
    if isinstance(folder, Remote):
        return folder.entries()
    found: list[Entry] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                inner = entry.is_dir()
            except OSError:  # a link to itself
                inner = False
            found.append(Entry(entry.name, folder / entry.name, inner, entry.is_symlink()))
    return found


def matching(folder: Place, ending: str | tuple[str, ...]) -> list[Place]:
    """Files of a folder by the end of their names, sorted by name."""
    return [entry.place for entry in sorted(listing(folder), key=lambda one: one.name)
            if not entry.folder and entry.name.endswith(ending)]


def spread(files: Sequence[Place], count: int) -> Sequence[Place]:
    """At most `count` of the files, evenly spread, the first among them."""
    if len(files) <= count:
        return files
    return [files[i * (len(files) - 1) // max(count - 1, 1)] for i in range(count)]


def size_of(path: Place) -> int:
    """Bytes of a file.

    Raises:
        OSError: there is none.
    """
    return path.size() if isinstance(path, Remote) else path.stat().st_size


@contextmanager
def local_copy(path: Place) -> Iterator[Path]:
    """The file on a local disk; a copy is removed on leaving (what was mapped from it stays readable).

    Raises:
        OSError: there is no such file.
        DraftscopeError: it cannot be had, or the temporary folder has no room for it.
    """
    if not isinstance(path, Remote):
        yield path
        return
    with workspace() as folder:
        target = folder / path.name
        _copy(path, target)
        yield target


def _copy(path: Remote, target: Path) -> None:
    size = path.size()
    if size > shutil.disk_usage(target.parent).free - RESERVE:
        raise DraftscopeError(f"has {size:,} bytes, more than {target.parent.parent} has to spare", where=str(path),
                              remedy="Set TMPDIR to a larger disk")
    with path.open("rb") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 8 * PIECE)
    if target.stat().st_size != size:
        raise Unreachable(f"gave {target.stat().st_size:,} of {size:,} bytes", where=str(path), remedy="Try again")


def model_folder(given: str | Place) -> Path:
    """A checkpoint's folder on a local disk: of a URL, copies of its files in a folder of the same name, gone at exit.

    Raises:
        DraftscopeError: nothing there, or no room for it.
    """
    path = place(given)
    if not isinstance(path, Remote):
        return path
    if not path.is_dir():
        raise DraftscopeError("is not a folder" if path.exists() else "does not exist", where=str(path),
                              remedy="Name the folder of a checkpoint")
    folder = lasting_workspace() / (path.name or "checkpoint")
    folder.mkdir()
    for file in matching(path, MODEL_FILES):
        assert isinstance(file, Remote)
        _copy(file, folder / file.name)
    return folder
