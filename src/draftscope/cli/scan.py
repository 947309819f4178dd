"""The fingerprint of a source, and merging of fingerprints."""

from __future__ import annotations

import time
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
from draftscope.cli.scanning import (
    PiecesOption,
    ProjectOption,
    RayOption,
    RayResourceOption,
    WorkersOption,
    by_ray,
    forget,
    merge,
    projected,
    there,
)
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
        str | None, typer.Option("--shard", metavar="I/N|auto", help="Every N-th file from the I-th (0 .. N-1), or as torchrun "
                                 "or Slurm say; {i} in FILE is I. Merge them later.")
    ] = None,
    groups: Annotated[Path | None, typer.Option(
        "--groups", metavar="FILE",
        help="JSONL whose line i tells the natural group (source, domain, prompt kind) of sample i.")] = None,
    group_by: Annotated[str, typer.Option("--group-by", metavar="KEY", help="The key that holds it.")] = "source",
    every: Annotated[int | None, typer.Option(
        "--every", min=1, metavar="N",
        help="Samples and cosines of one ordinary row in N, 1 = of all; without it by the number of sequences.")] = None,
    ray: RayOption = None,
    ray_resource: RayResourceOption = None,
    pieces: PiecesOption = None,
    project: ProjectOption = None,
    workers: WorkersOption = 1,
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
    from draftscope.scan.core import engine_of
    from draftscope.scan.fingerprint import is_fingerprint
    from draftscope.scan.merging import NUMBER, shard_of
    from draftscope.scan.pieces import Done, Job, from_disk
    from draftscope.scan.scan import scan
    from draftscope.states.opening import open_source

    part = None if shard is None else shard_of(shard)
    if part is not None:
        out = Path(str(out).replace(NUMBER, str(part[0])))
    if groups is not None and (on is not None or sources[0] == "merge"):
        raise UsageError("--groups are for scanning here, or with --ray")
    if ray is not None and (on is not None or part is not None):
        raise UsageError("--ray goes with neither --on nor --shard", remedy="Its pieces are of the whole source")
    if ray is None and (ray_resource is not None or pieces is not None):
        raise UsageError("--ray-resource and --pieces are for --ray")
    done: list[Done] = []
    ran, more = 1, {}
    host = host_of(on, python, memory, threads)
    check_writable(out)
    check_own(out, lambda start: is_fingerprint(out))
    if sources[0] == "merge":
        if any(option is not None for option in (slots, shard, on, every, ray, project)):
            raise UsageError("--slots, --shard, --every, --on, --ray and --project are for scanning, not for merging")
        work = merge(ui, sources[1:])
        result, more = work.fingerprint, work.more
    elif len(sources) > 1:
        raise UsageError("one source at a time", remedy="Scan each, then `draftscope scan merge`")
    elif ray is not None:
        job = Job(sources[0], format, slots, every, skip_bad, None if groups is None else _groups(groups, group_by),
                  threads=threads or 1)
        work = by_ray(ui, job, ray, ray_resource, pieces, "scan --ray")
        result, done, ran, more = work.fingerprint, work.done, work.workers, work.more
    elif host is not None:
        work = there(ui, host, sources[0], out, slots=slots, shard=part, every=every, format=format, skip_bad=skip_bad)
        result, more = work.fingerprint, work.more
    else:
        source = open_source(sources[0], format, skip_bad=skip_bad)
        total = len(source) if part is None else len(range(part[0], len(source), part[1]))
        begun, disk, sizes = time.monotonic(), from_disk(), [0]

        def counted(rows: int, size: int) -> None:
            sizes[0] += size
            advance(1)

        with ui.progress(f"scanning {source.path}", total=total, unit="sequences", beside=out) as advance:
            result = scan(source, slots=slots, shard=part, on_item=counted, skip_odd=skip_bad, every=every,
                          groups=None if groups is None else _groups(groups, group_by))
        done = [Done(total, result.rows, sizes[0], time.monotonic() - begun, from_disk() - disk, "")]
        ui.note_source(source)
        if engine_of().name != "numba":
            ui.note("numba is not installed: the passes run on torch, many times slower (`pip install 'draftscope[fast]'`)")
    result.save(out)
    if host is not None:
        forget(out)
    side = side_of(result)
    for part_of_story in fingerprint_story(side):
        ui.print(part_of_story)
    more |= projected(ui, project, workers, done, ran)
    ui.print(f"written to {out}")
    ui.write_json({"schema": "draftscope.scan/1", "fingerprint": str(out), **side.model_dump(), **more})
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
