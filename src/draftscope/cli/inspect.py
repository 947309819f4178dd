"""What a file, data set, checkpoint or capture is and holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftscope.cli.common import FormatOption, JsonOption, QuietOption, SkipBadOption, ThreadsOption, Ui, setup
from draftscope.cli.elsewhere import MemoryOption, OnOption, PythonOption, host_of
from draftscope.errors import DraftscopeError, UsageError
from draftscope.inspecting.report import Inspection
from draftscope.text import visible

if TYPE_CHECKING:
    from draftscope.elsewhere.session import Host
    from draftscope.inspecting.inspect import Answer


def command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files or folders: states, captures, checkpoints, targets.")
    ],
    norms: Annotated[
        bool, typer.Option("--norms", help="Print shape, norms and first values of every entry of the first item.")
    ] = False,
    trainer: Annotated[
        str | None, typer.Option("--as", metavar="NAME[@VERSION]", help="What this trainer makes of training data.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="DIR", help="The target, whole or its parts: says what each entry is.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, metavar="N", help="Read the states of at most N items, evenly spread; 0 = all.")
    ] = 2000,
    on: OnOption = None,
    python: PythonOption = "python3",
    memory: MemoryOption = 4.0,
    format: FormatOption = None,
    skip_bad: SkipBadOption = False,
    json: JsonOption = None,
    quiet: QuietOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Print what each PATH is and holds, found from its content. Exit code 1 if something is wrong with it."""
    ui = setup(quiet, threads, json=json, schema="inspect", refusal=_refusal)
    from draftscope.inspecting.as_trainer import check_name
    from draftscope.inspecting.meaning import FOREIGN, foreign
    from draftscope.inspecting.tables import story
    from draftscope.states.opening import ABSENT

    if trainer is not None:
        check_name(trainer)
    known = None
    if target is not None:
        from draftscope.inspecting.placing import know
        from draftscope.states.places import place

        known = know(place(target))
    result = Inspection()
    read_as = 0
    options = {"known": known, "norms": norms, "trainer": trainer, "samples": samples, "format": format, "skip_bad": skip_bad}
    there = host_of(on, python, memory, threads)
    for answer in _here(ui, paths, options) if there is None else _there(ui, there, paths, options):
        if isinstance(answer, DraftscopeError):
            if len(paths) == 1:
                raise answer
            if not skip_bad or answer.what == ABSENT:
                result.verdict = "undecided"
            result.next.append(str(answer))
            ui.errors.print(f"draftscope: {visible(answer)}", soft_wrap=True)
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
        if not answer.findings and foreign(answer.report.entries):
            result.verdict = "undecided"
            result.next.append(f"{answer.report.path}: {FOREIGN}")
    if trainer is not None and not read_as and result.inspected:
        raise UsageError("--as takes training data, and none of the paths holds any")
    if result.verdict is None and not result.findings:
        result.verdict = "clean" if result.inspected else "undecided"
    ui.write_json(result)
    if result.verdict == "undecided":
        return 3
    return 1 if result.findings else 0


def _here(ui: Ui, paths: list[str], options: dict[str, Any]) -> Iterator[Answer | DraftscopeError]:
    from draftscope.inspecting.inspect import inspect_path
    from draftscope.states.places import place

    for given in paths:
        try:
            path = place(given)
            with ui.progress(f"reading {path.name}", unit="files") as advance:
                answer = inspect_path(path, **options, on_item=advance)
        except UsageError:
            raise
        except DraftscopeError as error:
            yield error
        else:
            yield answer


def _there(ui: Ui, host: Host, paths: list[str], options: dict[str, Any]) -> Iterator[Answer | DraftscopeError]:
    from draftscope.elsewhere.answers import inspect_there

    with ui.progress(f"reading on {host.name}", unit="files") as advance:
        yield from inspect_there(host, paths, **options, on_items=advance)


def _refusal(error: DraftscopeError) -> Inspection:
    return Inspection(verdict="undecided", next=[str(error)])

