"""The fingerprint of a source, and merging of fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli.common import (
    FormatOption,
    JsonOption,
    QuietOption,
    SkipBadOption,
    ThreadsOption,
    check_own,
    check_writable,
    setup,
)
from draftscope.cli.elsewhere import MemoryOption, OnOption, PythonOption, host_of
from draftscope.errors import DraftscopeError, UsageError


def command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE | merge F...", help="Training data or a capture to scan; or fingerprints to merge."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the fingerprint goes.")],
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, metavar="N", help="Slots in a capture's rows; without it found, else 3.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Every N-th sequence from the I-th (0 .. N-1); merge them later.")
    ] = None,
    groups: Annotated[Path | None, typer.Option(
        "--groups", metavar="FILE",
        help="JSONL whose line i tells the natural group (source, domain, prompt kind) of sample i.")] = None,
    group_by: Annotated[str, typer.Option("--group-by", metavar="KEY", help="The key that holds it.")] = "source",
    every: Annotated[int | None, typer.Option(
        "--every", min=1, metavar="N",
        help="Samples and cosines of one ordinary row in N, 1 = of all; without it by the number of sequences.")] = None,
    on: OnOption = None,
    python: PythonOption = "python3",
    memory: MemoryOption = 4.0,
    format: FormatOption = None,
    skip_bad: SkipBadOption = False,
    json: JsonOption = None,
    quiet: QuietOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Write the mergeable statistics of SOURCE to a file, or merge such files (`draftscope scan merge F1 F2 -o F`)."""
    ui = setup(quiet, threads, json=json)
    from draftscope.compare.statistics import side_of
    from draftscope.report.comparison import fingerprint_story
    from draftscope.scan.fingerprint import is_fingerprint, load_fingerprint
    from draftscope.scan.kernels import engine
    from draftscope.scan.scan import scan
    from draftscope.states.opening import open_source
    from draftscope.states.places import place

    if groups is not None and (on is not None or sources[0] == "merge"):
        raise UsageError("--groups are for scanning here")
    check_writable(out)
    check_own(out, lambda start: is_fingerprint(out))
    if sources[0] == "merge":
        if len(sources) < 3:
            raise UsageError("nothing to merge", remedy="Name two fingerprints or more")
        if slots is not None or shard is not None or on is not None or every is not None:
            raise UsageError("--slots, --shard, --every and --on are for scanning, not for merging")
        result = load_fingerprint(place(sources[1]))
        for name in sources[2:]:
            result = result.merge(load_fingerprint(place(name)))
    elif len(sources) > 1:
        raise UsageError("one source at a time", remedy="Scan each, then `draftscope scan merge`")
    elif (there := host_of(on, python, memory, threads)) is not None:
        from draftscope.elsewhere.answers import scan_there

        with ui.progress(f"scanning {there.path(sources[0])}", unit="sequences", beside=out) as advance:
            scanned = scan_there(there, sources[0], slots=slots, shard=_shard(shard), every=every, format=format,
                                 skip_bad=skip_bad, on_items=advance)
        result = scanned.fingerprint
        ui.note_source(scanned)
        if scanned.skips > len(scanned.skipped):
            ui.note(f"and {scanned.skips - len(scanned.skipped)} more")
    else:
        source = open_source(sources[0], format, skip_bad=skip_bad)
        part = _shard(shard)
        total = len(source) if part is None else len(range(part[0], len(source), part[1]))
        with ui.progress(f"scanning {source.path}", total=total, unit="sequences", beside=out) as advance:
            result = scan(source, slots=slots, shard=part, on_item=lambda rows, size: advance(1), skip_odd=skip_bad,
                          every=every, groups=None if groups is None else _groups(groups, group_by))
        ui.note_source(source)
        if engine() != "numba":
            ui.note("numba is not installed: the passes run on torch, many times slower (`pip install 'draftscope[fast]'`)")
    result.save(out)
    side = side_of(result)
    for part_of_story in fingerprint_story(side):
        ui.print(part_of_story)
    ui.print(f"written to {out}")
    ui.write_json({"schema": "draftscope.scan/1", "fingerprint": str(out), **side.model_dump()})
    return 0


def _groups(path: Path, key: str) -> dict[int, str]:
    """Group by line number, from 0."""
    from draftscope.states.tensorfile import parse_json

    found = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                value = parse_json(line) if line.strip() else None
                if isinstance(value, dict) and isinstance(value.get(key), str | int):
                    found[number] = str(value[key])
    except (OSError, ValueError) as error:
        raise DraftscopeError(f"is not readable JSONL ({error})", where=str(path)) from None
    if not found:
        raise UsageError(f"no line has the key {key!r}", where=str(path), remedy="Name another with --group-by")
    return found


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise UsageError(f"no shard: `{text}`", remedy="Write I/N with I from 0 to N-1, such as 0/4")
    return int(number), int(count)
