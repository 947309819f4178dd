"""`draftscope gate`: a build against its baseline, for continuous integration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftscope.cli.common import (
    JsonOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    setup,
    write_json,
    write_text,
)
from draftscope.cli.outputs import Output, own_json
from draftscope.errors import DraftscopeError, UsageError
from draftscope.text import visible

if TYPE_CHECKING:
    from pydantic import BaseModel

    from draftscope.gating.report import Observed

FAILED = 1


def refusal(error: DraftscopeError) -> BaseModel:
    """What `--json` gets of builds that can't be compared."""
    from draftscope.gating.report import Gate

    return Gate(schema="draftscope.gate/1", verdict="undecided", next=[str(error)])


def command(
    baseline: Annotated[Path, typer.Option("--baseline", metavar="FILE", help="What holds, as --write-baseline left it.")],
    current: Annotated[Path | None, typer.Option(
        "--current", metavar="FILE", help="The current build, measured before; without it, measured now from the inputs below.")
    ] = None,
    write_baseline: Annotated[bool, typer.Option(
        "--write-baseline", help="Measure the inputs and write them to --baseline; nothing is compared.")] = False,
    train: Annotated[str | None, typer.Option("--train", metavar="DIR", help="Training states.")] = None,
    serve: Annotated[str | None, typer.Option("--serve", metavar="DIR", help="A capture of what the draft received.")] = None,
    draft: Annotated[str | None, typer.Option("--draft", metavar="DIR", help="The draft's checkpoint.")] = None,
    target: Annotated[str | None, typer.Option("--target", metavar="DIR", help="The target: with its weights, slots are "
                                               "placed.")] = None,
    metrics: Annotated[list[str] | None, typer.Option("--metrics", metavar="FILE|URL", help="The engine's own counts.")] = None,
    consumer: Annotated[str | None, typer.Option("--for", metavar="CONSUMER", help="Who reads the checkpoint.")] = None,
    k: Annotated[int | None, typer.Option("-k", "--k", min=1, max=16, help="Drafted tokens per step.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, metavar="N", help="Rows taken from each side.")] = 4096,
    level: Annotated[float, typer.Option(
        "--level", min=1e-6, max=0.5, metavar="P", help="Chance of a false alarm, all tests of acceptance together.")] = 0.05,
    margin: Annotated[float, typer.Option(
        "--margin", min=0.0, metavar="X", help="A fall of accept length that is allowed (of a position: X / K).")] = 0.0,
    summary: Annotated[Path | None, typer.Option(
        "--summary", metavar="FILE", help="Write the answer as Markdown; if GITHUB_STEP_SUMMARY is set, it goes there too.")
    ] = None,
    json: JsonOption = None,
    quiet: QuietOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Hold a build of a trainer or a server against its baseline: acceptance by position, and what every slot holds.

    Exit code: 0 passed, 1 acceptance fell or a slot changed, 2 usage, 3 builds that can't be read or compared.
    """
    outputs = [] if summary is None else [
        Output("--summary", summary, lambda start: start.startswith(b"## draftscope gate"))]
    if write_baseline:
        outputs.append(Output("--baseline", baseline, own_json("baseline")))
    ui = setup(quiet, threads, seed, json, schema="gate", outputs=outputs, refusal=refusal,
               others={"--current": current} | ({} if write_baseline else {"--baseline": baseline}))
    given = any((train, serve, draft, metrics))
    if current is not None and (given or write_baseline):
        raise UsageError("--current is a build measured before; inputs are measured now", remedy="Give one of the two")
    if current is None and not given:
        raise UsageError("nothing to hold against the baseline", remedy="Give --current, or --serve, --draft and --target")
    from draftscope.diagnose.case import Inputs
    from draftscope.gating.judging import judge, markdown
    from draftscope.gating.observing import observe
    from draftscope.states.places import place

    def measured() -> Observed:
        places = {name: None if path is None else place(path) for name, path in (
            ("train", train), ("serve", serve), ("draft", draft), ("target", target))}
        return observe(
            Inputs(**places, metrics=metrics or None, consumer=consumer, k=k, max_tokens=max_tokens, seed=seed),  # type: ignore[arg-type]
            ui.note)

    if write_baseline:
        found = measured()
        write_json(baseline, found)
        ui.print(f"written: {baseline}, with acceptance {', '.join(found.rungs) or 'none'} and "
                 f"{len(found.placement.train) + len(found.placement.serve)} slots")
        return
    if not baseline.exists():
        raise UsageError("there is no baseline yet", where=str(baseline),
                         remedy="Write one of a build that holds: the same command with --write-baseline")
    before = read(baseline)
    answer = judge(before, measured() if current is None else read(current), level=level, margin=margin)
    # Names come from files, and line ends in them would make rows of their own.
    text = "".join(f"{visible(line)}\n" for line in markdown(answer).split("\n")).rstrip("\n") + "\n"
    ui.print(text)
    if summary is not None:
        write_text(summary, text)
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with open(page, "a", encoding="utf-8") as file:
            file.write(text)
    ui.write_json(answer)
    if answer.verdict == "failed":
        raise typer.Exit(FAILED)


def read(path: Path) -> Observed:
    """A build as `--write-baseline` left it.

    Raises:
        DraftscopeError: a file that is none.
    """
    from pydantic import ValidationError

    from draftscope.gating.report import Observed
    from draftscope.states.tensorfile import read_json

    try:
        return Observed.model_validate(read_json(path))
    except ValidationError:
        raise DraftscopeError("is no baseline", where=str(path), remedy="`draftscope gate --write-baseline` writes one") from None
