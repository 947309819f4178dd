"""TensorBoard's event files, read without it: records of a length, and in them protobuf messages of which the scalars count.

Facts: a record is a little-endian 8-byte length, 4 bytes of checksum, the message, 4 bytes of checksum (TFRecord). `Event` has
the step in field 2 and a `Summary` in field 5; that has `Value`s in field 1: tag in field 1, `simple_value` in field 2, a tensor
in field 8 whose `float_val` is field 5 and `tensor_content` field 4 (tensorflow's event.proto, summary.proto, tensor.proto).
Checksums are not checked; every length is, against what is there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from draftscope.errors import DraftscopeError

LONGEST = 64 << 20
"""Bytes of one record at most; a summary of scalars takes a few hundred."""
DEEPEST = 10


def scalars(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, tag -> value) of each event that holds scalars, in order. A last record that was cut off ends the file.

    Raises:
        DraftscopeError: what is there is no record, naming its place.
    """
    with path.open("rb") as file:
        number = at = 0
        while header := file.read(12):
            if len(header) < 12:
                return
            length = struct.unpack("<Q", header[:8])[0]
            if length > LONGEST:
                raise _fail(path, number, at, f"a record of {length} bytes")
            message = file.read(length)
            if len(message) < length or len(file.read(4)) < 4:
                return
            try:
                step, values = _event(message)
            except ValueError as error:
                raise _fail(path, number, at, str(error)) from None
            if values:
                yield step, values
            number, at = number + 1, at + length + 16


def _fail(path: Path, number: int, at: int, what: str) -> DraftscopeError:
    return DraftscopeError(f"not an event file: {what}", where=f"{path}: record {number}, byte {at}",
                           remedy="Give the events.out.tfevents file as the trainer wrote it")


def _event(message: bytes) -> tuple[int, dict[str, float]]:
    step, values = 0, dict[str, float]()
    for field, value in _fields(message):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for inner, one in _fields(value):
                if inner == 1 and isinstance(one, bytes):
                    tag, number = _value(one)
                    if tag and number is not None:
                        values[tag] = number
    return step, values


def _value(message: bytes) -> tuple[str, float | None]:
    tag, number = "", None
    for field, value in _fields(message):
        if field == 1 and isinstance(value, bytes):
            tag = value[:512].decode("utf-8", "replace")
        elif field == 2 and isinstance(value, float):
            number = value
        elif field == 8 and isinstance(value, bytes):
            number = _tensor(value)
    return tag, number


def _tensor(message: bytes) -> float | None:
    """The value of a tensor of one float32."""
    dtype, found = 0, None
    for field, value in _fields(message):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            found = float(struct.unpack("<f", value)[0])
        elif field == 5 and isinstance(value, float):
            found = value
    return found if dtype == 1 else None


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of a message's fields: varints, float32, and bytes; float64 is passed over."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield field, value
        elif kind == 2:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise ValueError(f"field {field} ends beyond its message")
            yield field, message[at : at + length]
            at += length
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            if at + size > len(message):
                raise ValueError(f"field {field} ends beyond its message")
            if kind == 5:
                yield field, float(struct.unpack_from("<f", message, at)[0])
            at += size
        else:
            raise ValueError(f"field {field} is of the unknown kind {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(DEEPEST):
        if at + i >= len(message):
            raise ValueError("a number is cut off")
        byte = message[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number is longer than ten bytes")
