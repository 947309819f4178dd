"""The parts of a diagnosis in words, the same for the terminal and the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftscope.boundaries import Boundary
from draftscope.diagnose.verdict import SPANS
from draftscope.findings import NOT_REPLAYED, Absorbed, Diagnosis, Effect, Finding, Ladder, Patch, Placed, Rung
from draftscope.text import count, interval, number, pairs, percent, scalar, sentence, visible

RUNGS = {
    "trained": ("trained", "needs the training states and the draft (--train or --train-heldout, --draft)"),
    "reference": ("reference", "needs the target to re-run the served tokens (--target)"),
    "served": ("served", "needs a capture and the draft (--serve, --draft)"),
    "as_read": ("as read", "needs a capture, the draft and its consumer (--serve, --draft, --for)"),
    "measured": ("measured", "needs the engine's counts (a capture with accepted_counts, or --metrics)"),
}

REASONS = 3
"""Reasons named why files of a side were passed over, the commonest first."""

SIDES = {"train": "training", "serve": "serving"}

STRENGTHS = {
    "proven": "the states themselves show it, or a repair that replay confirms",
    "supported": "the figures agree with it",
    "suspected": "one of several causes that would explain the figures",
}

_TRANSFORMS = {
    "direction": "up to a factor of each row's own", "rows": "but the rows of other tokens", "rotation": "up to a rotation",
    "permutation": "with its channels permuted",
}


def verdict(diagnosis: Diagnosis) -> str:
    """The answer in a sentence."""
    if diagnosis.verdict == "clean":
        return f"Nothing was found that keeps the draft from its trained acceptance{_looked_at(diagnosis)}."
    if diagnosis.verdict == "undecided" or not diagnosis.findings:
        return "What is at hand does not decide it; what to measure next stands below."
    return visible(sentence(diagnosis.findings[0].says))


def certainty(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Why the first finding is believed, in a few lines: how strong it is, what was found, what undoing it brings, what replay is
    worth."""
    if not diagnosis.findings:
        return []
    first = diagnosis.findings[0]
    lines: list[tuple[str, str]] = [(first.strength, STRENGTHS[first.strength])]
    lines += [("found", first.evidence[0].result)] if first.evidence else []
    gain = None if first.acceptance is None else first.acceptance.gain_interval
    if gain is not None and first.acceptance is not None:
        side = "above zero" if gain[0] > 0 else "below zero" if gain[1] < 0 else "not told from zero"
        lines.append(("cost", f"with all else repaired, leaving it in costs {number(first.acceptance.gain)} of accept length by "
                              f"replay, 95 % {interval(gain)}: {side}"))
    lines += [("replay", gate.split(":", 1)[1].strip()) for gate in diagnosis.steps if gate.startswith("gate: replay")]
    if gaps(diagnosis):
        lines.append(("ladder", ladder(diagnosis)))
    return [(name, visible(said)) for name, said in lines]


def _looked_at(diagnosis: Diagnosis) -> str:
    """How much a clean answer rests on, and what it would have missed."""
    rows, steps = diagnosis.power.get("rows") or {}, diagnosis.power.get("steps")
    seen = [count(rows[side], f"{name} row") for side, name in (("serve", "served"), ("train", "training")) if rows.get(side)]
    seen += [count(steps, "verify step")] if steps else []
    least = diagnosis.power.get("smallest_length_difference")
    missed = (f"; a loss below {least:.2f} of accept length would not have shown" if least is not None
              else "; too few sequences to say how small a loss would have shown")
    return f", in {', '.join(seen)}{missed}" if seen else ""


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
    if placed.transform in _TRANSFORMS:
        text += f", {_TRANSFORMS[placed.transform]}"
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
        out.append(f"accept length with everything repaired {number(gain.all_fixed)}, with all but this {number(gain.left_in)}: "
                   f"its loss {number(gain.gain)} {interval(gain.gain_interval)}".rstrip())
    return out


def recovery(finding: Finding) -> str:
    if finding.recovery == "bounded" and finding.acceptance is None:
        return "was not replayed"
    return {
        "replayed": "measured by replay of the requests on which no repair was chosen", "bounded": "replay bounds it",
        "needs-retraining": "needs retraining; replay cannot tell", "needs-serving": "needs serving again; replay cannot tell",
    }[finding.recovery]


def remark(rung: Rung) -> str:
    """What to know of a rung besides its figures."""
    held = {True: "held out", False: "in-sample", None: ""}[rung.held_out]
    over = count(rung.rounds, "round") if rung.readout != "all" else count(rung.rows, "row")
    if rung.readout != "all" and not rung.rounds:
        over = "no rounds" if rung.length is None else "an average, of how many rounds is not told"
    readout = {"walk": "", "engine": "at the engine's steps", "all": "over all rows"}[rung.readout]
    return ", ".join(part for part in (over, readout, held) if part)


def shares(rung: Rung) -> list[float]:
    """What was accepted at each position, joint; nothing where there was no round to accept in."""
    return rung.joint if rung.rounds else []


def rungs(diagnosis: Diagnosis) -> list[tuple[str, Rung | None, str]]:
    """The ladder in order: name, the rung, and a remark or why it is missing (an entry of `next` that begins with its name)."""
    out: list[tuple[str, Rung | None, str]] = []
    for field, (name, needs) in RUNGS.items():
        rung = getattr(diagnosis.acceptance, field)
        if rung is not None:
            out.append((name, rung, remark(rung)))
            continue
        told = [n.split(":", 1)[1].strip() for n in diagnosis.next if n.lower().startswith((f"{name}:", f"{field}:"))]
        if field != "measured":
            told += [n for n in diagnosis.next if n.startswith(NOT_REPLAYED)]
        out.append((name, None, visible(next(iter(told), needs))))
    return out


@dataclass(frozen=True, slots=True)
class Gap:
    """From one known rung to the next known one.

    Attributes:
        drop: of accept length, negative where it rises; None where the two are of different K.
        apart: whether the intervals do not overlap; None where one has none.
        spans: what changes between the two; a missing rung adds to it.
    """

    upper: str
    lower: str
    above: float
    below: float
    drop: float | None
    apart: bool | None
    spans: str

    @property
    def falls(self) -> bool:
        """By as much as two digits show."""
        return self.drop is not None and round(self.drop, 2) > 0

    def chance(self) -> str:
        """What the intervals say of it."""
        if self.apart is None:
            return "an interval is missing, so that chance is not excluded"
        return "the intervals do not overlap" if self.apart else "the intervals overlap, so that it may be chance"


def gaps(diagnosis: Diagnosis) -> list[Gap]:
    """The steps of the ladder between rungs that have an accept length, in order."""
    order = list(RUNGS)
    rungs = {field: getattr(diagnosis.acceptance, field) for field in order}
    known = [field for field in order if rungs[field] is not None and rungs[field].length is not None]
    out = []
    for upper, lower in pairwise(known):
        above, below = rungs[upper], rungs[lower]
        out.append(Gap(
            upper=RUNGS[upper][0], lower=RUNGS[lower][0], above=above.length, below=below.length,
            drop=above.length - below.length if above.k == below.k else None,
            apart=None if above.interval is None or below.interval is None else _apart(above.interval, below.interval),
            spans="; ".join(SPANS[field] for field in order[order.index(upper) + 1 : order.index(lower) + 1]),
        ))
    return out


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] > other[1] or other[0] > one[1]


def signed(difference: float) -> str:
    """`+0.05`, `−1.00`, `±0.00`: two digits, no zero that is below zero."""
    shown = f"{abs(difference):.2f}"
    return f"{'±' if float(shown) == 0 else '+' if difference > 0 else '−'}{shown}"


def ladder(diagnosis: Diagnosis) -> str:
    """What to see in the ladder: the largest drop, and what it spans."""
    known = [(name, rung) for name, rung, _ in rungs(diagnosis) if rung is not None and rung.length is not None]
    steps = gaps(diagnosis)
    if not known:
        return "No rung has an accept length; beside each stands what it needs"
    if not steps:
        return f"Only {known[0][0]} is known, at {number(known[0][1].length)}: a gap takes two rungs"
    falling = [gap for gap in steps if gap.falls]
    rest = " (rungs of another K are not compared)" if any(gap.drop is None for gap in steps) else ""
    if not falling:
        return f"No rung that is known lies below another before it{rest}"
    worst = max(falling, key=lambda gap: gap.drop or 0.0)
    return (f"The largest drop, {number(worst.drop)}, is from {worst.upper} ({number(worst.above)}) to {worst.lower} "
            f"({number(worst.below)}) and spans {worst.spans}; {worst.chance()}{rest}")


def slot_name(slot: int) -> str:
    return "last" if slot < 0 else f"slot {slot}"


def page_path(finding: Finding) -> str | None:
    """Where the documentation of a fault stands; None for a name that is none."""
    return f"docs/faults/{finding.fault}.md" if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", finding.fault) else None


def matched(facts: Mapping[str, Any]) -> list[str]:
    """What went into the comparison: `the capture: 12 of 12 sequences, 1,469 rows, 649 verify steps`."""
    lines, left = [], dict(facts)
    for key, name in (("train", "training states"), ("serve", "the capture")):
        side = left.get(key)
        if not isinstance(side, Mapping) or not {"read", "taken", "rows"} <= side.keys():
            continue
        del left[key]
        line = f"{name}: {side['taken']:,} of {count(side['read'], 'sequence')}, {count(side['rows'], 'row')}"
        line += f", {count(side['steps'], 'verify step')}" if side.get("steps") else ""
        line += f", {count(side['rows_cut'], 'row')} left out" if side.get("rows_cut") else ""
        line += f", {count(side['steps_cut'], 'verify step')} with them" if side.get("steps_cut") else ""
        passed = sorted(side.get("skipped", {}).items(), key=lambda pair: -pair[1])
        line += "".join(f"; {n:,} passed over: {visible(why, 200)}" for why, n in passed[:REASONS])
        line += f"; {sum(n for _, n in passed[REASONS:]):,} for other reasons" if passed[REASONS:] else ""
        text = left.get(f"{key}_text")
        if isinstance(text, Mapping) and {"agreement", "last_state"} <= text.keys() and text["agreement"] is not None:
            del left[f"{key}_text"]
            line += f"; the head gives {percent(text['agreement'])} of the text (last state {text['last_state']}-norm)"
        lines.append(visible(line))
    for key, name in (("trained_text", "training text"), ("served_text", "served text")):
        text = left.get(key)
        if isinstance(text, Mapping) and {"own", "other", "recorded"} <= text.keys():
            del left[key]
            unknown = text.get("unknown", 0)
            if not text["other"] and not text["recorded"] and not unknown:
                continue
            lines.append(f"{name}: {count(text['own'], 'sequence')} of the target's own writing, {text['other']:,} of another's, "
                         f"{text['recorded']:,} taken as recorded"
                         + (f", {unknown:,} of unknown authors (nothing says where answers begin)" if unknown else ""))
    if reference := left.pop("reference", None):
        lines.append(visible(f"what the slots should hold: after {reference}"))
    return lines + [visible(f"{name}: {value}") for name, value in pairs(left)]


def most_drafted(ladder: Ladder) -> int:
    """The largest K on the ladder, at least 1."""
    return max((rung.k for field in RUNGS if (rung := getattr(ladder, field)) is not None), default=1) or 1


def config_lines(config: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A fix as configuration: consumer and its JSON, as it is pasted."""
    return [(visible(consumer), scalar(settings)) for consumer, settings in config.items()]


def patch_lines(patch: Patch | None) -> list[tuple[str, str]]:
    """What a fix changes in the checkpoint: where, and to what."""
    if patch is None:
        return []
    lines = [("config.json", scalar(patch.config))] if patch.config else []
    return lines + [(f"tensor {visible(name)}", visible(change)) for name, change in patch.tensors.items()]


def power(diagnosis: Diagnosis) -> dict[str, Any]:
    """What is known of what would have shown; only where nothing did, that excludes anything."""
    excluded = diagnosis.power.get("excludes")
    silent = diagnosis.verdict == "clean" and isinstance(excluded, list) and excluded
    return {name: value for name, value in diagnosis.power.items() if silent or name != "excludes"}


def absorbed(done: Absorbed) -> dict[str, Any]:
    """The figures of a folded draft, those that are known."""
    return {name: value for name, value in done.model_dump(exclude={"says"}).items() if value not in (None, "", [])}


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
