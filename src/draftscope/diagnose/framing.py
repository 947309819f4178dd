"""How training texts and served requests are rendered: what each side has in common outside of its contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftscope.diagnose.case import Text
from draftscope.faults.facts_data import Frame, TemplateFacts
from draftscope.pipeline.turns import Ids, Markers, find, majority, turns
from draftscope.states.types import Sequence as Rows
from draftscope.text import visible

COMMON = 0.9
"""Share of a side's texts from which what they hold alike is its frame."""
RARE = 0.05
LEAST = 4
"""Texts of a side from which it has a frame."""
HEAD, TAIL, OPENING, WINDOW = 96, 24, 12, 8


def template_facts(train: Sequence[Text], serve: Sequence[Text], markers: Markers | None, tokenizer: Any) -> TemplateFacts:
    """The frames of both sides; a side of few texts, or whose answers are unknown, has none."""
    template = markers if markers is not None and markers.source == "template" else None
    facts = TemplateFacts(known=template is not None)
    # Training masks may be wrong themselves; what was answered by a server is known.
    trained, served = _prompts(train, template), _prompts(serve, None)
    facts.train, facts.serve = _frame(trained, template, tokenizer), _frame(served, template, tokenizer)
    if facts.train is not None and facts.serve is not None:
        facts.lacking = _lacking(trained, served, template, tokenizer)
        facts.opened = (_share(served, facts.train.opening), _share(trained, facts.serve.opening))
        facts.named = {token: _shown(tokenizer, (token,)) for token in facts.lacking}
    return facts


def _prompts(texts: Sequence[Text], template: Markers | None) -> list[tuple[Ids, Ids]]:
    """(prompt, first answer) of each text whose answers are known: by the template's markers, else by the mask."""
    found = []
    for text in texts:
        if text.answer is None:
            continue
        if template is not None and (answers := turns(text.token_ids.numpy(), template)):
            ids, first = text.token_ids.numpy(), answers[0]
            found.append((ids[: first.start], ids[first.start : first.end]))
            continue
        ids, mask = text.token_ids.numpy(), text.answer.numpy().astype(bool)
        on = np.flatnonzero(mask)
        if not len(on) or on[0] == 0:
            continue
        start = int(on[0])
        off = np.flatnonzero(~mask[start:])
        found.append((ids[:start], ids[start : start + int(off[0])] if len(off) else ids[start:]))
    return found


def _frame(texts: list[tuple[Ids, Ids]], template: Markers | None, tokenizer: Any) -> Frame | None:
    if len(texts) < LEAST:
        return None
    prompts = [prompt for prompt, _ in texts]
    head = majority([prompt[:HEAD] for prompt in prompts], COMMON)
    tail = majority([prompt[::-1][:TAIL] for prompt in prompts], COMMON)[::-1]
    opening = majority([answer[:OPENING] for _, answer in texts], COMMON)
    system = marked = None
    if template is not None:
        head = _before_content(head, template)
        marked = float(np.mean([len(find(prompt, template.opening)) > 0 for prompt in prompts]))
        system = float(np.mean([_system(prompt, template) for prompt in prompts]))
        tail = _after_content(tail, template)
    first = [prompt[0] == prompt[1] for prompt in prompts if len(prompt) > 1]
    shown = {} if tokenizer is None else {
        "head": _shown(tokenizer, head), "tail": _shown(tokenizer, tail), "opening": _shown(tokenizer, opening)}
    return Frame(len(texts), tuple(head), tuple(tail), tuple(opening), bool(first) and float(np.mean(first)) >= COMMON, system,
                 marked, shown)


def _system(prompt: Ids, template: Markers) -> bool:
    """Whether a text begins with a system turn: with what the template puts before one and not before a user's."""
    return any(len(once) > 1 and tuple(prompt[: len(once)].tolist()) == once for once in template.once)


def _before_content(head: list[int], template: Markers) -> list[int]:
    """A common beginning up to the first user's content: contents that happen to begin alike are no frame."""
    ids = np.array(head, dtype=np.int64)
    ends = [int(at) + len(header) for header in template.others for at in find(ids, header)]
    return head[: min(ends)] if ends else head


def _after_content(tail: list[int], template: Markers) -> list[int]:
    """A common end from the turn's closing token on: contents that happen to end alike are no frame."""
    closings = [i for i, token in enumerate(tail) if token in template.closing]
    if closings:
        return tail[closings[0] :]
    at = find(np.array(tail, dtype=np.int64), template.opening)
    return tail[int(at[-1]) :] if len(at) else tail


def _lacking(train: list[tuple[Ids, Ids]], serve: list[tuple[Ids, Ids]], template: Markers | None,
             tokenizer: Any) -> dict[int, tuple[float, float]]:
    """Special tokens that nearly every text of one side holds, its answers included, and hardly one of the other."""
    special = set() if template is None else {*template.closing, *template.opening}
    if tokenizer is not None:
        special |= set(getattr(tokenizer, "added_tokens_decoder", {}))
    found = {}
    for token in special:
        shares = [float(np.mean([bool((np.concatenate(pair) == token).any()) for pair in side])) for side in (train, serve)]
        if max(shares) >= COMMON and min(shares) <= RARE:
            found[token] = (shares[0], shares[1])
    return found


def _share(texts: list[tuple[Ids, Ids]], opening: tuple[int, ...]) -> float:
    """Share of the answers that begin so."""
    return float(np.mean([tuple(answer[: len(opening)].tolist()) == opening for _, answer in texts]))


def first_tokens(sequences: Sequence[Rows]) -> tuple[float | None, float | None]:
    """Accepted drafts a step in the first `WINDOW` tokens of served answers, and after them; None without steps there."""
    early: list[int] = []
    later: list[int] = []
    for sequence in sequences:
        if sequence.steps is None or sequence.answer is None or not bool(sequence.answer.any()):
            continue
        first = int(sequence.answer.int().argmax())
        for start, accepted in zip(sequence.steps.start.tolist(), sequence.steps.accepted.tolist(), strict=True):
            (early if start < first + WINDOW else later).append(accepted)
    return float(np.mean(early)) if early else None, float(np.mean(later)) if later else None


def _shown(tokenizer: Any, ids: Sequence[int]) -> str:
    if tokenizer is None:
        return str(list(ids))
    return visible(str(tokenizer.decode(list(ids))), 160)
