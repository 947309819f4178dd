"""What a capture costs a vLLM server: tokens per second with the recorder against without, interleaved in one run.

    python bench/bench_capture.py [--rounds 7] [--prompts 8] [--tokens 64] [-k 3]

Four engines of the same pair lie side by side, one without the recorder, one that records a tenth of the requests, one that
records every row, one that keeps sums of every row in their place (`--statistics`); they answer the same prompts in turn (and
back), one at a time. A round gives each a ratio to the plain one; the median over the rounds is the figure. Beside it the
recorder's own time on the engine's thread over the wall time. Writes bench/results/capture.json. Needs scripts/env-vllm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_worker import Engine

from draftscope.embedded.pair import DRAFT
from draftscope.engines.launching import emit
from draftscope.target.embedded import ensure_target

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "recipes" / "foreign"))
from conversations import SERVED, greedy  # noqa: E402

RESULT = HERE / "results" / "capture.json"
KINDS = {"plain": None, "a tenth of the requests": "share=0.1,keep_free=0,max_bytes=0",
         "every row": "keep_free=0,max_bytes=0", "statistics of every row": "keep_free=0,statistics=1"}


class Recorded(Engine):
    """An engine with the recorder in, or without it."""

    def __init__(self, target: Path, k: int, options: str | None, folder: Path) -> None:
        self.folder = folder
        inside = {}
        if options is not None:
            copy = folder.with_name(f"recorder_{folder.name}.py")
            emit(copy)
            inside = {"DRAFTSCOPE_CAPTURE": str(folder), "DRAFTSCOPE_CAPTURE_OPTIONS": options,
                      "DRAFTSCOPE_CAPTURE_FILE": str(copy)}
        super().__init__(target, DRAFT, 8, k, **inside)

    def captured(self) -> dict[str, Any]:
        """What its capture counted, once it has ended."""
        self.close()
        path = self.folder / "capture.json"
        return dict(json.loads(path.read_text())["captured"]) if path.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-k", type=int, default=3)
    options = parser.parse_args()
    target = ensure_target(report=print)
    prompts = [c.token_ids[: c.prompt_length] for c in greedy(SERVED, options.prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        engines = {kind: Recorded(target, options.k, asked, Path(scratch) / str(number))
                   for number, (kind, asked) in enumerate(KINDS.items())}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        seconds = dict.fromkeys(KINDS, 0.0)
        answers: dict[str, Any] = {}
        for engine in engines.values():
            engine.run(prompts, options.tokens)
        for number in range(options.rounds):
            for kind in list(KINDS) if number % 2 == 0 else list(KINDS)[::-1]:
                told = engines[kind].run(prompts, options.tokens)
                rates[kind].append(told["tokens"] / told["seconds"])
                seconds[kind] += told["seconds"]
                if answers.setdefault("first", told["answers"]) != told["answers"]:
                    raise SystemExit(f"{kind}: the answers are not those of the other engines")
            shown = ", ".join(f"{kind} {rates[kind][-1]:.1f}" for kind in KINDS)
            print(f"round {number + 1}: {shown} tokens/s", flush=True)
        captured = {kind: engine.captured() for kind, engine in engines.items()}
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
