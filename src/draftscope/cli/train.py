"""`draftscope train`: training states to an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftscope.cli.common import (
    FormatOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SkipBadOption,
    ThreadsOption,
    keep,
    setup,
)
from draftscope.errors import UsageError

AlignmentName = Literal["served", "same", "next"]
OptimizerName = Literal["adamw", "muon"]
PrecisionName = Literal["float32", "bfloat16"]


def command(
    states: Annotated[str, typer.Argument(metavar="STATES", help="Training data, as `extract` writes it.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The run: log, state to go on from, draft/ and best/.")],
    target: Annotated[Path | None, typer.Option("--target", metavar="DIR", help="Without it the embedded target.")] = None,
    heldout: Annotated[str | None, typer.Option(
        "--heldout", metavar="STATES", help="Held-out data; without it every 20th sample is held out.")] = None,
    draft_vocab: Annotated[int, typer.Option(
        "--draft-vocab", min=1, metavar="N", help="Most frequent tokens that the draft can say.")] = 8192,
    boundaries: Annotated[str | None, typer.Option(
        "--boundaries", metavar="B,B,B", help="What the slots hold; without it the target's defaults.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, metavar="N", help="Passes over the data.")] = 10,
    ttt_steps: Annotated[int, typer.Option("--ttt-steps", min=1, metavar="N", help="Draft steps trained at once.")] = 3,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, metavar="N", help="Tokens per batch.")] = 2048,
    learning_rate: Annotated[float, typer.Option("--learning-rate", metavar="X", help="Its peak.")] = 1e-3,
    head_rate: Annotated[float, typer.Option("--head-rate", metavar="X", help="Of that, what the head gets.")] = 0.2,
    noise: Annotated[float, typer.Option("--noise", min=0, metavar="X", help="Noise on features, in their deviations.")] = 0.0,
    alignment: Annotated[AlignmentName, typer.Option(
        "--alignment", help="Rows supervised: those served, or l_t (same) or l_t+1 (next) as other trainers do.")] = "served",
    optimizer: Annotated[OptimizerName, typer.Option(
        "--optimizer", help="Of the draft's inner matrices; muon learns more from each step (try 5 times the rate).")] = "adamw",
    precision: Annotated[PrecisionName, typer.Option(
        "--precision", help="Of matrix products; bfloat16 is faster where the processor has it.")] = "float32",
    max_length: Annotated[int, typer.Option("--max-length", min=4, metavar="N", help="Longer samples are cut there.")] = 2048,
    save_minutes: Annotated[float, typer.Option("--save-minutes", metavar="X", help="How often the state is saved.")] = 5.0,
    format: FormatOption = None, skip_bad: SkipBadOption = False,
    json: JsonOption = None, quiet: QuietOption = False, seed: SeedOption = 0, threads: ThreadsOption = None,
) -> None:
    """Train a one-layer EAGLE-3 draft with training-time test.

    Run the same command again to go on after an interruption. `draft/` and `best/` load in SGLang and vLLM.
    """
    ui = setup(quiet, threads, seed, json=json)
    if not learning_rate > 0 or head_rate < 0:
        raise UsageError("--learning-rate must be above 0 and --head-rate not below")
    from draftscope.cli.extract import parse_boundaries
    from draftscope.eagle3.examples import load_examples, split_heldout
    from draftscope.eagle3.start import draft_vocabulary, shape_of, token_counts
    from draftscope.eagle3.train import Settings, train
    from draftscope.states.opening import open_source
    from draftscope.target.embedded import ensure_target
    from draftscope.target.parts import read_config, read_parts

    folder = target or ensure_target(report=ui.note)
    parts, raw = read_parts(folder), read_config(folder)
    source = open_source(states, format, kind="samples", skip_bad=skip_bad)
    if source.kind != "samples":
        raise UsageError("holds a capture, not training data", where=str(source.path),
                         remedy="Make training data with `draftscope extract`")
    with ui.progress("reading", None, "tokens") as advance:
        examples = load_examples(source, parts, max_length=max_length, cache=out / "teacher.safetensors", on_tokens=advance,
                                 skip_bad=skip_bad)
        if heldout is not None:
            aside = open_source(heldout, format, kind="samples", skip_bad=skip_bad)
            held = load_examples(aside, parts, max_length=max_length, cache=out / "teacher-heldout.safetensors",
                                 on_tokens=advance, skip_bad=skip_bad)
        else:
            examples, held = split_heldout(examples, 20)
    ui.note_source(source, skipped=0)
    if source.skipped:
        ui.note(f"{len(source.skipped)} files passed over, the first: {source.skipped[0].path}: {source.skipped[0].why}")
    normed = sum(example.normed for example in examples)
    if normed:
        ui.note(f"the last state of {normed} of {len(examples)} samples is after the final norm, which is not applied again")
    size = min(draft_vocab, int(raw["vocab_size"]))
    changes: dict[str, Any] = {} if boundaries is None else {"boundaries": parse_boundaries(boundaries)}
    if examples:
        changes["slots"] = int(examples[0].states.shape[1]) - 1
    config = shape_of(raw, size, **changes)
    d2t, _, coverage = draft_vocabulary(token_counts(examples, int(raw["vocab_size"])), size)
    ui.note(f"{len(examples)} samples, {sum(int(e.answer.sum()) for e in examples)} answer tokens, {len(held)} held out; "
            f"the draft vocabulary of {size} covers {coverage:.2%} of them")
    settings = Settings(
        ttt_steps=ttt_steps, epochs=epochs, batch_tokens=batch_tokens, learning_rate=learning_rate, head_rate=head_rate,
        noise=noise, alignment=alignment, optimizer=optimizer, precision=precision, seed=seed,
    )
    keep(f"the state is kept in {out}; the same command goes on from there")
    last: dict[str, Any] = {}
    with ui.progress("training", None, "steps") as advance:
        def show(event: Mapping[str, Any]) -> None:
            if "heldout" in event:
                last.update(event)
                ui.note(told(event))
                return
            advance(event["step"] if not last.get("step") else 1, total=event["of"], what=f"loss {event['loss']:.3f}")
            last["step"] = event["step"]

        result = train(examples, parts, config, d2t if size < int(raw["vocab_size"]) else None, out, settings=settings,
                       heldout=held, save_minutes=save_minutes, on_event=show)
    figures = result.heldout
    if not result.finished:
        raise KeyboardInterrupt
    ui.print(f"{result.steps} steps; the draft is in {out / 'draft'}"
             + ("" if figures is None else f"; held-out accept length {figures.length:.2f} (K = {figures.k})"))
    ui.write_json({
        "schema": "draftscope.train/1", "folder": str(out), "steps": result.steps, "coverage": coverage,
        "samples": len(examples), "heldout_samples": len(held), "loss": result.losses[-1] if result.losses else None,
        "heldout": None if figures is None else {"k": figures.k, "rows": figures.rows, "joint": figures.joint,
                                                 "length": figures.length},
    })


def told(event: Mapping[str, Any]) -> str:
    """One line about a step or an evaluation of the log."""
    if "heldout" in event:
        figures = event["heldout"]
        joint = " ".join(f"{share:.3f}" for share in figures["joint"])
        return f"step {event['step']}: held-out accept length {figures['length']:.3f}, joint acceptance {joint}"
    accuracy = " ".join("-" if share is None else f"{share:.3f}" for share in event["accuracy"])
    return (f"step {event['step']}/{event['of']}: loss {event['loss']:.3f}, accuracy {accuracy}, "
            f"{event['answer_tokens_per_s']:.0f} answer tokens/s, {event['left_s'] / 60:.0f} min left")
