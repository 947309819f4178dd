"""What a path is and holds: its kind found from the content, its figures, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from draftscope.errors import DraftscopeError
from draftscope.findings import Finding
from draftscope.inspecting.as_trainer import read_as
from draftscope.inspecting.meaning import infer
from draftscope.inspecting.measure import Pass, measure
from draftscope.inspecting.norms import Slots, first_norms, norms_block
from draftscope.inspecting.otherwise import no_states
from draftscope.inspecting.report import AsTrainer, Inspected
from draftscope.inspecting.suspicions import find
from draftscope.states.opening import ABSENT, open_source, recognised
from draftscope.states.places import Place

if TYPE_CHECKING:
    from draftscope.inspecting.placing import Knowledge


@dataclass(slots=True)
class Answer:
    """What was found at one path."""

    report: Inspected
    findings: list[Finding] = field(default_factory=list)
    norms: str = ""
    as_trainer: AsTrainer | None = None


def inspect_path(path: Place, *, known: Knowledge | None = None, norms: bool = False, trainer: str | None = None,
                 samples: int = 0, format: str | None = None, skip_bad: bool = False,
                 on_item: Callable[[], None] | None = None) -> Answer:
    """Inspect one file or folder.

    Args:
        known: the target, where one was given.
        norms: also the block of per-token norms, of the first item.
        trainer: also what this trainer makes of training data.
        samples: read the states of at most this many items; 0 = all.
        format: read it as this format whatever its content looks like.
        skip_bad: count what is unreadable in a file named directly instead of raising.

    Raises:
        DraftscopeError: there is nothing here that can be read.
        UsageError: an unknown trainer.
    """
    if not path.exists():
        raise DraftscopeError(ABSENT, where=str(path), remedy="Check the path")
    if format is None and recognised(path) is None:
        other = no_states(path)
        if other is not None:
            return Answer(*other)
    source = open_source(path, format, skip_bad=skip_bad)
    found = measure(source, samples=samples, width=None if known is None else known.parts.width, on_item=on_item)
    width = None if known is None else known.parts.width
    return judged(found, first_norms(found, width) if norms else None, known, trainer)


def judged(found: Pass, norms: Slots | None = None, known: Knowledge | None = None, trainer: str | None = None) -> Answer:
    """What the figures of a pass mean, wherever they were taken."""
    if known is not None:
        from draftscope.inspecting.placing import place_entries

        place_entries(found, known)
        if known.remark:
            found.report.notes.append(known.remark)
    infer(found.report.entries, found.constant)
    found.report.notes += remarks(found)
    layers = None if known is None or known.target is None else known.target.layers
    answer = Answer(found.report, find(found, None if known is None else known.parts, layers))
    if norms is not None:
        answer.norms = norms_block(norms, found.report.entries)
    if trainer is not None and found.report.what == "training data":
        answer.as_trainer = read_as(trainer, found)
    return answer


def remarks(found: Pass) -> list[str]:
    """What looks odd and may be right."""
    said = []
    entries = found.report.entries
    for one, other in pairwise(entries):
        if one.norm_median and other.norm_median and other.norm_median < 0.9 * one.norm_median:
            said.append(f"norms fall from {one.name} ({one.norm_median:.4g}) to {other.name} ({other.norm_median:.4g}): "
                        "streams grow with depth, so they are out of order, or a norm was applied")
    dtypes = {name for entry in entries for name in entry.dtypes}
    if len(dtypes) > 1:
        said.append(f"files are stored in unlike dtypes: {', '.join(sorted(dtypes))}")
    facts = found.report.facts
    length = facts.get("accept_length")
    if found.steps >= 16 and length == 1.0:
        said.append("not one drafted token was accepted: NaN in the states or a draft that is not loaded look like this")
    if found.report.what == "training data" and not found.report.masked:
        said.append("no loss_mask: which tokens are answers is not known, the argmax rules apply")
    return said

