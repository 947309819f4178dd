"""`draftscope replay`: acceptance offline, drafts and counterfactuals side by side."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftscope.cli.common import FormatOption, JsonOption, QuietOption, SeedOption, SkipBadOption, ThreadsOption, Ui, setup
from draftscope.cli.speculation import NodesOption, StepsOption, TopkOption, shape_of
from draftscope.errors import DraftscopeError
from draftscope.text import count, interval, number, percent, visible

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

    from draftscope.counterfactual import Change, ReplayRung, Replays

ReadoutName = Literal["walk", "engine", "all"]
TextName = Literal["auto", "own", "other"]


def refusal(error: DraftscopeError) -> BaseModel:
    """What `--json` gets of inputs that can't be read."""
    from draftscope.counterfactual import Replays

    return Replays(schema="draftscope.replay/1", next=[str(error)])


def command(
    draft: Annotated[list[str], typer.Option("--draft", metavar="DIR", help="A draft's checkpoint; may be given again.")],
    states: Annotated[str, typer.Option("--states", metavar="DIR", help="Training states or a capture.")],
    target: Annotated[str | None, typer.Option(
        "--target", metavar="DIR",
        help="The target, or only its embedding, final norm and head: tells who wrote the text, lends its embedding.")] = None,
    k: Annotated[int | None, typer.Option(
        "-k", "--k", min=1, max=16, metavar="K", help="Drafted tokens per step; else the capture's, else 3.")] = None,
    readout: Annotated[ReadoutName | None, typer.Option(
        "--readout", help="Rows from which the draft starts: as a server walks, as the engine did, or all answer rows.")] = None,
    sets: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE",
        help="A counterfactual: any draft setting, or slots=1,2,0, scale.2=8, shift=-1, d2t=zero|absolute|offset, "
             "feedback=pre|post. Each --set is a row of its own; blanks join several changes in one.")] = None,
    topk: TopkOption = None,
    steps: StepsOption = None,
    nodes: NodesOption = None,
    consumer: Annotated[str | None, typer.Option(
        "--for", metavar="CONSUMER", help="Read the checkpoint as vllm@0.32 or sglang@0.5.23 does.")] = None,
    text: Annotated[TextName, typer.Option(
        "--text", help="Whether the target wrote the answers greedily; auto finds out.")] = "auto",
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=2, metavar="N", help="Stop after about N rows.")] = None,
    format: FormatOption = None,
    skip_bad: SkipBadOption = False,
    json: JsonOption = None,
    quiet: QuietOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Run drafts over recorded states: which of their tokens would have been accepted, and what a change would do to that.

    Every row of the table is compared with the first, sequence by sequence.
    """
    ui = setup(quiet, threads, seed, json, schema="replay", refusal=refusal)
    from draftscope.counterfactual import counterfactuals

    _, tree = shape_of(k, topk, steps, nodes)
    with ui.progress("replaying", unit="rows") as advance:
        found = counterfactuals(
            draft, states, target=target, sets=sets or [], consumer=consumer, k=k, tree=tree, readout=readout,
            text=text, max_tokens=max_tokens, seed=seed, format=format, skip_bad=skip_bad, on_tokens=advance,
            report=lambda what: advance(0, what=what),
        )
    show(ui, found)
    ui.write_json(found)


def show(ui: Ui, found: Replays) -> None:
    """A table, one row per draft and set."""
    first = found.rungs[0]
    rows = {"walk": "as a server walks", "engine": "the engine's own steps", "all": "all answer rows"}[found.readout or "all"]
    tree = found.tree
    shape = f"K = {found.k}" if tree is None else f"trees of topk {tree.topk}, {tree.steps} steps, {tree.nodes} nodes"
    ui.print(f"Replay of {visible(found.states)}: {count(first.sequences, 'sequence')}, {rows}, {shape}")
    ui.print(_table(found, wide=ui.console.width >= 92))
    share = first.text["share"]
    if share is not None:
        ui.print(f"Text: {percent(float(share))} of the checked answer tokens are the target's own choice.")
    if found.readout == "all":
        ui.print("Tokens: 1 + the joint acceptances over all rows, which is no accept length.")
    for rung in found.rungs:
        if rung.nonfinite:
            ui.print(f"{_name(rung)}: {count(rung.nonfinite, 'row')} see a NaN or Inf and accept nothing.")
    for rung in found.rungs:
        for tie in rung.gate.near_ties if rung.gate else []:
            ui.print(f"{_name(rung)}: near-tie in {visible(tie.name)}, row {tie.row}, position {tie.position + 1}.")
    for note in found.notes:
        ui.print(f"Note: {visible(note)}.")


def _table(found: Replays, *, wide: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len({rung.draft for rung in found.rungs}) > 1
    if several:
        table.add_column("draft", overflow="fold")
    table.add_column("set", overflow="fold")
    table.add_column("tokens" if found.readout == "all" else "length", justify="right", no_wrap=wide)
    if len(found.rungs) > 1:
        table.add_column("change", justify="right", no_wrap=wide)
    table.add_column("joint", justify="right", no_wrap=wide)
    table.add_column("nll", justify="right")
    covered = all(rung.coverage is None or rung.coverage == 1 for rung in found.rungs)
    if not covered:
        table.add_column("cover", justify="right")
    table.add_column("rounds", justify="right")
    if any(rung.gate for rung in found.rungs):
        table.add_column("gate", justify="right")
    for i, rung in enumerate(found.rungs):
        cells = [visible(PurePath(rung.draft).name or rung.draft)] if several else []
        cells.append(visible(" ".join(rung.set)) or "–")
        cells.append(" ".join(filter(None, (number(rung.tokens), interval(rung.interval)))))
        if len(found.rungs) > 1:
            cells.append(_change(rung.change) if i else "")
        cells += [" ".join(number(p) for p in rung.joint), number(rung.nll)]
        cells += [] if covered else [percent(rung.coverage)]
        cells.append(f"{rung.rounds:,}")
        if any(other.gate for other in found.rungs):
            cells.append(percent(rung.gate.share) if rung.gate else "–")
        table.add_row(*cells)
    return table


def _change(change: Change | None) -> str:
    if change is None or change.value is None:
        return "–"
    return " ".join(filter(None, (f"{change.value:+.2f}", interval(change.interval))))


def _name(rung: ReplayRung) -> str:
    return visible(" ".join([PurePath(rung.draft).name or rung.draft, *rung.set]))
