"""What a capture costs a vLLM server: tokens per second with the recorder against without, interleaved in one run.

    python bench/bench_capture.py [--rounds 7] [--prompts 8] [--tokens 64] [-k 3]

Three engines of the same pair lie side by side, one without the recorder, one that records a tenth of the requests, one that
records every row; they answer the same prompts in turn (and back), one at a time. A round gives each a ratio to the plain one;
the median over the rounds is the figure. Beside it the recorder's own time on the engine's thread over the wall time.
Writes bench/results/capture.json. Needs scripts/env-vllm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from draftscope.embedded.pair import DRAFT
from draftscope.target.embedded import ensure_target

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "capture.json"
KINDS = {"plain": None, "a tenth of the requests": "share=0.1,keep_free=0,max_bytes=0",
         "every row": "keep_free=0,max_bytes=0"}


class Engine:
    """One worker process."""

    def __init__(self, python: str, options: str | None, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTSCOPE_CAPTURE")}
        if options is not None:
            environment |= {"DRAFTSCOPE_CAPTURE": str(folder), "DRAFTSCOPE_CAPTURE_OPTIONS": options}
        self.process = subprocess.Popen([python, str(HERE / "capture_worker.py"), *arguments], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if self._line().strip() != "ready":
            raise SystemExit(f"{python} does not serve the pair: run scripts/env-vllm")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self._line())
        return told

    def close(self) -> dict[str, Any]:
        """What its capture counted."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        path = self.folder / "capture.json"
        return dict(json.loads(path.read_text())["captured"]) if path.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-k", type=int, default=3)
    options = parser.parse_args()
    envs = Path(os.environ.get("DRAFTSCOPE_ENVS", Path.home() / ".cache" / "draftscope" / "envs"))
    python = str(envs / "vllm" / "bin" / "python")
    target = ensure_target(report=print)
    arguments = [str(target), str(DRAFT), str(options.prompts), str(options.tokens), str(options.k)]
    with tempfile.TemporaryDirectory() as scratch:
        engines = {kind: Engine(python, asked, Path(scratch) / str(number), arguments)
                   for number, (kind, asked) in enumerate(KINDS.items())}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        seconds = dict.fromkeys(KINDS, 0.0)
        answers: dict[str, Any] = {}
        for engine in engines.values():
            engine.run()
        for number in range(options.rounds):
            for kind in list(KINDS) if number % 2 == 0 else list(KINDS)[::-1]:
                told = engines[kind].run()
                rates[kind].append(told["tokens"] / told["seconds"])
                seconds[kind] += told["seconds"]
                if answers.setdefault("first", told["answers"]) != told["answers"]:
                    raise SystemExit(f"{kind}: the answers are not those of the other engines")
            shown = ", ".join(f"{kind} {rates[kind][-1]:.1f}" for kind in KINDS)
            print(f"round {number + 1}: {shown} tokens/s", flush=True)
        captured = {kind: engine.close() for kind, engine in engines.items()}
    result: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "rounds": options.rounds,
        "prompts": options.prompts, "tokens": options.tokens, "k": options.k, "answers_identical": True,
        "tokens_per_second": rates, "kinds": {},
    }
    for kind in list(KINDS)[1:]:
        ratios = [with_it / without for with_it, without in zip(rates[kind], rates["plain"], strict=True)]
        # The recorder also counts the warm-up, whose wall time is about that of a round.
        wall = seconds[kind] * (options.rounds + 1) / options.rounds
        result["kinds"][kind] = {
            "ratio": statistics.median(ratios), "ratios": ratios, "share_of_wall": captured[kind]["engine_seconds"] / wall,
            "writer_seconds": captured[kind]["writer_seconds"], "seconds": wall,
            "rows": captured[kind]["rows"], "bytes": captured[kind]["bytes"],
        }
        print(f"{kind}: median {statistics.median(ratios):.3f} of the tokens/s without, "
              f"{captured[kind]['engine_seconds'] / wall:.2%} of the wall time in the recorder")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
