"""`draftscope demo`: the case this tool began with, on the pair that comes with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli.common import HtmlOption, JsonOption, QuietOption, SeedOption, ThreadsOption, setup, write_json, write_text
from draftscope.errors import UsageError

PROMPTS, MAX_NEW, ROWS = 16, 48, 8
RUNS = ("healthy", "broken", "mended")


def command(
    fault: Annotated[str, typer.Option("--fault", metavar="ID", help="Which fault to plant.")] = "layer-set",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs and the reports go.")] = Path(
        "draftscope-demo"
    ),
    json: JsonOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """A healthy pair is broken, diagnosed from its files alone, mended, and measured again.

    Exit code 0: the planted fault was found first; 4: it was not.
    """
    ui = setup(quiet, threads, seed, json, html, schema="diagnosis")
    from draftscope.diagnose.demo import tell
    from draftscope.embedded.pair import BOUNDARIES, DRAFT, spread, training_sample
    from draftscope.faults import FAULTS
    from draftscope.faults.rig import Conversation, Rig
    from draftscope.report.html import page
    from draftscope.report.terminal import show
    from draftscope.target.embedded import ensure_target
    from draftscope.target.model import load_target
    from draftscope.target.packed import pack

    known = {f.id for f in FAULTS}
    if fault not in known:
        raise UsageError(f"no fault `{fault}`", remedy=f"Known: {', '.join(sorted(known))}")
    prepare_folder(out)
    target = load_target(ensure_target(report=ui.note))
    pack(target)
    prompts = [
        target.tokenizer.encode(target.tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True))
        for p in spread(PROMPTS)
    ]
    rig = Rig(
        target,
        DRAFT,
        prompts,
        [Conversation(*c) for c in training_sample()],
        max_new=MAX_NEW,
        rows=ROWS,
        stop_ids=target.stop_ids,
    )
    told = tell(rig, BOUNDARIES, fault, out, ui.note)

    if not ui.quiet:
        show(told.diagnosis, ui.console)
    ui.print("")
    for name, summary in (
        ("healthy", told.healthy),
        (f"with {fault} planted", told.broken),
        ("with the fix applied", told.mended),
    ):
        if summary is None or summary.accept_length is None:
            ui.print(f"{name}: not measured again, the fix takes retraining")
        else:
            joint = ", ".join(f"{p:.2f}" for p in summary.joint)
            ui.print(
                f"{name}: accept length {summary.accept_length:.2f}, accepted per position {joint} ({summary.steps} verify steps)"
            )
    write_json(out / "diagnosis.json", told.diagnosis)
    write_text(out / "diagnosis.html", page(told.diagnosis))
    ui.write_json(told.diagnosis)
    ui.write_html(lambda: page(told.diagnosis))
    ui.print(f"written: {out / 'diagnosis.json'} and {out / 'diagnosis.html'}; the runs they rest on are beside them")
    if not told.found:
        ui.print(
            "the planted fault was not the first finding: "
            f"{told.diagnosis.findings[0].fault if told.diagnosis.findings else 'none'}"
        )
        raise typer.Exit(4)


def prepare_folder(out: Path) -> None:
    """An empty folder, or one that an earlier demo filled; anything else in it is left alone and refused."""
    if out.exists():
        foreign = (
            [p.name for p in out.iterdir() if p.name not in (*RUNS, "diagnosis.json", "diagnosis.html", ".draftscope-demo")]
            if out.is_dir()
            else [out.name]
        )
        if foreign or (not (out / ".draftscope-demo").exists() and any(out.iterdir())):
            raise UsageError(
                f"holds other files ({', '.join(foreign[:3]) or 'not of a demo'})",
                where=str(out),
                remedy="Give an empty folder with --out",
            )
        for name in RUNS:
            shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / ".draftscope-demo").touch()
