"""Answers of the other side, checked and turned into what the same work here gives."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from draftscope.elsewhere.partial import Partial
from draftscope.elsewhere.session import Frame, Host, error_of, run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.findings import Finding, Placed
from draftscope.inspecting.figures import Inspected
from draftscope.inspecting.inspect import Answer, judged
from draftscope.inspecting.measure import Pass
from draftscope.inspecting.norms import Slots
from draftscope.scan.fingerprint import Fingerprint, Odd, load_fingerprint
from draftscope.scan.pieces import together
from draftscope.scan.scan import BAD
from draftscope.states.types import Sample, Skipped, Trace

if TYPE_CHECKING:
    from draftscope.inspecting.placing import Knowledge

BEGINNINGS = "the target was held against the first 2,048 rows at most, 512 of one sequence"

SECONDS = 60.0
"""Between two parts of a scan's answer: what a lost connection may lose."""


class Kept(BaseModel):
    name: str
    meta: dict[str, Any]


class Measured(BaseModel):
    """A `Pass` without its tensors."""

    report: Inspected
    same: list[tuple[int, int, int]]
    compared: int
    constant: list[int]
    ranks_agree: bool
    negative_ids: int
    largest_id: int
    steps: int
    accepted: int
    contradictions: int
    rows_by_phase: dict[str, int]
    claimed: list[tuple[str | None, int]]
    kept: list[Kept]


class One(BaseModel):
    """What the other side says of one path: a pass, or a report with findings."""

    path: str
    measured: Measured | None = None
    norms: Slots | None = None
    report: Inspected | None = None
    findings: list[Finding] = []


One.model_rebuild(_types_namespace={"Placed": Placed})


def inspect_there(host: Host, paths: list[str], *, known: Knowledge | None = None, norms: bool = False,
                  trainer: str | None = None, samples: int = 0, format: str | None = None, skip_bad: bool = False,
                  on_items: Callable[[int], None] = lambda items: None) -> Iterator[Answer | DraftscopeError]:
    """`inspect_path` of each path, measured there and judged here; errors of a path are yielded in its place.

    Raises:
        DraftscopeError: there is no answer at all.
        UsageError: options that do not go together.
    """
    job = {"what": "inspect", "paths": paths, "norms": norms, "samples": samples, "format": format, "skip_bad": skip_bad,
           "width": None if known is None else known.parts.width}
    for frame in run(host, job, on_items):
        if frame.kind != "answer":
            error = error_of(host, frame)
            if isinstance(error, UsageError):
                raise error
            yield error
            continue
        try:
            held = One.model_validate(frame.held)
            report = held.report if held.measured is None else held.measured.report
            if report is None:
                raise ValueError("no report")
            report.path = host.path(held.path)
            if held.measured is None:
                yield Answer(report, held.findings)
                continue
            found = _pass(held.measured, load(frame.more) if frame.more else {})
        except (ValidationError, ValueError, KeyError, SafetensorError) as error:
            raise DraftscopeError(f"answered with something that is no answer ({str(error).splitlines()[0]})",
                                  where=host.name) from None
        if known is not None:
            found.report.notes.append(BEGINNINGS)
        yield judged(found, held.norms, known, trainer)


def _pass(held: Measured, tensors: dict[str, Tensor]) -> Pass:
    kept: list[Sample | Trace] = []
    for number, one in enumerate(held.kept):
        own = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.partition(".")[0] == str(number)}
        if "states" in own:
            kept.append(Sample(one.name, own["token_ids"], own["states"], own.get("loss_mask"), ()))
        elif "fc_input" in own:
            kept.append(Trace(one.name, own["fc_input"], own["token_ids"], own["accepted"], phase=own.get("phase"),
                              last_hidden=own.get("last_hidden"), meta=one.meta))
    return Pass(
        report=held.report, same=Counter({(i, j): number for i, j, number in held.same}), compared=held.compared,
        constant=held.constant, ranks_agree=held.ranks_agree, negative_ids=held.negative_ids, largest_id=held.largest_id,
        steps=held.steps, accepted=held.accepted, contradictions=held.contradictions,
        rows_by_phase=Counter(held.rows_by_phase), kept=kept, claimed=Counter(dict(held.claimed)),
    )


@dataclass(slots=True)
class Scanned:
    """A fingerprint made there, with what `Ui.note_source` prints of a source; `before`: files that an earlier call had got."""

    made: Fingerprint | None
    format: str
    chosen: str
    notes: list[str]
    skipped: list[Skipped]
    skips: int
    before: int = 0

    @property
    def fingerprint(self) -> Fingerprint:
        assert self.made is not None
        return self.made


def scan_there(host: Host, path: str, out: Path | None = None, *, slots: int | None = None, shard: tuple[int, int] | None = None,
               every: int | None = 1, format: str | None = None, skip_bad: bool = False,
               on_items: Callable[[int], None] = lambda items: None,
               on_begin: Callable[[int, int], None] = lambda files, before: None) -> Scanned:
    """`scan` of a path there; its origin is named `HOST:PATH`.

    What was measured comes every `SECONDS`, and is kept beside `out` until all of it is there: the same call goes on after what
    an earlier one got before its connection was lost.

    Args:
        out: where the fingerprint will go; None = nothing is kept.
        on_items: told of files as they are read; on_begin: of how many there are, and how many came before.

    Raises:
        DraftscopeError: as `scan`, or there is no answer, or the files there are others than those of the earlier call.
    """
    asked = {"paths": [path], "slots": slots, "shard": shard, "every": every, "format": format, "skip_bad": skip_bad}
    partial = Partial.of(out or Path("nowhere/none"), {**asked, "host": host.name})
    job = {"what": "scan", **asked, "start": partial.next, "listing": partial.listing, "seconds": SECONDS}
    scanned = Scanned(None, "", "", [], [], 0, partial.next)
    bad: list[tuple[str, str]] = []
    of = 0
    try:
        for frame in run(host, job, on_items):
            if frame.kind == "begun":
                of, partial.listing = int(frame.held["of"]), str(frame.held["listing"])
                on_begin(of, partial.next)
                continue
            if frame.kind != "answer":
                raise error_of(host, frame)
            _take(host, frame, scanned, partial, bad)
            if out is not None and partial.next < of:
                partial.keep()
    except (KeyError, TypeError, ValueError) as error:
        raise DraftscopeError(f"answered with something that is no answer ({error})", where=host.name) from None
    except DraftscopeError as error:
        if out is None or not partial.next or isinstance(error, UsageError):
            raise
        remedy = f"{error.remedy + '. ' if error.remedy else ''}The same command goes on after {partial.next:,} of {of:,} files"
        raise DraftscopeError(error.what, where=error.where, remedy=remedy) from None
    if partial.made is None:
        raise DraftscopeError("gave no answer", where=host.name)
    partial.made.origins = together(partial.made.origins)
    scanned.made = partial.made
    return scanned


def _take(host: Host, frame: Frame, scanned: Scanned, partial: Partial, bad: list[tuple[str, str]]) -> None:
    """A part of the answer to what came before it.

    Raises:
        DraftscopeError: it is no fingerprint, or of another layout.
    """
    held = frame.held
    scanned.format, scanned.chosen, scanned.notes = str(held["format"]), str(held["chosen"]), list(map(str, held["notes"]))
    scanned.skipped = [*scanned.skipped, *(Skipped(**one) for one in held["skipped"])]
    scanned.skips += int(held["skips"])
    bad += [(str(name), str(why)) for name, why in held.get("bad", ())]
    if frame.more:
        with tempfile.TemporaryDirectory(prefix="draftscope-") as folder:
            file = Path(folder) / "fingerprint"
            file.write_bytes(frame.more)
            made = load_fingerprint(file)
        made.origins = tuple(replace(origin, path=host.path(origin.path)) for origin in made.origins)
        if partial.made is None:
            partial.made = made
        else:
            partial.made.absorb(made)
    if partial.made is not None and bad:
        odd = partial.made.odd.setdefault(BAD, Odd())
        for name, why in bad:
            odd.add(name, why)
        partial.made.origins = (*partial.made.origins[:-1], replace(
            partial.made.origins[-1], skipped=partial.made.origins[-1].skipped + len(bad)))
        bad.clear()
    partial.next = int(held["next"])
