"""A training file as a named trainer reads it: which entry goes to which slot, which is the teacher, what it does not notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftscope.errors import UsageError
from draftscope.inspecting.meaning import READABLE, is_normed
from draftscope.inspecting.measure import Pass
from draftscope.inspecting.report import AsTrainer, Entry, Feed
from draftscope.inspecting.suspicions import alone, layer_number, says_embedding
from draftscope.inspecting.trainers import ELSEWHERE, TRAINERS, Fact, Trainer
from draftscope.states import plain, speculators
from draftscope.states.scales import SCALES

KNOWN = tuple(name for trainer in TRAINERS.values()
              for name in (trainer.name, *(f"{trainer.name}@{version}" for version in trainer.versions)))


def check_name(name: str) -> str:
    """The trainer's name, if it is known.

    Raises:
        UsageError: it is not; lists those that are.
    """
    _known(name)
    return name


def _known(name: str) -> tuple[Trainer, str]:
    called, _, version = name.partition("@")
    trainer, minor = TRAINERS.get(called), ".".join(version.removeprefix("v").split(".")[:2])
    if trainer is None or (version and minor not in trainer.versions):
        raise UsageError(f"no trainer `{name}`", remedy=f"Known: {', '.join(KNOWN)}")
    return trainer, minor


def read_as(name: str, found: Pass) -> AsTrainer:
    """What the trainer makes of training data that was measured.

    Raises:
        UsageError: an unknown trainer, or the path holds no training data.
    """
    trainer, version = _known(name)
    report = found.report
    if report.what != "training data":
        raise UsageError(f"{report.path} is a {report.what}, which no trainer reads", remedy="--as takes training data")
    norm, norm_source = trainer.norm_of(version)
    view = _View(found)
    said = "the final norm is " + {"applied": "applied to it", "not applied": "not applied to it",
                                   "by marker": _by_marker(found), "by setting": "applied to it where the run is set so"}[norm]
    result = AsTrainer(trainer=name, path=report.path, reads=f"{trainer.slots.says}; {trainer.teacher.says}; {said}",
                       refuses=_refuses(trainer, version, report.format))
    if len({side for side in found.claimed if side is not None}) > 1 and norm == "by marker":
        result.refuses.append("files marked as before and as after the final norm in one folder: a batch of both is an error")
    entries = report.entries
    applied = {"applied": True, "not applied": False, "by marker": _marked(found), "by setting": None}[norm]
    for number, entry in enumerate(entries):
        teacher = number == len(entries) - 1
        feed = Feed(entry=number, label=entry.label, inferred=entry.inferred,
                    goes_to=f"teacher ({trainer.teacher_name})" if teacher else f"slot {number}")
        feed.warns = _teacher(entry, entries, applied) if teacher else _slot(entry)
        result.feeds.append(feed)
    result.alignment = [fact.says for fact in trainer.alignment if fact.holds(version)]
    facts = [fact for fact in trainer.silently if fact.holds(version) and CONDITIONS[fact.when](view)]
    result.silently = [view.fill(fact) for fact in facts]
    sources = [trainer.slots.source, trainer.teacher.source, norm_source, *(fact.source for fact in (*trainer.alignment, *facts))]
    result.sources = list(dict.fromkeys(sources))
    return result


def _refuses(trainer: Trainer, version: str, format: str) -> list[str]:
    readers = trainer.reads.get(format)
    if readers is None:
        takes = ", ".join(trainer.reads)
        return [f"{trainer.name} does not read {format} files, it reads {takes}" + (
            f" ({ELSEWHERE[format]})" if format in ELSEWHERE else "") + ": what follows is how it would take these entries"]
    if version and readers and version not in readers:
        return [f"this version does not read {format} files; read by {', '.join(readers)}"]
    return []


def _marked(found: Pass) -> bool:
    """Whether the files carry the marker that makes the trainer apply the norm."""
    return found.claimed.get("pre", 0) > found.claimed.get("post", 0) + found.claimed.get(None, 0)


def _by_marker(found: Pass) -> str:
    pre, post, none = (found.claimed.get(side, 0) for side in ("pre", "post", None))
    applied = "applied to it" if _marked(found) else "not applied to it"
    return f"{applied}: {pre} samples are marked as before it, {post} as after it, {none} not marked, which counts as after it"


class _View:
    """The figures that conditions ask and sentences are filled with."""

    def __init__(self, found: Pass) -> None:
        report = found.report
        self.found, self.report, self.entries = found, report, report.entries
        self.safetensors = report.format in (plain.NAME, speculators.NAME)
        turned = found.report.facts.get("order_as_text") or ("", "")
        self.figures: dict[str, Any] = {
            "slots": len(report.entries) - 1, "bad": max((entry.nonfinite.items for entry in report.entries), default=0),
            "empty": report.empty_masks, "first": Path(turned[0]).name, "second": Path(turned[1]).name,
        }

    def fill(self, fact: Fact) -> str:
        return fact.says.format_map(self.figures)

    def dtypes(self) -> set[str]:
        return {dtype for entry in self.entries for dtype in entry.dtypes}


CONDITIONS: dict[str, Callable[[_View], bool]] = {
    "always": lambda view: True,
    "slots": lambda view: view.figures["slots"] != 3,
    "bad": lambda view: view.figures["bad"] > 0,
    "wide dtype": lambda view: bool(view.dtypes() & {"float32", "float64"}),
    "eight bits": lambda view: any(SCALES in note for note in view.report.notes),
    "safetensors": lambda view: view.safetensors,
    "torch unmasked": lambda view: not view.safetensors and view.report.masked < view.report.items,
    "unmasked": lambda view: view.report.masked < view.report.items,
    "empty masks": lambda view: bool(view.report.masked and view.report.empty_masks),
    "text order": lambda view: bool(view.figures["first"]),
    "dump": lambda view: "batch" in view.report.chosen,
}
"""What `Fact.when` can name."""


def _teacher(entry: Entry, entries: list[Entry], applied: bool | None) -> list[str]:
    warns = []
    placed, text = entry.placed, max(entry.text_pre or 0.0, entry.text_post or 0.0)
    if placed is not None and placed.boundary is not None and placed.boundary != len(placed.errors) - 1:
        warns.append(f"is {entry.inferred}, not the last state: the teacher's logits are the head over a middle layer")
    elif placed is None and entry.text_pre is not None and text < READABLE:
        warns.append(f"the target's head gives {100 * text:.0f} % of the text from it: no last state, or not this target's text")
    elif alone(entry):
        warns.append("depends on the token alone: a teacher that repeats the input")
    elif entry.rank is not None and entry.rank < sum(e.rank is not None for e in entries) and not is_normed(entry):
        warns.append("is not the deepest entry by norm and token share: perhaps no last state, or one after the final norm")
    number = layer_number(entry.label)
    others = [n for e in entries[:-1] if (n := layer_number(e.label)) is not None]
    if number is not None and others and number <= max(others):
        warns.append(f"is labelled “{entry.label}”, not the deepest label: were the labels right, no last state would be there")
    post = placed.norm == "post" if placed is not None else is_normed(entry)
    tested = placed is not None or entry.text_pre is not None
    if post and applied:
        warns.append("was stored after the final norm: the trainer applies that norm once more")
    elif post is False and applied is False and tested:
        warns.append("is before the final norm, and this version feeds it to the head as it is")
    elif applied is None and tested:
        side, value = ("after", "false") if post else ("before", "true")
        warns.append(f"is {side} the final norm: last_hidden_states_prenorm must be {value}, else the teacher is wrong")
    return warns


def _slot(entry: Entry) -> list[str]:
    warns = []
    if says_embedding(entry.label) and alone(entry) is False:
        warns.append(f"labelled “{entry.label}”, but is no embedding; the trainer does not read labels")
    if alone(entry) and not says_embedding(entry.label):
        warns.append("holds the embedding")
    return warns
