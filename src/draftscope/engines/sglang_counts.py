"""SGLang's gauges, counters, decode log lines, per-request fields and server info, as `Counters`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftscope.engines.counted import Counters
from draftscope.engines.definitions import (
    SGLANG_CALLS,
    SGLANG_LENGTH,
    SGLANG_RATES,
    SGLANG_REQUEST_LENGTH,
    SGLANG_REQUEST_RATES,
    Definition,
    Figure,
    Shape,
    Version,
    of_version,
)
from draftscope.engines.prometheus import Scrape
from draftscope.engines.vllm_counts import from_histograms, histogram
from draftscope.errors import DraftscopeError
from draftscope.text import count

NAMES = ("sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:spec_num_steps", "sglang:spec_num_draft_tokens",
         "sglang:spec_verify_calls", "sglang:generation_tokens", "sglang:num_requests")
_COUNTERS = NAMES[4:]
_LINE = re.compile(r"accept len: (\d{1,9}\.\d{1,9}|nan)(?:, accept rate: (\d{1,9}\.\d{1,9}))?")
_RUNNING = re.compile(r"#running-req: (\d{1,9})")
_HEAD = 400
"""Characters within which a decode line says what it is."""
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens")
MOST_NODES = 257
CONTRADICT = "accept len and accept rate agree under no definition known (adaptive steps or constrained decoding)"
PREFILL = "that one of each request taken off"
ENDS = "tokens of a last step beyond the end of its text are not counted, which makes the length a little too low"


def counts(name: str) -> bool:
    """Whether a metric of SGLang's is a counter."""
    return name in _COUNTERS


@dataclass(slots=True)
class Rates:
    """Pairs of length and rate as printed to two decimals, with the weight of each."""

    lengths: list[float]
    rates: list[float]
    rounding: float


def meaning(pairs: Rates, shape: Shape, release: Version) -> tuple[Definition | None, Shape, str]:
    """Which definition of the accept rate is in effect: the release's, or the one under which rate and length agree.

    Returns:
        the definition, None where the pairs cannot tell; the shape, its draft tokens inferred where they were not known; and a
        caveat, empty if there is none.
    """
    named = of_version(SGLANG_RATES, release)
    if shape.nodes is None and shape.steps is None:
        candidates = SGLANG_RATES[1:] if named is None else (named,)
        tried = [(d, Shape(nodes, nodes - 1, shape.topk)) for d in candidates for nodes in range(2, MOST_NODES)]
        found = [(d, guess) for d, guess in tried if _agrees(d, pairs, guess)]
        if len(found) == 1:
            guess = Shape(found[0][1].nodes, None, shape.topk)
            return found[0][0], guess, f"that there are {guess.nodes} draft tokens is inferred from accept len and accept rate"
        return None, shape, ""
    fitting = [d for d in SGLANG_RATES if _agrees(d, pairs, shape)]
    if named is not None:
        if fitting and named not in fitting:
            other = fitting[-1]
            return other, shape, f"the rate is not what release {'.'.join(map(str, release))} counts but {other.counts}"
        return named, shape, "" if fitting or named.to_length(0.5, shape) is None else CONTRADICT
    if not fitting:
        return None, shape, CONTRADICT if shape.nodes is not None else ""
    # Over a chain of K drafts, which is K + 1 draft tokens, the two older definitions are one.
    same = {d.to_length(0.5, shape) for d in fitting}
    return (fitting[-1] if len(same) == 1 else None), shape, ""


def _agrees(known: Definition, pairs: Rates, shape: Shape) -> bool:
    """Whether rates mean the lengths, in the mean over the pairs and within what printing rounds."""
    found = [known.to_length(rate, shape) for rate in pairs.rates]
    if not found or any(f is None for f in found):
        return False
    slope = (known.to_length(1.0, shape) or 0) - (known.to_length(0.0, shape) or 0)
    slack = (pairs.rounding + 1e-9) * (1 + slope)
    return all(abs((f or 0) - length) <= slack for f, length in zip(found, pairs.lengths, strict=True))


def from_scrape(scrape: Scrape, shape: Shape, release: Version, *, window: bool = False) -> Counters | None:
    """Counters where the release has them (0.5.14 on), else the gauges of the last decode interval; None without either.

    Raises:
        DraftscopeError: figures that contradict each other.
    """
    lengths = [v for v in scrape.values("sglang:spec_accept_length") if v > 0]
    rates = scrape.values("sglang:spec_accept_rate")
    nodes, steps = (_one(scrape, f"sglang:spec_num_{name}") for name in ("draft_tokens", "steps"))
    shape = Shape(nodes or shape.nodes, steps or shape.steps, shape.topk)
    calls, made, requests = (scrape.total(name) for name in _COUNTERS)
    figures, caveats = [], []
    if lengths:
        figures.append(Figure(SGLANG_LENGTH, sum(lengths) / len(lengths), shape, "the last decode interval alone"))
    if lengths and len(rates) == len(scrape.values("sglang:spec_accept_length")):
        rates = [r for r, v in zip(rates, scrape.values("sglang:spec_accept_length"), strict=True) if v > 0]
        known, shape, caveat = meaning(Rates(lengths, rates, 0.0), shape, release)
        if known is not None:
            figures.append(Figure(known, sum(rates) / len(rates), shape))
        if caveat:
            caveats.append(caveat)
    span = "between two scrapes" if window else "since the start"
    if calls and made is not None and requests is not None:
        if made < requests:
            raise DraftscopeError(f"{int(made)} generated tokens of {int(requests)} requests contradict each other",
                                  where=scrape.where, remedy="Scrape once, at rest")
        length = (made - requests) / calls
        if length < 0.99:
            raise DraftscopeError(
                f"{int(made)} generated tokens of {int(requests)} requests in {int(calls)} verify steps contradict each other: "
                "each step yields a token", where=scrape.where, remedy="Scrape once, at rest")
        figures.append(Figure(SGLANG_CALLS, made / calls, shape, PREFILL, length))
        return Counters(int(calls), (), round(made - requests - calls), f"SGLang's counters of finished requests {span}",
                        shape=shape, figures=tuple(figures), caveats=(*caveats, ENDS)).checked(scrape.where)
    if not lengths:
        return None
    caveats.append("a gauge of the last decode interval: give a log, or two scrapes of a release with counters (0.5.14 on)")
    return Counters(0, (), 0, "SGLang's accept length gauge", stated=sum(lengths) / len(lengths), shape=shape,
                    figures=tuple(figures), caveats=tuple(caveats)).checked(scrape.where)


def _one(scrape: Scrape, name: str) -> int | None:
    values = {int(v) for v in scrape.values(name) if 0 < v <= 10_000}
    return values.pop() if len(values) == 1 else None


def from_log(lines: Iterable[str], where: str, shape: Shape, release: Version) -> Counters | None:
    """The mean over all decode lines, weighted by running requests; None where there are none.

    Raises:
        DraftscopeError: a length that is none.
    """
    pairs = Rates([], [], 0.005)
    weighted = weight = read = 0.0
    for line in lines:
        if "Decode batch" not in line[:_HEAD] or not (match := _LINE.search(line)):
            continue
        running = _RUNNING.search(line)
        load = min(int(running[1]), 10**6) if running else 1
        if match[1] == "nan" or float(match[1]) > 10_000:
            raise DraftscopeError(f"a line with accept len {match[1][:20]}", where=where, remedy="Give SGLang's own log")
        if not load or float(match[1]) == 0:
            continue
        read += 1
        weight += load
        weighted += load * float(match[1])
        if match[2] is not None:
            pairs.lengths.append(float(match[1]))
            pairs.rates.append(float(match[2]))
    if not read:
        return None
    length = weighted / weight
    figures = [Figure(SGLANG_LENGTH, length, shape, f"the mean of {count(int(read), 'line')}, by running requests")]
    caveats = ["each line averages one decode interval; how many steps it holds is not printed"]
    if pairs.rates:
        known, shape, caveat = meaning(pairs, shape, release)
        if known is not None:
            figures.append(Figure(known, sum(pairs.rates) / len(pairs.rates), shape))
        elif not caveat:
            caveats.append("accept rate: what it counts differs by release, and neither that nor the number of draft tokens is "
                           "known")
        if caveat:
            caveats.append(caveat)
    return Counters(0, (), 0, f"SGLang's log, {count(int(read), 'decode line')}", stated=length, shape=shape,
                    figures=tuple(figures), caveats=tuple(caveats)).checked(where)


def from_requests(found: Sequence[dict[str, Any]], where: str, shape: Shape, release: Version) -> Counters | None:
    """`meta_info` of requests, summed: histograms where all have them, else accepted drafts, else completion tokens.

    None where no request was verified.

    Raises:
        DraftscopeError: counts that contradict each other.
    """
    used = [one for one in found if _whole(one.get("spec_verify_ct"), where, "spec_verify_ct")]
    if not used:
        return None
    calls = sum(int(one["spec_verify_ct"]) for one in used)
    name = next((h for h in _HISTOGRAMS if all(h in one for one in used)), None)
    accepted = next((a for a in _ACCEPTED if all(a in one for one in used)), None)
    completion = all("completion_tokens" in one for one in used)
    tokens = sum(_whole(one["completion_tokens"], where, "completion_tokens") for one in used) if completion else 0
    proposed = sum(_whole(one.get("spec_num_proposed_drafts", one.get("spec_draft_token_num")), where, "drafts") for one in used)
    if proposed and proposed % calls == 0:
        shape = Shape(proposed // calls + 1, shape.steps, shape.topk)
    figures = [Figure(SGLANG_REQUEST_LENGTH, tokens / calls, shape, PREFILL, (tokens - len(used)) / calls)] if completion else []
    rates, caveats = [one.get("spec_accept_rate") for one in used], []
    if all(isinstance(rate, (int, float)) and 0 <= rate <= 1 for rate in rates):
        rate = sum(float(r) * int(one["spec_verify_ct"]) for r, one in zip(rates, used, strict=True) if r is not None) / calls
        known = of_version(SGLANG_REQUEST_RATES, release) or SGLANG_REQUEST_RATES[1]
        figures.append(Figure(known, rate, shape))
    says = f"SGLang's per-request fields of {count(len(used), 'request')}"
    positions: tuple[int, ...] = ()
    if name is not None:
        drafts, positions, total = from_histograms([[*histogram(_padded(one[name]), where)] for one in used])
        if drafts != calls:
            caveats.append(f"the histograms hold {drafts} steps, spec_verify_ct {calls}: the histograms count")
        calls = drafts
        if shape.k is not None and shape.k >= len(positions):
            positions += (0,) * (shape.k - len(positions))
        else:
            caveats.append("positions end with the last that was ever accepted: K is not known")
        if shape.tree:
            caveats.append("of a tree: a position counts as accepted where any of its candidates was")
    elif accepted is not None:
        total = sum(_whole(one[accepted], where, accepted) for one in used)
    elif completion:
        total = tokens - len(used) - calls
        caveats += ["from completion tokens, one of prefill taken off each request", ENDS]
    else:
        raise DraftscopeError("holds verify counts but no accepted ones", where=where, remedy="Give whole `meta_info` fields")
    return Counters(calls, positions, total, says, shape=shape, figures=tuple(figures), caveats=tuple(caveats)).checked(where)


def _padded(value: object) -> object:
    """A histogram as SGLang grows it: at least one entry; one of a single zero count stands for K unknown."""
    return [*value, 0] if isinstance(value, list) and len(value) == 1 else value


def _whole(value: object, where: str, name: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise DraftscopeError(f"{name} is no count", where=where, remedy="Give the engine's own answers")
    return value


def from_server_info(states: Sequence[object], where: str, shape: Shape) -> Counters | None:
    """`avg_spec_accept_length` of each scheduler, since its start; None where there is none."""
    values = [s["avg_spec_accept_length"] for s in states if isinstance(s, dict) and "avg_spec_accept_length" in s]
    if not values:
        return None
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0.99 <= v <= 10_000 for v in values):
        raise DraftscopeError("avg_spec_accept_length is no length", where=where, remedy="Ask the server again")
    mean = sum(values) / len(values)
    caveats = ("the schedulers' averages are averaged as equals",) if len(values) > 1 else ()
    figures = (Figure(SGLANG_LENGTH, mean, shape, "since the server's start"),)
    return Counters(0, (), 0, "SGLang's server info", stated=mean, shape=shape, figures=figures, caveats=caveats).checked(where)
