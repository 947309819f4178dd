"""A scan by the tasks of a real Ray cluster: several nodes on this machine, one of them killed midway."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from farside import free_port
from test_pieces import alike, identical, write_source

from draftscope.cli.main import run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.scan.fingerprint import load_fingerprint
from draftscope.scan.pieces import Done, Job, finished, in_order, listing_of, scan_piece, spans
from draftscope.scan.scan import scan
from draftscope.scan.spread import Cluster, scan_by_ray
from draftscope.states.opening import open_source
from draftscope.target.embedded import cache_directory

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).resolve().parent.parent
FILES = 40
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def site() -> Path:
    """Ray's packages, for this version of Python."""
    folder = Path(os.environ.get("DRAFTSCOPE_ENVS", cache_directory() / "envs")) / "ray" / "lib"
    return folder / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def patiently(call: Any) -> Any:
    """On a machine that is busy a node takes longer to register than the half minute that Ray waits."""
    def asked(*args: Any, **named: Any) -> Any:
        for _ in range(90):
            try:
                return call(*args, **named)
            except RuntimeError:
                time.sleep(1)
        return call(*args, **named)

    return asked


def told_beforehand(start: Any) -> Any:
    """A raylet waits 15 seconds at most for its agents to write down their ports; those that were given are written here."""
    signature = inspect.signature(start)

    def started(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        for name in PORTS:
            (Path(given["session_dir"]) / f"{name}_{given['node_id']}").write_text(str(given[name]))
        return start(*args, **named)

    return started


def add_node(nodes: Any, **more: Any) -> None:
    """One more node, of one processor."""
    for attempt in range(3):
        try:
            ports = {name: free_port() for name in PORTS}
            nodes.add_node(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False, no_monitor=True, **ports, **more)
            nodes.wait_for_nodes(timeout=120)
            return
        except Exception:
            if attempt == 2:
                raise


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes of one processor each; whatever was started is ended."""
    if not (site() / "ray").is_dir():
        pytest.skip("no environment of Ray for this Python (make test-ray)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(site())])
        # Workers get no more of this process than its environment.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(site())]))
        for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("OMP_NUM_THREADS", "1"), ("RAY_health_check_period_ms", "1000"),
                            ("RAY_worker_register_timeout_seconds", "300"), ("RAY_prestart_worker_first_driver", "0")):
            patch.setenv(name, value)
        from ray._private import node, services
        from ray.cluster_utils import Cluster as Nodes

        # The dashboard's server is of no use here, and its packages are not there.
        patch.setattr(node.Node, "start_api_server", lambda self, **named: None)
        patch.setattr(services, "get_node", patiently(services.get_node))
        patch.setattr(services, "start_raylet", told_beforehand(services.start_raylet))
        nodes = Nodes()
        try:
            for _ in range(3):
                add_node(nodes)
            yield nodes
        finally:
            import ray

            ray.shutdown()
            nodes.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("ray") / "d", files=FILES)


def here(job: Job, pieces: int) -> Any:
    """The same pieces and the same tree without Ray."""
    listing = listing_of(job.open())
    return finished(in_order(scan_piece(job, listing, each) for each in spans(listing.files, pieces)), listing)


def test_a_node_killed_midway_changes_nothing(cluster: Any, folder: Path) -> None:
    """The figures are bit for bit those of the same pieces here, and to rounding those of a scan of the whole."""
    job, told, killed = Job(str(folder), every=1), [], []
    by_id = {node.node_id[:8]: node for node in cluster.list_all_nodes()}

    def piece_done(done: Done) -> None:
        told.append(done)
        node = by_id[done.node.split()[-1]]
        if not killed and node is not cluster.head_node and len(told) >= 3:
            killed.append(done.node)
            cluster.remove_node(node, allow_graceful=False)

    spread = scan_by_ray(job, Cluster(cluster.address, pieces=20), on_piece=piece_done)
    assert len(killed) == 1, "a node was lost that had done some of it"
    assert len(told) == len(spread.done) == 20
    assert spread.workers == 3
    assert sum(done.files for done in spread.done) == FILES
    identical(spread.fingerprint, here(job, 20))
    alike(spread.fingerprint, scan(open_source(folder)))


def test_by_the_command_line_where_the_data_are(
    cluster: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "f", tmp_path / "j"
    arguments = ["scan", str(folder), "-o", str(out), "--every", "1", "--pieces", "5", "--json", str(text)]
    # What the node killed by the test before had is made again, so that there is one with the data in any case.
    add_node(cluster, resources={"seen": 1})
    assert run([*arguments, "--ray", cluster.address, "--ray-resource", "seen", "--project", "7.3TB", "--workers", "32"]) == 0
    found = json.loads(text.read_text())
    assert len(found["nodes"]) == 1, "only one node has the resource"
    assert sum(piece["files"] for piece in found["pieces"]) == FILES
    assert found["projection"] is None, "too little was read to tell a rate"
    identical(load_fingerprint(out), here(Job(str(folder), every=1), 5))
    capsys.readouterr()
    assert run([*arguments, "--ray", cluster.address, "--ray-resource", "nowhere"]) == 2
    assert "no node of the cluster has a resource `nowhere`" in capsys.readouterr().err


def test_errors_of_workers_are_the_users(cluster: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftscopeError, match="no-such"):
        scan_by_ray(Job(str(tmp_path / "no-such")), Cluster(cluster.address))
    with pytest.raises(UsageError, match="nonsense"):
        scan_by_ray(Job(str(folder), "nonsense"), Cluster(cluster.address))
    narrow = write_source(tmp_path / "d", files=3)
    write_source(tmp_path / "other", files=1, width=48)
    (tmp_path / "other" / "hs_0.safetensors").rename(narrow / "hs_9.safetensors")
    with pytest.raises(DraftscopeError, match=r"different width|entries of width"):
        scan_by_ray(Job(str(narrow), every=1), Cluster(cluster.address))


def test_no_cluster_is_said(cluster: Any, folder: Path) -> None:
    with pytest.raises(DraftscopeError, match="no Ray cluster can be reached"):
        scan_by_ray(Job(str(folder)), Cluster("127.0.0.1:1"))
