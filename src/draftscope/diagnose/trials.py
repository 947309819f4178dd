"""Known wrong runtimes as a table of readings, tried one by one where replay as read is not what the engine did.

Cheap first: a few sequences and rounds, by the best that was recorded (draft states, else drafted ids, else counts). What
survives is run over everything. Two at once are tried only one of each group: what changes the first draft of a round, and what
changes the later ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from draftscope.diagnose.case import Case
from draftscope.diagnose.ladder import Ladder, combine
from draftscope.diagnose.likeness import Recorded, Round, likeness
from draftscope.diagnose.rotary import THETAS, target_config, target_rope
from draftscope.diagnose.sampled import drawn, temperature
from draftscope.eagle3.reading import Reading, Runtime
from draftscope.eagle3.replayed import Gate
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.facts_runtime import NEARLY, Likeness, RuntimeFacts, Tried
from draftscope.faults.measurements import SAME, GateFacts

Group = Literal["first", "later"]

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
WINDOWS = 32
"""Windows of no usual size that are tried at most."""
BLOCKS = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Trial:
    """One wrong runtime.

    Attributes:
        name: `key=value`; fault: whose it is; says: what the engine does.
        group: whether the first draft of a round is touched, or only later ones.
        runtime: fields of `Runtime` in which it differs; settings: of the configuration.
    """

    name: str
    fault: str
    says: str
    group: Group
    runtime: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def of(self, reading: Reading) -> Reading:
        """The reading with it added."""
        return replace(reading, settings={**reading.settings, **dict(self.settings)},
                       runtime=replace(reading.runtime, **dict(self.runtime)))

    @property
    def undone(self) -> tuple[str, ...]:
        return tuple(name for name, _ in (*self.runtime, *self.settings))


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
        explains = self._best(self._survivors((t,) for t in wanted))
        if not explains and group != "later":
            explains = self._best(self._survivors((t,) for t in self._windows()))
        explains = explains or self._best(self._survivors(self._pairs(trials, group)))
        self.facts.explains = explains or (self._best(self._survivors((t,) for t in others)) if group == "later" else [])

    def _windows(self) -> Iterator[Trial]:
        """Windows of no usual size: without one the draft is like the engine up to the engine's window, and not beyond."""
        try:
            rounds = self.recorded.rounds(self.ladder.draft(_window(None).of(self.as_read)), self.sample)
        except (DraftscopeError, UsageError):
            return
        alike, off = 0, 0
        for several in rounds.values():
            first = _first_off(several)
            if first < len(several):
                alike = max([alike, *(one.context for one in several[:first])])
                off = min(off or several[first].context, several[first].context)
        # A round's later drafts see K rows more, and rows just beyond the window may matter little.
        sizes = range(max(alike, off - WINDOWS), off + self.case.k)
        if not alike:  # every prompt is longer: the nearest of some sizes, and those round it
            step = max(1, off // WINDOWS)
            nearest = min(range(step, off + self.case.k, step), key=self._away, default=0)
            sizes = range(nearest - step, nearest + step + 1)
        yield from (_window(size) for size in sizes if size > 0)

    def _away(self, size: int) -> float:
        """How far off the engine's first rounds are under a window: a state's error, or the share of rounds."""
        like = self._like(_window(size).of(self.as_read), self.sample, ROUNDS)
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
            gate = None if found is None else gate_facts(found)
            if self.facts.drawn or (gate is not None and gate.passed):
                told.append(Tried(tuple(t.name for t in trials), tuple(t.fault for t in trials), tuple(t.says for t in trials),
                                  tuple(t.undone for t in trials), like, gate))
        if not told:
            return []
        most = max(one.like.share for one in told)
        told = [one for one in told if one.like.share > most - 0.005]
        nearest = min(_distance(one.like) for one in told)
        return [one for one in told if _distance(one.like) <= BETTER * nearest + 1e-6]


def gate_facts(gate: Gate) -> GateFacts:
    """The figures of a gate that rules read."""
    return GateFacts(gate.share, gate.steps, len(gate.near_ties), gate.left_out)


def _with(reading: Reading, trials: Iterable[Trial]) -> Reading:
    for trial in trials:
        reading = trial.of(reading)
    return reading


def _window(size: int | None) -> Trial:
    return Trial(f"sliding_window={size}", "attn-mask", f"applies a sliding window of {size}", "first",
                 settings=(("sliding_window", size),))


def _first_off(rounds: list[Round]) -> int:
    """The first round that departs; their number where none does."""
    return next((one.number for one in rounds if not one.alike), len(rounds))


def _distance(like: Likeness) -> float:
    """The largest median error of a draft position; 0 where no states were recorded."""
    return max((e for e in like.errors if e == e), default=0.0)


def reading_of(tried: Tried, case: Case, as_read: Reading) -> Reading:
    """The reading under which it explains the engine."""
    return _with(as_read, (t for t in table(case, as_read) if t.name in tried.names))


def table(case: Case, as_read: Reading) -> Iterator[Trial]:
    """Every wrong runtime that is known, as far as this draft and these requests can have it; the plainest first."""
    assert case.checkpoint is not None and case.serve is not None
    config = case.checkpoint.config.model_copy(update=dict(as_read.settings))
    longest = max(int(s.positions.max()) + 1 for s in case.serve.sequences if s.rows)
    yield from _recurrence(config.norm_output if as_read.feedback is None else as_read.feedback == "post")
    yield from _positions(as_read.runtime)
    yield from _masks(config.sliding_window, config.layers, longest, case)
    yield from _cache(longest)
    yield from _limits(config.max_position_embeddings, longest)
    yield from _rope(dict(config.rope_parameters), case)


def _recurrence(post: bool) -> Iterator[Trial]:
    wrong = "pre" if post else "post"
    yield Trial(f"feedback={wrong}", "recur-state", f"feeds the {wrong}-norm state back between draft steps", "later",
                settings=(("norm_output", not post),))
    for name, says in (
        ("target", "gives the second draft step the target's own state, projected, in place of the draft's"),
        ("previous", "feeds each draft step the state of the step before the last one"),
        ("branch", "feeds back what the last layer's MLP added, without the residual"),
    ):
        yield Trial(f"fed={name}", "recur-state", f"{says}", "later", (("fed", name),))
        if name == "target":
            yield Trial(f"fed={name} first", "recur-state", f"{says}, in the first round after the prompt", "later",
                        (("fed", name), ("fed_first", True)))


def _positions(runtime: Runtime) -> Iterator[Trial]:
    for by in (1, -1, 2):
        many = f"{abs(by)} too {'high' if by > 0 else 'low'}"
        yield Trial(f"ahead={by:+d}", "pos-id", f"runs draft steps after the first at a position {many}", "later",
                    (("ahead", runtime.ahead + by),))
        yield Trial(f"after_prompt={by:+d}", "pos-id", f"runs everything after the prompt at positions {many}", "first",
                    (("after_prompt", runtime.after_prompt + by),))
    yield Trial("still", "pos-id", "does not advance the position from one draft step to the next", "later", (("still", True),))
    yield Trial("restart", "pos-id", "starts positions again at 0 after the prompt", "first", (("restart", True),))
    for size in BLOCKS[1:]:
        yield Trial(f"padded_to={size}", "pos-id", f"counts positions after the prompt from its length padded to {size}", "first",
                    (("padded_to", size),))


def _masks(window: int | None, layers: int, longest: int, case: Case) -> Iterator[Trial]:
    yield Trial("blind_to_prompt", "attn-mask", "hides the prompt from draft steps after the first", "later",
                (("blind_to_prompt", True),))
    yield Trial("blind_to_drafted", "attn-mask", "hides from each draft step what was drafted before it in its round", "later",
                (("blind_to_drafted", True),))
    if layers > 1:
        yield Trial("two_way", "attn-mask", "lets rows of one pass see later ones", "first", (("two_way", True),))
    tried: dict[int | None, str] = {}
    other: int | None
    if window is not None:
        tried[None] = f"ignores the draft's sliding window of {window}"
        for other in (window - 1, window + 1):
            tried[other] = f"applies a sliding window of {other} in place of {window}"
    own = target_config(case).get("sliding_window")
    if isinstance(own, int) and own != window:
        tried[own] = f"applies the target's sliding window of {own} to the draft"
    size = 8
    while size < longest:
        if size != window:
            tried.setdefault(size, f"applies a sliding window of {size}" + (
                "; the draft has none" if window is None else f" in place of {window}"))
        size *= 2
    for other, says in tried.items():
        if other is None or 0 < other < longest:
            yield Trial(f"sliding_window={other}", "attn-mask", says, "first", settings=(("sliding_window", other),))


def _cache(longest: int) -> Iterator[Trial]:
    yield Trial("unrefreshed=0", "draft-kv", "keeps what was drafted for accepted rows in the draft's cache, without running the "
                "draft over their true features", "first", (("unrefreshed", 0),))
    for kept, says in (("all", "leaves every drafted step's entry in the draft's cache, to be seen by all that follows"),
                       ("rejected", "leaves rejected drafts' entries in the draft's cache, to be seen by all that follows")):
        yield Trial(f"unrewound={kept}", "draft-kv", says, "first", (("unrewound", kept),))
        yield Trial(f"unrewound={kept} counted", "draft-kv", f"{says}, and counts them in positions", "first",
                    (("unrewound", kept), ("counted", True)))
    yield Trial("warm=1", "draft-kv", "starts drafting with a cache that holds only the prompt's last row", "first",
                (("warm", 1),))
    for size in BLOCKS[1:]:
        if size < longest:
            yield Trial(f"warm={size}", "draft-kv", f"starts drafting with a cache of only the prompt's last {size} rows",
                        "first", (("warm", size),))
    for size in BLOCKS:
        if size < longest:
            yield Trial(f"prefix={size}", "draft-kv", "lacks in the draft's cache the part of a prompt that an earlier request "
                        f"begins with (blocks of {size})", "first", (("prefix", size),))
    size = 8
    while size < longest:
        yield Trial(f"chunk={size}", "draft-kv", f"gives the draft the prompt's last token at the end of every prefill chunk of "
                                                 f"{size} "
                    "rows, in place of the next one", "first", (("chunk", size),))
        size *= 2
    for late in (2, 4, 8, 16, 32):
        yield Trial(f"unrefreshed={late}", "draft-kv", f"keeps, from round {late} on, what was drafted for accepted rows in the "
                    "draft's cache", "first", (("unrefreshed", late),))


def _limits(limit: int, longest: int) -> Iterator[Trial]:
    for size in dict.fromkeys((limit, *(1 << n for n in range(5, 18)))):
        if size < longest:
            whose = "the draft's max_position_embeddings" if size == limit else f"{size}"
            yield Trial(f"table={size}", "ctx-limit", f"stops counting positions at {whose} ({size})", "first",
                        (("table", size),))


def _rope(own: dict[str, Any], case: Case) -> Iterator[Trial]:
    theta = float(own.get("rope_theta", 10000.0))
    tried: dict[str, tuple[str, dict[str, Any]]] = {}

    def add(says: str, parameters: dict[str, Any]) -> None:
        name = ",".join(f"{k}={v:g}" if isinstance(v, int | float) else f"{k}={v}" for k, v in sorted(parameters.items()))
        if parameters == own:
            return
        before = tried.get(name)
        tried[name] = (says if before is None else f"{before[0]}, or {says}", parameters)

    scaled = own.get("rope_type", "default") != "default"
    plain = {"rope_type": "default", "rope_theta": theta}
    if scaled:
        add(f"drops the draft's rope scaling ({own['rope_type']})", plain)
    if target := target_rope(case):
        add("turns the draft's queries and keys by the target's rotary table", target)
    if own.get("partial_rotary_factor"):
        add("turns the whole head where the draft has only part of it turned",
            {k: v for k, v in own.items() if k != "partial_rotary_factor"})
    else:
        for part in (0.5, 0.25):
            add(f"turns only {part:.0%} of each head", {**own, "partial_rotary_factor": part})
    for other in (t for t in THETAS if t != theta and {**own, "rope_theta": t} != target):
        add(f"has a rope theta of {other:g} in effect; the draft's is {theta:g}", {**own, "rope_theta": other})
    if not scaled:
        for factor in (2.0, 4.0, 8.0):
            add(f"applies a linear rope scaling of {factor:g} that the draft does not have",
                {**plain, "rope_type": "linear", "factor": factor})
    for name, (says, parameters) in tried.items():
        yield Trial(f"rope_parameters={name}", "rope", says, "first", settings=(("rope_parameters", parameters),))
