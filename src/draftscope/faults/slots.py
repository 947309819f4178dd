"""What the faults of slots share: each slot beside what it should hold, in all rows or in those of one phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from draftscope.compare.maps import MAPPED
from draftscope.faults.facts_slots import Held
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.faults.rowcause import claimed
from draftscope.findings import Placed, Strength
from draftscope.target.spoiling import Phase

SAME_SCALE = 0.02
WHOLE = 0.9
"""Share of rows from which a reading holds for a slot as a whole."""
PLAIN = ("none", "lag", "scale", "lag and scale", "direction")
"""Readings under which a slot's place is one of the target's own states."""
TURNED = ("rotation", "permutation")
CLEAR = 0.5
"""Margin from which a boundary found through a map is another than the wanted one."""

Way = Literal["placed", "normed", "turned", "part", "lost"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot beside what it should hold.

    Attributes:
        phase: the rows are of that phase alone; None = all rows alike.
        held: its rows against the states they should be.
    """

    slot: int
    phase: Phase | None
    got: Placed
    want: Placed
    held: Held | None

    @property
    def way(self) -> Way:
        """How the slot is to be read: as a place of the target, or as what a map made of the state it should hold.

        The map has to leave half of the error that the place leaves, at most.
        """
        got, held = self.got, self.held
        sound = got.transform in PLAIN and got.boundary is not None and (got.share or 0.0) > WHOLE
        most = 0.5 * (got.error or 0.0) if sound else float("inf")
        if got.boundary is not None and got.boundary == self.want.boundary and got.norm != self.want.norm:
            return "normed"
        if held is not None:
            if self.norms != (1 if self.want.norm == "post" else 0) and min(held.plain, held.normed, held.twice) < most:
                return "normed"
            if held.turn is not None and held.turn.error < most:
                return "turned"
            if held.part is not None and held.part.error < most:
                return "part"
        if got.transform in TURNED:
            return "turned"
        return "lost" if got.boundary is None else "placed"

    @property
    def elsewhere(self) -> bool:
        """Whether a slot in another basis holds, in that basis, the state of another boundary than it should."""
        got, held = self.got, self.held
        if self.way != "turned" or got.transform not in TURNED or got.boundary is None or self.want.boundary is None:
            return False
        if got.boundary == self.want.boundary or self.want.boundary in got.candidates or (got.margin or 0.0) < CLEAR:
            return False
        return held is None or held.turn is None or (got.error or 0.0) < 0.5 * held.turn.error

    @property
    def norms(self) -> int:
        """How often the final norm was applied to the state that the slot should hold, as far as that explains its rows.

        -1 where it should have been and was not.
        """
        held, wanted = self.held, 1 if self.want.norm == "post" else 0
        if held is None or held.norms == wanted:
            return wanted
        if held.norms == 0:
            return -1 if wanted and held.plain < MAPPED else wanted
        return held.norms

    @property
    def ratio(self) -> float:
        """The factor on all channels, against what it should be."""
        return (1.0 if self.got.scale is None else self.got.scale) / (self.want.scale or 1.0)

    @property
    def rows(self) -> str:
        """The phase in words that go behind a slot's name."""
        return in_words(self.phase)


def in_words(phase: Phase | None) -> str:
    """Behind a slot's name: which of its rows are meant."""
    return {None: "", "prefill": " in the prompt's rows", "verify": " in rows of verify steps"}[phase]


def compared(m: Measurements) -> tuple[SideFacts | None, list[Slot]]:
    """The side that departs from the reference, and every slot of it; twice, by phase, where its phases hold unlike things."""
    side = m.train if m.departed == "train" else m.serve
    if side is None or m.reference is None:
        return None, []
    apart = claimed(m, side)
    return side, [s for s in beside(side, m.reference) if s.slot not in apart]


def beside(side: SideFacts, reference: Sequence[Placed]) -> list[Slot]:
    """The slots of a side beside a reference."""
    found = []
    for got, want in zip(side.slots, reference, strict=False):
        phases: tuple[Phase, ...] = ("prefill", "verify")
        apart = [Slot(got.slot, phase, side.detail.phases[phase][got.slot], want, side.detail.of(got.slot, phase))
                 for phase in phases if phase in side.detail.phases]
        whole = Slot(got.slot, None, got, want, side.detail.of(got.slot))
        told = [slot for slot in apart if slot.way != "lost"]
        if len(told) == 2:
            found += [whole] if _alike(*told) else told
        else:
            # Of rows that hold nothing known no phase can be named: what the others show is all there is.
            found.append(replace(told[0], phase=None) if told else whole)
    return found


def _alike(a: Slot, b: Slot) -> bool:
    """Whether two phases hold the same, rows moved about apart: those are the business of token-shift and of others."""
    x, y = a.got, b.got
    if a.way != b.way or a.way != "placed":
        return a.way == b.way
    place = x.boundary == y.boundary or x.boundary in y.candidates or y.boundary in x.candidates
    return place and x.norm == y.norm and x.kind == y.kind and abs(a.ratio / b.ratio - 1) <= SAME_SCALE


def names(side: SideFacts, slots: Iterable[Slot]) -> list[str]:
    """The slots' names in findings, each once."""
    return list(dict.fromkeys(side.where(s.slot) for s in slots))


def listed(side: SideFacts, slots: Sequence[Slot]) -> str:
    """Slots in words, with the phase where they share one."""
    phases = {s.phase for s in slots}
    shared = in_words(next(iter(phases))) if len(phases) == 1 else ""
    return ", ".join(dict.fromkeys(side.where(s.slot) + ("" if len(phases) == 1 else s.rows) for s in slots)) + shared


def strength(side: SideFacts) -> Strength:
    """What the way in which a side was placed allows to say."""
    return "proven" if side.proof in ("sweep", "pairs") else "suspected"


def figures(side: SideFacts, slots: Iterable[Slot], **more: object) -> dict[str, object]:
    """Placement figures by slot (and phase), for evidence."""
    return {
        side.where(s.slot) + ("" if s.phase is None else f", {s.phase}"): {
            "boundary": s.got.boundary, "norm": s.got.norm, "kind": s.got.kind, "wanted": s.want.boundary, "error": s.got.error,
            "margin": s.got.margin, "share": s.got.share, **({} if s.phase is None else {"phase": s.phase}), **more,
        }
        for s in slots
    }
