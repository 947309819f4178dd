"""Known wrong runtimes, tried one by one where replay as read is not what the engine did.

Cheap first: a few sequences and rounds, by the best that was recorded (draft states, else drafted ids, else counts). What
survives is run over everything. Two at once are tried only one of each group: what changes the first draft of a round, and what
changes the later ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from draftscope.diagnose.case import Case
from draftscope.diagnose.ladder import Ladder, combine
from draftscope.diagnose.likeness import Recorded, Round, likeness
from draftscope.diagnose.sampled import drawn, temperature
from draftscope.diagnose.wrong_runtimes import Dial, Group, Trial, dials, rare, table, window, windows
from draftscope.eagle3.reading import Reading
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.facts_runtime import NEARLY, Likeness, RuntimeFacts, Tried
from draftscope.faults.measurements import SAME, GateFacts

FEW = 3
"""Rounds with a state clearly off from which it is no accident, however few of all they are."""
SAMPLE = 4
"""Sequences on which trials are screened: those that depart most."""
ROUNDS = 2
"""Rounds of each that are run first; then as far as it takes to see it depart, and so many more."""
SCREENED = 0.9
"""Likeness on the sample from which a trial is run over everything."""
LOOKED_AT = 64
"""Rounds of each sequence whose states are looked at though the gate passes: each takes K passes of the draft."""
BETTER = 3.0
"""A trial explains no better than another whose states are off by less than so many times as much."""
EXACT = 0.995
"""Share of first drafts that are the engine's where only later ones are wrong."""


def try_runtimes(case: Case, ladder: Ladder, as_read: Reading, passed: bool) -> RuntimeFacts | None:
    """The engine's own rounds under the reading, and where they differ, under every wrong runtime that is known.

    Args:
        passed: the gate, as read: then only states can still tell of a fault.

    Returns:
        None without recorded rounds.
    """
    assert case.serve is not None
    draft = ladder.draft(as_read)
    recorded = Recorded(draft, case.serve.sequences, case.parts, case.k, case.tree)
    if not recorded.sequences:
        return None
    rounds = recorded.rounds(draft, None, LOOKED_AT if passed else None)
    facts = RuntimeFacts(likeness(rounds, case.k))
    warm = temperature(case.serve.meta)
    if warm and case.tree is None and drawn(draft, case.serve.sequences, warm):
        recorded = Recorded(draft, case.serve.sequences, case.parts, case.k, None, drawn=True)
        rounds = recorded.rounds(draft)
        facts = RuntimeFacts(likeness(rounds, case.k), drawn=True)
        if facts.as_read.states is None:
            return facts
    told = facts.as_read
    rare = (told.departs or 0.0) * told.rounds >= FEW
    if not rare and told.share >= NEARLY and (passed or told.states is not None):
        return facts
    _Search(case, ladder, as_read, recorded, rounds, facts).run()
    return facts


class _Search:
    def __init__(self, case: Case, ladder: Ladder, as_read: Reading, recorded: Recorded, rounds: dict[int, list[Round]],
                 facts: RuntimeFacts) -> None:
        self.case, self.ladder, self.as_read, self.recorded, self.facts = case, ladder, as_read, recorded, facts
        self.rounds = rounds
        worst = sorted(rounds, key=lambda i: (_first_off(rounds[i]), i))
        self.sample = worst[:SAMPLE]
        latest = max((_first_off(rounds[i]) for i in self.sample if _first_off(rounds[i]) < len(rounds[i])), default=0)
        self.most = latest + ROUNDS

    def run(self) -> None:
        trials = list(table(self.case, self.as_read))
        group = self._departs()
        wanted, others = ([t for t in trials if (group in (None, t.group)) is yes] for yes in (True, False))
        explains = (
            self._best(self._survivors((t,) for t in wanted)) or self._best(self._survivors((t,) for t in self._rare(group)))
            or self._best(self._survivors(self._pairs(trials, group)))
        )
        self.facts.explains = explains or (self._best(self._survivors((t,) for t in others)) if group == "later" else [])

    def _rare(self, group: Group | None) -> Iterator[Trial]:
        """What has no usual size or kind."""
        found = list(dials(self.case, self.as_read))
        if group != "later" and (seen := self._unwindowed()) is not None:
            found.insert(0, seen)
        for dial in found:
            if group not in (None, dial.group):
                continue
            chosen: Sequence[int] = dial.values
            if dial.between and chosen:
                nearest = min(range(len(chosen)), key=lambda at, dial=dial: self._away(dial.make(dial.values[at])))  # type: ignore[misc]
                low, high = chosen[max(nearest - 1, 0)], chosen[min(nearest + 1, len(chosen) - 1)]
                chosen = range(min(low, chosen[nearest] - 1) or 1, max(high, chosen[nearest] + 1) + 1)
            yield from map(dial.make, chosen)
        yield from (trial for trial in rare(self.case, self.as_read) if group in (None, trial.group))

    def _unwindowed(self) -> Dial | None:
        """The engine's window as rounds without one tell it: they are alike up to it, and not beyond."""
        try:
            rounds = self.recorded.rounds(self.ladder.draft(window(None).of(self.as_read)), self.sample)
        except (DraftscopeError, UsageError):
            return None
        alike, off = 0, 0
        for several in rounds.values():
            first = _first_off(several)
            if first < len(several):
                alike = max([alike, *(one.context for one in several[:first])])
                off = min(off or several[first].context, several[first].context)
        return windows(alike, off, self.case.k) if off else None

    def _away(self, trial: Trial) -> float:
        """How far off the engine's first rounds are under it: a state's error, or the share of rounds."""
        like = self._like(trial.of(self.as_read), self.sample, ROUNDS)
        return float("inf") if like is None else _distance(like) or 1 - like.share

    def _departs(self) -> Group | None:
        """Which drafts of a round depart: where its first never does, only later ones can be wrong."""
        firsts = [one.errors[0] < SAME if one.errors else one.ids[0] if one.ids else one.found in (-1, one.recorded)
                  for several in self.rounds.values() for one in several]
        told = self.facts.as_read
        if told.states is None and told.ids is None:
            return None
        return "later" if sum(firsts) > len(firsts) - max(FEW, (1 - EXACT) * len(firsts)) else "first"

    def _like(self, reading: Reading, chosen: list[int] | None, most: int | None) -> Likeness | None:
        try:
            found = self.recorded.rounds(self.ladder.draft(reading), chosen, most)
        except (DraftscopeError, UsageError):
            return None  # a setting that this draft cannot have
        return likeness(found, self.case.k)

    def _survivors(self, several: Iterable[tuple[Trial, ...]]) -> list[tuple[tuple[Trial, ...], Likeness]]:
        kept = []
        for trials in several:
            self.facts.tried += 1
            reading = _with(self.as_read, trials)
            like = None
            for chosen, most in ((self.sample, ROUNDS), (self.sample, self.most), (None, None)):
                like = self._like(reading, chosen, most)
                if like is None or like.share < (SCREENED if chosen else NEARLY):
                    break
            else:
                if like is not None and self._better(like):
                    kept.append((trials, like))
        return kept

    def _better(self, like: Likeness) -> bool:
        """Whether it leaves less than half of what was off as read."""
        before = self.facts.as_read
        if like.departs is not None and before.departs:
            return like.departs < before.departs / 2
        return 1 - like.share < (1 - before.share) / 2

    def _pairs(self, trials: list[Trial], group: Group | None) -> Iterator[tuple[Trial, ...]]:
        """Two at once: one that mends the first draft of every round, if that is wrong, and one for those after it; else two
        of different faults for those."""
        if group is None:
            return
        later = [t for t in trials if t.group == "later"]
        if group == "later":
            yield from (pair for pair in combinations(later, 2) if pair[0].fault != pair[1].fault)
            return
        for trial in trials:
            like = self._like(trial.of(self.as_read), self.sample, self.most) if trial.group == "first" else None
            if like is not None and like.off and like.off[0] < 1 - SCREENED:
                yield from ((trial, other) for other in later)

    def _best(self, survivors: list[tuple[tuple[Trial, ...], Likeness]]) -> list[Tried]:
        """Those that the gate passes with, without any whose states are clearly farther off than the nearest's."""
        told = []
        for trials, like in survivors:
            found = None
            if not self.facts.drawn:
                found = self.ladder.served(combine([], _with(self.as_read, trials))).gate()
            gate = None if found is None else GateFacts.of(found)
            if self.facts.drawn or (gate is not None and gate.passed):
                told.append(Tried(tuple(t.name for t in trials), tuple(t.fault for t in trials), tuple(t.says for t in trials),
                                  tuple(t.undone for t in trials), like, gate,
                                  tuple(pair for t in trials for pair in t.runtime),
                                  tuple(pair for t in trials for pair in t.settings)))
        if not told:
            return []
        most = max(one.like.share for one in told)
        told = [one for one in told if one.like.share > most - 0.005]
        nearest = min(_distance(one.like) for one in told)
        return [one for one in told if _distance(one.like) <= BETTER * nearest + 1e-6]


def _with(reading: Reading, trials: Iterable[Trial]) -> Reading:
    for trial in trials:
        reading = trial.of(reading)
    return reading


def _first_off(rounds: list[Round]) -> int:
    """The first round that departs; their number where none does."""
    return next((one.number for one in rounds if not one.alike), len(rounds))


def _distance(like: Likeness) -> float:
    """The largest median error of a draft position; 0 where no states were recorded."""
    return max((e for e in like.errors if e == e), default=0.0)


def reading_of(tried: Tried, as_read: Reading) -> Reading:
    """The reading under which it explains the engine."""
    return replace(as_read, settings={**as_read.settings, **dict(tried.settings)},
                   runtime=replace(as_read.runtime, **dict(tried.runtime)))
