"""`draftscope capture`: what a draft receives while serving, under a budget; one command per engine."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli import verify
from draftscope.cli.common import JsonOption, QuietOption, ThreadsOption, keep, setup
from draftscope.cli.generate import (
    BoundariesOption,
    DraftOption,
    LimitOption,
    MaxNewOption,
    PromptsArgument,
    RowsOption,
    TargetOption,
    Way,
    answer,
    prepare,
    report,
)
from draftscope.cli.speculation import KOption, NodesOption, StepsOption, TopkOption, shape_of
from draftscope.errors import UsageError
from draftscope.text import count, visible

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def engines() -> None:
    """States at the draft's input while serving, under a budget: a folder that `replay` and `diagnose` read."""


@app.command("transformers")
def transformers(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the capture, one file a request.")],
    prompts: PromptsArgument = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    k: KOption = None,
    max_new: MaxNewOption = 64,
    rows: RowsOption = 1,
    limit: LimitOption = None,
    boundaries: BoundariesOption = None,
    topk: TopkOption = None,
    steps: StepsOption = None,
    nodes: NodesOption = None,
    max_bytes: Annotated[str | None, typer.Option(
        "--max-bytes", metavar="SIZE", help="Budget of the files, such as 500MB; what is beyond it is left out.")] = None,
    max_requests: Annotated[int | None, typer.Option(
        "--max-requests", min=1, metavar="N", help="Requests recorded at most.")] = None,
    last_hidden: Annotated[bool, typer.Option(
        "--last-hidden/--no-last-hidden", help="Record the target's last state too.")] = True,
    json: JsonOption = None, quiet: QuietOption = False, threads: ThreadsOption = None,
) -> None:
    """Answer prompts as `generate` does, and record what the draft receives.

    The budget and the disk never change what is generated; what they kept out is counted. Exit code 3: the capture stopped early.
    """
    ui = setup(quiet, threads, json=json)
    budget = None if max_bytes is None else parse_bytes(max_bytes)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("is not an empty folder", where=str(out), remedy="Name a new one with --out: captures are not mixed")
    depth, tree = shape_of(k, topk, steps, nodes)
    job = prepare(ui, prompts, target, draft, boundaries, limit)
    assert job.draft is not None
    from draftscope.engines.transformers import Capture, description

    slots = [slot.index for slot in job.wiring.slots]
    capture = Capture(
        out, description(model=job.target.folder.name, draft=job.draft_name, layer_ids=slots, k=depth, tree=tree),
        max_bytes=budget, max_requests=max_requests, last_hidden=last_hidden,
    )
    keep(f"requests recorded so far are kept in {out}")
    way = Way(depth, max_new, rows, tree)
    try:
        results = answer(ui, job, job.draft, way, observer=capture)
    finally:
        captured = capture.close()
    report(ui, job, results, None, way, capture={"folder": str(out), **asdict(captured)})
    ui.print(f"{count(captured.requests, 'request')} with {count(captured.rows, 'row')} in {visible(out)}, "
             f"{captured.bytes / 1e6:.1f} MB")
    if captured.requests_left_out or captured.tails_cut:
        ui.print(f"the budget left out {count(captured.requests_left_out, 'request')}, "
                 f"and {count(captured.rows_cut, 'row')} at the end of {captured.tails_cut} others")
    if captured.stopped is not None:
        ui.note(f"the capture stopped early: {captured.stopped}")
        raise typer.Exit(3)


app.command("verify")(verify.command)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`500MB`, `2GiB`, `1000` as bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--max-bytes {text!r} is not a size", remedy="For example 500MB or 2GiB")
    power = " kmgt".index(match[2].lower()) if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
