"""The scan against `dd` and a plain torch script, side by side over the same files in the page cache: ratios of their rates.

    python bench/bench_scan.py [--gigabytes 2] [--rounds 2] [--threads N] [--folder DIR] [--shapes 7168 576]

Data of the shape [1281, H] bf16, four entries a sample, are made once and deleted at the end. Per round all run in turn: `dd` of
every file, `draftscope.scan` with the share of rows taken whole that a large source gets, its core tier as good as alone (one
row in 10^9 taken whole), and a plain torch script with the figures of the core tier. Rates are bytes over wall time and, since a
machine is seldom alone, over processor time. That the figures agree is checked. Writes bench/results/scan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftscope.scan.core import engine_of
from draftscope.scan.fingerprint import Fingerprint
from draftscope.scan.rich import FULL
from draftscope.scan.scan import scan
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample

RESULT = Path(__file__).parent / "results" / "scan.json"
ROWS, ENTRIES = 1281, 4
SPREAD = torch.tensor([1.0, 5.0, 20.0, 50.0])
TOLERANCE = 1e-9


def make(folder: Path, width: int, size: float) -> int:
    """Samples in a folder, so many bytes or a little more; bytes."""
    folder.mkdir(parents=True)
    count = max(2, round(size / (ROWS * ENTRIES * width * 2)))
    block = torch.randn(ROWS, ENTRIES, width, generator=torch.Generator().manual_seed(0)) * SPREAD[:, None]
    block[:, :, 7] *= 30  # a channel that stands out
    for number in range(count):
        states = (block * (1 + number / count)).bfloat16()
        states[0, 1:] *= 40
        name = f"hs_{number}.safetensors"
        mask = torch.arange(ROWS) >= ROWS // 4
        write_sample(folder / name, Sample(name, torch.arange(ROWS), states, mask, tuple("abcd"), number))
    return sum(file.stat().st_size for file in folder.iterdir())


def read(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=1M"], check=True, capture_output=True)


def plain(folder: Path) -> list[dict[str, Any]]:
    """The core tier's figures in torch, as one writes it down: by entry, over all rows."""
    totals: list[dict[str, Any]] = [{} for _ in range(ENTRIES)]
    for file in sorted(folder.iterdir()):
        states = load_file(file)["hidden_states"]
        for entry, total in enumerate(totals):
            rows = states[:, entry]
            rows = rows[rows.isfinite().all(-1)].double()
            norms = rows.norm(dim=-1)
            bar = 6 * norms / rows.shape[1] ** 0.5
            part = {
                "rows": len(rows), "nan": int(states[:, entry].isnan().sum()), "infinite": int(states[:, entry].isinf().sum()),
                "norms": float(norms.sum()), "sum": rows.sum(0), "squares": rows.square().sum(0),
                "exceeds": (rows.abs() > bar[:, None]).sum(0),
            }
            for name, value in part.items():
                total[name] = total[name] + value if name in total else value
            for name, value in {"largest": rows.abs().amax(0), "norm": norms.max()}.items():
                total[name] = torch.maximum(total[name], value) if name in total else value
    return totals


def disagreement(found: Fingerprint, totals: list[dict[str, Any]]) -> float:
    """Largest relative difference of mean (against the spread), variance and norms; raises where a count differs."""
    worst = 0.0
    for entry, total in enumerate(totals):
        held = found.statistics(entry)
        dimensions, counts = held.dimensions.result(), held.counts.result()
        assert dimensions.mean is not None and dimensions.variance is not None
        if (counts.rows, counts.nan, counts.infinite) != (total["rows"], total["nan"], total["infinite"]):
            raise SystemExit(f"entry {entry}: {counts} against {total['rows']} rows")
        if not torch.equal(held.outliers.exceeds, total["exceeds"]) or not torch.equal(held.outliers.largest.double(),
                                                                                    total["largest"]):
            raise SystemExit(f"entry {entry}: outliers differ")
        mean = total["sum"] / total["rows"]
        variance = total["squares"] / total["rows"] - mean.square()
        norm_mean = total["norms"] / total["rows"]
        worst = max(
            worst, float(((dimensions.mean - mean).abs() / variance.sqrt()).max()),
            float(((dimensions.variance - variance).abs() / variance).max()),
            abs(float(held.norms.result().mean or 0) / norm_mean - 1),
            abs(float(held.norms.result().maximum or 0) / float(total["norm"]) - 1),
        )
    return worst


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, wall seconds, processor seconds of this process and those it started."""
    def used() -> float:
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in both)

    before, begun = used(), time.perf_counter()
    given = run()
    return given, time.perf_counter() - begun, used() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the widest shape; the others have an eighth")
    parser.add_argument("--shapes", type=int, nargs="+", default=[7168, 576])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where the data go; without it a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(prefix="bench-scan-", dir=options.folder))
    told = []
    try:
        for number, width in enumerate(options.shapes):
            told.append(contest(folder / str(width), width, options.gigabytes * 1e9 / (8 if number else 1), options.rounds))
    finally:
        shutil.rmtree(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({
        "threads": options.threads, "engine": engine_of().name, "torch": torch.__version__, "machine": platform.machine(),
        "cores": os.cpu_count(), "load": os.getloadavg(), "shapes": told,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }, indent=1) + "\n")
    print(f"written to {options.out}")


def contest(folder: Path, width: int, wanted: float, rounds: int) -> dict[str, Any]:
    size = make(folder, width, wanted)
    files = len(list(folder.iterdir()))
    print(f"[{ROWS}, {ENTRIES}, {width}] bf16, {files} samples, {size / 1e9:.2f} GB, passes by {engine_of().name}", flush=True)
    scan(open_source(folder), shard=(0, files))  # compiled, and the first file read
    runners: dict[str, Callable[[], Any]] = {
        "dd": lambda: read(folder), "scan": lambda: scan(open_source(folder), every=FULL),
        "core": lambda: scan(open_source(folder), every=10**9), "torch": lambda: plain(folder),
    }
    wall: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    last: dict[str, Any] = {}
    for round_ in range(rounds):
        for name, runner in runners.items():
            last[name], seconds, used = timed(runner)
            wall.setdefault(name, []).append(size / seconds / 1e9)
            processor.setdefault(name, []).append(size / used / 1e9)
        print(f"round {round_ + 1}: " + ", ".join(
            f"{name} {wall[name][-1]:.2f} GB/s ({processor[name][-1]:.2f} a processor second)" for name in runners), flush=True)
    apart = disagreement(last["scan"], last["torch"])
    if apart > TOLERANCE:
        raise SystemExit(f"figures differ by {apart:.1e}")

    def ratio(rates: dict[str, list[float]], name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))

    ratios = {f"{name} to {other}": {"wall": ratio(wall, name, other), "processor": ratio(processor, name, other)}
              for name in ("scan", "core") for other in ("dd", "torch")}
    for name, value in ratios.items():
        print(f"{name}: {value['wall']:.2f} by wall time, {value['processor']:.2f} by processor time")
    print(f"figures agree to {apart:.1e}; whole rows: one in {last['scan'].every[0]}")
    return {"width": width, "rows": ROWS, "entries": ENTRIES, "samples": files, "bytes": size, "every": last["scan"].every[0],
            "gigabytes_per_second": wall, "gigabytes_per_processor_second": processor, "ratios": ratios, "disagreement": apart}


if __name__ == "__main__":
    main()
