"""Outcomes counted: by class, by amount of data, by pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version

from draftscope.drilling.report import Clean, Drill, Outcome, PairScore, Score, Share
from draftscope.faults import FAULTS
from draftscope.shares import wilson

SINGLES, PAIRS = "all singles", "pairs of faults"


def share(hits: int, of: int) -> Share:
    return Share(hits=hits, of=of, share=hits / of if of else None, interval=wilson(hits, of))


def score(outcomes: Iterable[Outcome], *, keep_cases: bool = True) -> Drill:
    """Everything counted. Where a case was diagnosed on several amounts of data, its class counts the largest.

    Args:
        keep_cases: whether the outcomes themselves go into the result.
    """
    every = sorted(outcomes, key=lambda o: (o.pair, o.kind, o.key, _amount(o)))
    most = _fullest(every)
    scores = []
    one_fault = [o for o in every if o.kind in ("single", "other strength")]
    for name in (f.id for f in FAULTS):
        own = [o for o in one_fault if o.planted[0].fault == name]
        if own:
            scores.append(_score(name, own, most))
    if one_fault:
        scores.append(_score(SINGLES, one_fault, most))
    pairs = [o for o in every if o.kind == "pair"]
    if pairs:
        scores.append(_score(PAIRS, pairs, most))
    healthy = [o for o in every if o.kind == "clean"]
    return Drill(
        schema="draftscope.drill/1", version=version("draftscope"),
        pairs=[_pair(name, [o for o in most if o.pair == name], [o for o in every if o.pair == name])
               for name in dict.fromkeys(o.pair for o in every)],
        scores=scores, clean=_clean(healthy) if healthy else None, cases=every if keep_cases else [],
    )


def _amount(outcome: Outcome) -> float:
    return float("inf") if outcome.tokens is None else outcome.tokens


def _fullest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of each case the diagnosis with the most data."""
    found: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        held = found.get((outcome.pair, outcome.key))
        if held is None or _amount(outcome) >= _amount(held):
            found[outcome.pair, outcome.key] = outcome
    return list(found.values())


def _by_tokens(outcomes: Sequence[Outcome], hit: str) -> dict[str, Share]:
    amounts = sorted({_amount(o) for o in outcomes})
    found = {}
    for amount in amounts:
        some = [o for o in outcomes if _amount(o) == amount and o.error is None]
        hits = sum(bool(o.findings) if hit == "alarm" else o.first_right for o in some)
        found["all" if amount == float("inf") else str(int(amount))] = share(hits, len(some))
    return found


def _score(name: str, own: Sequence[Outcome], most: Sequence[Outcome]) -> Score:
    full = [o for o in most if o in own]
    ran = [o for o in full if o.error is None]
    missed = [o for o in full if not o.first_right or (name == PAIRS and not o.both)]
    return Score(
        fault=name, cases=len(full), errors=len(full) - len(ran),
        first=share(sum(o.first_right for o in ran), len(ran)),
        any=share(sum(any(n.right for n in o.findings) for o in ran), len(ran)),
        proven=sum(o.first_right and o.findings[0].strength == "proven" for o in ran),
        both=share(sum(o.both for o in ran), len(ran)) if name == PAIRS else None,
        wrong_proven=sum(bool(o.wrong_proven) for o in ran), by_tokens=_by_tokens(own, "first"),
        # Of all singles together they stand with their classes.
        misses=[] if name == SINGLES else [f"{o.pair}: {o.key}: {said(o)}" for o in missed],
    )


def _clean(healthy: Sequence[Outcome]) -> Clean:
    full = _fullest(healthy)
    ran = [o for o in healthy if o.error is None]
    return Clean(
        cases=len(full), errors=sum(o.error is not None for o in full),
        alarms=share(sum(bool(o.findings) for o in ran), len(ran)), proven=sum(bool(o.wrong_proven) for o in ran),
        undecided=sum(o.verdict == "undecided" for o in ran),
        by_tokens=_by_tokens(healthy, "alarm"),
        told=[f"{o.pair}: {o.key} (rows {o.tokens or 'all'}): {said(o)}" for o in healthy if o.findings or o.error],
    )


def said(outcome: Outcome) -> str:
    """What the diagnosis said, in one line."""
    if outcome.error is not None:
        return f"crashed: {outcome.error}"
    named = ", ".join(f"{n.fault} ({n.strength})" for n in outcome.findings)
    return named or f"{outcome.verdict}" + (f": {outcome.said[0]}" if outcome.said else "")


def _pair(name: str, full: Sequence[Outcome], every: Sequence[Outcome]) -> PairScore:
    singles = [o for o in full if o.kind != "clean" and o.error is None]
    healthy = [o for o in full if o.kind == "clean" and o.error is None]
    seconds = sum(o.seconds for o in every)
    return PairScore(
        pair=name, cases=len(full), first=share(sum(o.first_right for o in singles), len(singles)),
        alarms=share(sum(bool(o.findings) for o in healthy), len(healthy)),
        seconds_per_case=round(seconds / len(full), 2) if full else None,
    )
