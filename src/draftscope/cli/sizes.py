"""Sizes as people write them."""

from __future__ import annotations

import re

from draftscope.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)


def parse_bytes(text: str, option: str = "--max-bytes") -> int:
    """`500MB`, `2GiB`, `1000` as bytes.

    Raises:
        UsageError: no size; the option is named.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is not a size", remedy="For example 500MB or 2GiB")
    power = " kmgtp".index(match[2].lower()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
