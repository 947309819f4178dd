"""Scans that run elsewhere, and merging: what `scan` does besides scanning here."""

from __future__ import annotations

import glob
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftscope.cli.common import Ui, keep
from draftscope.errors import UsageError
from draftscope.text import count, visible

if TYPE_CHECKING:
    from draftscope.elsewhere.session import Host
    from draftscope.scan.fingerprint import Fingerprint
    from draftscope.scan.pieces import Done, Listing

RayOption = Annotated[str | None, typer.Option(
    "--ray", metavar="[ADDRESS]",
    help="Scan by tasks of a Ray cluster whose nodes see SOURCE; without an address this machine's; local = a new one here.")]
RayResourceOption = Annotated[str | None, typer.Option(
    "--ray-resource", metavar="NAME", help="Of --ray: a custom resource of the nodes that see SOURCE; without it all do.")]
PiecesOption = Annotated[int | None, typer.Option(
    "--pieces", min=1, metavar="N", help="Of --ray: tasks at most, each some files; without it 256.")]
ProjectOption = Annotated[str | None, typer.Option(
    "--project", metavar="SIZE", help="Tell from the rate measured how long so much (such as 7.3TB) would take: a projection.")]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, metavar="N", help="Of --project: workers that it is for.")]


@dataclass
class Work:
    """A fingerprint, what took how long and by how many workers, what else the JSON has, and whether its file is there."""

    fingerprint: Fingerprint
    done: list[Done] = field(default_factory=list)
    workers: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    written: bool = False


def merge(ui: Ui, names: Sequence[str]) -> Work:
    """Fingerprints as one.

    Raises:
        UsageError: fewer than two. DraftscopeError: they do not go together.
    """
    from draftscope.scan.merging import merge_files
    from draftscope.states.places import place

    if len(names) < 2:
        raise UsageError("nothing to merge", remedy="Name two fingerprints or more")
    merged = merge_files([place(name) for name in names])
    for note in merged.notes:
        ui.note(note)
    return Work(merged.fingerprint, more={"merged": len(names), "remarks": merged.notes})


def by_ray(ui: Ui, path: str, format: str | None, address: str, resource: str | None, pieces: int | None, **asked: Any) -> Work:
    """A scan by the tasks of a Ray cluster; `asked` as `Job` has it."""
    from draftscope.scan.pieces import MOST, Job, plain
    from draftscope.scan.spread import Cluster, scan_by_ray

    job = Job(path, format, **asked)
    keep("nothing is written: the pieces that were done are lost with the cluster's tasks")
    with ui.progress(f"scanning {job.path}", unit="files") as advance:
        def begun(listing: Listing, workers: int) -> None:
            advance(0, what=f"{visible(job.path)} on {count(workers, 'worker')}", total=listing.files)

        found = scan_by_ray(job, Cluster(address, resource, pieces or MOST), command="scan --ray", on_begin=begun,
                            on_piece=lambda done: advance(done.files))
    ui.note(f"read as {found.listing.format}: {found.listing.chosen}")
    for skip in (skipped := [skip for done in found.done for skip in done.skipped])[:5]:
        ui.note(f"skipped {skip.path}: {skip.why}")
    if len(skipped) > 5:
        ui.note(f"and {len(skipped) - 5} more")
    told: dict[str, list[Done]] = {}
    for done in found.done:
        told.setdefault(done.node, []).append(done)
    nodes = {}
    for node, held in told.items():
        size, seconds = sum(done.size for done in held), sum(done.seconds for done in held)
        nodes[node] = {"pieces": len(held), "bytes": size, "seconds": seconds}
        ui.print(f"  {visible(node)}: {count(len(held), 'piece')}, {size / 1e9:.3g} GB at {size / max(seconds, 1e-9) / 1e9:.2f} "
                 "GB/s a worker")
    return Work(found.fingerprint, found.done, found.workers,
                {"workers": found.workers, "nodes": nodes, "pieces": [plain(done) for done in found.done]})


def there(ui: Ui, host: Host, path: str, out: Path, **asked: Any) -> Work:
    """A scan where the files lie; what came before a connection was lost is gone on from."""
    from draftscope.elsewhere.answers import scan_there

    keep("what has come so far is kept; the same command goes on from there")
    with ui.progress(f"scanning {host.path(path)}", unit="files") as advance:
        scanned = scan_there(host, path, out, on_items=advance,
                             on_begin=lambda files, before: advance(before, total=files), **asked)
    if scanned.before:
        ui.note(f"went on after {count(scanned.before, 'file')} that had come before")
    ui.note_source(scanned)
    if scanned.skips > len(scanned.skipped):
        ui.note(f"and {scanned.skips - len(scanned.skipped)} more")
    return Work(scanned.fingerprint, more={"resumed_after": scanned.before} if scanned.before else {})


def slower(engines: Set[str], dtypes: Sequence[str], asked: str | None) -> str:
    """What is said of passes that were not compiled, by what they are: numba's absence, or states that it is not for."""
    import torch

    from draftscope.scan.kernels import KINDS, compiled

    ran = f"ran on {' and '.join(sorted(engines - {'numba'}))}, many times slower than compiled"
    if asked not in (None, "numba"):
        return f"the passes {ran}"
    if compiled() is None:
        return f"the passes {ran} (`pip install 'draftscope[fast]'`)"
    other = [name for name in dtypes if getattr(torch, name, None) not in KINDS]
    return f"the passes over states of {' and '.join(other) or 'this layout'} {ran}: there is nothing compiled for them"


def forget(out: Path) -> None:
    """Remove what was kept of scans elsewhere that were to end in this file, which is there now."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.*-*-*.partial"):
        path.unlink(missing_ok=True)


def projected(ui: Ui, size: int | None, workers: int, done: Sequence[Done], ran: int) -> dict[str, Any]:
    """A projection in words, and for the JSON; nothing where none was asked for."""
    if size is None:
        return {}
    from draftscope.scan.projecting import project, words

    told = project(size, workers, done, ran)
    if told is None:
        ui.note("no projection: less than 0.3 GB was read, which is mostly the beginning of a process")
        return {"projection": None}
    for line in words(told):
        ui.print(line)
    return {"projection": told.model_dump()}
