"""Text for people: numbers as they are printed, and strings of unknown origin made harmless."""

from __future__ import annotations

import unicodedata

_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: object, limit: int | None = None) -> str:
    """One line that a terminal prints as it stands.

    Control, format (bidirectional marks, zero widths) and undecodable characters become escapes, so that token text and
    file names can neither move the cursor nor change the order in which a line reads.
    """
    out = "".join(_escape(c) if unicodedata.category(c) in _UNSEEN else c for c in str(text))
    return out if limit is None or len(out) <= limit else out[: limit - 1] + "…"


def _escape(char: str) -> str:
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return known.get(char) or char.encode("unicode_escape", "backslashreplace").decode("ascii")


def number(value: float | None, digits: int = 2) -> str:
    """Fixed digits, or a dash where nothing was computed."""
    return "–" if value is None else f"{value:.{digits}f}"


def interval(bounds: tuple[float, float] | None, digits: int = 2) -> str:
    """`[2.17, 2.31]`, or nothing."""
    return "" if bounds is None else f"[{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def count(value: int, noun: str, plural: str = "") -> str:
    """`1 file`, `1,204 files`."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"
