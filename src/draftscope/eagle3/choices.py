"""The target's choices kept on the disk: computed once, read back a sample at a time.

`choices-R.i32` holds token ids as int32 one sample behind the other, `choices-R.jsonl` a line for each: its key, where it begins,
how many, and whether its last state is after the final norm. Both only grow, data before line, so what a killed run leaves is
whole but for its last line. Each of several processes R writes its own and reads all.
"""

from __future__ import annotations

import json
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from draftscope.errors import DraftscopeError

_BYTES = 4


class Choices:
    """Choices by key, in a folder. Use as a context to add some."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self._known: dict[str, tuple[int, int, int, bool]] = {}
        self._files: tuple[RawIOBase, RawIOBase] | None = None
        self.reload()

    def reload(self) -> None:
        """Also know what other processes have added."""
        for lines in sorted(self.folder.glob("choices-*.jsonl")):
            data = lines.with_suffix(".i32")
            if not data.is_file():
                continue
            rank, whole = int(lines.stem.rpartition("-")[2]), data.stat().st_size // _BYTES
            for line in lines.read_bytes().splitlines():
                try:
                    key, start, length, normed = json.loads(line)
                except ValueError:
                    continue
                if start + length <= whole:
                    self._known[str(key)] = (rank, start, length, bool(normed))

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = self._path(self.rank).open("ab", buffering=0)
            _append(data, b"\0" * (-data.tell() % _BYTES))
            lines = self._path(self.rank).with_suffix(".jsonl").open("a+b", buffering=0)
            if lines.tell():
                lines.seek(-1, 2)
                if lines.read(1) != b"\n":
                    _append(lines, b"\n")
        except OSError as error:
            raise self._failed(error) from None
        self._files = (data, lines)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._files is not None
        for file in self._files:
            file.close()
        self._files = None

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def add(self, key: str, best: Tensor, normed: bool) -> None:
        """Keep the choices [T] of a sample, and on which side of the norm its last state is.

        Raises:
            DraftscopeError: the disk refuses.
        """
        assert self._files is not None
        data, lines = self._files
        try:
            start = data.tell() // _BYTES
            _append(data, best.to(torch.int32).numpy().tobytes())
            _append(lines, json.dumps([key, start, len(best), normed]).encode() + b"\n")
        except OSError as error:
            raise self._failed(error) from None
        self._known[key] = (self.rank, start, len(best), normed)

    def normed(self, key: str) -> bool:
        """Whether the sample's last state is after the final norm."""
        return self._known[key][3]

    def read(self, key: str) -> Tensor:
        """[T] int64."""
        rank, start, length, _ = self._known[key]
        with self._path(rank).open("rb") as file:
            file.seek(start * _BYTES)
            return torch.from_numpy(np.frombuffer(file.read(length * _BYTES), np.int32).astype(np.int64))

    def _path(self, rank: int) -> Path:
        return self.folder / f"choices-{rank}.i32"

    def _failed(self, error: OSError) -> DraftscopeError:
        return DraftscopeError(f"the target's choices cannot be kept ({error.strerror})", where=str(self.folder),
                               remedy="Make room and run the same command again: what is kept already is used")


def _append(file: RawIOBase, held: bytes) -> None:
    while held:
        held = held[file.write(held) or 0 :]
