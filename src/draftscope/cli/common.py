"""What every command shares: options, output to people and to programs, progress.

A command declares what it needs of the options and calls `setup` first; all that it prints goes through the `Ui` it gets
back, so that `--json -` leaves stdout to the JSON alone and a pipe gets plain text.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import logging
import math
import os
import random
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftscope.cli.outputs import Output, check_outputs, own_json
from draftscope.errors import DraftscopeError
from draftscope.states.leftover import sweep_up, temporary
from draftscope.text import visible

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; with - stdout is the JSON alone.")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one self-contained page.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only; the exit code tells the rest.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of everything drawn at random.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, metavar="N", help="CPU threads; without it as many as torch takes.")
]

FormatOption = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="Read states as this format, whatever they look like; a wrong name lists all."),
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Count what is unreadable instead of stopping, also where a file was named directly.")
]

Refusal = Callable[[DraftscopeError], BaseModel]
PIPED_WIDTH = 100
EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class PipeConsole(Console):
    """A console that leaves a closed pipe to the entry point (rich would exit with 1, which means "cause found")."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@dataclass
class Ui:
    """Where a command's output goes.

    Attributes:
        console: the story for people: stdout, or stderr where stdout is taken by the JSON.
        errors: stderr, for progress and remarks.
        json: target of the JSON, `-` = stdout, None = not asked for.
        html: target of the page.
    """

    console: Console
    errors: Console
    quiet: bool
    json: str | None
    html: Path | None
    refusal: Refusal | None = None

    def print(self, *parts: RenderableType) -> None:
        """To people; nothing with `--quiet`. Strings are printed as they stand, without markup."""
        if not self.quiet:
            self.console.print(*parts)

    def note(self, text: str) -> None:
        """A remark about the work, on stderr."""
        if not self.quiet:
            self.errors.print(visible(text), style="dim", soft_wrap=True)

    def note_source(self, source: Any, name: object = "", skipped: int = 5) -> None:
        """How states are read, what was done to them on the way in, and what was passed over; on stderr."""
        ahead = f"{name}: " if name else ""
        self.note(f"{ahead}read as {source.format}: {source.chosen}")
        for said in getattr(source, "notes", []):
            self.note(f"{ahead}{said}")
        for skip in source.skipped[:skipped]:
            self.note(f"{ahead}skipped {skip.path}{f', row {skip.row}' if skip.row >= 0 else ''}: {skip.why}")
        if 0 < skipped < len(source.skipped):
            self.note(f"{ahead}and {len(source.skipped) - skipped} more")

    def write_json(self, model: BaseModel | Mapping[str, Any] | list[Any]) -> None:
        """The result to where `--json` said, if it did."""
        if self.json is not None:
            write_json(self.json, model)

    def write_html(self, render: Callable[[], str]) -> None:
        """The page to where `--html` said, if it did; `render` is called only then."""
        if self.html is not None:
            write_text(self.html, render())

    @contextlib.contextmanager
    def progress(
        self, what: str, total: float | None = None, unit: str = "", beside: Path | None = None,
    ) -> Iterator[Callable[..., None]]:
        """Progress with rate and time left on an interactive stderr; elsewhere a line now and then.

        Args:
            beside: an output, beside which how far the work is stands in a file of its own while it lasts.

        Yields:
            advance(amount=1, *, what=None, total=None).
        """
        with self._shown(what, total, unit) as advance:
            if beside is None:
                yield advance
                return
            with Noted(beside, what, total, unit) as noted:
                def both(amount: float = 1, *, what: str | None = None, total: float | None = None) -> None:
                    noted.add(amount, total)
                    advance(amount, what=what, total=total)

                yield both

    @contextlib.contextmanager
    def _shown(self, what: str, total: float | None, unit: str) -> Iterator[Callable[..., None]]:
        if self.quiet:
            yield lambda amount=1, *, what=None, total=None: None
            return
        if not self.errors.is_terminal:
            yield _Lines(self.errors, what, total, unit).advance
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Done(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=self.errors, transient=True) as bar:
            task = bar.add_task(visible(what, 40), total=total, unit=unit)

            def advance(amount: float = 1, *, what: str | None = None, total: float | None = None) -> None:
                bar.update(task, advance=amount, total=total, description=None if what is None else visible(what, 40))

            yield advance


@dataclass
class _Lines:
    """How far a work is where there is no terminal: a line in EVERY seconds."""

    console: Console
    what: str
    total: float | None
    unit: str
    done: float = 0.0

    def __post_init__(self) -> None:
        self._begun = self._told = time.monotonic()

    def advance(self, amount: float = 1, *, what: str | None = None, total: float | None = None) -> None:
        self.done += amount
        self.what, self.total = what or self.what, self.total if total is None else total
        now = time.monotonic()
        if now - self._told < EVERY:
            return
        self._told = now
        of = "" if self.total is None else f"/{self.total:,.0f}"
        rate = self.done / max(now - self._begun, 1e-9)
        told = f"{self.done:,.0f}{of} {self.unit}".rstrip() + f", {rate:,.{0 if rate >= 10 else 2}f}/s"
        self.console.print(Text(f"{visible(self.what, 40)}: {told}"), soft_wrap=True)


class Noted:
    """How far a long work is, in `NAME.progress.json` beside its output (draftscope.progress/1); gone when the work ends.

    Written at most once a second; what cannot be written is left, since the work matters more.
    """

    def __init__(self, output: Path, what: str, total: float | None, unit: str) -> None:
        self.path = self.beside(output)
        self.held: dict[str, Any] = {"schema": "draftscope.progress/1", "what": what, "done": 0.0, "total": total, "unit": unit,
                                     "started": time.time(), "updated": time.time()}
        self._written = -math.inf

    @staticmethod
    def beside(output: Path) -> Path:
        return output.with_name(f"{output.name}.progress.json")

    def __enter__(self) -> Noted:
        self.add(0, None)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def add(self, amount: float, total: float | None) -> None:
        self.held["done"] += amount
        self.held["total"] = self.held["total"] if total is None else total
        if time.monotonic() - self._written >= 1:
            self._written, self.held["updated"] = time.monotonic(), time.time()
            with contextlib.suppress(DraftscopeError):
                write_json(self.path, self.held)


class _Done(ProgressColumn):
    def render(self, task: Task) -> Text:
        of = "" if task.total is None else f"/{task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{of} {task.fields['unit']}".rstrip())


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2f}/s")


_current: Ui | None = None
_kept = ""


def setup(
    quiet: bool = False, threads: int | None = None, seed: int | None = None, json: str | None = None,
    html: Path | None = None, *, schema: str = "", outputs: Sequence[Output] = (),
    others: Mapping[str, Path | None] | None = None, refusal: Refusal | None = None,
) -> Ui:
    """Prepare a command: threads, seeds, quiet libraries, and where its output goes.

    Args:
        schema: that of what goes to `json`, such as `lint` for `draftscope.lint/1`: an earlier file of it may be overwritten.
        outputs: what else the command writes.
        others: what else it names, by option: no output may be one of these.
        refusal: what to write to `json` where the command ends with an error of the user's input; its argument is the error.

    Raises:
        UsageError: an output that could not be written, would overwrite what is no earlier result of its option, or is used by
            another option, told before the work.
    """
    global _current
    check_outputs([
        *([] if json in (None, "-") else [Output("--json", Path(str(json)), own_json(schema))]),
        *([] if html is None else [Output("--html", html, lambda start: start.startswith(b"<!doctype html>"))]),
        *outputs,
    ], others)
    for name in ("transformers", "huggingface_hub", "accelerate", "gguf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if seed is not None:
        random.seed(seed)
    if threads is not None or seed is not None:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        if seed is not None:
            torch.manual_seed(seed)
    _current = Ui(
        console=make_console(stderr=json == "-"), errors=make_console(stderr=True), quiet=quiet, json=json, html=html,
        refusal=refusal,
    )
    return _current


def make_console(*, stderr: bool) -> Console:
    """Plain when piped, uncoloured under NO_COLOR, 60 to 200 columns."""
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    console = PipeConsole(stderr=stderr, markup=False, highlight=False, emoji=False)
    asked = os.environ.get("COLUMNS", "")
    width = console.width if console.is_terminal or asked.isdigit() else PIPED_WIDTH
    console.width = min(max(width, 60), 200)
    return console


def keep(text: str) -> None:
    """Say what Ctrl-C would leave behind, and how to go on; the latest word is the one printed."""
    global _kept
    _kept = text


def kept() -> str:
    return _kept or "files already complete are kept"


def forget() -> None:
    """Back to the state before `setup`."""
    global _current, _kept
    _current, _kept = None, ""


def refuse(error: DraftscopeError) -> None:
    """Write the JSON of a command that ends with `error`, where it was asked for and the command has such a form."""
    if _current is not None and _current.json is not None and _current.refusal is not None:
        write_json(_current.json, _current.refusal(error))


def write_json(target: str | Path, model: BaseModel | Mapping[str, Any] | list[Any]) -> None:
    """JSON to a file (atomically) or, with `-`, to stdout. Numbers that are not finite become null."""
    plain = _plain(model.model_dump(by_alias=True) if isinstance(model, BaseModel) else model)
    text = jsonlib.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(target) != "-":
        write_text(Path(target), text)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(by_alias=True))
    if isinstance(value, Mapping):
        return {_utf8(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        return _plain(value.tolist())
    return _utf8(str(value))


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a temporary name beside it, then a rename. Devices and pipes are written directly."""
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        sweep_up(path.parent, path.name)
        part = temporary(path)
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            os.chmod(part, _mode(path))
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DraftscopeError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _mode(path: Path) -> int:
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
