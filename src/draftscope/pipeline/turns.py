"""Turns of a conversation found in its token ids: by the markers that a chat template writes round them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Source = Literal["template", "requests"]

OTHER, FRAME, ANSWER, CLOSING = 0, 1, 2, 3
"""Kinds of token: content of other turns, markers and separators, content of answers, what ends an answer."""
LONGEST = 24
"""Tokens of a marker taken from served requests at most."""


@dataclass(frozen=True, slots=True)
class Markers:
    """How turns are framed, as token ids.

    Attributes:
        opening: right before an answer's first token.
        closing: ends an answer; the first token after its content.
        separators: further tokens that follow `closing` before the next turn.
        others: headers of user and system turns, as far as they are known.
        once: what a text begins with and never holds again, () where every turn begins so.
        source: the target's chat template, or the prompts and answers that a server was seen to handle.
        generation: whether the template marks answers for transformers' assistant masks; None = there is no template.
    """

    opening: tuple[int, ...]
    closing: frozenset[int]
    separators: tuple[int, ...] = ()
    others: tuple[tuple[int, ...], ...] = ()
    once: tuple[tuple[int, ...], ...] = ()
    source: Source = "template"
    generation: bool | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer: tokens start .. end - 1, the closing one included where `closed`."""

    start: int
    end: int
    closed: bool


def find(ids: Ids, pattern: tuple[int, ...]) -> Ids:
    """Where a run of token ids begins in [T], every occurrence."""
    if not pattern or len(ids) < len(pattern):
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == np.asarray(pattern)).all(-1))


def turns(ids: Ids, markers: Markers) -> list[Turn]:
    """The answers in a text [T], in order. An answer that is cut off by the text's end is not closed."""
    starts = find(ids, markers.opening) + len(markers.opening)
    closings = np.flatnonzero(np.isin(ids, list(markers.closing)))
    found: list[Turn] = []
    for i, start in enumerate(starts.tolist()):
        if found and start < found[-1].end:
            continue
        after = closings[closings >= start]
        limit = int(starts[i + 1]) - len(markers.opening) if i + 1 < len(starts) else len(ids)
        if len(after) and int(after[0]) < limit:
            found.append(Turn(start, int(after[0]) + 1, True))
        elif start < limit:
            found.append(Turn(start, limit, False))
    return found


def kinds(ids: Ids, markers: Markers, answers: list[Turn] | None = None) -> npt.NDArray[np.int8]:
    """What each token [T] is: OTHER, FRAME, ANSWER or CLOSING."""
    kind = np.full(len(ids), OTHER, dtype=np.int8)
    for header in (markers.opening, *markers.others, *markers.once):
        for at in find(ids, header).tolist():
            kind[at : at + len(header)] = FRAME
    closings = np.flatnonzero(np.isin(ids, list(markers.closing)))
    kind[closings] = FRAME
    for i, token in enumerate(markers.separators):
        follows = closings + 1 + i
        follows = follows[follows < len(ids)]
        kind[follows[ids[follows] == token]] = FRAME
    for turn in turns(ids, markers) if answers is None else answers:
        kind[turn.start : turn.end] = ANSWER
        if turn.closed:
            kind[turn.end - 1] = CLOSING
    return kind


_USER, _ANSWER, _AGAIN, _LAST, _SYSTEM = "qxvj", "wzkq", "jvxw", "kqzj", "zwjk"


def of_template(tokenizer: Any) -> Markers | None:
    """The markers of a tokenizer's chat template, from what it makes of a conversation of known contents.

    None where there is no template, or where its markers cannot be told from their neighbours.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    again, last = {"role": "user", "content": _AGAIN}, {"role": "assistant", "content": _LAST}
    whole = _rendered(tokenizer, [user, answer, again, last])
    if whole is None or not all(part in whole for part in (_USER, _ANSWER, _AGAIN, _LAST)):
        return None
    head, rest = whole.split(_USER, 1)
    opened, rest = rest.split(_ANSWER, 1)
    between, rest = rest.split(_AGAIN, 1)
    closed = _common(between, rest.split(_LAST, 1)[1]) or between
    header = between[len(closed) :]
    opening = opened.removeprefix(closed)
    ends = _encode(tokenizer, closed)
    begins = _encode(tokenizer, opening)
    if not begins or not ends or _encode(tokenizer, opening + _ANSWER)[: len(begins)] != begins:
        return None
    others, once = [_encode(tokenizer, header)], []
    if head != header:
        once.append(_encode(tokenizer, head.removesuffix(header)))
    system = _rendered(tokenizer, [{"role": "system", "content": _SYSTEM}, user])
    if system is not None and _SYSTEM in system and _USER in system:
        once.append(_encode(tokenizer, system.split(_SYSTEM, 1)[0]))
    return Markers(
        opening=begins, closing=frozenset(ends[:1]), separators=ends[1:], others=tuple(o for o in others if o),
        once=tuple(o for o in once if o and o not in others),
        generation=isinstance(template, str) and "generation" in template.replace("add_generation_prompt", ""))


def of_requests(prompts: list[Ids], answers: list[Ids], stop_ids: frozenset[int] = frozenset()) -> Markers | None:
    """The markers that served prompts end with and served answers end with; None where they have none in common."""
    tail = majority([prompt[::-1] for prompt in prompts], 0.95)[:LONGEST][::-1]
    last = [int(answer[-1]) for answer in answers if len(answer)]
    common = max(set(last), key=last.count) if last else None
    closing = set(stop_ids)
    # Answers that a budget cut end with any token; one that ends answers does not stand inside them.
    inside = any(bool((answer[:-1] == common).any()) for answer in answers)
    if common is not None and last.count(common) >= max(2, len(last) / 2) and not inside:
        closing.add(common)
    while any(token in closing for token in tail):
        tail = tail[next(i for i, token in enumerate(tail) if token in closing) + 1 :]
    if len(tail) < 2 or not closing:
        return None
    return Markers(opening=tuple(tail), closing=frozenset(closing), source="requests")


def majority(texts: list[Ids], share: float) -> list[int]:
    """The beginning that at least `share` of the texts have in common."""
    common: list[int] = []
    left = [text for text in texts if len(text)]
    needed = share * len(texts)
    while left:
        position = len(common)
        tokens = [int(text[position]) for text in left if len(text) > position]
        if not tokens:
            break
        best = max(set(tokens), key=tokens.count)
        if tokens.count(best) < max(needed, 1):
            break
        common.append(best)
        left = [text for text in left if len(text) > position and int(text[position]) == best]
    return common


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # templates raise what they like
        return None


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()


def _common(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
