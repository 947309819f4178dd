"""The fingerprint of a source, and merging of fingerprints."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftscope.cli.common import (
    FormatOption,
    JsonOption,
    Noted,
    QuietOption,
    SkipBadOption,
    ThreadsOption,
    Ui,
    keep,
    setup,
)
from draftscope.cli.elsewhere import MemoryOption, OnOption, PythonOption, host_of
from draftscope.cli.outputs import Output
from draftscope.cli.scanning import (
    PiecesOption,
    ProjectOption,
    RayOption,
    RayResourceOption,
    Work,
    WorkersOption,
    by_ray,
    forget,
    merge,
    projected,
    slower,
    there,
)
from draftscope.cli.sizes import parse_bytes
from draftscope.errors import DraftscopeError, UsageError

if TYPE_CHECKING:
    from draftscope.scan.scan import Progress

LINE = 16 << 20
"""Bytes of a line of --groups: a device gives bytes for ever."""


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
    sample: Annotated[int | None, typer.Option(
        "--sample", min=1, metavar="N", help="Only N sequences, chosen by a hash of their names: an estimate with its interval.")
    ] = None,
    budget: Annotated[float | None, typer.Option(
        "--budget", min=0.01, metavar="SECONDS", help="As many sequences as can be taken in this time, chosen likewise.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted scan into the same file stopped.")] = False,
    engine: Annotated[str | None, typer.Option(
        "--engine", metavar="NAME", help="What passes over the rows: numba, torch or numpy; without it the fastest that works.")
    ] = None,
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
    """Write the mergeable statistics of SOURCE to a file, or merge such files (`draftscope scan merge F1 F2 -o F`).

    Ctrl-C keeps what was counted beside the output; --resume goes on from it.
    """
    from draftscope.compare.statistics import side_of
    from draftscope.report.comparison import fingerprint_story
    from draftscope.report.scanning import estimate_story, estimates
    from draftscope.scan.fingerprint import is_fingerprint
    from draftscope.scan.merging import NUMBER, shard_of
    from draftscope.scan.resuming import partial_of
    from draftscope.scan.served import is_statistics, load_statistics
    from draftscope.states.places import place

    size = None if project is None else parse_bytes(project, "--project")
    part = None if shard is None else shard_of(shard)
    if part is not None:
        out = Path(str(out).replace(NUMBER, str(part[0])))
    ui = setup(quiet, threads, json=json, schema="scan", outputs=[
        Output("--out", out, lambda start: is_fingerprint(out), beside=(partial_of(out), Noted.beside(out)))])
    here = {"--slots": slots, "--shard": shard, "--every": every, "--groups": groups, "--sample": sample, "--budget": budget,
            "--resume": resume or None, "--engine": engine}
    spread = {"--ray-resource": ray_resource, "--pieces": pieces}
    host = host_of(on, python, memory, threads)
    if sources[0] == "merge":
        _refuse(here | spread | {"--on": on, "--ray": ray, "--project": project}, "are for scanning, not for merging")
        work = merge(ui, sources[1:])
    elif len(sources) > 1:
        raise UsageError("one source at a time", remedy="Scan each, then `draftscope scan merge`")
    elif ray is not None:
        _refuse({name: here[name] for name in ("--shard", "--sample", "--budget", "--resume")} | {"--on": on},
                "do not go with --ray")
        work = by_ray(ui, sources[0], format, ray, ray_resource, pieces, slots=slots, every=every, skip_bad=skip_bad,
                      engine=engine, groups=None if groups is None else _groups(groups, group_by), threads=threads or 1)
    elif host is not None:
        far = {name: value for name, value in here.items() if name not in ("--slots", "--shard", "--every")}
        _refuse(far | spread | {"--project": project}, "are for scanning here, or for --ray")
        work = there(ui, host, sources[0], out, slots=slots, shard=part, every=every, format=format, skip_bad=skip_bad)
    elif is_statistics(place(sources[0])):
        _refuse(here | spread | {"--project": project}, "are for scanning: this capture kept statistics alone")
        work = Work(load_statistics(place(sources[0])))
    else:
        _refuse(spread, "are for --ray")
        asked = _Asked(slots, part, every, None if groups is None else _groups(groups, group_by), sample, budget, engine,
                       skip_bad)
        work = _scanned(ui, sources[0], out, format, asked, resume, _said(sources[0], here, group_by if groups else None))
    result = work.fingerprint
    if not work.written:
        result.save(out)
    if host is not None:
        forget(out)
    side = side_of(result)
    for part_of_story in (*fingerprint_story(side), *estimate_story(result)):
        ui.print(part_of_story)
    more = work.more | projected(ui, size, workers, work.done, work.workers)
    ui.print(f"written to {out}")
    made = {"schema": "draftscope.scan/1", "fingerprint": str(out), **side.model_dump(), **more}
    if result.estimated:
        made["estimate"] = {"asked": [vars(one) for one in result.estimated], "figures": estimates(result)}
    ui.write_json(made)
    return 0


@dataclass
class _Asked:
    """What to scan of a source."""

    slots: int | None
    shard: tuple[int, int] | None
    every: int | None
    groups: dict[int, str] | None
    sample: int | None
    budget: float | None
    engine: str | None
    skip_bad: bool


def _scanned(ui: Ui, path: str, out: Path, format: str | None, asked: _Asked, resume: bool, command: str) -> Work:
    """Scan a source that is readable here, into a file."""
    from draftscope.report.scanning import front
    from draftscope.scan.kernels import kept as kept_compiled
    from draftscope.scan.pieces import Done, from_disk
    from draftscope.scan.resuming import choice_of, partial_of, scan_to
    from draftscope.scan.rich import share_of
    from draftscope.scan.scan import Settings
    from draftscope.states.opening import open_source

    source = open_source(path, format, skip_bad=asked.skip_bad)
    choice = choice_of(source, asked.shard, asked.sample, asked.budget)
    every = share_of(len(source)) if asked.every is None else asked.every
    settings = Settings(asked.slots, asked.skip_bad, asked.groups, every, asked.engine)
    if choice.seconds is None:
        keep("nothing was counted to its end yet")
    else:
        keep("nothing was written")
    what = f"scanning {source.path}"
    if asked.engine in (None, "numba") and not kept_compiled():
        ui.note("the passes are compiled for this machine, once; until then nothing is read")
    with front(ui.errors, what, ui.quiet) as (shown, on_progress), Noted(out, what, None, "files") as noted:
        def on_kept(done: int, of: int) -> None:
            shown.kept = f"{done:,} of {of:,} files are safe in {partial_of(out).name}"
            keep(f"{shown.kept}; go on with --resume")

        def on_item(progress: Progress) -> None:
            taken.append((progress.done, progress.rows, progress.size))
            del taken[1:-1]
            noted.add(progress.done - noted.held["done"], progress.of)
            on_progress(progress)

        taken: list[tuple[int, int, int]] = []
        begun, disk = time.monotonic(), from_disk()
        result = scan_to(out, source, settings, choice, resume=resume, command=command, on_progress=on_item, on_kept=on_kept)
        seconds, ended = time.monotonic() - begun, from_disk()
    ui.note_source(source)
    engines = {name for one in result.provenance for name in one.engine.split(", ")}
    if engines - {"numba"}:
        ui.note(slower(engines, result.dtypes, asked.engine))
    files, rows, size = taken[-1] if taken else (0, 0, 0)
    done = Done(files, rows, size, seconds, ended - disk if min(disk, ended) >= 0 else -1, "")
    return Work(result, [done], written=True)


def _refuse(options: Mapping[str, object], why: str) -> None:
    named = [name for name, value in options.items() if value is not None]
    if named:
        raise UsageError(f"{' and '.join(named)} {why}")


def _said(path: str, options: Mapping[str, object], group_by: str | None) -> str:
    """The command as it is written down: what changes the figures, without credentials."""
    from draftscope.states.places import place

    words = ["draftscope", "scan", str(place(path))]
    for name, value in options.items():
        if value is not None and name != "--resume":
            words += [name, str(value)]
    return shlex.join([*words, *([] if group_by is None else ["--group-by", group_by])])


def _groups(path: Path, key: str) -> dict[int, str]:
    """Group by line number, from 0."""
    from draftscope.states.tensorfile import parse_json

    found, number = {}, 0
    if path.exists() and not path.is_file():
        raise DraftscopeError("is no regular file", where=str(path), remedy="Give JSONL: line i tells the group of sample i")
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE), b"")):
                if len(line) == LINE:
                    raise DraftscopeError(f"line {number + 1} is longer than {LINE >> 20} MiB", where=str(path))
                value = parse_json(line) if line.strip() else None
                if isinstance(value, dict) and isinstance(value.get(key), str | int):
                    found[number] = str(value[key])
    except OSError as error:
        raise DraftscopeError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except ValueError as error:
        raise DraftscopeError(f"line {number + 1} is no JSON ({error})", where=str(path),
                              remedy="Give JSONL: line i tells the group of sample i") from None
    if not found:
        raise UsageError(f"no line has the key {key!r}", where=str(path), remedy="Name another with --group-by")
    return found
