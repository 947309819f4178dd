"""Loss masks held against the turns that the token ids show themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
    firsts: set[int] = set()
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
        firsts.update(int(ids[turn.start]) for turn in answers)
        if mask.any() and not whole and not _near(mask, answers, markers):
            strange.append(i)
    facts.varied_first = len(firsts)
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


def _of_others(facts: MaskFacts, known: list[tuple[Ids, Mask]], found: list[list[Turn]], strange: list[int]) -> None:
    """Masks that are not about their own sample: whose answers they are of."""
    expected = []
    for (ids, _), answers in zip(known, found, strict=True):
        mask = np.zeros(len(ids), dtype=bool)
        for turn in answers:
            mask[turn.start : turn.end] = True
        expected.append(mask)
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

    Where the token before each run is the same, runs begin where they should; where that constant is inside, or one away, they
    are shifted, and their ends must say the same.
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
    facts.varied_first = len({int(ids[start]) for ids, start, _ in runs})
    # Early by one: the header's last token begins the run, and what closes the answer comes right after it.
    if constant(-1, 0) and constant(0, 0) and not constant(1, 0) and not constant(-1, 1) and constant(0, 1):
        facts.offsets[-1, -1] = len(runs)
    elif not constant(-1, 0) and constant(-2, 0) and constant(-3, 0) and not constant(0, 0):
        facts.offsets[1, 1] = len(runs)
    elif constant(-1, 0) and not constant(0, 0):
        facts.offsets[0, 0] = len(runs)
    return facts


def _runs(mask: Mask) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
