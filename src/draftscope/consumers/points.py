"""What is in effect, point by point: the value, the key that decided it, and what the checkpoint means by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftscope.findings import Strength


@dataclass(frozen=True, slots=True)
class Point:
    """One answer about a consumer and a checkpoint.

    Attributes:
        question: what it is about (`boundaries`, a setting's name, `tensor NAME`, `head`, ...).
        effect: what is in effect; meant: what the checkpoint was trained with as far as it says so, None = it does not.
        key: the config key that decided; empty = none did.
        says: a sentence for people; empty where there is nothing to say.
        source: file (and name in it) of the release.
        fault: id of the fault that this is; empty = none.
        where: as in findings: `slot i`, `tensor NAME`, `config KEY`.
    """

    question: str
    effect: Any
    meant: Any = None
    key: str = ""
    says: str = ""
    source: str = ""
    fault: str = ""
    strength: Strength = "proven"
    where: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return f"{self.says} [{self.source}]" if self.source else self.says


def at(raw: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Whether a dotted key is there, and its value."""
    inner: Any = raw
    for part in key.split("."):
        if not isinstance(inner, dict) or part not in inner:
            return False, None
        inner = inner[part]
    return True, inner


def nested(key: str, value: Any) -> dict[str, Any]:
    """A dotted key and its value as config.json holds them."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def listed(boundaries: Sequence[int] | None) -> str:
    return "of its own choice" if boundaries is None else "{" + ", ".join(map(str, boundaries)) + "}"
