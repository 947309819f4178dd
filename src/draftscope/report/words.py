"""Text for people: figures as they are printed, places in words, and strings of unknown origin made harmless."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftscope.boundaries import Boundary
from draftscope.findings import Diagnosis, Effect, Finding, Ladder, Placed, Rung

RUNGS = {
    "trained": ("trained", "needs the training states and the draft (--train or --train-heldout, --draft)"),
    "reference": ("reference", "needs the target to re-run the served tokens (--target)"),
    "served": ("served", "needs a capture and the draft (--serve, --draft)"),
    "as_read": ("as read", "needs a capture, the draft and its consumer (--serve, --draft, --for)"),
    "measured": ("measured", "needs the engine's counts (a capture with accepted_counts, or --metrics)"),
}


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


def verdict(diagnosis: Diagnosis) -> str:
    """The answer in a sentence."""
    if diagnosis.verdict == "clean":
        return "Nothing was found that keeps the draft from its trained acceptance."
    if diagnosis.verdict == "undecided" or not diagnosis.findings:
        return "What is at hand does not decide it; what to measure next stands below."
    return visible(sentence(diagnosis.findings[0].says))


def sentence(text: str) -> str:
    """With a full stop, and a capital unless the first word is a name (`d2t`, `capture.bin`, `reference:`)."""
    text = text.strip()
    if re.match(r"[a-z]+[ ,.]", text + ".") and not re.match(r"\w+\.\w", text):
        text = text[0].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) else ".")


def place(placed: Placed) -> str:
    """What a slot is: `boundary 15`, with lag and scale where they are not those of a healthy one."""
    if placed.boundary is None:
        return "not placed"
    text = str(Boundary(placed.boundary, placed.norm or "pre", placed.kind or "stream"))
    others = [b for b in placed.candidates if b != placed.boundary]
    if others:
        text += f" (or {', '.join(map(str, others[:4]))})"
    if placed.lag:
        text += f", of the token {abs(placed.lag)} {'later' if placed.lag > 0 else 'earlier'}"
    if placed.scale is not None and abs(placed.scale - 1) > 0.005:
        text += f", times {placed.scale:.3g}"
    if placed.transform not in ("none", "lag", "scale"):
        text += f", after {visible(placed.transform)}"
    if placed.share is not None and placed.share < 0.995:
        text += f", {percent(placed.share)} of the rows"
    return text


def same_place(one: Placed, other: Placed) -> bool:
    """Whether two placed slots may hold the same state."""
    def scale(placed: Placed) -> float:
        return 1.0 if placed.scale is None else placed.scale

    boundaries = ({one.boundary} | set(one.candidates)) & ({other.boundary} | set(other.candidates)) - {None}
    return bool(boundaries) and (one.norm, one.kind, one.lag or 0) == (other.norm, other.kind, other.lag or 0) and (
        abs(scale(one) - scale(other)) <= 0.005 * abs(scale(other)))


def effect(gain: Effect) -> list[str]:
    """What a fault costs and its repair brings, one line per figure."""
    out = []
    if gain.length_now is not None or gain.length_if_fixed is not None:
        out.append(f"accept length (K = {gain.k}) {number(gain.length_now)} now → {number(gain.length_if_fixed)} fixed "
                   f"{interval(gain.interval)}".rstrip())
    if gain.nll_now is not None or gain.nll_if_fixed is not None:
        out.append(f"nll at the first position {number(gain.nll_now)} now → {number(gain.nll_if_fixed)} fixed")
    if gain.all_fixed is not None or gain.left_in is not None:
        out.append(f"everything repaired {number(gain.all_fixed)}, all but this {number(gain.left_in)}: "
                   f"its loss {number(gain.gain)} {interval(gain.gain_interval)}".rstrip())
    return out


def recovery(finding: Finding) -> str:
    return {
        "replayed": "measured by replay of the recorded states", "bounded": "replay bounds it",
        "needs-retraining": "needs retraining; replay cannot tell", "needs-serving": "needs serving again; replay cannot tell",
    }[finding.recovery]


def remark(rung: Rung) -> str:
    """What to know of a rung besides its figures."""
    held = {True: "held out", False: "in-sample", None: ""}[rung.held_out]
    over = count(rung.rounds, "round") if rung.readout != "all" else count(rung.rows, "row")
    readout = {"walk": "", "engine": "at the engine's steps", "all": "over all rows"}[rung.readout]
    return ", ".join(part for part in (over, readout, held) if part)


def rungs(diagnosis: Diagnosis) -> list[tuple[str, Rung | None, str]]:
    """The ladder in order: name, the rung, and a remark or why it is missing (an entry of `next` that begins with its name)."""
    out: list[tuple[str, Rung | None, str]] = []
    for field, (name, needs) in RUNGS.items():
        rung = getattr(diagnosis.acceptance, field)
        if rung is not None:
            out.append((name, rung, remark(rung)))
            continue
        told = (n.split(":", 1)[1].strip() for n in diagnosis.next if n.lower().startswith((f"{name}:", f"{field}:")))
        out.append((name, None, visible(next(told, needs))))
    return out


def most_drafted(ladder: Ladder) -> int:
    """The largest K on the ladder, at least 1."""
    return max((rung.k for field in RUNGS if (rung := getattr(ladder, field)) is not None), default=1) or 1


def config_lines(config: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A fix as configuration: consumer and its JSON, as it is pasted."""
    return [(visible(consumer), scalar(settings)) for consumer, settings in config.items()]


def first_of(items: Iterable[str], limit: int) -> tuple[list[str], int]:
    """The first few, and how many more there are."""
    held = list(items)
    return held[:limit], max(len(held) - limit, 0)


def differs(diagnosis: Diagnosis, side: str, placed: Placed) -> bool:
    """Whether a serving slot holds another state than the training slot of its number."""
    if side != "serving":
        return False
    trained = [other for other in diagnosis.placement.train if other.slot == placed.slot]
    return bool(trained) and not same_place(trained[0], placed)
