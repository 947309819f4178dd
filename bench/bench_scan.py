"""The scan against `dd` and a plain torch script, side by side over the same files: ratios of their rates.

    python bench/bench_scan.py [--gigabytes 2] [--rounds 3] [--threads N] [--folder DIR] [--shapes 7168 576] [--cold]

Data of the shape [1281, H] bf16, four entries a sample, are made once and deleted at the end. Per round all run in turn, each in
a process of its own so that peak memory is its own: `dd` of every file (`cat` where files are small: starting one `dd` a file
would be most of the time), the default scan, with the share of rows taken whole that a source of 100,000 samples gets, its core
tier as good as alone (one row in 10^9 taken whole), the same with one thread, two processes of one thread on a half each, and,
over a tenth of the files, a plain torch script with the figures of the core tier. Rates are bytes over wall time and, since a
machine is seldom alone, over processor time. That the figures agree is checked. With --cold the page cache is emptied of the
files before `dd` and the default scan, which then read the disk. Writes bench/results/scan.json.
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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftscope.scan.core import engine_of
from draftscope.scan.fingerprint import Fingerprint, load_fingerprint
from draftscope.scan.rich import share_of
from draftscope.scan.scan import scan
from draftscope.states.folder import natural
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample

RESULT = Path(__file__).parent / "results" / "scan.json"
ROWS, ENTRIES = 1281, 4
SPREAD = torch.tensor([1.0, 5.0, 20.0, 50.0])
TOLERANCE = 1e-9
CASE = 100_000  # samples
TENTH = 10
SMALL = 2**24


def make(folder: Path, width: int, size: float) -> int:
    """Samples in a folder, so many bytes or a little more; bytes."""
    folder.mkdir(parents=True)
    count = max(4, round(size / (ROWS * ENTRIES * width * 2)))
    block = torch.randn(ROWS, ENTRIES, width, generator=torch.Generator().manual_seed(0)) * SPREAD[:, None]
    block[:, :, 7] *= 30  # a channel that stands out
    for number in range(count):
        states = (block * (1 + number / count)).bfloat16()
        states[0, 1:] *= 40
        name = f"hs_{number}.safetensors"
        mask = torch.arange(ROWS) >= ROWS // 4
        write_sample(folder / name, Sample(name, torch.arange(ROWS), states, mask, tuple("abcd"), number))
    return sum(file.stat().st_size for file in folder.iterdir())


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda file: natural(file.name))


def forget(files: list[Path]) -> None:
    """Out of the page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def plain(files: list[Path]) -> list[dict[str, Any]]:
    """The core tier's figures in torch, as one writes it down: by entry, over all rows."""
    totals: list[dict[str, Any]] = [{} for _ in range(ENTRIES)]
    for file in files:
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


# -- one contestant, in a process of its own -----------------------------------------------------------------------------------


def peak_of(used: resource.struct_rusage) -> int:
    """Bytes of resident memory at most. ru_maxrss would be what the parent held where that was more."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return used.ru_maxrss * 1024
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def work(what: str, folder: Path, threads: int, out: Path) -> None:
    """Warm up, wait for a line, run, and print seconds, processor seconds and the peak of resident memory."""
    torch.set_num_threads(threads)
    half = {"first": (0, 2), "second": (1, 2)}.get(what)
    files = files_of(folder)
    every = 10**9 if what in ("core", "one", "first", "second") else share_of(CASE)
    if what == "torch":
        plain(files[:1])
    else:
        scan(open_source(files[0]), every=every)  # compiled
    print("ready", flush=True)
    sys.stdin.readline()
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    if what == "torch":
        torch.save(plain(files[::TENTH]), out)
    else:
        found = scan(open_source(folder), shard=half, every=every)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if what != "torch":
        found.save(out)
    print(json.dumps({"seconds": seconds, "used": used, "peak": peak_of(after)}), flush=True)


def run(names: list[str], folder: Path, threads: int, out: Path) -> dict[str, float]:
    """Contestants that run at the same time: the longest time, the processor seconds of all, the largest peak."""
    started = [subprocess.Popen([sys.executable, __file__, "--work", name, "--folder", str(folder), "--threads", str(threads),
                                 "--out", str(out / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for name in names]
    for one in started:
        assert one.stdout is not None
        if one.stdout.readline() != "ready\n":
            raise SystemExit(f"{names} did not start")
    for one in started:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    told = []
    for one in started:
        text, _ = one.communicate()
        if one.returncode:
            raise SystemExit(f"{names} failed")
        told.append(json.loads(text.splitlines()[-1]))
    return {"seconds": max(each["seconds"] for each in told), "used": sum(each["used"] for each in told),
            "peak": max(each["peak"] for each in told)}


def read(files: list[Path]) -> dict[str, float]:
    """`dd` of every file, or one `cat` of all where they are small."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    if files[0].stat().st_size < SMALL:
        with open(os.devnull, "wb") as nowhere:
            subprocess.run(["cat", *map(str, files)], check=True, stdout=nowhere)
    else:
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=1M"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - begun, "used": used, "peak": 0}


# -- the contest ---------------------------------------------------------------------------------------------------------------


def contest(folder: Path, width: int, wanted: float, rounds: int, threads: int, cold: bool) -> dict[str, Any]:
    data, out = folder / str(width), folder / f"{width}-out"
    out.mkdir(parents=True)
    size = make(data, width, wanted)
    files = files_of(data)
    tenth = sum(file.stat().st_size for file in files[::TENTH])
    print(f"[{ROWS}, {ENTRIES}, {width}] bf16, {len(files)} samples, {size / 1e9:.2f} GB, by {engine_of().name}", flush=True)
    told: dict[str, list[dict[str, float]]] = {}

    def note(name: str, found: dict[str, float], amount: int) -> None:
        told.setdefault(name, []).append({
            "wall": amount / found["seconds"] / 1e9, "processor": amount / max(found["used"], 1e-3) / 1e9, "peak": found["peak"]})

    for round_ in range(rounds):
        read(files)  # into the page cache
        note("dd", read(files), size)
        for name in ("scan", "core", "one"):
            note(name, run([name], data, 1 if name == "one" else threads, out), size)
        note("two", run(["first", "second"], data, 1, out), size)
        note("torch", run(["torch"], data, threads, out), tenth)
        if cold:
            forget(files)
            note("dd, cold", read(files), size)
            forget(files)
            note("scan, cold", run(["scan"], data, threads, out), size)
        rates = [f"{name} {found[-1]['wall']:.2f} ({found[-1]['processor']:.2f})" for name, found in told.items()]
        print(f"round {round_ + 1}, GB/s (a processor second): {', '.join(rates)}", flush=True)
    part = folder / f"{width}-tenth"
    part.mkdir()
    for file in files[::TENTH]:
        (part / file.name).symlink_to(file)
    apart = disagreement(scan(open_source(part)), torch.load(out / "torch"))
    merged = load_fingerprint(out / "first").merge(load_fingerprint(out / "second"))
    if merged.rows != load_fingerprint(out / "scan").rows:
        raise SystemExit("the halves are not the whole")
    if apart > TOLERANCE:
        raise SystemExit(f"figures differ by {apart:.1e}")
    pairs = [("scan", "dd"), ("core", "dd"), ("scan", "torch"), ("core", "torch"), ("two", "one"),
             *([("scan, cold", "dd, cold")] if cold else [])]
    ratios = {f"{name} to {other}": {
        kind: statistics.median(a[kind] / b[kind] for a, b in zip(told[name], told[other], strict=True))
        for kind in ("wall", "processor")} for name, other in pairs}
    for name, value in ratios.items():
        print(f"{name}: {value['wall']:.2f} by wall time, {value['processor']:.2f} by processor time")
    peak = max(one["peak"] for one in told["scan"])
    print(f"figures agree to {apart:.1e}; peak memory of the default scan {peak / 2**20:.0f} MiB")
    return {
        "width": width, "rows": ROWS, "entries": ENTRIES, "samples": len(files), "bytes": size, "every": share_of(CASE),
        "gigabytes_per_second": {name: [one["wall"] for one in found] for name, found in told.items()},
        "gigabytes_per_processor_second": {name: [one["processor"] for one in found] for name, found in told.items()},
        "peak_resident_bytes": {name: max(one["peak"] for one in found) for name, found in told.items() if found[0]["peak"]},
        "ratios": ratios, "disagreement": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of each shape")
    parser.add_argument("--shapes", type=int, nargs="+", default=[7168, 576])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where the data go; without it a temporary folder")
    parser.add_argument("--cold", action="store_true", help="also from the disk")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.folder, options.threads, options.out)
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-scan-", dir=options.folder))
    try:
        told = []
        for width in options.shapes:
            told.append(contest(folder, width, options.gigabytes * 1e9, options.rounds, options.threads, options.cold))
            shutil.rmtree(folder / str(width))
    finally:
        shutil.rmtree(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({
        "threads": options.threads, "engine": engine_of().name, "torch": torch.__version__, "machine": platform.machine(),
        "cores": os.cpu_count(), "load": os.getloadavg(), "shapes": told,
    }, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
