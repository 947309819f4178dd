"""A scan on many machines: pieces as tasks of a Ray cluster, their fingerprints merged there in a tree.

Ray starts a task again whose worker or machine is lost, and makes results again that were lost with it. Since pieces and tree
follow from the source alone (`scan.pieces`), the figures are the same whoever did what.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.fingerprint import Fingerprint
from draftscope.scan.pieces import MOST, Done, Job, Listing, Piece, Tree, finished, joined, listing_of, scan_piece, spans

RETRIES = 5
"""Times that a task is started again whose worker was lost."""
AHEAD = 2
"""Pieces in flight for each worker, so that merging is not put off behind all of them."""
HEARD = 1.0
"""Seconds between two looks at what is done."""


@dataclass(frozen=True)
class Cluster:
    """Where the tasks run.

    Attributes:
        address: of a cluster, as `ray.init` takes it; `auto` = the one that this machine belongs to, `local` = a new one here.
        resource: name of a custom resource of the nodes that have the data; None = all have.
        pieces: tasks at most.
    """

    address: str = "auto"
    resource: str | None = None
    pieces: int = MOST


@dataclass(frozen=True)
class Failed:
    """An error of the user's input, told by a worker."""

    what: str
    where: str
    remedy: str
    usage: bool


@dataclass
class Spread:
    """What a cluster made of a source: how each piece went, in the order of the files."""

    fingerprint: Fingerprint
    listing: Listing
    done: list[Done]
    workers: int


def scan_by_ray(job: Job, cluster: Cluster, *, command: str = "",
                on_begin: Callable[[Listing, int], None] = lambda listing, workers: None,
                on_piece: Callable[[Done], None] = lambda done: None) -> Spread:
    """Scan a source by the tasks of a Ray cluster; nothing is read here.

    Args:
        on_begin: told what the source holds and how many tasks run at once; on_piece: told of each piece when it is done.

    Raises:
        DraftscopeError: no such cluster, another version of draftscope there, a path that its machines do not see, or as `scan`.
    """
    with _connected(cluster) as ray:
        there = ray.cluster_resources()
        if cluster.resource is not None and cluster.resource not in there:
            raise UsageError(f"no node of the cluster has a resource `{cluster.resource}`", where=cluster.address,
                             remedy="Start those that see the data with ray start --resources '{\"NAME\": 1}'")
        wants = {"num_cpus": job.threads, "max_retries": RETRIES,
                 "resources": {cluster.resource: 1e-3} if cluster.resource else None}
        list_there = ray.remote(_listing).options(**wants)
        scan_there = ray.remote(_piece).options(num_returns=2, **wants)
        merge_there = ray.remote(_merge).options(**{**wants, "num_cpus": 1})
        listing, version = _told(_got(ray, list_there.remote(job)))
        if version != metadata.version("draftscope"):
            raise DraftscopeError(f"its workers have draftscope {version}, this is {metadata.version('draftscope')}",
                                  where=cluster.address, remedy="Install the same version everywhere")
        workers = max(1, int(there.get("CPU", 1)) // job.threads)
        on_begin(listing, workers)
        tree: Tree[Any] = Tree(merge_there.remote)
        waiting: dict[Any, int] = {}
        done: dict[int, Done] = {}
        left = iter(enumerate(spans(listing.files, cluster.pieces)))
        held, given, number = {}, ray.put(job), 0
        while True:
            while len(waiting) < AHEAD * workers and (following := next(left, None)) is not None:
                at, span = following
                told, made = scan_there.remote(given, listing, span)
                waiting[told] = at
                held[at] = made
                while number in held:  # in the order of the files, which is that of submission
                    tree.add(held.pop(number))
                    number += 1
            if not waiting:
                break
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=HEARD)
            for told in ready:
                at = waiting.pop(told)
                done[at] = _told(_got(ray, told))
                on_piece(done[at])
        whole = _told(_got(ray, tree.result()))
        return Spread(finished(whole, listing, command), listing, [done[at] for at in sorted(done)], workers)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected; disconnected in the end, unless it was connected before."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--ray needs Ray ({error})", remedy="pip install 'draftscope[ray]'") from None
    own = not ray.is_initialized()
    if own:
        _answers(cluster.address)
        try:
            alone = {"include_dashboard": False} if cluster.address == "local" else {}
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error", configure_logging=False, **alone)
        except Exception as error:  # Ray raises what its parts raise
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DraftscopeError(
                f"no Ray cluster can be reached ({first})", where=cluster.address,
                remedy="Start one (`ray start --head`), or name its address; `--ray local` starts one here") from None
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


def _answers(address: str) -> None:
    """Ray itself asks an address where nothing listens for minutes.

    Raises:
        DraftscopeError: nothing listens at HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise DraftscopeError(f"no Ray cluster can be reached ({error})", where=address,
                              remedy="Start one (`ray start --head`), or name its address") from None


def _got(ray: Any, reference: Any) -> Any:
    """What a task gave.

    Raises:
        DraftscopeError: its worker was lost too often, or it failed.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise DraftscopeError(f"a worker failed: {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise DraftscopeError(f"a piece was lost {RETRIES} times ({type(error).__name__})",
                              remedy="Workers may lack memory: fewer at once, or less for each file") from error


def _told(given: Any) -> Any:
    """A result, or the error that a worker told of."""
    if isinstance(given, Failed):
        kind = UsageError if given.usage else DraftscopeError
        raise kind(given.what, where=given.where, remedy=given.remedy)
    return given


def _failed(error: DraftscopeError) -> Failed:
    return Failed(error.what, error.where, error.remedy, isinstance(error, UsageError))


# What runs on the workers.


def _listing(job: Job) -> tuple[Listing, str] | Failed:
    try:
        return listing_of(job.open()), metadata.version("draftscope")
    except DraftscopeError as error:
        return _failed(error)


def _piece(job: Job, listing: Listing, span: range) -> tuple[Done | Failed, Piece | Failed]:
    try:
        piece = scan_piece(job, listing, span)
    except DraftscopeError as error:
        failed = _failed(error)
        return failed, failed
    import ray

    node = ray.get_runtime_context().get_node_id()[:8]
    piece.done = replace(piece.done, node=f"{piece.done.node} {node}")
    return piece.done, piece


def _merge(one: Piece | Failed, other: Piece | Failed) -> Piece | Failed:
    if isinstance(one, Failed) or isinstance(other, Failed):
        return one if isinstance(one, Failed) else other
    try:
        return joined(one, other)
    except DraftscopeError as error:
        return _failed(error)
