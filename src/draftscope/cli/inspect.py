"""What a file, data set, checkpoint or capture is and holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli.common import FormatOption, JsonOption, QuietOption, SkipBadOption, ThreadsOption, Ui, setup
from draftscope.errors import DraftscopeError, UsageError
from draftscope.inspecting.report import Inspection
from draftscope.text import visible


def command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files or folders: states, captures, checkpoints, targets.")
    ],
    norms: Annotated[
        bool, typer.Option("--norms", help="Print shape, norms and first values of every entry of the first item.")
    ] = False,
    trainer: Annotated[
        str | None, typer.Option("--as", metavar="NAME[@VERSION]", help="What this trainer makes of training data.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--target", metavar="DIR", help="The target, whole or its parts: says what each entry is.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, metavar="N", help="Read the states of at most N items, evenly spread; 0 = all.")
    ] = 2000,
    on: Annotated[str | None, typer.Option("--on", metavar="USER@HOST", help="Inspect where the data lie, through ssh.")] = None,
    python: Annotated[str, typer.Option("--python", metavar="PATH", help="Python with draftscope on that host.")] = "python3",
    format: FormatOption = None,
    skip_bad: SkipBadOption = False,
    json: JsonOption = None,
    quiet: QuietOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Print what each PATH is and holds, found from its content. Exit code 1 if something is wrong with it."""
    ui = setup(quiet, threads, json=json, refusal=_refusal)
    if on is not None:
        return _remote(ui, on, python, paths, norms, trainer, target, samples, threads,
                       [*([] if format is None else ["--format", format]), *(["--skip-bad"] if skip_bad else [])])
    from draftscope.inspecting.as_trainer import check_name
    from draftscope.inspecting.inspect import inspect_path
    from draftscope.inspecting.tables import story

    if trainer is not None:
        check_name(trainer)
    known = None
    if target is not None:
        from draftscope.inspecting.placing import know

        known = know(target)
    result = Inspection()
    read_as = 0
    for path in paths:
        try:
            with ui.progress(f"reading {path.name}", unit="files") as advance:
                answer = inspect_path(path, known=known, norms=norms, trainer=trainer, samples=samples, format=format,
                                      skip_bad=skip_bad, on_item=advance)
        except UsageError:
            raise
        except DraftscopeError as error:
            if len(paths) == 1:
                raise
            if not skip_bad:
                result.verdict = "undecided"
            result.next.append(str(error))
            ui.errors.print(f"draftscope: {visible(error)}", soft_wrap=True)
            continue
        result.inspected.append(answer.report)
        result.findings += answer.findings
        if answer.norms:
            result.norms.append(answer.norms)
        if not quiet and answer.norms:
            ui.console.out(answer.norms, highlight=False)
        if answer.as_trainer is not None:
            result.as_trainer.append(answer.as_trainer)
            read_as += 1
        for part in story(answer):
            ui.print(part)
    if trainer is not None and not read_as and result.inspected:
        raise UsageError("--as takes training data, and none of the paths holds any")
    if result.verdict is None and not result.findings:
        result.verdict = "clean"
    ui.write_json(result)
    if result.verdict == "undecided":
        return 3
    return 1 if result.findings else 0


def _refusal(error: DraftscopeError) -> Inspection:
    return Inspection(verdict="undecided", next=[str(error)])


def _remote(ui: Ui, host: str, python: str, paths: list[Path], norms: bool, trainer: str | None, target: Path | None,
            samples: int, threads: int | None, more: list[str]) -> int:
    import json as jsonlib

    from draftscope.inspecting.remote import Remote

    arguments = ["inspect", "--samples", str(samples), *more]
    arguments += ["--norms"] if norms else []
    arguments += ["--as", trainer] if trainer is not None else []
    arguments += ["--target", str(target)] if target is not None else []
    arguments += ["--threads", str(threads)] if threads is not None else []
    arguments += ["--json", "-"] if ui.json is not None else []
    arguments += ["--quiet"] if ui.quiet else []
    code, text = Remote(host, python).run([*arguments, "--", *map(str, paths)], capture=ui.json is not None)
    if ui.json is not None and text:
        try:
            ui.write_json(jsonlib.loads(text))
        except ValueError:
            raise DraftscopeError("answered with something that is no JSON", where=host,
                                  remedy="Both sides need the same version of draftscope") from None
    return code
