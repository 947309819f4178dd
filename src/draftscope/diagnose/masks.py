"""Loss masks held against the turns that the token ids show themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from draftscope.diagnose.case import Text
from draftscope.faults.facts_data import MarkedBy, MaskFacts
from draftscope.pipeline.turns import FRAME, OTHER, Ids, Markers, Turn, kinds, majority, turns

Mask = npt.NDArray[np.bool_]
WHOLE = 0.98
"""Supervised share from which a sample is supervised throughout."""
EDGE = 3
"""Tokens by which a run's edges may be off and the run still be of its own sample's answer."""
TRIED = 512
"""Strange masks tried on all other samples, at most."""
MOST = 0.8
"""Share of the masks that are not right which have to be displaced alike, for that to be what is wrong with them."""
FURTHEST = 8
"""Tokens by which masks may be displaced where only repeated separators mark answers."""
FEW = 3
"""Supervised tokens up to which a mask is too short to be known again."""


def mask_facts(texts: Sequence[Text], markers: Markers | None) -> MaskFacts | None:
    """The masks of samples against the answers found in their tokens; None where nothing marks answers.

    Args:
        markers: None: repeated separators are looked for, by where supervised runs begin and end.
    """
    known = [(text.token_ids.numpy(), text.answer.numpy().astype(bool)) for text in texts if text.answer is not None]
    known = [(ids, _fitted(mask, len(ids))) for ids, mask in known if len(ids)]
    if not known:
        return None
    if markers is None:
        return _by_separators(known)
    by: MarkedBy = ("the target's chat template" if markers.source == "template"
                    else "what served requests begin and end with")
    facts = MaskFacts(by, generation=markers.generation, longest=max(len(ids) for ids, _ in known))
    found = [turns(ids, markers) for ids, _ in known]
    counted = np.zeros((4, 2), dtype=np.int64)
    moved: dict[int, int] = {}
    strange: list[int] = []
    for i, ((ids, mask), answers) in enumerate(zip(known, found, strict=True)):
        if not mask.any():
            facts.empty += 1
            facts.answerless += not answers
            facts.cut += not answers and len(ids) == facts.longest
        if not answers:
            continue
        facts.samples += 1
        kind = kinds(ids, markers, answers)
        for k in (OTHER, FRAME):
            counted[k] += (int((mask & (kind == k)).sum()), int((kind == k).sum()))
        whole = mask.mean() >= WHOLE and bool((kind == OTHER).any())
        facts.whole += int(whole)
        if mask.any() and not whole:
            _compare(facts, ids, mask, answers, markers)
            displaced = _displaced(mask, answers)
            if displaced is not None:
                moved[i] = displaced
        if mask.any() and not whole and not _near(mask, answers, markers):
            strange.append(i)
    strange = _take_moved(facts, known, found, moved, strange)
    facts.other_share = float(counted[OTHER, 0] / max(counted[OTHER, 1], 1))
    facts.header_share = float(counted[FRAME, 0] / max(counted[FRAME, 1], 1))
    _of_others(facts, known, found, strange)
    return facts


def _compare(facts: MaskFacts, ids: Ids, mask: Mask, answers: list[Turn], markers: Markers) -> None:
    """Where the supervised run of each answer begins and ends against the answer itself."""
    bare = []
    for turn in answers:
        facts.turns += 1
        low = max(turn.start - len(markers.opening), 0)
        run = _run(mask, low, turn.end)
        bare.append(run is None)
        if run is None:
            continue
        begins, ends = run[0] - turn.start, run[1] - turn.end
        if turn.closed:
            facts.closed += 1
            facts.open += begins == 0 and ends == -1
        # A run that would go on past the sample's end is cut there.
        if turn.end == len(ids) and begins > 0 and ends == 0:
            ends = begins
        facts.offsets[begins, ends] = facts.offsets.get((begins, ends), 0) + 1
    facts.bare += sum(bare)
    if len(answers) > 1:
        facts.repeats += 1
        facts.bare_before_last += not bare[-1] and all(bare[:-1])
        facts.all_turns += not any(bare)


def _run(mask: Mask, low: int, high: int) -> tuple[int, int] | None:
    """The supervised run that begins within low .. high - 1, to its end."""
    on = np.flatnonzero(mask[low:high])
    if not len(on):
        return None
    start = low + int(on[0])
    while start > 0 and on[0] == 0 and mask[start - 1]:
        start -= 1
    off = np.flatnonzero(~mask[start:])
    return start, start + int(off[0]) if len(off) else len(mask)


def _near(mask: Mask, answers: list[Turn], markers: Markers) -> bool:
    """Whether every supervised run is about an answer of its own sample, give or take its edges."""
    before = len(markers.opening) + 1
    return all(
        any(-before <= start - turn.start <= EDGE and abs(min(end, turn.end + EDGE + 1) - turn.end) <= EDGE for turn in answers)
        for start, end in _runs(mask))


def _displaced(mask: Mask, answers: list[Turn]) -> int | None:
    """By how many tokens a mask is the one of these answers, or of the last alone, displaced and cut at the text's ends."""
    on = np.flatnonzero(mask)
    for some in (answers, answers[-1:]):
        expected = _expected(some, len(mask))
        own = np.flatnonzero(expected)
        if not len(on) or not len(own):
            continue
        for by in sorted({int(on[0] - own[0]), int(on[-1] - own[-1])}, key=abs):
            if np.array_equal(mask, _moved(expected, by)):
                return by
    return None


def _expected(answers: list[Turn], length: int) -> Mask:
    mask = np.zeros(length, dtype=bool)
    for turn in answers:
        mask[turn.start : turn.end] = True
    return mask


def _moved(mask: Mask, by: int) -> Mask:
    found = np.zeros(len(mask), dtype=bool)
    if by >= 0:
        found[by:] = mask[: len(mask) - by]
    else:
        found[:by] = mask[-by:]
    return found


def _take_moved(facts: MaskFacts, known: list[tuple[Ids, Mask]], found: list[list[Turn]], moved: dict[int, int],
                strange: list[int]) -> list[int]:
    """Count displaced masks, and give back the strange ones that are not displaced as most of the wrong ones are.

    A mask of another sample may look displaced, too, but each by another number.
    """
    skipped: dict[int, set[int]] = {}
    for i, by in moved.items():
        facts.moved[by] = facts.moved.get(by, 0) + len(found[i])
        skipped.setdefault(by, set()).update(
            int(known[i][0][turn.start + by - 1]) for turn in found[i] if by > 0 and turn.start + by <= len(known[i][0]))
    facts.skipped = {by: len(tokens) for by, tokens in skipped.items() if by > 0}
    wrong = Counter(by for by in moved.values() if by)
    by, times = wrong.most_common(1)[0] if wrong else (0, 0)
    others = [i for i in strange if moved.get(i) != by]
    return others if by and times >= MOST * (times + len(others)) else strange


def _of_others(facts: MaskFacts, known: list[tuple[Ids, Mask]], found: list[list[Turn]], strange: list[int]) -> None:
    """Masks that are not about their own sample: whose answers they are of."""
    expected = [_expected(answers, len(ids)) for (ids, _), answers in zip(known, found, strict=True)]
    facts.of = len(strange)
    strange = [i for i in strange if known[i][1].sum() > FEW]
    fits = {i: [j for j in range(len(known)) if j != i and _is_of(known[i][1], expected[j])] for i in strange[:TRIED]}
    facts.other_sample = sum(bool(others) for others in fits.values())
    by = Counter(j - i for i, others in fits.items() for j in others)
    if by:
        step, times = by.most_common(1)[0]
        facts.by = step if times >= 0.8 * len(fits) else None


def _is_of(mask: Mask, expected: Mask) -> bool:
    """Whether a mask is another sample's, cut or filled up to its own length."""
    return bool(expected.any() and mask.any()) and np.array_equal(mask, _fitted(expected, len(mask)))


def _fitted(mask: Mask, length: int) -> Mask:
    return mask[:length] if len(mask) >= length else np.concatenate([mask, np.zeros(length - len(mask), dtype=bool)])


def _by_separators(known: list[tuple[Ids, Mask]]) -> MaskFacts | None:
    """Runs against separators that repeat at their edges: what stands at a run's edges in nearly every run is a marker.

    Where the token before each run is the same, runs begin where they should; where that constant is inside, or away, they are
    displaced, and their ends must say the same.
    """
    runs = [(ids, start, end) for ids, mask in known for start, end in _runs(mask)]
    facts = MaskFacts("repeated separators", samples=len(known), longest=max(len(ids) for ids, _ in known),
                      empty=sum(not mask.any() for _, mask in known))
    if len(runs) < 8:
        return facts if facts.empty else None

    def constant(at: int, edge: int) -> bool:
        tokens = [ids[(s, e)[edge] + at : (s, e)[edge] + at + 1] for ids, s, e in runs if 0 <= (s, e)[edge] + at < len(ids)]
        return len(tokens) >= 0.5 * len(runs) and bool(majority(tokens, 0.9))

    facts.turns = len(runs)
    by = next((by for by in sorted(range(-FURTHEST, FURTHEST + 1), key=abs) if _header_ends(by, constant)), None)
    if by is not None:
        facts.offsets[by, by] = facts.moved[by] = len(runs)
        facts.skipped[by] = len({int(ids[start - 1]) for ids, start, _ in runs if start})
    return facts


def _header_ends(by: int, constant: Callable[[int, int], bool]) -> bool:
    """Whether runs stand `by` tokens behind (or, below 0, before) where a header, the same before every answer, ends.

    Args:
        constant: whether the same token stands so many tokens from most runs' first (0) or behind their last (1).
    """
    if by == 0:
        return constant(-1, 0) and not constant(0, 0)
    last = -1 - by
    if not (constant(last, 0) and constant(last - 1, 0)):
        return False
    if by > 0:
        return not any(constant(at, 0) for at in range(-by, 1))
    # What closes the answer has to come as far behind the run.
    return not constant(last + 1, 0) and constant(last, 1) and not any(constant(at, 1) for at in range(-1, last))


def _runs(mask: Mask) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
