"""`draftscope train`: training states, or conversations, to an EAGLE-3 draft."""

from __future__ import annotations

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
    setup,
)
from draftscope.errors import UsageError

PresetChoice = Literal["own", "safeai", "specforge", "speculators"]
AlignmentName = Literal["served", "same", "next"]
LossName = Literal["soft-ce", "kl", "reverse-kl", "jsd", "ce", "tv", "nla", "lk-hybrid"]
NormaliserName = Literal["rows", "rows-eps", "positions"]
OutsideName = Literal["masked", "kept"]
NoiseName = Literal["normal", "uniform"]
FeedbackName = Literal["pre", "post"]
RopeName = Literal["plain", "target"]
ScheduleName = Literal["cosine", "linear", "constant"]
OptimizerName = Literal["adamw", "muon"]
PrecisionName = Literal["float32", "bfloat16"]
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")


def command(
    states: Annotated[str, typer.Argument(metavar="STATES", help="Training data; with --online, conversations.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The run: log, state to go on from, draft/ and best/.")],
    target: Annotated[Path | None, typer.Option("--target", metavar="DIR", help="Without it the embedded target.")] = None,
    heldout: Annotated[str | None, typer.Option(
        "--heldout", metavar="STATES", help="Held-out data; without it every 20th sample is held out.")] = None,
    online: Annotated[bool, typer.Option("--online", help="Compute states with the target as they are needed.")] = False,
    draft_vocab: Annotated[int, typer.Option(
        "--draft-vocab", min=1, metavar="N", help="Most frequent tokens that the draft can say.")] = 8192,
    vocab_map: Annotated[Path | None, typer.Option(
        "--vocab-map", metavar="FILE", help="A draft vocabulary made elsewhere (d2t), in place of that.")] = None,
    boundaries: Annotated[str | None, typer.Option(
        "--boundaries", metavar="B,B,B", help="What the slots hold; without it the target's defaults.")] = None,
    max_length: Annotated[int, typer.Option("--max-length", min=4, metavar="N", help="Longer samples are cut there.")] = 2048,
    preset: Annotated[PresetChoice, typer.Option(
        "--preset", help="Choose as that trainer does; what is said besides wins, the rest is our own.")] = "own",
    ttt_steps: Annotated[int | None, typer.Option(
        "--ttt-steps", min=1, metavar="N", help="Draft steps trained at once (own: 3).")] = None,
    decay: Annotated[float | None, typer.Option(
        "--decay", min=0, metavar="X", help="Step k weighs X^k (own: 0.8).")] = None,
    loss: Annotated[LossName | None, typer.Option("--loss", help="Of one row (own: soft-ce).")] = None,
    normaliser: Annotated[NormaliserName | None, typer.Option(
        "--normaliser", help="A step's sum is divided by: rows taught (own), these + 1e-5, all positions.")] = None,
    outside: Annotated[OutsideName | None, typer.Option(
        "--outside", help="Rows whose target lies outside the draft vocabulary (own: masked).")] = None,
    alignment: Annotated[AlignmentName | None, typer.Option(
        "--alignment", help="Rows supervised: those served (own), or l_t (same) or l_t+1 (next).")] = None,
    past_end: Annotated[bool | None, typer.Option(
        "--past-end/--no-past-end", help="With `same`: teach the row past the end the uniform distribution.")] = None,
    noise: Annotated[float | None, typer.Option(
        "--noise", min=0, metavar="X", help="Noise on features, in their deviations (own: 0).")] = None,
    noise_kind: Annotated[NoiseName | None, typer.Option(
        "--noise-kind", help="Its distribution (own: normal).")] = None,
    feedback: Annotated[FeedbackName | None, typer.Option(
        "--feedback", help="The state fed back: before or after the final norm (own: pre).")] = None,
    norms: Annotated[str | None, typer.Option(
        "--norms", metavar="LIST", help=f"Of {', '.join(NORMS)}, or none (own: none).")] = None,
    first_position: Annotated[int | None, typer.Option(
        "--first-position", min=0, metavar="N", help="Rotary position of the first row (own: 0).")] = None,
    rope: Annotated[RopeName | None, typer.Option(
        "--rope", help="Rotary parameters: theta 10000 (own), or the target's.")] = None,
    window: Annotated[int | None, typer.Option(
        "--window", min=0, metavar="N", help="Sliding window of the draft, 0 = none (own).")] = None,
    window_moves: Annotated[bool | None, typer.Option(
        "--window-moves/--window-stays", help="It moves on with each draft step (own), or not.")] = None,
    optimizer: Annotated[OptimizerName | None, typer.Option(
        "--optimizer", help="Of inner matrices (own: adamw); muon learns more a step (try 5 times the rate).")] = None,
    learning_rate: Annotated[float | None, typer.Option(
        "--learning-rate", metavar="X", help="Its peak (own: 1e-3).")] = None,
    head_rate: Annotated[float | None, typer.Option(
        "--head-rate", min=0, metavar="X", help="Of that, what the head gets; 0 freezes it (own: 0.2).")] = None,
    schedule: Annotated[ScheduleName | None, typer.Option("--schedule", help="After warmup (own: cosine).")] = None,
    warmup_share: Annotated[float | None, typer.Option(
        "--warmup-share", min=0, max=1, metavar="X", help="Of all steps (own: 50 steps).")] = None,
    weight_decay: Annotated[float | None, typer.Option(
        "--weight-decay", min=0, metavar="X", help="Of matrices (own: 0.02).")] = None,
    clip: Annotated[float | None, typer.Option("--clip", min=0, metavar="X", help="Largest gradient norm (own: 1).")] = None,
    epochs: Annotated[int | None, typer.Option(
        "--epochs", min=1, metavar="N", help="Passes over the data (own: 10).")] = None,
    batch_tokens: Annotated[int, typer.Option(
        "--batch-tokens", min=1, metavar="N", help="Tokens per batch, of all processes together.")] = 2048,
    device: Annotated[str, typer.Option(
        "--device", metavar="NAME", help="Where the draft is: cpu, cuda, cuda:1.")] = "cpu",
    precision: Annotated[PrecisionName, typer.Option(
        "--precision", help="Of matrix products; bfloat16 is faster where the processor has it.")] = "float32",
    compute: Annotated[PrecisionName, typer.Option(
        "--compute", help="With --online: what the target runs in.")] = "float32",
    evaluate_every: Annotated[int, typer.Option(
        "--evaluate-every", min=1, metavar="N", help="Steps between held-out figures, besides every epoch's.")] = 100,
    patience: Annotated[int, typer.Option(
        "--patience", min=0, metavar="N", help="End after N held-out figures without a longer one; 0 = never.")] = 0,
    save_minutes: Annotated[float, typer.Option(
        "--save-minutes", metavar="X", help="How often the state is saved.")] = 5.0,
    in_flight: Annotated[int, typer.Option(
        "--in-flight", min=1, metavar="MIB", help="Batches loaded ahead and in use.")] = 512,
    timeout: Annotated[float, typer.Option(
        "--timeout", min=1, metavar="S", help="Under torchrun: longest wait for another process.")] = 1800.0,
    format: FormatOption = None, skip_bad: SkipBadOption = False,
    json: JsonOption = None, quiet: QuietOption = False, seed: SeedOption = 0, threads: ThreadsOption = None,
) -> None:
    """Train a one-layer EAGLE-3 draft with training-time test.

    Run the same command again to go on after an interruption. `draft/` and `best/` load in SGLang and vLLM. Under
    `torchrun --no-python` several processes share each batch.
    """
    ui = setup(quiet, threads, seed, json=json, schema="train")
    if learning_rate is not None and not learning_rate > 0:
        raise UsageError("--learning-rate must be above 0")
    from draftscope.cli.extract import parse_boundaries
    from draftscope.cli.training import Work
    from draftscope.eagle3.parallel import joined
    from draftscope.eagle3.recipes import PRESETS
    from draftscope.eagle3.train import Settings, Watch
    from draftscope.states.places import place

    chosen = PRESETS.get(preset)
    given = {
        "ttt_steps": ttt_steps, "decay": decay, "loss": loss, "normaliser": normaliser, "outside": outside,
        "alignment": alignment, "past_end": past_end, "noise": noise, "noise_kind": noise_kind, "first_position": first_position,
        "window_moves": window_moves, "optimizer": optimizer, "learning_rate": learning_rate, "head_rate": head_rate,
        "schedule": schedule, "warmup_share": warmup_share, "weight_decay": weight_decay, "clip": clip, "epochs": epochs,
        "batch_tokens": batch_tokens, "precision": precision, "seed": seed,
    }
    said = {name: value for name, value in given.items() if value is not None}
    settings = Settings(**((chosen.chosen if chosen else {}) | said))
    if settings.past_end and settings.alignment != "same":
        raise UsageError("--past-end goes with --alignment same")
    shape: dict[str, Any] = chosen.shaped if chosen else {}
    if feedback is not None:
        shape["norm_output"] = feedback == "post"
    if norms is not None:
        shape |= dict.fromkeys(NORMS, False) | dict.fromkeys(_norms(norms), True)
    if window is not None:
        shape["sliding_window"] = window or None
    if boundaries is not None:
        shape["boundaries"] = parse_boundaries(boundaries)
    if rope == "plain":
        shape.pop("rope_parameters", None)
    with joined(device, timeout) as ranks:
        if not ranks.first:
            ui.quiet, ui.json = True, None
        if chosen is not None:
            taken = ", ".join(f"{name} {value}" for name, value in chosen.chosen.items() if name not in said)
            ui.note(f"as {chosen.name} {chosen.version}: {taken}")
            ui.note(f"not reproduced: {'; '.join(chosen.beyond)}")
        Work(
            ui, ranks, out, settings, shape, device=device if ranks.world == 1 else str(ranks.device), max_length=max_length,
            format=format, skip_bad=skip_bad, compute=compute, draft_vocab=draft_vocab, vocab_map=vocab_map,
            target_rope=rope == "target" or (rope is None and chosen is not None and bool(chosen.target_rope)),
            watch=Watch(evaluate_every, patience, save_minutes, in_flight * 2**20),
        ).run(place(states), None if heldout is None else place(heldout), target, online=online)


def _norms(text: str) -> list[str]:
    named = [part.strip() for part in text.split(",") if part.strip() not in ("", "none")]
    if unknown := [name for name in named if name not in NORMS]:
        raise UsageError(f"--norms: no norm `{unknown[0]}`", remedy=f"Known: {', '.join(NORMS)}, none")
    return named
