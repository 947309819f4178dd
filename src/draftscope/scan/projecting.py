"""How long a source of some size would take on some workers, told from what was measured: an estimate, with what it assumes."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from draftscope.scan.pieces import Done

LEAST = 2**28
"""Bytes from which a rate is one: less is mostly the beginning of a process."""
MEMORY = 0.5
"""Share of the bytes that came from storage below which the rate is that of memory."""


class Projection(BaseModel):
    """A projection, not a measurement (`measured` says what is).

    Attributes:
        bytes, workers: what it is for.
        rate: bytes a second of one worker; `low` and `high` of a tenth and nine tenths of the pieces, where there were several.
        seconds: bytes / (workers x rate); `longest` and `shortest` by `low` and `high`.
        measured: bytes, seconds and workers that the rate is from.
        assumes: what has to hold for it.
    """

    bytes: int
    workers: int
    rate: float
    low: float | None = None
    high: float | None = None
    seconds: float
    longest: float | None = None
    shortest: float | None = None
    measured: Measured
    assumes: list[str]


class Measured(BaseModel):
    """What a rate is from; `from_disk` is the share of the bytes that came from storage, None where that is not known."""

    bytes: int
    seconds: float
    workers: int
    pieces: int
    from_disk: float | None


Projection.model_rebuild()


def project(size: int, workers: int, seen: Sequence[Done], ran: int) -> Projection | None:
    """A projection from pieces that `ran` workers took; None where too little was read to tell.

    The rate of a worker is all bytes over all seconds of pieces, so it holds what the workers cost each other.
    """
    told = [done for done in seen if done.size and done.seconds > 0]
    total, seconds = sum(done.size for done in told), sum(done.seconds for done in told)
    if total < LEAST:
        return None
    rate = total / seconds
    rates = sorted(done.size / done.seconds for done in told)
    low, high = (rates[len(rates) // 10], rates[-1 - len(rates) // 10]) if len(rates) >= 5 else (None, None)
    disk = sum(done.disk for done in told)
    from_disk = disk / total if all(done.disk >= 0 for done in told) else None
    assumes = [
        f"each of {workers:,} workers reads as fast as one of {ran:,} did here ({rate / 1e9:.2f} GB/s), on storage that gives "
        f"{workers * rate / 1e9:,.1f} GB/s in all",
        "sequences of the same width, entries and dtype, and about as long",
        "merging, starting, and pieces that end later than others are left out",
    ]
    if from_disk is None:
        assumes.append("it is not known how much came from disk here, and how much was in memory already")
    elif from_disk < MEMORY:
        assumes.append(f"{100 * (1 - from_disk):.0f} % of the bytes were in memory already: a slower disk makes it longer")
    else:
        assumes.append(f"{100 * min(from_disk, 1):.0f} % of the bytes came from disk here")
    return Projection(
        bytes=size, workers=workers, rate=rate, low=low, high=high, seconds=size / (workers * rate),
        longest=None if low is None else size / (workers * low), shortest=None if high is None else size / (workers * high),
        measured=Measured(bytes=total, seconds=seconds, workers=ran, pieces=len(told), from_disk=from_disk), assumes=assumes,
    )


def words(told: Projection) -> list[str]:
    """A projection in lines."""
    between = f" ({span(told.shortest)} to {span(told.longest)} by the fastest and slowest tenth of the pieces)" if (
        told.shortest is not None and told.longest is not None) else ""
    said = f"{told.bytes / 1e12:,.2f} TB on {told.workers:,} workers would take {span(told.seconds)}{between}"
    return [f"projected, not measured: {said}", *(f"  assumed: {text}" for text in told.assumes)]


def span(seconds: float) -> str:
    """`42 s`, `3.5 min`, `2.1 h`, `4.0 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
