"""One pass over a source: every accepted row of every sequence into its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.fingerprint import Fingerprint, Origin
from draftscope.scan.tally import Tally, share_of
from draftscope.states.types import Sample, Skipped, Source, Trace

RUNS = 8


def scan(
    source: Source, *, slots: int | None = None, shard: tuple[int, int] | None = None, skip_odd: bool = False,
    groups: Mapping[int, str] | None = None, every: int | None = 1, on_item: Callable[[int, int], None] | None = None,
) -> Fingerprint:
    """Statistics of all accepted rows of a source.

    Args:
        source: samples or traces.
        slots: slots of a capture's rows; None = told by the width of the last state, else three.
        shard: (i, n): only every n-th sequence, from the i-th on; all n merge into the fingerprint of the whole.
        skip_odd: pass over sequences of another layout than the first, and count them, instead of raising.
        groups: natural group (source, domain, prompt kind) of a sample, by its file's own number (its input line).
        every: of how many ordinary rows one goes into what needs whole rows (samples, cosines), by a hash of the sequence's name
            and the position; None = by the number of sequences (`share_of`).
        on_item: called after each sequence with its rows and bytes.

    Raises:
        DraftscopeError: nothing readable, or sequences of different layouts.
        UsageError: a shard outside 0 .. n-1, or a share below one row of one.
    """
    if every is not None and every < 1:
        raise UsageError(f"one row of every {every}", remedy="Say 1 for all rows, or more")
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise UsageError(f"shard {shard[0]} of {shard[1]}", remedy="Shards are numbered from 0 to n - 1")
    result: Fingerprint | None = None
    tally: Tally | None = None
    sequences = rows = 0
    dtypes: set[str] = set()
    notes: dict[str, None] = {}
    first, step = (0, 1) if shard is None else shard
    total, groupings = len(source), set[str]()
    every = share_of(total) if every is None else every
    for number, item in enumerate(source if shard is None else islice(source, first, None, step)):
        states, answer, names, last = entries_of(item, slots, notes)
        if result is None or tally is None:
            result = Fingerprint(names, last, int(states.shape[2]))
            tally = Tally(result, every)
        elif (len(result.entries), result.last, result.width) != (len(names), last, states.shape[2]):
            if skip_odd:
                why = f"rows of {len(names)} x {states.shape[2]}, not {len(result.entries)} x {result.width}"
                source.skipped.append(Skipped(item.name, why, cause="layout"))
                continue
            raise DraftscopeError(
                f"has {len(names)} entries of width {states.shape[2]}, those before it {len(result.entries)} of {result.width}",
                where=f"{source.path}: {item.name}", remedy="Scan files of different layouts apart, or --skip-bad",
            )
        sequences += 1
        rows += len(states)
        dtypes.add(str(states.dtype).removeprefix("torch."))
        grouped, group = group_of(item.name, first + number * step, total, str(source.path),
                                  None if groups is None else groups.get(getattr(item, "index", -1)))
        groupings.add(grouped)
        tally.add(item.name, states, answer, group)
        if on_item is not None:
            on_item(len(states), states.nbytes)
    if result is None or tally is None:
        why = f" ({source.skipped[0].path}: {source.skipped[0].why})" if source.skipped else ""
        raise DraftscopeError(f"holds no readable sequence{why}", where=str(source.path))
    tally.close()
    if every > 1:
        notes[f"samples and cosines are of one ordinary row in {every}"] = None
    part = "" if shard is None else f"{shard[0]} of {shard[1]}"
    skipped = len({skip.path for skip in source.skipped})
    result.origins = (Origin(str(source.path), source.format, source.kind, sequences, rows, skipped, part),)
    result.dtypes, result.notes, result.grouped = tuple(sorted(dtypes)), tuple(notes), tuple(sorted(groupings))
    return result


def entries_of(
    item: Sample | Trace, slots: int | None, notes: dict[str, None]
) -> tuple[Tensor, Tensor | None, tuple[str, ...], bool]:
    """States [T, L, Ht] of the accepted rows, answer rows [T] or None, names of entries, whether the last is the last state."""
    if isinstance(item, Sample):
        mask = None if item.loss_mask is None else item.loss_mask.bool()
        return item.states, mask, tuple(item.labels), item.states.shape[1] > 1
    total, last = int(item.fc_input.shape[1]), item.last_hidden
    width = None if last is None or total % last.shape[1] else int(last.shape[1])
    if slots is None:
        slots = 3 if width is None else total // width
    if total % slots:
        raise DraftscopeError(f"rows of width {total} do not divide into {slots} slots", where=item.name,
                              remedy="Say how many slots a row has")
    states = item.fc_input[item.accepted].unflatten(1, (slots, -1))
    names = tuple(f"slot {i}" for i in range(slots))
    rejected = len(item.accepted) - len(states)
    if rejected:
        notes["rejected rows are left out"] = None
    joined = last is not None and last.shape[1] == states.shape[2]
    if last is not None and joined:
        if last.dtype != states.dtype:
            notes[f"last states cast from {last.dtype} to {states.dtype}".replace("torch.", "")] = None
        states = torch.cat([states, last[item.accepted][:, None].to(states.dtype)], 1)
        names = (*names, "last")
    answer = None if item.phase is None else item.phase[item.accepted] == 1
    return states, answer, names, joined


def group_of(name: str, position: int, total: int, path: str, given: str | None = None) -> tuple[str, str]:
    """What kind of natural group a sequence belongs to, and which: the one given, else its file of several, else its run.

    Sources are concatenated from others more often than they are shuffled, so that runs of neighbours (an eighth of the source)
    are the best that can be told where nothing else is.

    Args:
        name: of the sequence within its source; position: its number there, of `total`.
    """
    if given is not None:
        return "given", given
    if name.endswith("]") and "[" in name:
        return "files", f"{path}: {name[: name.rindex('[')]}"
    return "runs", f"{path}: run {min(position * RUNS // max(total, 1), RUNS - 1) + 1} of {RUNS}"
