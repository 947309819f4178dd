"""Replays of the draft: on training states, on served states, on the target's own, with faults undone. Each run once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftscope.compare.maps import FEWEST, fitted_turn
from draftscope.diagnose.case import Case
from draftscope.diagnose.changing import Map, changed, rows_of, shifted
from draftscope.diagnose.reference import explained
from draftscope.diagnose.sides import SweptSide, choosing
from draftscope.eagle3.checkpoint import build_draft
from draftscope.eagle3.model import Draft
from draftscope.eagle3.reading import Reading, Runtime
from draftscope.eagle3.replay import replay
from draftscope.eagle3.replayed import Replay
from draftscope.faults.base import Undo
from draftscope.faults.changes import Change, TurnBack
from draftscope.faults.measurements import Measurements
from draftscope.findings import Placed
from draftscope.linting.vocabulary import rebuilt_ids
from draftscope.states.types import Sequence

ROWS = 4096
"""Rows on which an orthogonal map is fitted, at most."""
VIEWED = ("rope_parameters", "sliding_window", "norm_output")
"""Settings that no weight's shape or use depends on."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Faults undone together: what changes in the served states, and in how the draft is read."""

    reference: frozenset[int] = frozenset()
    order: tuple[int, ...] = ()
    states: tuple[Change, ...] = ()
    reading: Reading = field(default_factory=Reading)
    rebuilt_map: bool = False
    ids: tuple[int, ...] = ()
    given: bool = False


def combine(undos: Iterable[Undo], base: Reading) -> Repair:
    """The repair that undoes all of these, starting from a reading in effect."""
    repair = Repair(reading=base)
    for undo in undos:
        reading, rebuilt = repair.reading, repair.rebuilt_map
        if undo.d2t == "rebuilt":
            rebuilt = True
        elif undo.d2t is not None:
            reading = replace(reading, d2t=undo.d2t)
        if undo.settings:
            reading = replace(reading, settings={})
        if undo.feedback is not None:
            reading = replace(reading, feedback=undo.feedback)
        if undo.switches:
            reading = replace(reading, settings={**reading.settings, **undo.switches})
        if undo.loading:
            reading = replace(reading, altered=(), lost=())
        if undo.altered:
            reading = replace(reading, altered=(*reading.altered, *undo.altered))
        if undo.target_embedding:
            reading = without_embedding(reading)
        if undo.habits or undo.unset:
            reading = right_again(reading, undo.habits, undo.unset)
        repair = Repair(
            reference=repair.reference | undo.reference,
            order=undo.order or repair.order,
            states=(*repair.states, *undo.states),
            reading=reading,
            rebuilt_map=rebuilt,
            ids=undo.ids or repair.ids,
            given=repair.given or undo.given,
        )
    return repair


def without_embedding(reading: Reading) -> Reading:
    """The reading with the checkpoint's own embedding passed over: the target's stands in."""
    return replace(reading, lost=(*reading.lost, "embed_tokens."))


def right_again(reading: Reading, habits: Iterable[str], unset: Iterable[str]) -> Reading:
    """The reading with some habits of the engine right, and some settings as the checkpoint has them."""
    right, gone = Runtime(), set(unset)
    return replace(reading, runtime=replace(reading.runtime, **{name: getattr(right, name) for name in habits}),
                   settings={name: value for name, value in reading.settings.items() if name not in gone})


def as_meant(m: Measurements) -> Repair:
    """The checkpoint as its trainer meant it, its vocabulary map mended where the file allows that."""
    facts = m.vocabulary
    if facts is not None and facts.stored == "absolute":
        return combine([], Reading(d2t="absolute"))
    if facts is not None and facts.stored in ("missing", "zero", "contradicts") and facts.rebuilt:
        return combine([Undo(d2t="rebuilt")], Reading())
    return combine([], Reading())


class Ladder:
    """Runs the draft over the case's states and remembers every result.

    Args:
        reference: what the slots should hold, for states re-made by the target.
    """

    def __init__(
        self,
        case: Case,
        serve: SweptSide | None,
        reference: tuple[Placed, ...] | None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self.case, self.serve, self.reference, self.on_tokens = case, serve, reference, on_tokens
        self._replays: dict[object, Replay] = {}
        self._drafts: dict[object, Draft] = {}
        self._turns: dict[TurnBack, Map | None] = {}

    @property
    def replays(self) -> int:
        """How many there have been."""
        return len(self._replays)

    @property
    def can_remake(self) -> bool:
        """Whether the target's own states at the reference boundaries are at hand."""
        return (
            self.serve is not None
            and self.reference is not None
            and all(self.serve.holds(p) and explained(p) for p in self.reference)
            and (self.case.parts is not None or all(p.norm == "pre" for p in self.reference))
        )

    def draft(self, reading: Reading, rebuilt_map: bool = False, ids: tuple[int, ...] = ()) -> Draft:
        """The checkpoint's draft under a reading; `ids`: its target ids, where others than any map says.

        Readings that differ in no weight share them.
        """
        assert self.case.checkpoint is not None
        viewed = () if self.case.checkpoint.config.mla is not None else VIEWED
        settings = {name: value for name, value in reading.settings.items() if name in viewed}
        weights = replace(reading, runtime=Runtime(), settings={n: v for n, v in reading.settings.items() if n not in viewed})
        key = (repr(weights), rebuilt_map, ids)
        if key not in self._drafts:
            draft = build_draft(self.case.checkpoint, self.case.parts, weights)
            rebuilt = rebuilt_ids(self.case.checkpoint) if rebuilt_map else None
            if rebuilt is not None:
                draft.target_ids = rebuilt
            if ids:
                draft.target_ids = torch.tensor(ids)
            self._drafts[key] = draft
        if reading.feedback is not None:
            settings.pop("norm_output", None)
        return self._drafts[key].view(reading.runtime, settings)

    def trained(self, repair: Repair) -> Replay:
        """On training states, held-out ones if given."""
        chosen = self.case.heldout or self.case.train
        assert chosen is not None
        return self._run(("trained", repair.reading, repair.rebuilt_map, repair.ids), repair, chosen.sequences)

    def in_sample(self, repair: Repair) -> Replay:
        """On training states, whether held-out ones are given or not."""
        assert self.case.train is not None
        return self._run(("in sample", repair.reading, repair.rebuilt_map, repair.ids), repair, self.case.train.sequences)

    def served(self, repair: Repair) -> Replay:
        """On the served states with a repair applied."""
        assert self.case.serve is not None
        return self._run(("served", repair), repair, (self._repaired(s, repair) for s in self.case.serve.sequences))

    def repaired(self, repair: Repair, names: Collection[str]) -> Iterable[Sequence]:
        """Some of the served sequences with their states repaired."""
        assert self.case.serve is not None
        return (self._repaired(s, repair) for s in self.case.serve.sequences if s.name in names)

    def with_draft(self, draft: Draft, names: Collection[str]) -> Replay:
        """Another draft on some of the served sequences, states as they came; not remembered."""
        chosen = self.repaired(Repair(), names)
        return replay(draft, chosen, parts=self.case.parts, k=self.case.k, tree=self.case.tree, on_tokens=self.on_tokens)

    def remade_sequences(self) -> Iterable[Sequence]:
        """The served sequences with the target's own states at the reference boundaries."""
        assert self.case.serve is not None and self.reference is not None
        whole = Repair(reference=frozenset(range(len(self.reference))))
        return (self._repaired(s, whole) for s in self.case.serve.sequences)

    def remade(self, repair: Repair) -> Replay:
        """On the served tokens with the target's own states."""
        assert self.reference is not None
        whole = replace(repair, reference=frozenset(range(len(self.reference))), order=(), states=())
        return self.served(whole)

    def _run(self, key: tuple[object, ...], repair: Repair, sequences: Iterable[Sequence]) -> Replay:
        name = repr((key, [(p.boundary, p.norm, p.kind, p.mlp, p.scale, p.lag) for p in self.reference or ()]))
        if name not in self._replays:
            draft = self.draft(repair.reading, repair.rebuilt_map, repair.ids)
            self._replays[name] = replay(
                draft, sequences, parts=self.case.parts, k=self.case.k, tree=self.case.tree, on_tokens=self.on_tokens,
            )
        return self._replays[name]

    def _repaired(self, sequence: Sequence, repair: Repair) -> Sequence:
        features = sequence.features
        if repair.states:
            features = changed(sequence, repair.states, lambda: self.own(sequence), self.turn)
        if repair.order:
            features = features[:, list(repair.order)]
        if repair.reference:
            features = features.float().clone()
            own = self.own(sequence)
            for slot in repair.reference:
                features[:, slot] = own[:, slot]
        last = sequence.last
        if last is None and self.serve is not None:
            # What the target would say needs its last state, and the sweep over the same tokens has it.
            last = self.serve.last[sequence.name]
        answer = self.case.answers.get(sequence.name) if sequence.answer is None else sequence.answer
        return replace(sequence, features=features, last=last, answer=answer, inputs=None if repair.given else sequence.inputs)

    def own(self, sequence: Sequence) -> Tensor:
        """The target's own states [T, S, H], as the reference has them: with its factor, its lag, after the norm or before."""
        assert self.serve is not None and self.reference is not None
        states = []
        for place in self.reference:
            state = self.serve.own(sequence.name, place)
            if place.norm == "post" and self.case.parts is not None:
                state = self.case.parts.final_norm(state)
            states.append(shifted(state * (1.0 if place.scale is None else place.scale), place.lag or 0))
        return torch.stack(states, 1)

    def turn(self, change: TurnBack) -> Map | None:
        """The orthogonal map of a slot, fitted on the sequences on which repairs are chosen."""
        if change not in self._turns:
            assert self.case.serve is not None and self.serve is not None
            sequences = {s.name: s for s in self.case.serve.sequences}
            found, own = [], []
            for name in choosing(list(sequences)):
                rows = rows_of(sequences[name], change.phase) & sequences[name].features[:, change.slot].isfinite().all(-1)
                found.append(sequences[name].features[rows, change.slot].float())
                right = self.own(sequences[name])[:, change.slot] if change.boundary is None else (
                    self.serve.reference(name, [change.boundary])[:, 0])
                own.append(right[rows])
            x, r = torch.cat(found)[:ROWS], torch.cat(own)[:ROWS]
            self._turns[change] = fitted_turn(x, r) if len(x) >= FEWEST else None
        return self._turns[change]
