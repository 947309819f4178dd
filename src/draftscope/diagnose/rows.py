"""Row by row: what each side says of itself, and, where placement found a slot to hold several things, what its rows hold."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from draftscope.compare.rowwise import Rowwise, Slot, blocks_alone, blocks_of, identical, interleaved_errors
from draftscope.compare.runs import Recorded
from draftscope.compare.within import within
from draftscope.diagnose.case import Selected
from draftscope.faults.facts_rows import Blocks, RowFacts, SlotRows, Unfit
from draftscope.faults.measurements import SideFacts
from draftscope.findings import Placed
from draftscope.states.types import Trace
from draftscope.target.sweep import sweep

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

SOUND = 0.995
"""Share of a slot's rows that match as placed, from which they need no look one by one."""
TRACES = 256
"""Requests whose own ids are held against each other."""
KEPT = 1024
"""Rows kept for the question of which channels are whose."""


def integrity(examination: Examination) -> None:
    """What each side's rows say without the target: repeated, unlike under like tokens, channels missing, slots alike."""
    for name, selected in (("train", examination.case.train), ("serve", examination.case.serve)):
        facts = examination.m.rows.setdefault(name, RowFacts())  # type: ignore[arg-type]
        facts.counted = examination.case.counted.get(name)
        if selected is not None:
            _alone(facts, selected, served=name == "serve")


def _alone(facts: RowFacts, selected: Selected, *, served: bool) -> None:
    items = [
        Recorded(s.name, s.token_ids[: s.rows], s.positions, s.features,
                 torch.zeros(s.rows, dtype=torch.bool) if s.answer is None else s.answer[: s.rows].bool())
        for s in selected.sequences if s.rows
    ]
    traces = [t for t in itertools.islice(iter(selected.source), TRACES) if isinstance(t, Trace)] if served else []
    found = within(traces, items)
    facts.prefix_rows, facts.prefix_differ, facts.prefix_example = found.prefix_rows, found.prefix_differ, found.prefix_example
    facts.chained, facts.broken, facts.broken_example = found.chained, found.broken, found.broken_example
    facts.rows, facts.verify_rows = sum(len(i.token_ids) for i in items), sum(int(i.verify.sum()) for i in items)
    facts.repeats = list(found.repeats)
    facts.identical = identical(selected.sequences)
    facts.unfit = _unfit(selected)
    for slot in range(items[0].slots.shape[1] if items else 0):
        states = torch.cat([item.slots[:, slot] for item in items])[:KEPT]
        if (held := blocks_alone(states)) is not None:
            facts.blocks.append(Blocks(slot, held[0], held[1], len(states)))


def _unfit(selected: Selected) -> dict[int, Unfit]:
    """By slot (-1: the last state) what its values that are not finite are, and where."""
    found = {}
    first = selected.sequences[0]
    for slot in [*range(first.features.shape[1]), *([-1] if first.last is not None else [])]:
        states = [s.features[:, slot] if slot >= 0 else s.last for s in selected.sequences]
        bad = [(~x.isfinite(), x) for x in states if x is not None]
        if not any(bool(mask.any()) for mask, _ in bad):
            continue
        rows = [mask.any(-1).nonzero().squeeze(-1) for mask, _ in bad]
        channels = torch.stack([mask.any(0) for mask, _ in bad]).any(0)
        since = min(int(r[0]) for r in rows if len(r))
        found[slot] = Unfit(
            nan=sum(int(x.isnan().sum()) for _, x in bad), inf=sum(int(x.isinf().sum()) for _, x in bad),
            channels=int(channels.sum()), of=len(channels), since=since, last=max(int(r[-1]) for r in rows if len(r)),
            sequences=sum(len(r) > 0 for r in rows), longer=sum(len(x) > since for _, x in bad),
        )
    return found


def examine_rows(examination: Examination) -> None:
    """Each side's slots that are not of one kind, row by row against the target's own states."""
    case, m = examination.case, examination.m
    target = case.recorded or case.target
    for facts, selected in ((m.train, case.train), (m.serve, case.serve)):
        if facts is None or selected is None or facts.proof != "sweep" or target is None:
            continue
        rows = m.rows[facts.name]
        rows.places = tuple(p.boundary for p in facts.slots)
        wanted = _wanted(facts, m.reference)
        mixed = {slot: b for slot, b in wanted.items() if not _sound(facts.slots[slot])}
        if not mixed:
            continue
        examination.report(f"looking at rows of {len(mixed)} slots one by one")
        gathered = Rowwise(mixed)
        items = {s.name: s for s in selected.sequences}
        tokens = [(name, s.token_ids[: s.rows]) for name, s in items.items()]
        whole = len(wanted) == len(facts.slots) and len(mixed) == len(wanted)
        # A trainer's last state is written with its slots, or apart.
        turned: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        found = target.sweep(tokens) if case.recorded is not None else sweep(target, tokens, partial=True)  # type: ignore[union-attr, arg-type]
        for swept in found:
            sequence = items[swept.name]
            gathered.update(sequence, swept)
            for with_last in ((False, True) if facts.name == "train" else (False,)) if whole else ():
                turned[with_last].append(interleaved_errors(sequence, swept, [wanted[i] for i in range(len(wanted))],
                                                            with_last=with_last)[1:])
        gathered.finish()
        medians = [float(torch.cat(errors).nan_to_num(torch.inf).median()) for errors in turned.values() if errors]
        rows.interleaved = min(medians, default=None)
        known = {b.slot for b in rows.blocks}
        for slot, held in gathered.slots.items():
            rows.slots.append(_slot_rows(slot, held, gathered))
            if slot not in known and held.bad:
                _blocks(rows, slot, held, gathered)
        examination.steps.append(f"{facts.name} rows one by one: " + "; ".join(_words(facts, s) for s in rows.slots))


def _wanted(facts: SideFacts, reference: tuple[Placed, ...] | None) -> dict[int, int]:
    """Whole streams that the slots should hold."""
    return {
        i: want.boundary for i, want in enumerate(reference or ())
        if i < len(facts.slots) and want.boundary is not None and want.kind == "stream" and want.norm == "pre" and not want.lag
    }


def _sound(placed: Placed) -> bool:
    return placed.boundary is not None and placed.transform in ("none", "lag", "scale", "lag and scale") and (
        placed.share is None or placed.share >= SOUND)


def _slot_rows(slot: int, held: Slot, gathered: Rowwise) -> SlotRows:
    example = ""
    if held.bad:
        first = held.bad[0]
        example = f"{gathered.names[first.sequence]}, row {first.row}"
    elif held.zeros:
        number, zeros = held.zeros[0]
        example = f"{gathered.names[number]}, row {zeros[0]}"
    return SlotRows(
        slot, held.wanted, dict(held.kinds), dict(held.verify) if gathered.phased else {}, dict(held.places), held.later,
        dict(held.offsets), held.steps, gathered.of_step_before(held), held.beside, held.whole,
        gathered.shard(held) or gathered.turned(held), example,
    )


def _blocks(rows: RowFacts, slot: int, held: Slot, gathered: Rowwise) -> None:
    some = held.bad[:KEPT]
    x = torch.stack([row.x for row in some])
    r = torch.stack([gathered.states[held.wanted][row.sequence][row.row] for row in some])
    if (found := blocks_of(x, r)) is not None:
        rows.blocks.append(Blocks(slot, found[0], found[1], len(some), found[2]))


def _words(facts: SideFacts, rows: SlotRows) -> str:
    shares = (f"{rows.share(kind):.0%} {kind}" for kind, count in rows.kinds.items() if count)
    return f"{facts.where(rows.slot)} {', '.join(shares)}"
