"""vLLM's counters, log lines and per-request metrics, as `Counters`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from draftscope.engines.counted import Counters
from draftscope.engines.definitions import (
    VLLM_LENGTHS,
    VLLM_POSITIONS,
    VLLM_RATE,
    VLLM_V0_EFFICIENCY,
    VLLM_V0_RATE,
    Figure,
    Shape,
)
from draftscope.engines.prometheus import Scrape
from draftscope.errors import DraftscopeError
from draftscope.text import count

PREFIX = "vllm:spec_decode_"
LINE = "SpecDecoding metrics: "
LINE_V0 = "Speculative metrics: "
_FIELDS = {
    "length": re.compile(r"Mean acceptance length: (\d{1,9}\.\d{1,9})(?![\d.])"),
    "accepted": re.compile(r"(?<!throughput: )Accepted: (\d{1,15}) tokens"),
    "drafted": re.compile(r"Drafted: (\d{1,15}) tokens"),
    "positions": re.compile(r"Per-position acceptance rate: (\d\.\d{1,9}(?:, \d\.\d{1,9}){0,1023})"),
}
_V0 = re.compile(
    r"Draft acceptance rate: (\d\.\d{1,9}), System efficiency: (\d\.\d{1,9}), Number of speculative tokens: (\d{1,4}), "
    r"Number of accepted tokens: (\d{1,15}), Number of draft tokens: (\d{1,15}), Number of emitted tokens: (\d{1,15})")
_EXACT = 1000
"""Steps below which three decimals give a count exactly."""


def counts(name: str) -> bool:
    """Whether a metric of vLLM's is a counter."""
    return name.startswith(f"{PREFIX}num_")


def from_scrape(scrape: Scrape) -> Counters | None:
    """The counters of a scrape (or of a difference of two); None where there are none.

    Raises:
        DraftscopeError: counters that contradict each other, or are of two models.
    """
    drafts, accepted = scrape.total(f"{PREFIX}num_drafts"), scrape.total(f"{PREFIX}num_accepted_tokens")
    emitted, drafted = scrape.total(f"{PREFIX}num_emitted_tokens"), scrape.total(f"{PREFIX}num_draft_tokens")
    if drafts is None:
        if emitted is not None or scrape.has(f"{PREFIX}efficiency"):
            return _v0(scrape)
        return None
    models = scrape.by(f"{PREFIX}num_drafts", "model_name")
    if len(models) > 1:
        raise DraftscopeError(f"holds counters of {len(models)} models ({', '.join(sorted(models))[:200]})", where=scrape.where,
                              remedy="Give the lines of one of them")
    positions = scrape.by(f"{PREFIX}num_accepted_tokens_per_pos", "position")
    if any(not place.isdigit() or len(place) > 4 for place in positions):
        raise DraftscopeError("holds a position that is no number", where=scrape.where, remedy="Scrape /metrics again")
    order = sorted(positions, key=int)
    if [int(place) for place in order] != list(range(len(order))):
        raise DraftscopeError(f"lacks positions: there are {', '.join(order)[:80]}", where=scrape.where, remedy="Scrape again")
    per_position = tuple(int(positions[place]) for place in order)
    total = int(accepted) if accepted is not None else sum(per_position)
    if per_position and abs(sum(per_position) - total) > 0.01 * total:
        raise DraftscopeError(f"{total} accepted tokens but {sum(per_position)} over the positions contradict each other",
                              where=scrape.where, remedy="Scrape once, at rest")
    if drafted is not None and (total > drafted or drafts > drafted):
        raise DraftscopeError(
            f"{int(drafts)} steps with {int(drafted)} drafts, {total} of them accepted, contradict each other",
            where=scrape.where, remedy="Scrape once, at rest")
    shape = Shape(steps=len(per_position) or None)
    figures, caveats = [], []
    if drafted and shape.steps:
        note = ""
        if drafted < drafts * shape.steps:
            note = f"{drafted / drafts:.2f} drafts a step: the rate is over fewer than {shape.steps}, and gives another length"
            caveats.append(f"{drafted / drafts:.2f} drafts were verified a step, fewer than {shape.steps} (ends of texts, or a "
                           "budget): later positions had fewer trials than steps")
        figures.append(Figure(VLLM_RATE, total / drafted, shape, note))
    engines = scrape.by(f"{PREFIX}num_drafts", "engine")
    says = "vLLM's spec_decode counters" + (f", {len(engines)} engines together" if len(engines) > 1 else "")
    return Counters(int(drafts), per_position, total, says, shape=shape, figures=tuple(figures),
                    caveats=tuple(caveats)).checked(scrape.where)


def _v0(scrape: Scrape) -> Counters:
    """V0's: its accepted tokens count on after a rejection, so emitted tokens are the only measure."""
    efficiency = next(iter(scrape.values(f"{PREFIX}efficiency")), None)
    rate = next(iter(scrape.values(f"{PREFIX}draft_acceptance_rate")), None)
    figures = [Figure(known, value, Shape()) for known, value in ((VLLM_V0_EFFICIENCY, efficiency), (VLLM_V0_RATE, rate))
               if value is not None]
    return Counters(0, (), 0, "vLLM's V0 metrics", figures=tuple(figures), caveats=(
        "V0's counters hold no number of steps: its log line gives the length",))


def from_log(lines: Iterable[str], where: str) -> Counters | None:
    """All intervals of a log together; None where it has none.

    Raises:
        DraftscopeError: lines that contradict themselves, or that are of several K.
    """
    steps = total = drafted_total = read = old = 0
    sums: list[float] = []
    exact, shape = True, Shape()
    last_v0: Counters | None = None
    for line in lines:
        if LINE_V0 in line and (match := _V0.search(line)):
            last_v0 = _v0_line(match, where)
        if LINE not in line:
            continue
        held = {name: found[1] for name, pattern in _FIELDS.items() if (found := pattern.search(line))}
        if not {"length", "accepted", "drafted", "positions"} <= set(held):
            continue
        accepted, drafted = int(held["accepted"]), int(held["drafted"])
        rates = [float(rate) for rate in held["positions"].split(", ")]
        made = _steps(float(held["length"]), accepted, drafted, rates, where)
        if made is None:
            continue
        number, bonus = made
        if sums and len(sums) != len(rates):
            raise DraftscopeError(f"holds lines of {len(sums)} and of {len(rates)} positions", where=where,
                                  remedy="Give the log of one server start")
        sums = sums or [0.0] * len(rates)
        counted = [rate * number for rate in rates]
        exact &= number < _EXACT
        sums = [s + (round(c) if number < _EXACT else c) for s, c in zip(sums, counted, strict=True)]
        steps, total, drafted_total = steps + number, total + accepted, drafted_total + drafted
        read, old = read + 1, old + (not bonus)
    if not read:
        return last_v0
    shape = Shape(steps=len(sums))
    length = total / steps
    known = VLLM_LENGTHS[0] if old else VLLM_LENGTHS[1]
    figures = [Figure(known, length + (not old), shape), Figure(VLLM_RATE, total / drafted_total, shape)]
    caveats = [] if exact else ["positions are from shares of three decimals"]
    if drafted_total < steps * len(sums):
        caveats.append("steps that drafted fewer than K were counted by their mean length, of two decimals")
    accepted_at = _fitted([round(s) for s in sums], total, steps, where)
    figures.append(Figure(VLLM_POSITIONS, accepted_at[0] / steps, shape, "the first position's"))
    return Counters(steps, tuple(accepted_at), total, f"vLLM's log, {count(read, 'line')}", shape=shape, figures=tuple(figures),
                    caveats=tuple(caveats)).checked(where)


def _steps(length: float, accepted: int, drafted: int, rates: Sequence[float], where: str) -> tuple[int, bool] | None:
    """Verify steps of one line, and whether its mean length counts the bonus: what makes the line agree with itself."""
    k = len(rates)
    if not drafted:
        return None
    if accepted > drafted:
        raise DraftscopeError(f"a line with {accepted} accepted of {drafted} drafts contradicts itself", where=where,
                              remedy="Give vLLM's own log")
    whole = drafted // k
    if drafted % k == 0:
        for bonus in (True, False):
            if abs(accepted / whole + bonus - length) <= 0.0051 and abs(accepted / whole - sum(rates)) <= 0.0006 * k:
                return whole, bonus
    # Chains cut short: the shares of the positions sum to accepted / steps.
    fit = accepted / sum(rates) if sum(rates) else (accepted / (length - 1) if length > 1 and accepted else float(whole))
    steps = max(1, round(fit))
    for bonus in (True, False):
        if abs(accepted / steps + bonus - length) <= 0.0051 + 0.0006 * k:
            return steps, bonus
    raise DraftscopeError(f"a line with mean length {length:.2f}, {accepted} of {drafted} drafts and shares {list(rates)} "
                          "contradicts itself", where=where, remedy="Give vLLM's own log")


def _fitted(accepted: list[int], total: int, steps: int, where: str) -> list[int]:
    """Counts of the positions made to sum to the total, which is exact where they are rounded."""
    if abs(sum(accepted) - total) > max(len(accepted) * 0.001 * steps, 1):
        raise DraftscopeError(f"{total} accepted tokens but {sum(accepted)} over the positions contradict each other",
                              where=where, remedy="Give vLLM's own log")
    return accepted


def _v0_line(match: re.Match[str], where: str) -> Counters:
    k, drafted, emitted = int(match[3]), int(match[5]), int(match[6])
    shape = Shape(steps=k)
    if not k or not drafted or drafted % k:
        raise DraftscopeError(f"{drafted} drafts of {k} a step contradict each other", where=where, remedy="Give vLLM's own log")
    steps = drafted // k
    figures = (Figure(VLLM_V0_EFFICIENCY, float(match[2]), shape), Figure(VLLM_V0_RATE, float(match[1]), shape))
    return Counters(steps, (), emitted - steps, "vLLM's V0 log, its last line", shape=shape, figures=figures).checked(where)


def from_requests(found: Sequence[dict[str, Any]], where: str) -> Counters:
    """Per-request metrics (`metrics.speculative_decoding`), summed.

    Raises:
        DraftscopeError: no histogram of counts, or of several K.
    """
    histograms = [histogram(one.get("acceptance_histogram"), where) for one in found]
    if len({len(h) for h in histograms}) > 1:
        raise DraftscopeError("holds requests of several K", where=where, remedy="Give those of one server start")
    drafts, accepted, total = from_histograms(histograms)
    shape = Shape(steps=len(accepted))
    drafted = sum(int(one["num_draft_tokens"]) for one in found if isinstance(one.get("num_draft_tokens"), int))
    figures = [Figure(VLLM_LENGTHS[1], 1 + total / drafts, shape)] if drafts else []
    figures += [Figure(VLLM_RATE, total / drafted, shape)] if drafted else []
    return Counters(drafts, accepted, total, f"vLLM's per-request metrics of {count(len(found), 'request')}", shape=shape,
                    figures=tuple(figures)).checked(where)


def histogram(value: object, where: str) -> list[int]:
    """Steps by how many drafts they accepted, [K + 1]."""
    fine = isinstance(value, list) and 1 < len(value) <= 1025 and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**53 for n in value)
    if not fine:
        raise DraftscopeError("holds a histogram that is no list of counts", where=where, remedy="Give the engine's own answers")
    assert isinstance(value, list)
    return value


def from_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...], int]:
    """Steps, accepted per position [K] and accepted in all."""
    longest = max(map(len, histograms))
    pooled = [sum(h[j] for h in histograms if j < len(h)) for j in range(longest)]
    accepted = tuple(sum(pooled[k:]) for k in range(1, longest))
    return sum(pooled), accepted, sum(accepted)
