"""What went into a fingerprint, sequence by sequence, and how the same input is known again.

An input is one sequence as its source yields it: mostly a file, else a row of one. It is the same input as another if both have
the same *identity*: a hash of its file's own name (without folders: the same file lies under other paths on other machines), the
size of that file, the states' shape and dtype, all token ids, and `PIECES` pieces of `LENGTH` bytes of the states, spread
evenly over the rows and shifting through the columns. The pieces are of values that the scan reads anyway, so nothing is read
for it. First bytes alone would not do: samples begin with the same tokens more often than not. A file that is renamed counts as
another input; so does one of the same name whose tokens, size or sampled values differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.places import Place, Remote

PIECES, LENGTH = 64, 64
BYTES = 16
_TAG = re.compile(r'^(W/)?"?|"$')


@dataclass(frozen=True, slots=True)
class Input:
    """A sequence that was counted.

    Attributes:
        name: its path below the source, and its row where the file holds several.
        size: bytes of the file; -1 unknown.
        time: of the file's last change, nanoseconds since 1970; -1 unknown.
        etag: what a store says in place of a time, else empty.
        rows: counted of it.
        identity: 32 hexadecimal digits (module docstring); empty = unknown.
    """

    name: str
    size: int
    time: int
    etag: str
    rows: int
    identity: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file's place says of it: a file that changed has another."""

    size: int = -1
    time: int = -1
    etag: str = ""


UNKNOWN = Stamp()


def stamp_of(file: Place) -> Stamp:
    """Size and time of a file, or its tag where a store gives one; unknown where it does not say.

    Raises:
        OSError: there is no such file.
        Unreachable: a store does not answer.
    """
    if not isinstance(file, Remote):
        held = file.stat()
        return Stamp(held.st_size, held.st_mtime_ns)
    return Stamp(file.size(), -1, _TAG.sub("", file.tag()))


def identity_of(name: str, size: int, token_ids: Tensor, states: Tensor) -> str:
    """See the module.

    Args:
        name: of the sequence; folders in it do not count.
        token_ids: [T]; states: [T, ...] as stored, before any cast.
    """
    found = hashlib.blake2b(digest_size=BYTES)
    found.update(json.dumps([name.rpartition("/")[2], size, str(states.dtype), list(states.shape)]).encode())
    found.update(token_ids.to(torch.int64).contiguous().numpy().tobytes())
    if states.numel():
        stored = states.reshape(len(states), -1).view(torch.uint8)
        rows, columns = _places(*stored.shape)
        found.update(stored[rows, columns].numpy().tobytes())
    return found.hexdigest()


@lru_cache(maxsize=256)
def _places(rows: int, width: int) -> tuple[Tensor, Tensor]:
    length = min(LENGTH, width)
    numbers = torch.arange(PIECES)
    starts = numbers * 2654435761 % (width - length + 1)
    return (numbers * (rows - 1) // (PIECES - 1))[:, None], starts[:, None] + torch.arange(length)


@dataclass
class Inputs:
    """Inputs of a fingerprint, each once, in the order in which they were counted."""

    held: list[Input] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[Input]:
        return iter(self.held)

    def add(self, one: Input) -> None:
        self.held.append(one)

    def twice(self, others: Iterable[Input]) -> list[Input]:
        """Those of the others that are among these."""
        known = {one.identity for one in self.held if one.identity}
        return [one for one in others if one.identity in known]

    def merge(self, others: Iterable[Input]) -> None:
        """Take in the others.

        Raises:
            DraftscopeError: one is among these already; nothing is taken in then.
        """
        others = list(others)
        twice = self.twice(others)
        if twice:
            more = f", and {len(twice) - 1:,} more" if len(twice) > 1 else ""
            raise DraftscopeError(f"is in both fingerprints{more}: its rows would count twice", where=twice[0].name,
                                  remedy="Merge each shard once")
        self.held += others

    def tensors(self) -> dict[str, Tensor]:
        """Columns: `text` uint8, JSON of [names, etags]; `numbers` [N, 3] int64: size, time, rows; `identity` [N, 16] uint8."""
        text = json.dumps([[one.name for one in self.held], [one.etag for one in self.held]]).encode()
        unknown = "00" * BYTES
        raw = bytearray(bytes.fromhex("".join(one.identity or unknown for one in self.held)))
        return {
            "text": torch.frombuffer(bytearray(text), dtype=torch.uint8),
            "numbers": torch.tensor([[one.size, one.time, one.rows] for one in self.held], dtype=torch.int64).view(-1, 3),
            "identity": (torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8)).view(-1, BYTES),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Inputs:
        """Raises ValueError or KeyError where they do not fit each other."""
        names, etags = json.loads(tensors["text"].numpy().tobytes())
        numbers, raw = tensors["numbers"].tolist(), tensors["identity"].contiguous().numpy().tobytes()
        if len(raw) != BYTES * len(names):
            raise ValueError(f"{len(names)} inputs with {len(raw)} bytes of identity")
        made = cls()
        for at, (name, etag, (size, time, rows)) in enumerate(zip(names, etags, numbers, strict=True)):
            own = raw[at * BYTES : (at + 1) * BYTES]
            made.add(Input(str(name), size, time, str(etag), rows, own.hex() if any(own) else ""))
        return made
