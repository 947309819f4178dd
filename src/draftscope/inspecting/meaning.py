"""What the figures of an entry say it is, in words."""

from __future__ import annotations

import torch

from draftscope import findings
from draftscope.boundaries import Boundary
from draftscope.inspecting.depth import ordinal
from draftscope.inspecting.report import Entry

READABLE = 0.2
"""From this share on a head over the state says something about text that somebody else wrote."""


def tolerance(entry: Entry) -> float:
    """How far storage in the entry's dtype may take a row, relative to its norm."""
    coarsest = max((torch.finfo(getattr(torch, name)).eps for name in entry.dtypes), default=0.0)
    return max(2 * coarsest, 1e-3)


def is_embedding(entry: Entry) -> bool | None:
    """Boundary 0, proven from the target's parts; None = not tested."""
    if entry.embedding_error is None:
        return None
    return entry.embedding_error <= tolerance(entry) and (entry.embedding_factor or 0.0) > 0


FOREIGN = ("no entry is a state of this target over these tokens: look whether target, tokenizer and precision are those that "
           "wrote the data")


def is_normed(entry: Entry) -> bool:
    """Rows divided by the final norm's weights have root mean square 1: the norm was applied."""
    return entry.rms_post is not None and abs(entry.rms_post - 1) < 0.02 and (entry.rms_spread or 0.0) < 0.02


def foreign(entries: list[Entry]) -> bool:
    """Whether entries were held against a target and none is a state of it."""
    return bool(entries) and all(
        entry.placed is not None and entry.placed.boundary is None and not is_embedding(entry) for entry in entries)


def infer(entries: list[Entry], constant: list[int]) -> None:
    """Write into each entry what it was inferred to be, in words."""
    ranked = sum(entry.rank is not None for entry in entries)
    best_text = max((max(e.text_pre or 0.0, e.text_post or 0.0) for e in entries), default=0.0)
    for number, entry in enumerate(entries):
        entry.inferred = _words(entry, number in constant, ranked, best_text)


def _words(entry: Entry, constant: bool, ranked: int, best_text: float) -> str:
    placed = entry.placed
    if placed is not None and placed.boundary is not None:
        return _placed_words(placed, entry)
    if is_embedding(entry):
        factor = entry.embedding_factor or 1.0
        return "embedding (boundary 0)" + (f" times {factor:.3g}" if abs(factor - 1) > 0.01 else "")
    if placed is not None:
        return "no boundary of this target fits"
    if constant:
        return "the same vector in every row"
    depth = "" if entry.rank is None else f"; {ordinal(entry.rank)} of {ranked} by depth"
    text = max(entry.text_pre or 0.0, entry.text_post or 0.0)
    if text >= READABLE and text == best_text:
        norm = "after" if is_normed(entry) else "before"
        return f"last state, {norm} the final norm (head gives {100 * text:.0f} % of the text)"
    if entry.embedding_error is not None or entry.token_alone is False:
        return f"not the embedding{depth}"
    if entry.token_alone:
        return f"depends on the token alone, as the embedding does{depth}"
    return f"no token comes twice{depth}"


def _placed_words(placed: findings.Placed, entry: Entry) -> str:
    assert placed.boundary is not None
    text = str(Boundary(placed.boundary, placed.norm or "pre", placed.kind or "stream"))
    others = [b for b in placed.candidates if b != placed.boundary]
    if others:
        text += f" (or {', '.join(map(str, others[:4]))})"
    if placed.lag:
        text += f", of the token {abs(placed.lag)} {'later' if placed.lag > 0 else 'earlier'}"
    if placed.scale is not None:
        text += f", times {placed.scale:.3g}"
    return text
