"""`draftscope capture`: what a draft receives while serving, under a budget; one command per engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from draftscope.cli import verify
from draftscope.cli.common import JsonOption, QuietOption, ThreadsOption, Ui, keep, setup
from draftscope.cli.generate import (
    BoundariesOption,
    DraftOption,
    LimitOption,
    MaxNewOption,
    PromptsArgument,
    RowsOption,
    TargetOption,
    Way,
    answer,
    prepare,
    report,
)
from draftscope.cli.outputs import Output
from draftscope.cli.sizes import parse_bytes
from draftscope.cli.speculation import KOption, NodesOption, StepsOption, TopkOption, shape_of
from draftscope.errors import UsageError
from draftscope.text import count, visible

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


SGLANG_HELP = """Record what an EAGLE-3 draft receives in SGLang (0.5.5 to 0.5.23), around a server or a script of yours.

The command runs as it would without this, CUDA graphs included, and gives its exit code; the file that runs inside it says in
its head what it does. Budget and disk never change what is served. Exit code 3: the command ended well, but there is no capture.
"""


StatisticsOption = Annotated[bool, typer.Option(
    "--statistics", help="Keep statistics of the rows in place of the rows, for as long as it runs: DIR/fingerprint in the end.")]
SampleOption = Annotated[int, typer.Option(
    "--sample-rows", min=0, metavar="N", help="Of --statistics: rows that are kept whole, for cosines and components.")]


@app.callback()
def engines() -> None:
    """States at the draft's input while serving, under a budget: a folder that `replay` and `diagnose` read."""


@app.command("transformers")
def transformers(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the capture, one file a request.")],
    prompts: PromptsArgument = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    k: KOption = None,
    max_new: MaxNewOption = 64,
    rows: RowsOption = 1,
    limit: LimitOption = None,
    boundaries: BoundariesOption = None,
    topk: TopkOption = None,
    steps: StepsOption = None,
    nodes: NodesOption = None,
    max_bytes: Annotated[str | None, typer.Option(
        "--max-bytes", metavar="SIZE", help="Budget of the files, such as 500MB; what is beyond it is left out.")] = None,
    max_requests: Annotated[int | None, typer.Option(
        "--max-requests", min=1, metavar="N", help="Requests recorded at most.")] = None,
    last_hidden: Annotated[bool, typer.Option(
        "--last-hidden/--no-last-hidden", help="Record the target's last state too.")] = True,
    statistics: StatisticsOption = False,
    sample_rows: SampleOption = 256,
    json: JsonOption = None, quiet: QuietOption = False, threads: ThreadsOption = None,
) -> None:
    """Answer prompts as `generate` does, and record what the draft receives.

    The budget and the disk never change what is generated; what they kept out is counted. Exit code 3: the capture stopped early.
    """
    ui = setup(quiet, threads, json=json, schema="generate")
    budget = None if max_bytes is None else parse_bytes(max_bytes)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("is not an empty folder", where=str(out), remedy="Name a new one with --out: captures are not mixed")
    depth, tree = shape_of(k, topk, steps, nodes)
    job = prepare(ui, prompts, target, draft, boundaries, limit)
    assert job.draft is not None
    from draftscope.engines.transformers import Capture, description

    slots = [slot.index for slot in job.wiring.slots]
    capture = Capture(
        out, description(model=job.target.folder.name, draft=job.draft_name, layer_ids=slots, k=depth, tree=tree),
        max_bytes=budget, max_requests=max_requests, last_hidden=last_hidden, statistics=statistics, sample_rows=sample_rows,
    )
    keep(f"requests recorded so far are kept in {out}")
    way = Way(depth, max_new, rows, tree)
    try:
        results = answer(ui, job, job.draft, way, observer=capture)
    finally:
        captured = capture.close()
    prints = _fingerprints(out) if statistics else []
    report(ui, job, results, None, way, capture={"folder": str(out), **asdict(captured), **({"fingerprints": prints} if prints
                                                                                             else {})})
    ui.print(f"{count(captured.requests, 'request')} with {count(captured.rows, 'row')} in {visible(out)}, "
             f"{captured.bytes / 1e6:.1f} MB")
    _tell(ui, prints)
    empty = sum(len(one.token_ids) <= 1 for one in results)
    if empty:
        ui.print(f"{count(empty, 'request')} got an answer of one token or none: they hold no verify step")
    if captured.requests_left_out or captured.tails_cut:
        ui.print(f"the budget left out {count(captured.requests_left_out, 'request')}, "
                 f"and {count(captured.rows_cut, 'row')} at the end of {captured.tails_cut} others")
    if captured.stopped is not None:
        ui.note(f"the capture stopped early: {captured.stopped}")
        raise typer.Exit(3)


SWEEPS = ("sweep", "target", "python", "tokens", "engine")


@app.command("vllm")
def vllm(
    command: Annotated[list[str] | None, typer.Argument(
        metavar="-- COMMAND...", help="What to run: the server or a script, in any environment.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", metavar="DIR", help="Folder for the capture, one file a request.")] = None,
    emit: Annotated[Path | None, typer.Option(
        "--emit", metavar="FILE", help="Write the one file that runs inside the server, to read it or to use it alone.")] = None,
    sweep: Annotated[Path | None, typer.Option(
        "--sweep", metavar="STATES", help="Instead of serving, run the target over the tokens of this capture or training data "
        "and keep every boundary: a reference for targets that nothing else can run.")] = None,
    target: Annotated[str | None, typer.Option("--target", metavar="MODEL", help="Of --sweep, as vLLM takes it.")] = None,
    python: Annotated[str, typer.Option("--python", metavar="PATH", help="Of --sweep: the Python that has vLLM.")] = "python3",
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Tokens of --sweep at most.")] = 4096,
    engine: Annotated[str, typer.Option("--engine", metavar="JSON", help="Of --sweep: further arguments of vLLM's LLM.")] = "{}",
    max_bytes: Annotated[str, typer.Option(
        "--max-bytes", metavar="SIZE", help="Budget of all files; what is beyond it is left out. 0 = none.")] = "2GB",
    max_requests: Annotated[int, typer.Option("--max-requests", min=0, metavar="N", help="Requests at most; 0 = no limit.")] = 0,
    max_rows: Annotated[int, typer.Option("--max-rows", min=0, metavar="N", help="Rows at most; 0 = no limit.")] = 0,
    max_seconds: Annotated[float, typer.Option(
        "--max-seconds", min=0, metavar="S", help="Time from the first pass on; 0 = no limit.")] = 0,
    share: Annotated[float, typer.Option(
        "--share", min=0, max=1, metavar="P", help="Share of the requests, chosen by a hash of their ids.")] = 1.0,
    max_held: Annotated[str, typer.Option(
        "--max-held", metavar="SIZE", help="Memory for what is not written yet; what is beyond it is left out.")] = "1GB",
    keep_free: Annotated[str, typer.Option("--keep-free", metavar="SIZE", help="Left free on the disk.")] = "1GB",
    fc_output: Annotated[bool, typer.Option("--fc-output/--no-fc-output", help="Record what `fc` returned too.")] = True,
    draft_states: Annotated[bool, typer.Option(
        "--draft-states/--no-draft-states", help="Record the draft's states too.")] = True,
    statistics: StatisticsOption = False,
    sample_rows: SampleOption = 256,
    json: JsonOption = None, quiet: QuietOption = False,
) -> None:
    """Record what an EAGLE-3 draft receives in vLLM, around a server or a script of yours.

    The command runs as it would without this, and gives its exit code; the file that runs inside it says in its head what it
    does. Budget and disk never change what is served. Exit code 3: the command ended well, but there is no capture.
    With --sweep, vLLM runs the target over given tokens instead and keeps its state at every boundary.
    """
    if sweep is not None:
        _sweep(setup(quiet, json=json, schema="sweep"), sweep, out, target, python, tokens, engine)
        return
    _around("vllm", "vllm serve ...", command, out, emit, json, quiet, {
        "max_bytes": parse_bytes(max_bytes), "max_requests": max_requests, "max_rows": max_rows, "max_seconds": max_seconds,
        "share": share, "max_held": parse_bytes(max_held), "keep_free": parse_bytes(keep_free),
        "fc_output": "yes" if fc_output else "no", "draft_states": "yes" if draft_states else "no",
        "statistics": "yes" if statistics else "no", "sample_rows": sample_rows,
    })


@app.command("sglang", help=SGLANG_HELP)
@wraps(vllm)  # the same options, but for those of --sweep
def sglang(command: list[str] | None, out: Path | None, emit: Path | None, json: str | None, quiet: bool, **options: Any) -> None:
    options |= {name: parse_bytes(options[name]) for name in ("max_bytes", "max_held", "keep_free")}
    options |= {name: "yes" if options[name] else "no" for name in ("fc_output", "draft_states", "statistics")}
    _around("sglang", "python -m sglang.launch_server ...", command, out, emit, json, quiet, options)


setattr(sglang, "__signature__", signature(vllm, eval_str=True).replace(parameters=[  # noqa: B010 (mypy knows no such attribute)
    parameter for name, parameter in signature(vllm, eval_str=True).parameters.items() if name not in SWEEPS
]))


def _around(engine: str, example: str, command: list[str] | None, out: Path | None, emit: Path | None, json: str | None,
            quiet: bool, options: Mapping[str, Any]) -> None:
    """Run a command with the part that runs inside in its processes, and say what was captured."""
    from draftscope.engines import launching

    ui = setup(quiet, json=json, schema="capture",
               outputs=[] if emit is None else [Output("--emit", emit, launching.is_own)])
    if emit is not None:
        launching.emit(emit)
        ui.print(f"wrote {visible(emit)}; its head says how to use it")
        if not command:
            return
    if not command or out is None:
        raise UsageError("a capture needs --out DIR and a command", remedy=f"draftscope capture {engine} -o DIR -- {example}")
    if out.exists() and (not out.is_dir() or any(name.name != ".lock" for name in out.iterdir())):
        raise UsageError("is not an empty folder", where=str(out), remedy="Name a new one with --out: captures are not mixed")
    code = launching.run(command, out, ",".join(f"{name}={value}" for name, value in options.items()), engine)
    found = [launching.outcome(folder) for folder in (out, *sorted(out.glob("dp*")))]
    told = [one for one in found if one is not None]
    prints = _fingerprints(out) if options["statistics"] == "yes" else []
    ui.write_json({"schema": "draftscope.capture/1", "folder": str(out), "exit_code": code, "captures": told,
                   **({"fingerprints": prints} if prints else {})})
    for one in told:
        ui.print(f"{_counted(one['captured'])} in {visible(out)}")
        for note in (*one.get("notes", ()), *filter(None, [one.get("stopped")])):
            ui.note(str(note))
    _tell(ui, prints)
    if not told:
        missing = "vLLM worker with a model came up" if engine == "vllm" else "EAGLE worker of SGLang's served anything"
        ui.note(f"nothing was captured: no {missing}, or its Python does not see the plugin (its log says)")
    if code or not any(one["captured"].get("requests") for one in told):
        raise typer.Exit(code or 3)


def _fingerprints(out: Path) -> list[str]:
    """The fingerprint of each worker's statistics, beside them."""
    from draftscope.scan.served import is_statistics, load_statistics

    made = []
    for folder in (out, *sorted(out.glob("dp*"))):
        if is_statistics(folder):
            load_statistics(folder).save(folder / "fingerprint")
            made.append(str(folder / "fingerprint"))
    return made


def _tell(ui: Ui, prints: list[str]) -> None:
    for path in prints:
        ui.print(f"fingerprint written to {visible(path)}")


def _sweep(ui: Ui, states: Path, out: Path | None, target: str | None, python: str, tokens: int, engine: str) -> None:
    from draftscope.engines.sweeping import sweep_by_vllm, tokens_of
    from draftscope.states.opening import open_source

    if out is None or target is None:
        raise UsageError("a sweep needs --out DIR and --target MODEL",
                         remedy="draftscope capture vllm --sweep capture/ -o sweep/ --target MODEL --python VLLM/bin/python")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("is not an empty folder", where=str(out), remedy="Name a new one with --out")
    sequences = tokens_of(open_source(states), tokens)
    if not sequences:
        raise UsageError("holds no tokens from a sequence's first on", where=str(states))
    files = sweep_by_vllm(python, target, sequences, out, engine)
    ui.print(f"{count(files, 'sequence')} of {count(sum(map(len, sequences)), 'token')} at every boundary in {visible(out)}; "
             f"diagnose takes it with --sweep")
    ui.write_json({"schema": "draftscope.sweep/1", "folder": str(out), "sequences": files, "tokens": sum(map(len, sequences))})


def _counted(captured: dict[str, Any]) -> str:
    """The figures of a capture in one line."""
    said = (f"{count(captured['requests'], 'request')} with {count(captured['rows'], 'row')} and "
            f"{count(captured['steps'], 'step')}, {captured['bytes'] / 1e6:.1f} MB")
    if captured["steps"]:
        said += f"; accept length {1 + captured['accepted'] / captured['steps']:.2f}"
    left = sum(captured["requests_left_out"].values())
    if left or captured["tails_cut"]:
        said += f"; left out {count(left, 'request')}, and {count(captured['rows_cut'], 'row')} of {captured['tails_cut']} others"
    return said


app.command("verify")(verify.command)
