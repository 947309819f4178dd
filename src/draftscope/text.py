"""Strings and figures as people read them; strings of unknown origin made harmless."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def visible(text: object, limit: int | None = None) -> str:
    """One line that a terminal prints as it stands.

    Control, format (bidirectional marks, zero widths) and undecodable characters become escapes, so that token text and
    file names can neither move the cursor nor change the order in which a line reads.
    """
    out = "".join(c if c.isprintable() else _escape(c) for c in str(text))
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


def reached(nll: float | None, length: float | None) -> str:
    """What a replay reached, by the figures that there are: text of another's writing has no accept length."""
    told = [] if nll is None else [f"-log p {nll:.2f}"]
    return " and ".join(told if length is None else [*told, f"accept length {length:.2f}"])


def scalar(value: Any) -> str:
    """A figure of unknown type, short."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (Mapping, list, tuple)):
        return visible(json.dumps(value, ensure_ascii=False, default=str))
    return "–" if value is None else visible(value)


def pairs(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as (name, value) in order, names of the levels joined by spaces."""
    out: list[tuple[str, str]] = []
    for key, value in mapping.items():
        name = f"{prefix} {visible(key).replace('_', ' ')}".strip()
        if isinstance(value, Mapping):
            out += pairs(value, name)
        elif isinstance(value, (list, tuple)) and not any(isinstance(v, (Mapping, list, tuple)) for v in value):
            out.append((name, ", ".join(map(scalar, value)) or "none"))
        else:
            out.append((name, scalar(value)))
    return out


def sentence(text: str) -> str:
    """With a full stop, and a capital unless the first word is a name (`d2t`, `capture.bin`, `reference:`)."""
    text = text.strip()
    if re.match(r"[a-z]+[ ,.]", text + ".") and not re.match(r"\w+\.\w", text):
        text = text[0].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) else ".")
