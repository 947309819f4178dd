"""A capture tested: against itself, and against captures of the same prompts under other conditions (`draftscope.verify/1`).

The mark that a verification leaves in the capture's folder says which files were tested; a diagnosis reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftscope.compare.agreement import Agreement, agreement
from draftscope.compare.runs import Recorded, recorded
from draftscope.compare.within import Within, within
from draftscope.errors import DraftscopeError
from draftscope.findings import STRONGEST_FIRST, Finding
from draftscope.inspecting.inspect import inspect_path
from draftscope.inspecting.measure import slots_of
from draftscope.inspecting.placing import Knowledge
from draftscope.inspecting.suspicions import suspect
from draftscope.states.opening import open_source
from draftscope.states.places import Place, matching, size_of
from draftscope.states.tensorfile import read_json
from draftscope.states.types import Trace

MARK = "verified.json"
SCHEMA = "draftscope.verify/1"
FAULTS = {
    "not finite": ("nonfinite", "Find where the values overflow or are never written"),
    "zeros": ("graph-capture", "Look for rows that this condition never writes: a prefix from the cache, a graph captured before "
                               "the auxiliary states were switched on"),
    "padding": ("graph-capture", "The buffer is read beyond its live rows, or nothing writes it: copy only the rows of this "
                                 "batch, after the pass that made them"),
    "stale": ("graph-capture", "The buffer was read before this step wrote it, or after a later one did: copy the rows where the "
                               "pass ends, outside of the graph"),
    "another request": ("req-mix", "Rows are taken by the wrong bounds or order of requests: take the bounds before anything "
                                   "reorders or overwrites them"),
    "another slot": ("capture-alias", "Slots share a buffer or change places in this condition: copy states where they arise"),
    "shifted": ("token-shift", "States and token ids come from different rows in this condition"),
    "scaled": ("scale-mult", "A multiplier is applied in one of the two conditions only"),
    "unknown": ("capture-alias", "Two captures of the same tokens differ: give --target, which tells half of a residual pair "
                                 "or another layer from noise"),
}
"""By kind of row: the fault it is a trace of, and where to look."""
NEXT_SECOND = ("capture the same prompts again under another condition (alone, prefix cache off, eager) and give both: "
               "draftscope capture verify A B")


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Tested(Model):
    """One capture by itself."""

    path: str
    requests: int
    rows: int
    slots: int
    dtype: str
    claims: dict[str, Any] = Field(default_factory=dict)
    skipped: int = 0
    prefix_rows: int = 0
    chained_rows: int = 0


class Compared(Model):
    """The first capture against another. Errors are relative, by slot; `missing_rows` are the other's, `missing_here` its own."""

    against: str
    requests: int
    matched: int
    rows: int
    differing_text: int
    missing_rows: int
    missing_here: int
    tolerance: float
    median_error: list[float]
    largest_error: list[float]
    beyond: list[int]
    unlike: dict[str, int] = Field(default_factory=dict)


class Verified(Model):
    schema_: Literal["draftscope.verify/1"] = Field(default="draftscope.verify/1", alias="schema")
    verdict: Literal["clean", "undecided"] | None = None
    captures: list[Tested] = Field(default_factory=list)
    comparisons: list[Compared] = Field(default_factory=list)
    findings: list[Finding] = Field(default_factory=list)
    next: list[str] = Field(default_factory=list)


def verify(paths: list[Path], *, known: Knowledge | None = None, on_capture: Callable[[Path], None] | None = None) -> Verified:
    """Test captures of the same prompts: each by itself, the first against every other.

    Args:
        known: the target, where it is at hand: then every slot is placed, too.

    Raises:
        DraftscopeError: a path that holds no capture, or captures without a request in common.
    """
    result = Verified()
    held: list[list[Recorded]] = []
    for path in paths:
        if on_capture is not None:
            on_capture(path)
        traces, items, tested = _read(path, None if known is None else known.parts.width)
        held.append(items)
        result.captures.append(tested)
        found = within(traces, items)
        tested.prefix_rows, tested.chained_rows = found.prefix_rows, found.chained
        result.findings += _by_itself(path, tested, found, alone=len(paths) == 1)
        if known is not None:
            inspected = inspect_path(path, known=known, format="capture")
            result.findings += [f for f in inspected.findings if f.fault not in {g.fault for g in result.findings}]
    for path, items in zip(paths[1:], held[1:], strict=True):
        compared = agreement(held[0], items)
        if not compared.matched:
            raise DraftscopeError(f"no request has the tokens of one in {paths[0]}", where=str(path),
                                  remedy="Capture the same prompts under both conditions, answered greedily")
        result.comparisons.append(_facts(path, compared))
        result.findings += _differences(paths[0], path, compared)
        result.next += _remarks(path, compared)
    if len(paths) == 1:
        result.next.append(NEXT_SECOND)
    result.findings.sort(key=lambda finding: STRONGEST_FIRST[finding.strength])
    if not result.findings:
        result.verdict = "clean" if len(paths) > 1 else "undecided"
    return result


def _read(path: Path, width: int | None) -> tuple[list[Trace], list[Recorded], Tested]:
    source = open_source(path, kind="traces", skip_bad=True)
    if source.kind != "traces":
        raise DraftscopeError(f"holds training data ({source.format}), no capture", where=str(path),
                              remedy="Name folders that `draftscope capture` or your own hook wrote")
    traces: list[Trace] = list(source)
    if not traces:
        raise DraftscopeError("holds no request that can be read", where=str(path))
    slots = slots_of(traces[0], width)[0]
    items = [item for trace in traces if trace.fc_input.shape[1] == traces[0].fc_input.shape[1]
             and (item := recorded(trace, slots)) is not None]
    if not items:
        raise DraftscopeError("holds not one accepted row", where=str(path))
    dtype = str(items[0].slots.dtype).removeprefix("torch.")
    tested = Tested(
        path=str(path), requests=len(traces), rows=sum(len(item.token_ids) for item in items), slots=slots, dtype=dtype,
        claims=dict(source.meta), skipped=len(source.skipped) + len(traces) - len(items),
    )
    return traces, items, tested


def _by_itself(path: Path, tested: Tested, found: Within, *, alone: bool) -> Iterator[Finding]:
    name = path.name
    if found.repeats:
        places = "; ".join(f"slot {one.slot}: {one.rows} rows, such as {one.example}" for one in found.repeats)
        yield suspect(
            "graph-capture", [f"slot {one.slot}" for one in found.repeats],
            f"{name}: rows of unlike tokens hold the same vector, bit for bit", "supported", "needs-serving",
            "Rows were never written, or read from a buffer that still held another step: copy live rows, where they are made",
            measured="every row's bytes against all others of the capture", result=places,
            decides="unlike tokens have unlike states", figures={"rows": sum(one.rows for one in found.repeats)},
        )
    if found.prefix_differ:
        yield suspect(
            "req-mix", ["tensor fc_input"], f"{name}: requests that begin with the same tokens have unlike states there",
            "supported", "needs-serving",
            "One of the two rows belongs to another request or step: compare a run of one request at a time with one in a batch",
            measured="rows of the same token prefix in two requests",
            result=f"{found.prefix_differ} of {found.prefix_rows} rows differ beyond rounding, first {found.prefix_example}",
            decides="the same prefix gives the same state", figures={"rows": found.prefix_rows, "differ": found.prefix_differ},
        )
    if found.broken:
        yield suspect(
            "req-mix", ["tensor verified_ids"], f"{name}: what the target chose after a row is not the next accepted row's token",
            "proven", "needs-serving",
            "Token ids, accepted rows and verified ids are not of the same rows: check where each is taken",
            measured="verified_ids of every accepted row against the token of the next",
            result=f"{found.broken} of {found.chained} differ, first {found.broken_example}", decides="they are the same token",
            figures={"rows": found.chained, "differ": found.broken},
        )
    if found.gaps:
        yield suspect(
            "req-mix", ["tensor positions"], f"{name}: accepted rows leave positions out or repeat them", "supported",
            "needs-serving", "Rows were dropped, or rejected ones counted as accepted",
            measured="positions of accepted rows",
            result=f"{len(found.gaps)} of {tested.requests} requests, such as {found.gaps[0]}",
            decides="one after the other", figures={"requests": len(found.gaps)},
        )
    if found.late and alone:
        yield suspect(
            "draft-kv", ["tensor positions"], f"{name}: the first rows of {found.late} requests are missing", "suspected",
            "needs-serving", "Capture with the prefix cache off, or with every row of the first pass",
            measured="position of every request's first row",
            result=f"{found.late_rows} rows of {found.late} requests are not there",
            decides="a request begins at position 0",
            caveats=["a prefix that came from the cache has no rows to capture; the draft's own cache must hold it too"],
        )


def _differences(first: Path, other: Path, found: Agreement) -> Iterator[Finding]:
    kinds: dict[str, list[Any]] = {}
    for one in found.unlike:
        kinds.setdefault(one.kind, []).append(one)
    for kind, group in kinds.items():
        fault, fix = FAULTS[kind]
        slots = sorted({one.slot for one in group})
        rows = sum(one.rows for one in group)
        verify_rows = sum(one.verify for one in group)
        where = "all in verify steps" if verify_rows == rows else "none in verify steps" if not verify_rows else \
            f"{verify_rows} of them in verify steps"
        holds = "; ".join(f"slot {one.slot}: {one.of} ({one.rows} rows, such as {one.example}, relative error {one.error:.2g})"
                          for one in group[:6])
        beyond = sum(found.beyond)
        yield suspect(
            fault, [f"slot {slot}" for slot in slots],
            f"{other.name} does not hold {first.name}'s states for the same tokens: {_KIND[kind]}",
            "suspected" if kind == "unknown" else "proven", "needs-serving", fix,
            measured=f"{found.rows} rows of the same tokens in both; {beyond} entries beyond {found.tolerance:.2g}, "
                     f"{sum(one.rows for one in found.unlike)} of them looked up among the other's rows",
            result=f"{holds}; {where}", decides="the same tokens give the same states in every condition",
            figures={"rows": rows, "verify": verify_rows, "compared": found.rows, "beyond": found.beyond},
        )


_KIND = {
    "not finite": "values that are not finite", "zeros": "rows of zeros", "padding": "one vector over and over",
    "stale": "rows of another step", "another request": "rows of another request", "another slot": "another slot's states",
    "shifted": "rows of a neighbouring token", "scaled": "states times a factor", "unknown": "states found nowhere in the other",
}


def _facts(path: Path, found: Agreement) -> Compared:
    unlike: dict[str, int] = {}
    for one in found.unlike:
        unlike[one.kind] = unlike.get(one.kind, 0) + one.rows
    return Compared(
        against=str(path), requests=found.requests, matched=found.matched, rows=found.rows, differing_text=found.differing_text,
        missing_rows=found.missing, missing_here=found.missing_in_a, tolerance=found.tolerance, median_error=found.median,
        largest_error=found.largest, beyond=found.beyond, unlike=unlike,
    )


def _remarks(path: Path, found: Agreement) -> Iterator[str]:
    if found.missing:
        yield (f"{path.name} lacks {found.missing} rows at the beginning of requests that the first has (a cached prefix): the "
               "draft must have them in its own cache, which no capture shows")
    if found.missing_in_a:
        yield f"{path.name} has {found.missing_in_a} rows at the beginning of requests that the first lacks (a cached prefix)"
    if found.differing_text:
        yield (f"{found.differing_text} of {found.matched} requests of {path.name} go on with another text at some token: rows "
               "up to there were compared; answer greedily, and expect near-ties to part in low precision")
    if found.unmatched:
        yield f"{len(found.unmatched)} requests of {path.name} have no counterpart, such as {found.unmatched[0]}"


def contents(folder: Place) -> dict[str, int]:
    """The capture's files by name, with their sizes."""
    return {file.name: size_of(file) for file in matching(folder, ".safetensors")}


def mark(folder: Path, result: Verified) -> dict[str, Any]:
    """What is kept in the folder of the first capture, as `verified.json`."""
    return {
        "schema": SCHEMA, "verdict": result.verdict, "findings": [finding.fault for finding in result.findings],
        "against": [c.against for c in result.comparisons], "rows": sum(c.rows for c in result.comparisons),
        "files": contents(folder),
    }


def read_mark(folder: Place) -> tuple[bool, str]:
    """Whether a capture was verified and found clean, and what is to be said of it."""
    if not folder.is_dir() or not (folder / MARK).is_file():
        return False, "the capture was not verified against a second one (draftscope capture verify A B)"
    try:
        held = read_json(folder / MARK)
    except DraftscopeError:
        return False, f"the capture's {MARK} cannot be read: verify it again"
    if not isinstance(held, dict) or held.get("schema") != SCHEMA:
        return False, f"the capture's {MARK} is not a verification"
    if held.get("files") != contents(folder):
        return False, "the capture was verified, but its files have changed since"
    if held.get("verdict") == "clean":
        others = held.get("against")
        count = len(others) if isinstance(others, list) else 0
        return True, f"the capture was verified: {held.get('rows')} rows agree with {count} other captures"
    faults = held.get("findings")
    return False, f"the capture was verified and did not pass: {', '.join(map(str, faults)) if faults else 'nothing compared'}"
