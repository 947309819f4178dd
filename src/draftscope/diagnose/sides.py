"""One side at a time: what its slots hold, and the states that the target itself would have put there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.compare.evidence import Candidate
from draftscope.compare.placed import Placed as PlacedSlot
from draftscope.compare.placed import as_finding
from draftscope.compare.placement import Placer
from draftscope.diagnose.case import Selected
from draftscope.faults.measurements import NonFinite, SideFacts, SideName
from draftscope.findings import Placed
from draftscope.target.model import Target
from draftscope.target.recorded import RecordedSweep
from draftscope.target.spoiling import Phase
from draftscope.target.sweep import sweep

HALVES_FROM = 16
"""Sequences from which a repair is chosen on one half and judged on the other."""

FEWEST = 12
"""Rows of a phase from which its slots are placed on their own."""


def choosing(names: list[str]) -> list[str]:
    """The sequences on which slots are placed and repairs chosen."""
    half = _half(names)
    return [name for name in names if name in half] if half else names


def judging(names: list[str]) -> list[str]:
    """The sequences from which figures come: those on which nothing was chosen, or all where there are few."""
    half = _half(names)
    return [name for name in names if name not in half] if half else names


def _half(names: list[str]) -> set[str]:
    """Half of the names by their hash, so that nothing which repeats (ranks that write in turn) falls into one half alone."""
    if len(names) < HALVES_FROM:
        return set()
    return set(sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[: (len(names) + 1) // 2])


@dataclass(slots=True)
class SweptSide:
    """What a sweep of the target over one side's tokens gave.

    Attributes:
        placed: one entry per slot, as placement found it; the last state's behind them where there is one.
        phases: the same from the rows of one phase alone, where a capture tells the phases apart.
        streams: by sequence name, the target's own states [T, B, Ht] float32 at the boundaries `kept`.
        last: by sequence name, boundary n before the final norm [T, Ht].
        parts: branches and partial streams [T, Ht] float32 that were asked for, by sequence name.
    """

    placed: list[PlacedSlot]
    kept: tuple[int, ...]
    streams: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    phases: dict[Phase, list[PlacedSlot]] = field(default_factory=dict)
    parts: dict[Candidate, dict[str, Tensor]] = field(default_factory=dict)

    def holds(self, place: Placed) -> bool:
        """Whether the target's own states at a place were kept."""
        return place.boundary in self.kept if place.kind == "stream" else candidate(place) in self.parts

    def own(self, name: str, place: Placed) -> Tensor:
        """[T, Ht]: the target's own states of a sequence at a place, before any norm."""
        if place.kind == "stream":
            return self.reference(name, [place.boundary or 0])[:, 0]
        return self.parts[candidate(place)][name]

    def reference(self, name: str, boundaries: list[int]) -> Tensor:
        """[T, len(boundaries), Ht]: what the slots of a sequence should hold."""
        return self.streams[name][:, [self.kept.index(b) for b in boundaries]]


def candidate(place: Placed) -> Candidate:
    """A branch or partial stream as placement knows it."""
    return Candidate(Boundary(place.boundary or 0, "pre", place.kind or "stream"), place.mlp)


def sweep_side(
    target: Target | RecordedSweep, selected: Selected, keep: tuple[int, ...], on_tokens: Callable[[int], None] | None = None,
    *, parts: Iterable[Candidate] = (),
) -> SweptSide:
    """Run the target over a side's tokens once: place every slot, and keep its own states at some boundaries, and some parts.

    Slots are placed from the sequences on which a repair is chosen, so that its effect is measured on others.
    """
    placer = Placer()
    placing = set(choosing([sequence.name for sequence in selected.sequences]))
    result, told = SweptSide([], keep, parts={part: {} for part in parts}), False
    by_name = {sequence.name: sequence for sequence in selected.sequences}
    items = [(name, sequence.token_ids[: sequence.rows]) for name, sequence in by_name.items()]
    found = target.sweep(items, on_tokens=on_tokens) if isinstance(target, RecordedSweep) else sweep(
        target, items, partial=True, on_tokens=on_tokens)
    for swept in found:
        sequence = by_name[swept.name]
        slots = sequence.features.float()
        if sequence.last is not None:
            slots = torch.cat([slots, sequence.last.float()[:, None]], 1)
        if swept.name in placing:
            verify = sequence.answer if selected.source.kind == "traces" else None
            told |= verify is not None
            placer.update(slots, swept, None if verify is None else verify[: sequence.rows])
        result.streams[swept.name] = swept.stream[list(keep)].transpose(0, 1).float().clone()
        result.last[swept.name] = swept.stream[-1].float().clone()
        for part in result.parts:
            result.parts[part][swept.name] = part.rows(swept, torch.arange(sequence.rows))
    result.placed = placer.result()
    if told:
        result.phases = {"prefill": placer.result(verify=False), "verify": placer.result(verify=True)}
    return result


def side_facts(name: SideName, selected: Selected, swept: SweptSide | None) -> SideFacts:
    """The figures of one side that faults look at."""
    first = selected.sequences[0]
    facts = SideFacts(
        name=name,
        sequences=len(selected.sequences),
        tokens=selected.rows,
        nonfinite=[NonFinite(*bad) for bad in sorted(selected.nonfinite)],
        masked=selected.masked,
        empty=selected.empty,
        answer_tokens=selected.answer_tokens,
    )
    facts.detail.claimed_norm, facts.detail.stored_in = selected.claimed_norm, str(first.features.dtype).removeprefix("torch.")
    if swept is not None:
        slots = int(first.features.shape[1])
        converted = [as_finding(placed, _label(selected, placed.slot)) for placed in swept.placed]
        facts.slots, facts.proof = converted[:slots], "sweep"
        facts.detail.phases = {
            phase: [as_finding(placed, _label(selected, placed.slot)) for placed in several[:slots]]
            for phase, several in swept.phases.items() if all(placed.rows >= FEWEST for placed in several[:slots])
        }
        facts.last = converted[slots].model_copy(update={"slot": -1}) if len(converted) > slots else None
    return facts


def _label(selected: Selected, slot: int) -> str:
    labels = selected.labels
    if not labels:
        claimed = selected.meta.get("labels") or selected.meta.get("layer_ids")
        labels = tuple(str(x) for x in claimed) if isinstance(claimed, list) else ()
    return labels[slot] if slot < len(labels) else ""
