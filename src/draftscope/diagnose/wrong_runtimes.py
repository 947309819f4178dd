"""Every wrong runtime of a draft that is known, as a change to how it is read: first of the usual sizes, then of any.

What has a size (a window, a cache that lacks rows, a chunk, a displacement) is looked for among sizes that engines have; only
where none of those explains an engine are others tried, those nearest to its first rounds first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftscope.diagnose.case import Case
from draftscope.diagnose.rotary import THETAS, target_config, target_rope
from draftscope.eagle3.reading import Reading, Runtime

Group = Literal["first", "later"]

BLOCKS = (1, 8, 16, 32, 64, 128, 256)
SIZES = 32
"""Sizes that are tried at most of what may have any."""
FAR = 8
"""Positions by which steps may be displaced."""
THETAS_BETWEEN = tuple(float(f"{lead}e{power}") for power in (3, 4, 5, 6, 7) for lead in (1, 2, 3, 4, 6, 8))
FACTORS = (1.5, 2.5, 3.0, 5.0, 6.0, 10.0, 16.0, 32.0, 40.0)
FED = {
    "target": "gives the second draft step the target's own state, projected, in place of the draft's",
    "previous": "feeds each draft step the state of the step before the last one",
    "branch": "feeds back what the last layer's MLP added, without the residual",
}
"""What draft steps are fed with in place of the step before."""


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


@dataclass(frozen=True, slots=True)
class Dial:
    """Wrong runtimes that differ in one number.

    Attributes:
        make: the trial of a value; values: rising.
        between: a value between two of them may be the right one: those next to the nearest are tried, too.
    """

    group: Group
    make: Callable[[int], Trial]
    values: tuple[int, ...]
    between: bool = False


def table(case: Case, as_read: Reading) -> Iterator[Trial]:
    """Every wrong runtime that is known, as far as this draft and these requests can have it; the plainest first."""
    assert case.checkpoint is not None
    config = case.checkpoint.config.model_copy(update=dict(as_read.settings))
    longest = _longest(case)
    yield from _recurrence(config.norm_output if as_read.feedback is None else as_read.feedback == "post")
    yield from _positions(as_read.runtime)
    yield from _masks(config.sliding_window, config.layers, longest, case)
    yield from _cache(longest)
    yield from _limits(config.max_position_embeddings, longest)
    yield from _rope(dict(config.rope_parameters), case)


def rare(case: Case, as_read: Reading) -> Iterator[Trial]:
    """Those of no usual kind, to be tried one by one."""
    for name in ("previous", "branch"):
        yield Trial(f"fed={name} first", "recur-state", f"{FED[name]}, in the first round after the prompt", "later",
                    (("fed", name), ("fed_first", True)))
    assert case.checkpoint is not None
    config = case.checkpoint.config.model_copy(update=dict(as_read.settings))
    yield from _rope(dict(config.rope_parameters), case, THETAS_BETWEEN, FACTORS, (0.75, 0.125, 0.375))


def dials(case: Case, as_read: Reading) -> Iterator[Dial]:
    """Those of any size, beside the usual ones of `table`; windows are `windows`."""
    runtime, longest = as_read.runtime, _longest(case)
    displaced = tuple(by for by in range(-FAR, FAR + 1) if by not in (-1, 0, 1, 2))
    yield Dial("later", lambda by: _ahead(runtime, by), displaced)
    yield Dial("first", lambda by: _after_prompt(runtime, by), displaced)
    yield Dial("first", _warm, _spread(longest), between=True)
    yield Dial("first", _prefix, tuple(size for size in (2, 3, 4, 5, 6, 12, 24, 48, 96) if size < longest))
    yield Dial("first", _chunk, tuple(size for size in (*range(4, 2 * SIZES), *range(2 * SIZES, 512, 16)) if size < longest))
    yield Dial("first", _unrefreshed, (1, 3, 5, 6, 7, 10, 12, 20, 24))


def windows(alike: int, off: int, k: int) -> Dial:
    """Windows of any size, where rounds without one are like the engine's up to `alike` rows of context, and off from `off` on.

    A round's later drafts see K rows more, and rows just beyond the window may matter little. Where every prompt is longer than
    the window (`alike` = 0), the nearest is looked for.
    """
    if not alike:
        return Dial("first", window, _spread(off + k), between=True)
    return Dial("first", window, tuple(range(max(alike, off - SIZES), off + k)))


def window(size: int | None) -> Trial:
    says = "no sliding window" if size is None else f"a sliding window of {size}"
    return Trial(f"sliding_window={size}", "attn-mask", f"applies {says}", "first", settings=(("sliding_window", size),))


def _longest(case: Case) -> int:
    """Rows of the longest request."""
    assert case.serve is not None
    return max(int(s.positions.max()) + 1 for s in case.serve.sequences if s.rows)


def _spread(end: int) -> tuple[int, ...]:
    step = max(1, end // SIZES)
    return tuple(range(step, end, step))


def _recurrence(post: bool) -> Iterator[Trial]:
    wrong = "pre" if post else "post"
    yield Trial(f"feedback={wrong}", "recur-state", f"feeds the {wrong}-norm state back between draft steps", "later",
                settings=(("norm_output", not post),))
    for name, says in FED.items():
        yield Trial(f"fed={name}", "recur-state", says, "later", (("fed", name),))
    yield Trial("fed=target first", "recur-state", f"{FED['target']}, in the first round after the prompt", "later",
                (("fed", "target"), ("fed_first", True)))


def _ahead(runtime: Runtime, by: int) -> Trial:
    return Trial(f"ahead={by:+d}", "pos-id", f"runs draft steps after the first at a position {_many(by)}", "later",
                 (("ahead", runtime.ahead + by),))


def _after_prompt(runtime: Runtime, by: int) -> Trial:
    return Trial(f"after_prompt={by:+d}", "pos-id", f"runs everything after the prompt at positions {_many(by)}", "first",
                 (("after_prompt", runtime.after_prompt + by),))


def _many(by: int) -> str:
    return f"{abs(by)} too {'high' if by > 0 else 'low'}"


def _positions(runtime: Runtime) -> Iterator[Trial]:
    for by in (1, -1, 2):
        yield _ahead(runtime, by)
        yield _after_prompt(runtime, by)
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
    yield from (_warm(size) for size in BLOCKS if size == 1 or size < longest)
    yield from (_prefix(size) for size in BLOCKS if size < longest)
    size = 8
    while size < longest:
        yield _chunk(size)
        size *= 2
    yield from (_unrefreshed(late) for late in (2, 4, 8, 16, 32))


def _warm(size: int) -> Trial:
    rows = "row" if size == 1 else f"{size} rows"
    return Trial(f"warm={size}", "draft-kv", f"starts drafting with a cache that holds only the prompt's last {rows}", "first",
                 (("warm", size),))


def _prefix(size: int) -> Trial:
    return Trial(f"prefix={size}", "draft-kv", "lacks in the draft's cache the part of a prompt that an earlier request begins "
                 f"with (blocks of {size})", "first", (("prefix", size),))


def _chunk(size: int) -> Trial:
    return Trial(f"chunk={size}", "draft-kv", "gives the draft the prompt's last token at the end of every prefill chunk of "
                 f"{size} rows, in place of the next one", "first", (("chunk", size),))


def _unrefreshed(late: int) -> Trial:
    return Trial(f"unrefreshed={late}", "draft-kv", f"keeps, from round {late} on, what was drafted for accepted rows in the "
                 "draft's cache", "first", (("unrefreshed", late),))


def _limits(limit: int, longest: int) -> Iterator[Trial]:
    for size in dict.fromkeys((limit, *(1 << n for n in range(5, 18)))):
        if size < longest:
            whose = "the draft's max_position_embeddings" if size == limit else f"{size}"
            yield Trial(f"table={size}", "ctx-limit", f"stops counting positions at {whose} ({size})", "first",
                        (("table", size),))


def _rope(own: dict[str, Any], case: Case, thetas: Sequence[float] = THETAS, factors: Sequence[float] = (2.0, 4.0, 8.0),
          parts: Sequence[float] = (0.5, 0.25)) -> Iterator[Trial]:
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
        for part in parts:
            add(f"turns only {part:.0%} of each head", {**own, "partial_rotary_factor": part})
    for other in (t for t in thetas if t != theta and {**own, "rope_theta": t} != target):
        add(f"has a rope theta of {other:g} in effect; the draft's is {theta:g}", {**own, "rope_theta": other})
    if not scaled:
        for factor in factors:
            add(f"applies a linear rope scaling of {factor:g} that the draft does not have",
                {**plain, "rope_type": "linear", "factor": factor})
    for name, (says, parameters) in tried.items():
        yield Trial(f"rope_parameters={name}", "rope", says, "first", settings=(("rope_parameters", parameters),))
