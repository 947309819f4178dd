"""What a consumer makes of a draft checkpoint, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli.common import JsonOption, QuietOption, ThreadsOption, setup
from draftscope.errors import DraftscopeError
from draftscope.linting.report import Lint


def command(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder of the draft: config.json and weights.")],
    consumers: Annotated[list[str] | None, typer.Option(
        "--for", metavar="CONSUMER",
        help="Who reads it: NAME[@VERSION][:VARIANT], as sglang@0.5.23, sglang@0.5.14:eagle, vllm@0.33:v1, speculators@0.9, "
        "specforge@0.2; or all. May be given several times; without it the checkpoint alone is looked at.")] = None,
    target_config: Annotated[str | None, typer.Option(
        "--target-config", metavar="DIR", help="Folder of the target's config.json: depth, width, vocabulary, kind.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="DIR", help="The target, or its embedding, norm and head: held against the draft's.")] = None,
    token_freq: Annotated[Path | None, typer.Option(
        "--token-freq", metavar="FILE", help="Token counts of the text: what the draft's vocabulary covers.")] = None,
    json: JsonOption = None,
    quiet: QuietOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Read a draft checkpoint as its consumer does: what is in effect, ignored, defaulted, wrong. Exit code 1 on findings."""
    ui = setup(quiet, threads, json=json, schema="lint", refusal=_refusal)
    from draftscope.linting.lint import lint
    from draftscope.linting.tables import story
    from draftscope.states.places import place

    result = lint(checkpoint, consumers or [], target_config=None if target_config is None else place(target_config),
                  target=None if target is None else place(target), token_freq=token_freq)
    for part in story(result):
        ui.print(part)
    ui.write_json(result)
    return 0 if result.verdict == "clean" else 1


def _refusal(error: DraftscopeError) -> Lint:
    return Lint(verdict="undecided", next=[str(error)])
