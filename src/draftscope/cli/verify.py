"""`draftscope capture verify`: captures of the same prompts under several conditions, held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from draftscope.cli.common import JsonOption, QuietOption, ThreadsOption, setup, write_json
from draftscope.errors import DraftscopeError


def command(
    captures: Annotated[list[Path], typer.Argument(
        metavar="CAPTURE...", help="The capture to be used, then others of the same prompts: alone or in a batch, prefix cache "
        "on or off, eager or compiled, or simply once more.")],
    target: Annotated[Path | None, typer.Option(
        "--target", metavar="DIR", help="The target: tells half of a residual pair or another layer.")] = None,
    mark: Annotated[bool, typer.Option(
        "--mark/--no-mark", help="Leave verified.json in the first folder: a diagnosis then knows.")] = True,
    json: JsonOption = None, quiet: QuietOption = False, threads: ThreadsOption = None,
) -> None:
    """Test a capture before believing it: against itself, and against others of the same prompts.

    The same tokens must give the same states, whatever else was in the batch. Exit code 1: they do not, and what the rows hold
    instead is named. With one capture alone only contradictions within it can be found (exit code 5 where there are none).
    """
    ui = setup(quiet, threads, json=json, schema="verify", refusal=_refusal)
    from draftscope.inspecting.placing import know
    from draftscope.inspecting.tables import verified_story
    from draftscope.inspecting.verify import MARK, verify
    from draftscope.inspecting.verify import mark as marked

    result = verify(captures, known=None if target is None else know(target), on_capture=lambda path: ui.note(f"reading {path}"))
    for part in verified_story(result):
        ui.print(part)
    ui.write_json(result)
    if mark and captures[0].is_dir() and len(captures) > 1:
        try:
            write_json(captures[0] / MARK, marked(captures[0], result))
        except DraftscopeError as error:
            ui.note(f"a diagnosis will not know of this: {error}")
    if result.findings:
        raise typer.Exit(1)
    if result.verdict == "undecided":
        raise typer.Exit(5)


def _refusal(error: DraftscopeError) -> BaseModel:
    from draftscope.inspecting.verify import Verified

    return Verified(verdict="undecided", next=[str(error)])
