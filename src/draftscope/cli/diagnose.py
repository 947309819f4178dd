"""`draftscope diagnose`: the cause, from any subset of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli.common import (
    HtmlOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SkipBadOption,
    ThreadsOption,
    setup,
)
from draftscope.cli.outputs import Output
from draftscope.errors import DraftscopeError, UsageError
from draftscope.findings import Diagnosis

EXIT = {"clean": 0, "undecided": 5}
CONTRADICTED = 3
"""Inputs that exclude each other, and nothing else found."""


def refusal(error: DraftscopeError) -> Diagnosis:
    """What `--json` gets of inputs that can't be read."""
    return Diagnosis(schema="draftscope.diagnosis/1", verdict="undecided", next=[str(error)])


def command(
    train: Annotated[str | None, typer.Option("--train", metavar="DIR", help="Training states.")] = None,
    train_heldout: Annotated[
        str | None, typer.Option("--train-heldout", metavar="DIR", help="Training states kept out of training.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option("--serve", metavar="DIR", help="A capture of what the draft received in service.")
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", metavar="DIR", help="The draft's checkpoint.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="DIR", help="The target: a folder with weights, or only its embedding, final norm and head."
        ),
    ] = None,
    sweep: Annotated[str | None, typer.Option(
        "--sweep", metavar="DIR", help="Every boundary of the target over these tokens, recorded by an engine (capture vllm "
        "--sweep): for a target that cannot be run here.")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics", metavar="FILE|URL",
            help="The engine's own counts: its /metrics (an address, or saved), its log, its answers, its server info, or the "
            "JSON of generate. Several add up; of two scrapes, the earlier first, the difference counts."),
    ] = None,
    metrics_window: Annotated[float, typer.Option(
        "--metrics-window", min=0, max=86400, metavar="SECONDS",
        help="Scrape the address twice, so long apart, and count what came in between.")] = 0.0,
    url: Annotated[str | None, typer.Option(
        "--url", metavar="URL",
        help="A running server (vLLM, SGLang): it is asked for greedy answers to training prompts and to fresh ones; --serve is "
        "then the folder into which it captures.")] = None,
    prompts: Annotated[Path | None, typer.Option(
        "--prompts", metavar="FILE", help="Fresh prompts for --url, as JSONL; without them those of --train-heldout.")] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="N", help="Prompts of each kind for --url.")] = 24,
    max_new: Annotated[int, typer.Option("--max-new", min=4, metavar="N", help="Tokens of an answer of --url at most.")] = 64,
    log: Annotated[list[Path] | None, typer.Option(
        "--log", metavar="FILE|DIR",
        help="The training's own log: train's log.jsonl, console output of SpecForge or speculators, trainer_state.json, "
        "TensorBoard's event files; or the folder of the run. Several are one run, in order.")] = None,
    conversations: Annotated[Path | None, typer.Option(
        "--conversations", metavar="FILE", help="What --train was made from, as JSONL: messages, or token ids.")] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="CONSUMER",
            help="Who reads the checkpoint, as vllm@0.32 or sglang@0.5.23; without it, who the capture says.",
        ),
    ] = None,
    absorb: Annotated[Path | None, typer.Option(
        "--absorb", metavar="DIR",
        help="Write a copy of the draft whose fc undoes what is wrong with the served states, for an engine that cannot be "
        "changed; only where replay shows that it helps.")] = None,
    source_draft: Annotated[str | None, typer.Option(
        "--source-draft", metavar="DIR",
        help="The checkpoint that --draft was made from, before a conversion or export: compared tensor by tensor.")] = None,
    apply: Annotated[Path | None, typer.Option(
        "--apply", metavar="DIR",
        help="Write a copy of --draft with the fixes in it to this new folder, and replay the draft from it.")] = None,
    k: Annotated[
        int | None, typer.Option("-k", "--k", min=1, max=16, help="Drafted tokens per step; without it the capture's, else 3.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, metavar="N", help="Rows taken from each side.")] = 4096,
    format: Annotated[list[str] | None, typer.Option(
        "--format", metavar="NAME",
        help="Read states as this format: one of training data for --train, one of captures for --serve.")] = None,
    explain: Annotated[list[str] | None, typer.Option(
        "--explain", metavar="FAULT", help="Say why this fault was, or was not, named; may be given more than once.")] = None,
    bundle: Annotated[Path | None, typer.Option(
        "--bundle", metavar="FILE",
        help="Pack report, JSON, configurations, counters and a few rows into a small zip file, to attach to an issue; without "
        "absolute paths, hosts and texts.")] = None,
    bundle_rows: Annotated[int, typer.Option(
        "--bundle-rows", min=0, max=256, metavar="N", help="Rows of each of two sequences a side in the bundle; 0 = no states.")
    ] = 16,
    bundle_text: Annotated[bool, typer.Option(
        "--bundle-text", help="Leave texts and token ids of the rows in the bundle.")] = False,
    skip_bad: SkipBadOption = False,
    json: JsonOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Find out why a draft's tokens are rejected.

    Exit code: 0 clean, 1 a cause was found, 5 undecided, 3 input that can't be read, or that contradicts itself.
    """
    ui = setup(
        quiet, threads, seed, json, html, schema="diagnosis", refusal=refusal,
        outputs=[] if bundle is None else [
            Output("--bundle", bundle, lambda start: start.startswith(b"PK") and b"draftscope-bundle" in start[:128])],
        others={"--absorb": absorb, "--apply": apply, "--conversations": conversations, "--prompts": prompts},
    )
    if prompts is not None and url is None:
        raise UsageError("--prompts are asked of a server", remedy="Give its address with --url")
    if conversations is not None and train is None:
        raise UsageError("--conversations are compared with training states", remedy="Give these with --train")
    from draftscope.bundling import write_bundle
    from draftscope.diagnose.case import Inputs
    from draftscope.diagnose.run import diagnose
    from draftscope.faults import FAULTS
    from draftscope.report.html import page
    from draftscope.report.terminal import show
    from draftscope.states.places import Place, place
    from draftscope.text import visible

    known = [fault.id for fault in FAULTS]
    for name in explain or ():
        if name not in known:
            raise UsageError(f"no fault is called {name!r}", remedy=f"Known: {', '.join(known)}")

    def at(given: str | None) -> Place | None:
        return None if given is None else place(given)

    inputs = Inputs(
        train=at(train),
        train_heldout=at(train_heldout),
        serve=at(serve),
        draft=at(draft),
        target=at(target),
        sweep=at(sweep),
        metrics=metrics or None,
        metrics_window=metrics_window,
        url=url,
        prompts=prompts,
        requests=requests,
        max_new=max_new,
        consumer=consumer,
        k=k,
        max_tokens=max_tokens,
        seed=seed,
        formats=tuple(format or ()),
        skip_bad=skip_bad,
        explain=tuple(explain or ()),
        absorb=absorb,
        source_draft=at(source_draft),
        apply=apply,
        logs=tuple(log or ()),
        conversations=conversations,
    )
    found = diagnose(inputs, ui.note)
    if not ui.quiet:
        show(found, ui.console)
    if found.absorbed is not None:
        ui.print(f"--absorb: {visible(found.absorbed.says)}")
    ui.write_json(found)
    ui.write_html(lambda: page(found))
    if bundle is not None:
        packed = write_bundle(bundle, found, inputs, text=bundle_text, rows=bundle_rows)
        ui.print(f"--bundle: {len(packed.files)} files, {packed.size:,} bytes in {bundle}; look into it before you hand it on")
        for left in packed.left_out:
            ui.note(f"not in the bundle: {left}")
    contradicted = found.verdict == "undecided" and bool(found.matched.get("contradictions"))
    raise typer.Exit(CONTRADICTED if contradicted else EXIT.get(found.verdict, 1))
