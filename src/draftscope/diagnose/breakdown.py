"""Acceptance by where a round starts, and by what the prompt looks like, on every rung whose rounds are at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from draftscope.diagnose.case import Selected
from draftscope.diagnose.ladder import as_meant
from draftscope.eagle3.acceptance import Counts, Ints, summarise
from draftscope.eagle3.replayed import Replay
from draftscope.findings import Readout
from draftscope.states.types import Sequence
from draftscope.views import Breakdown, Part

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

QUANTILES = (0.2, 0.4, 0.6, 0.8)
KINDS = ("code", "figures", "another script", "long text", "question", "instruction")
_CODE = re.compile(
    r"```|\b(?:python|javascript|typescript|java|rust|sql|regex|bash|html|css|code|algorithm|compile[rs]?|script)\b|"
    r"\bdef \w+\(|\bfunction\b|#include|[{};]\s*\n", re.IGNORECASE)
_FIGURES = re.compile(r"\d+ ?[-+*/^=%] ?\d|\b(?:calculate|equation|solve|sum of|how many|percent|average)\b", re.IGNORECASE)
LONG = 1200
"""Characters of a prompt that count as a long text."""
READ = 8000
"""Characters of a prompt that are looked at."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of one sequence: where each starts, and what was kept and could be judged."""

    sequence: Sequence
    starts: Ints
    lead: Ints
    limit: Ints


def breakdowns(examination: Examination, tokenizer: Any, replayed: Replay | None) -> list[Breakdown]:
    """By context length, then by kind of prompt where the target's tokenizer is at hand."""
    rungs = _rungs(examination, replayed)
    if not rungs:
        return []
    k = examination.case.k
    places = np.concatenate([r.sequence.positions.numpy()[r.starts] for _, _, rounds in rungs for r in rounds])
    inner = sorted({int(np.quantile(places, q)) for q in QUANTILES})
    edges = sorted({0, *inner, int(places.max()) + 1})
    found = [_by("context", name, readout, k, [(f"{low} to {high - 1}", _within(rounds, low, high)) for low, high in
                                                pairwise(edges)]) for name, readout, rounds in rungs]
    if tokenizer is not None:
        named = {name: kinds_of([r.sequence for r in rounds], tokenizer) for name, _, rounds in rungs}
        if len({kind for kinds in named.values() for kind in kinds.values()}) > 1:
            found += [
                _by("kind", name, readout, k, [(kind, [r for r in rounds if named[name][r.sequence.name] == kind])
                                                for kind in KINDS])
                for name, readout, rounds in rungs
            ]
    return found


def _rungs(examination: Examination, replayed: Replay | None) -> list[tuple[str, Readout, list[Rounds]]]:
    """Name, read-out and rounds of what has an accept length."""
    case, ladder = examination.case, examination.ladder
    found: list[tuple[str, Readout, list[Rounds]]] = []
    trained = case.heldout or case.train
    if ladder is not None and trained is not None and "trained" in examination.rungs:
        found.append(("trained", *_replayed(ladder.trained(as_meant(examination.m)), trained)))
    if replayed is not None and case.serve is not None:
        name = "as read" if "as_read" in examination.rungs else "served"
        found.append((name, *_replayed(replayed, case.serve)))
    if case.serve is not None and examination.counted is not None:
        rounds = []
        for sequence in case.serve.sequences:
            steps = sequence.steps
            if steps is not None and len(steps.start) and (steps.parents is not None) == (case.tree is not None):
                kept = steps.accepted.clamp(max=case.k).numpy()
                rounds.append(Rounds(sequence, steps.start.numpy(), kept, np.full(len(kept), case.k)))
        found.append(("measured", "engine", rounds))
    return [one for one in found if one[1] != "all" and any(len(r.starts) for r in one[2])]


def _replayed(replay: Replay, selected: Selected) -> tuple[Readout, list[Rounds]]:
    by_name = {s.name: s for s in selected.sequences}
    rounds = []
    for one in replay.sequences:
        outcome = one.walk if replay.readout == "walk" else None if one.steps is None else one.steps.outcome
        if outcome is not None and one.name in by_name:
            known = outcome.accepted >= 0
            rounds.append(Rounds(by_name[one.name], outcome.rows[known], outcome.lead[known], outcome.limit[known]))
    return replay.readout, rounds


def _within(rounds: Iterable[Rounds], low: int, high: int) -> list[Rounds]:
    found = []
    for r in rounds:
        place = r.sequence.positions.numpy()[r.starts]
        chosen = (place >= low) & (place < high)
        if chosen.any():
            found.append(Rounds(r.sequence, r.starts[chosen], r.lead[chosen], r.limit[chosen]))
    return found


def _by(by: Literal["context", "kind"], rung: str, readout: Readout, k: int, parts: list[tuple[str, list[Rounds]]]) -> Breakdown:
    return Breakdown(by=by, rung=rung, k=k, parts=[_part(name, rounds, k, readout) for name, rounds in parts if rounds])


def _part(name: str, rounds: list[Rounds], k: int, readout: Readout) -> Part:
    pooled = summarise([Counts.of(r.sequence.name, r.lead, r.limit, k) for r in rounds], k, readout)
    return Part(name=name, rounds=pooled.rounds, sequences=len(rounds), length=pooled.length, interval=pooled.interval,
                first=pooled.joint[0] if pooled.joint else None)


def kinds_of(sequences: list[Sequence], tokenizer: Any) -> Mapping[str, str]:
    """By sequence what its prompt looks like; what all prompts begin with (a system turn) is left out."""
    prompts = {s.name: s.token_ids[: _prompt(s)].tolist() for s in sequences}
    columns = zip(*prompts.values(), strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns))) if len(prompts) > 1 else 0
    texts = {name: str(tokenizer.decode(ids[shared : shared + READ], skip_special_tokens=True)) for name, ids in prompts.items()}
    return {name: kind_of(text[:READ]) for name, text in texts.items()}


def _prompt(sequence: Sequence) -> int:
    """Tokens before the answer."""
    if sequence.answer is not None and bool(sequence.answer.any()):
        return int(sequence.answer.int().argmax())
    if sequence.steps is not None and len(sequence.steps.start):
        return int(sequence.steps.start.min())
    return len(sequence.token_ids)


def kind_of(prompt: str) -> str:
    """What a prompt looks like, by its letters alone: one of `KINDS`."""
    letters = [c for c in prompt if c.isalpha()]
    if letters and sum(ord(c) > 0x24F for c in letters) > 0.3 * len(letters):
        return "another script"
    if _CODE.search(prompt):
        return "code"
    if _FIGURES.search(prompt) or sum(c.isdigit() for c in prompt) > 0.06 * max(len(prompt), 1):
        return "figures"
    if len(prompt) > LONG:
        return "long text"
    return "question" if "?" in prompt else "instruction"
