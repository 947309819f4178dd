"""A request as a strip of tokens: what was drafted and kept, what was rejected, and how true each slot was there.

The strip is a group of radio buttons, so that a keyboard walks it with the arrow keys and no script is needed to show what
stands behind a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from draftscope.findings import Diagnosis
from draftscope.report.drawing import WIDTH, Table, framed, joined, label, line, series
from draftscope.text import count, visible
from draftscope.views import Request

WORDS = {
    "prompt": "prompt", "own": "the target's own, no draft", "accepted": "drafted, accepted",
    "instead": "in place of a rejected draft", "bonus": "the target's own after all drafts", "unknown": "not told",
}
LETTERS = 24


@dataclass(frozen=True, slots=True)
class Token:
    """One token as shown: its letters, its class, and what is said of it."""

    letters: str
    status: str
    says: str
    shown: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """A request's tokens, a drawing of its slots' cosines where they are known, and the data."""

    number: int
    title: str
    says: str
    tokens: tuple[Token, ...]
    drawn: Markup | None
    table: Table


def strips(diagnosis: Diagnosis) -> list[Strip]:
    return [_strip(i, request) for i, request in enumerate(diagnosis.views.requests) if request.ids]


def statuses(strip: Strip) -> list[tuple[str, str]]:
    """Those that occur, in a fixed order, and what each means."""
    held = {token.status for token in strip.tokens}
    return [(status, said) for status, said in WORDS.items() if status in held]


def _strip(number: int, request: Request) -> Strip:
    example = next((i for i, s in enumerate(request.status) if s == "instead"), 0)
    places = range(len(request.ids))
    tokens = tuple(Token(_letters(request, i), request.status[i], _says(request, i), i == example) for i in places)
    rows = tuple(_row(request, i) for i in places)
    head = ("position", "token", "comes from", "rejected draft", *(f"slot {s}" for s in range(len(request.cosines))))
    name = visible(request.name, 60)
    height, drawn = _curves(request)
    said = f"Cosine of each slot, token by token, along {name}"
    return Strip(number, f"{name}, {visible(request.why, 80)}", _request_says(request), tokens,
                 framed(said, height, drawn) if drawn else None, Table(head, rows))


def _letters(request: Request, i: int) -> str:
    if not request.text:
        return str(request.ids[i])
    return visible(request.text[i], LETTERS) or f"[{request.ids[i]}]"


def _draft(request: Request, i: int) -> str:
    """The rejected draft, quoted; nothing where none is known."""
    if not request.drafted or request.drafted[i] < 0:
        return ""
    text = request.drafted_text[i] if request.drafted_text else ""
    return f"“{visible(text, LETTERS)}”" if text else str(request.drafted[i])


def _says(request: Request, i: int) -> str:
    said = f"position {request.first + i}: {WORDS[request.status[i]]}"
    if draft := _draft(request, i):
        said += f" {draft}"
    cosines = [f"slot {s} {column[i]:.3f}" for s, column in enumerate(request.cosines) if column[i] is not None]
    return said + (f"; cosine {', '.join(cosines)}" if cosines else "")


def _row(request: Request, i: int) -> tuple[str, ...]:
    cosines = ("–" if column[i] is None else f"{column[i]:.4f}" for column in request.cosines)
    return (str(request.first + i), _letters(request, i), WORDS[request.status[i]], _draft(request, i) or "–", *cosines)


def _request_says(request: Request) -> str:
    kept = request.status.count("accepted")
    lost = request.status.count("instead")
    by = "the engine's counts" if request.recorded else "replay"
    known = request.length is not None
    said = f"Accept length {request.length:.2f} over {count(request.rounds, 'round')} by {by}; " if known else ""
    said += f"of the tokens shown {kept} were drafted and kept, and at {lost} a draft was rejected"
    columns = [[v for v in column if v is not None] for column in request.cosines]
    medians = [(s, median(values)) for s, values in enumerate(columns) if values]
    if not medians:
        return said + "; the target's own states are not at hand, so that no cosines can be told"
    places = [f"slot {s} {value:.3f} with {visible(request.places[s])}" if s < len(request.places) else f"slot {s} {value:.3f}"
              for s, value in medians]
    return said + f"; median cosine of what the draft received with what it was trained on: {', '.join(places)}"


def _curves(request: Request) -> tuple[float, list[Markup]]:
    """One line a slot over the tokens shown, with a mark where a draft was rejected."""
    left, right, top, depth = 52.0, 70.0, 22.0, 120.0
    values = [v for column in request.cosines for v in column if v is not None]
    if not values:
        return 0, []
    low = min(-0.05, min(values)) if min(values) < 0 else 0.0
    span = max(len(request.ids) - 1, 1)

    def at(i: int, value: float) -> tuple[float, float]:
        return left + (WIDTH - left - right) * i / span, top + depth * (1 - (value - low) / (1 - low))

    parts: list[Markup] = []
    for tick in (-0.5, 0.0, 0.5, 1.0):
        if tick >= low - 0.05:
            y = at(0, tick)[1]
            parts += [line(left, y, WIDTH - right, y, "grid"), label(left - 6, y + 4, f"{tick:g}", "tick end")]
    for i, status in enumerate(request.status):
        if status == "instead":
            x = at(i, 0)[0]
            parts.append(line(x, top + depth, x, top + depth + 7, "lost"))
    parts.append(label(left, top - 8, "cosine", "tick"))
    parts.append(label(left, top + depth + 22, "marks: where a draft was rejected", "tick"))
    for s, column in enumerate(request.cosines):
        parts.append(joined([None if v is None else at(i, v) for i, v in enumerate(column)], f"{series(s)} d{s}"))
        y = top + 12 + 20 * s
        parts += [joined([(WIDTH - right + 8, y - 4), (WIDTH - right + 26, y - 4)], f"{series(s)} d{s}"),
                  label(WIDTH - right + 30, y, f"slot {s}")]
    return top + depth + 28, parts

