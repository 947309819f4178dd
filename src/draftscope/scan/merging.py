"""Fingerprints of shards as one: read one after the other, merged as a tree, with what does not fit told or refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.fingerprint import Fingerprint, Origin, load_fingerprint
from draftscope.scan.pieces import Tree, together
from draftscope.states.places import Place

PART = re.compile(r"(\d+) of (\d+)")
RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
         ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"))
"""Variables in which torchrun, srun, mpirun and Slurm's arrays say which of how many processes this is; the first pair counts."""
NUMBER = "{i}"
"""In the name of a shard's output: its number."""


@dataclass(frozen=True)
class Read:
    """A fingerprint and the file that it is from."""

    made: Fingerprint
    name: str


@dataclass
class Merged:
    """All fingerprints as one, and what a reader has to know of it."""

    fingerprint: Fingerprint
    notes: list[str]


def merge_files(files: Sequence[Place]) -> Merged:
    """Merge fingerprint files, at most log2 of them in memory.

    Raises:
        DraftscopeError: one cannot be read; they have other widths, entries or dtypes of one source's shards; an input is in two.
    """
    tree: Tree[Read] = Tree(_both)
    settings: dict[str, set[str]] = {"rows taken whole, one in": set(), "version of draftscope": set(), "engine": set()}
    for file in files:
        made = load_fingerprint(file)
        _noted(settings, made)
        tree.add(Read(made, str(file)))
    whole = tree.result()
    if whole is None:
        raise UsageError("nothing to merge", remedy="Name two fingerprints or more")
    made = whole.made
    origins, notes = whole_sources(together(made.origins))
    made.origins = origins
    notes += [f"they differ in {what}: {', '.join(sorted(values))}" for what, values in settings.items() if len(values) > 1]
    if len({origin.path for origin in origins}) > 1:
        notes.append(f"of {len({origin.path for origin in origins})} sources: what they differ by is in the figures as well")
    return Merged(made, notes)


def _noted(settings: dict[str, set[str]], made: Fingerprint) -> None:
    settings["rows taken whole, one in"] |= {str(every) for every in made.every}
    settings["version of draftscope"] |= {one.version for one in made.provenance}
    settings["engine"] |= {one.engine for one in made.provenance}


def _both(one: Read, other: Read) -> Read:
    """The second into the first.

    Raises:
        DraftscopeError: they do not merge; both are named.
    """
    for mine in one.made.origins:
        for its in other.made.origins:
            if mine.path == its.path and mine.format != its.format:
                raise DraftscopeError(f"was read as {mine.format} in {one.name} and as {its.format} in {other.name}",
                                      where=mine.path, remedy="Scan all shards with the same --format")
    try:
        one.made.absorb(other.made)
    except DraftscopeError as error:
        raise DraftscopeError(f"{error.what} ({one.name} and {other.name})", where=error.where, remedy=error.remedy) from None
    return one


def whole_sources(origins: Sequence[Origin]) -> tuple[tuple[Origin, ...], list[str]]:
    """Origins whose shards are all there as one origin each; of others, which shards are missing.

    Raises:
        DraftscopeError: one source in shards of different numbers, which share sequences or leave some out.
    """
    sharded: dict[tuple[str, str, str], dict[int, Origin]] = {}
    numbers: dict[tuple[str, str, str], set[int]] = {}
    result, notes = [], []
    for origin in origins:
        told = PART.fullmatch(origin.part)
        if told is None:
            result.append(origin)
            continue
        key = (origin.path, origin.format, origin.kind)
        numbers.setdefault(key, set()).add(int(told[2]))
        sharded.setdefault(key, {})[int(told[1])] = origin
    for key, parts in sharded.items():
        if len(numbers[key]) > 1:
            raise DraftscopeError(f"is in shards of {' and of '.join(map(str, sorted(numbers[key])))}", where=key[0],
                                  remedy="Merge the shards of one division: I/N with the same N, every I once")
        count = numbers[key].pop()
        missing = [i for i in range(count) if i not in parts]
        if missing:
            named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
            notes.append(f"{key[0]}: {len(missing)} of {count} shards are missing ({named})")
            result += parts.values()
        else:
            held = list(parts.values())
            result.append(replace(held[0], part="", sequences=sum(o.sequences for o in held), rows=sum(o.rows for o in held),
                                  skipped=sum(o.skipped for o in held)))
    return tuple(result), notes


def shard_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """`I/N`, or `auto`: what torchrun, Slurm or mpirun say of this process.

    Raises:
        UsageError: neither.
    """
    if text == "auto":
        for rank, size in RANKS:
            if environment.get(rank, "").isdecimal() and environment.get(size, "").isdecimal():
                number, count = int(environment[rank]), int(environment[size])
                if rank == "SLURM_ARRAY_TASK_ID":
                    number -= int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
                if number < count:
                    return number, count
        raise UsageError("--shard auto: nothing here says which of how many processes this is",
                         remedy=f"Start it by torchrun, srun or mpirun (they set {', '.join(rank for rank, _ in RANKS)}), "
                                "or write I/N")
    number_, _, count_ = text.partition("/")
    if not (number_.isdecimal() and count_.isdecimal() and int(number_) < int(count_)):
        raise UsageError(f"no shard: `{text}`", remedy="Write I/N with I from 0 to N-1, such as 0/4, or auto")
    return int(number_), int(count_)
