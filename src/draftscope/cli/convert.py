"""`draftscope convert`: checkpoints and training data from one form to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftscope.cli.common import JsonOption, QuietOption, keep, setup
from draftscope.errors import UsageError
from draftscope.text import visible

if TYPE_CHECKING:
    from draftscope.cli.common import Ui
    from draftscope.states.places import Place

DATA, EITHER = ("plain", "specforge"), "speculators"


def command(
    given: Annotated[str, typer.Argument(metavar="DRAFT|STATES", help="A draft checkpoint, or training data.")],
    to: Annotated[str, typer.Option("--to", metavar="FORM", help=(
        "A checkpoint: native, speculators, or a consumer (sglang@0.5.23, vllm@0.32). Data: plain, speculators, specforge."))],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new folder.")],
    form: Annotated[str | None, typer.Option(
        "--format", metavar="FORM", help="What the source is, where that isn't to be inferred.")] = None,
    target_given: Annotated[str | None, typer.Option(
        "--target", metavar="DIR", help="The target: how its layers are counted, its embedding and norm.")] = None,
    json: JsonOption = None, quiet: QuietOption = False,
) -> None:
    """Write a draft checkpoint or training data in another form.

    Layer ids are rewritten into the consumer's own convention and place. What a form or consumer can't honour is refused by
    name; every change is said.
    """
    ui = setup(quiet, json=json, schema="convert")
    from draftscope.inspecting.checkpoints import is_draft
    from draftscope.states.places import place
    from draftscope.target.parts import target_folder

    source, target = place(given), None if target_given is None else target_folder(target_given)
    checkpoint = is_draft(source)
    if checkpoint and to in DATA:
        raise UsageError(f"holds a draft checkpoint, which has no form {to!r}", where=str(source),
                         remedy="Convert it --to native, speculators or a consumer")
    if not checkpoint and to not in (*DATA, EITHER):
        raise UsageError(f"holds no draft checkpoint (config.json and weights) to convert to {to!r}", where=str(source),
                         remedy=f"Training data is converted --to {', '.join((*DATA, EITHER))}")
    keep("nothing was written")
    found = _checkpoint(ui, source, to, out, form, target) if checkpoint else _data(ui, source, to, out, form, target)
    ui.write_json({"schema": "draftscope.convert/1", "source": str(source), "folder": str(out), "to": to, **found})


def _checkpoint(ui: Ui, source: Place, to: str, out: Path, form: str | None, target: Path | None) -> dict[str, Any]:
    from draftscope.pipeline.convert_drafts import convert_draft
    from draftscope.states.places import model_folder

    if form not in (None, "specforge", "native", "speculators"):
        raise UsageError(f"--format {form!r} is no form of a checkpoint", remedy="Known: native, specforge, speculators")
    made = convert_draft(model_folder(source), to, out, target=target, writer="specforge" if form == "specforge" else None)
    for step in made.steps:
        ui.print(f"  {visible(step)}")
    for caveat in made.caveats:
        ui.note(f"note: {caveat}")
    ui.print(f"{made.tensors} tensors for {made.to}, read back and equal: {visible(str(out))}")
    return {"what": "checkpoint", "to": made.to, "tensors": made.tensors, "steps": made.steps, "caveats": made.caveats,
            "left": made.left}


def _data(ui: Ui, source: Place, to: str, out: Path, form: str | None, target: Path | None) -> dict[str, Any]:
    from draftscope.pipeline.convert_data import convert_data

    with ui.progress("converting", None, "tokens") as advance:
        made = convert_data(source, out, to, format=form, target=target, on_tokens=advance)
    for step in made.steps:
        ui.print(f"  {visible(step)}")
    if made.skipped:
        first = made.skipped[0]
        ui.note(f"{len(made.skipped)} files passed over, the first: {first.path}: {first.why}")
    ui.print(f"{made.files} files, {made.tokens:,} tokens: {visible(str(out))}")
    return {"what": "data", "files": made.files, "tokens": made.tokens, "steps": made.steps,
            "skipped": [{"path": str(one.path), "why": one.why} for one in made.skipped]}
