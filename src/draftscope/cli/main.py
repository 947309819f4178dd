"""The entry point: commands found by name when they are called, and the exit codes.

Help imports no command, hence neither torch nor transformers. A command is a module of this package, in the table below,
with a function `command`, or a Typer named `app` where it has commands of its own.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from draftscope import stopping
from draftscope.errors import DraftscopeError

FOUND, USAGE, UNREADABLE, INTERNAL, UNDECIDED = 1, 2, 3, 4, 5
INTERRUPTED, CLOSED_PIPE = 130, 141
BARE = {"--ray": "auto"}
"""What an option stands for where its value is left out."""
MEANT = {
    "--capture": ("--serve", "--states"), "--dump": ("--serve", "--states"), "--trace": ("--serve", "--states"),
    "--states": ("--train", "--serve"), "--data": ("--train",), "--training": ("--train",),
    "--checkpoint": ("--draft",), "--drafter": ("--draft",), "--eagle": ("--draft",), "--speculator": ("--draft",),
    "--speculative-model": ("--draft",), "--speculative-draft-model-path": ("--draft",), "--model-path": ("--target",),
    "--model": ("--target",), "--base": ("--target",), "--base-model": ("--target",), "--verifier": ("--target",),
    "--engine": ("--for",), "--consumer": ("--for",), "--output": ("--out",), "--output-dir": ("--out",),
    "--max-tokens": ("--max-new",), "--max-new-tokens": ("--max-new",), "--num-speculative-tokens": ("-k", "--steps"),
    "--speculative-num-steps": ("--steps",), "--speculative-eagle-topk": ("--topk",),
    "--speculative-num-draft-tokens": ("--nodes",), "--held-out": ("--train-heldout", "--heldout"),
    "--test": ("--train-heldout", "--heldout"), "--lr": ("--learning-rate",),
}
"""What other programs call an option, and what it may be here: told where a command lacks the one and has the other."""
UNWRITTEN = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO})
"""What a write to an open stream fails with, for which nobody but the disk is to blame."""


class Entry(NamedTuple):
    """A command in the table: one line of help, and the heading it stands under."""

    help: str
    group: str


FIRST, FINGERPRINTS, PIPELINE, HOUSEKEEPING = "Commands", "Fingerprints", "Pipeline", "Around it"

TABLE = {
    "demo": Entry("The case on the embedded pair: broken, diagnosed, fixed, measured.", FIRST),
    "lint": Entry("What a consumer makes of a draft checkpoint, in seconds.", FIRST),
    "inspect": Entry("What a file, data set, checkpoint or capture is and holds.", FIRST),
    "capture": Entry("States at the draft's input while serving, under a budget.", FIRST),
    "replay": Entry("Acceptance of a draft offline, over recorded states.", FIRST),
    "diagnose": Entry("The cause, its evidence, the fix and what the fix will bring.", FIRST),
    "scan": Entry("The mergeable statistics of a source: its fingerprint.", FINGERPRINTS),
    "compare": Entry("Two sources or fingerprints against each other.", FINGERPRINTS),
    "prepare": Entry("Prompts to the target's own answers.", PIPELINE),
    "extract": Entry("Answers to training states.", PIPELINE),
    "train": Entry("Training states to an EAGLE-3 draft.", PIPELINE),
    "generate": Entry("Speculative decoding with a draft, counted.", PIPELINE),
    "convert": Entry("States and checkpoints from one format to another.", HOUSEKEEPING),
    "drill": Entry("The exercise that scores the diagnosis on known faults.", HOUSEKEEPING),
    "gate": Entry("A check for continuous integration.", HOUSEKEEPING),
    "serve": Entry("Reports in a browser.", HOUSEKEEPING),
}

EPILOG = (
    "Exit codes: 0 clean or done, 1 a cause was found, 2 usage, 3 input that cannot be read or contradicts itself, "
    "4 internal error (--debug shows where), 5 undecided."
)


def available() -> dict[str, Entry]:
    """The commands of the table that this installation has, in order; none is imported."""
    return {name: entry for name, entry in TABLE.items() if importlib.util.find_spec(_module(name)) is not None}


def _module(name: str) -> str:
    return f"draftscope.cli.{name.replace('-', '_')}"


class Commands(TyperGroup):
    """The group of all commands; `commands` holds stand-ins until one is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name=name, short_help=entry.help) for name, entry in available().items()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in self.commands else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        entries = available()
        for name, entry in entries.items():
            groups.setdefault(entry.group, []).append((f"{name:<{max(map(len, entries))}}", entry.help))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def load(name: str) -> Any:
    """Import the command `name` and make it callable."""
    module = importlib.import_module(_module(name))
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(module.command)
    command = typer.main.get_command(app)
    command.name = name
    return _without_markup(command)


def _without_markup(command: Any) -> Any:
    command.rich_markup_mode = None
    for child in getattr(command, "commands", {}).values():
        _without_markup(child)
    return command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftscope {metadata.version('draftscope')}")
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; DRAFTSCOPE_DEBUG=1 does the same.")] = False,
) -> None:
    """Finds out why a draft model's tokens get rejected."""


def _root() -> Any:
    app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None, no_args_is_help=True, epilog=EPILOG)
    app.callback()(_options)
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. A command returns its own, or raises `typer.Exit`."""
    arguments, debug = _take_debug(list(arguments))
    arguments = _filled(arguments)
    if (common := _common()) is not None:
        common.forget()
    with warnings.catch_warnings():
        if not debug:
            _calm_libraries()
        return _run(arguments, debug)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        with _root().make_context("draftscope", arguments) as context:
            code = context.command.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as leaving:
        return leaving.exit_code
    except typer.TyperException as error:
        _suggest(error)
        error.show() if hasattr(error, "show") else _say(str(error))
        return USAGE
    except (KeyboardInterrupt, typer.Abort) as error:
        common = _common()
        _say("interrupted" if common is None else f"interrupted; {common.kept()}")
        return error.exit_code if isinstance(error, stopping.Stopped) else INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return CLOSED_PIPE
    except DraftscopeError as error:
        return _refused(error, debug)
    except OSError as error:
        if error.filename is None and error.errno in UNWRITTEN:
            _silence_stdout()
            return _refused(DraftscopeError(f"the output cannot be written: {error.strerror}"), debug)
        if error.filename is None:
            return _internal(error, debug)
        return _refused(DraftscopeError(error.strerror or "cannot be read", where=os.fsdecode(error.filename)), debug)
    except Exception as error:
        return _internal(error, debug)


def _suggest(error: Any) -> None:
    """Put what an unknown option is called here before what is merely spelt like it."""
    meant, context = MEANT.get(getattr(error, "option_name", "")), getattr(error, "ctx", None)
    if meant is not None and context is not None:
        held = {name for parameter in context.command.params for name in parameter.opts}
        error.possibilities = [name for name in meant if name in held] or error.possibilities


def main() -> NoReturn:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open to the end)
    from draftscope.cli import lostpages

    lostpages.watch(_pages_lost)
    stopping.watch()
    sys.exit(run(sys.argv[1:]))


def _pages_lost(path: str) -> int:
    code = _refused(DraftscopeError("was cut short while it was read", where=path or "a file",
                                    remedy="Run it again when its writer is done"), debug=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` works wherever it stands, like the variable."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [a for a in arguments[:end] if a != "--debug"] + arguments[end:]
    return rest, len(rest) < len(arguments) or os.environ.get("DRAFTSCOPE_DEBUG", "") not in ("", "0")


def _filled(arguments: list[str]) -> list[str]:
    """Options whose value may be left out, with the value that this means."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    result = []
    for argument, following in itertools.pairwise([*arguments[:end], "-"]):
        result += [argument, BARE[argument]] if argument in BARE and following.startswith("-") else [argument]
    return result + arguments[end:]


def _calm_libraries() -> None:
    """Read when the libraries are imported, hence before any command is."""
    for key, value in {
        "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(key, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _common() -> Any:
    """What commands share, where one was begun: help and usage need none of it, and it takes a while to import."""
    return sys.modules.get("draftscope.cli.common")


def _refused(error: DraftscopeError, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    _say(str(error))
    if (common := _common()) is not None:
        _guarded(lambda: common.refuse(error))
    return error.exit_code


def _internal(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {os.path.basename(where[0].filename)}:{where[0].lineno}" if where else ""
    hint = "" if debug else "; run it again with --debug for the traceback"
    _say(f"internal error: {type(error).__name__}{place}: {str(error) or 'no message'}{hint}")
    return INTERNAL


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except (DraftscopeError, BrokenPipeError) as error:
        _say(str(error) or "the JSON could not be written")


def _say(text: str) -> None:
    from draftscope.text import visible

    print(f"draftscope: {visible(text)}", file=sys.stderr, flush=True)


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
