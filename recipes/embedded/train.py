"""The embedded draft from the states of the target's own answers.

    draftscope extract recipes/embedded/answers --out WORK
    python recipes/embedded/train.py [--work DIR] [--epochs 2]

WORK (default ~/.cache/draftscope/embedded-train) holds the states and gets `run/` with the log and the state to go on
from, `run/draft`, `run/best`, and the draft of every epoch as `run/epoch-NN`; all are native checkpoints. Every 48th sample
is held out.

The defaults are those of the draft in the package, trained with `--precision bfloat16`, its states from part 13 on extracted with
`--compute bfloat16`: on a processor without bfloat16 leave both out.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftscope.cli.training import told
from draftscope.eagle3.corpus import FileCorpus, split, token_counts
from draftscope.eagle3.examples import Fitting
from draftscope.eagle3.start import draft_vocabulary, shape_of
from draftscope.eagle3.train import Settings, Watch, train
from draftscope.states.opening import open_source
from draftscope.target.embedded import ensure_target
from draftscope.target.parts import read_config, read_parts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "draftscope" / "embedded-train")
    parser.add_argument("--states", type=Path, default=None, help="default WORK")
    parser.add_argument("--target", type=Path, default=None, help="default: the embedded target")
    parser.add_argument("--run", default="run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--head-rate", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32",
                        help="bfloat16 where the processor has it")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=None, help="width of the draft's MLP, without it the target's")
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.target or ensure_target(report=print)
    parts, raw = read_parts(folder), read_config(folder)
    run = options.work / options.run

    began, read = time.time(), 0

    def reading(tokens: int) -> None:
        nonlocal read
        if (read + tokens) // 20000 > read // 20000:
            print(f"target's choices: {read + tokens} tokens, {(read + tokens) / (time.time() - began):.0f}/s", flush=True)
        read += tokens

    source = open_source(options.states or options.work, kind="samples")
    corpus, held = split(FileCorpus.of(source, Fitting(parts, max_length=512), run / "choices", on_tokens=reading), 48)
    counts = token_counts(corpus, int(raw["vocab_size"]))
    d2t, _, coverage = draft_vocabulary(counts, options.draft_vocab)
    changes = {} if options.intermediate is None else {"intermediate_size": options.intermediate}
    config = shape_of(raw, options.draft_vocab, **changes)
    print(f"{len(corpus.lengths)} samples, {int(counts.sum())} answer tokens, {len(held.lengths)} held out; draft vocabulary "
          f"covers {coverage:.4f}", flush=True)

    def show(event: Mapping[str, Any]) -> None:
        if "heldout" in event or event["step"] % 10 == 0:
            print(told(event), flush=True)
        if "heldout" not in event and event["ends_epoch"]:
            copy = run / f"epoch-{event['epoch']:02d}"
            shutil.copytree(run / "draft", copy, dirs_exist_ok=True)

    settings = Settings(epochs=options.epochs, batch_tokens=options.batch_tokens,
                        learning_rate=options.learning_rate, head_rate=options.head_rate,
                        noise=options.noise, weight_decay=options.weight_decay, optimizer=options.optimizer,
                        precision=options.precision)
    result = train(corpus, parts, config, d2t, run, settings=settings, heldout=held,
                   watch=Watch(evaluate_every=130, patience=options.patience, save_minutes=3), on_event=show)
    print("finished" if result.finished else "interrupted; the same command goes on", result.heldout)


if __name__ == "__main__":
    main()
