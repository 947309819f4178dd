"""`draftscope drill`: known faults planted in a known pair, and what the diagnosis makes of their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftscope.cli.common import (
    JsonOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    Ui,
    keep,
    setup,
    write_json,
    write_text,
)
from draftscope.cli.outputs import Output, own_json
from draftscope.errors import UsageError

if TYPE_CHECKING:
    from draftscope.drilling.cases import Case
    from draftscope.drilling.exercised import Pair
    from draftscope.drilling.report import Outcome


def command(
    target: Annotated[Path | None, typer.Option("--target", metavar="DIR", help="A target of your own; without it the embedded "
                                                "pair.")] = None,
    draft: Annotated[Path | None, typer.Option("--draft", metavar="DIR", help="A healthy draft for the target.")] = None,
    prompts: Annotated[Path | None, typer.Option(
        "--prompts", metavar="FILE", help="Prompts as JSONL; half are served, half become what the draft learned from.")] = None,
    faults: Annotated[list[str] | None, typer.Option(
        "--faults", metavar="ID[: VARIANT]", help="Only these faults or variants; may be given again. Without it all. "
                                "docs/faults.md has them; an unknown one lists the ids.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Of every fault its plainest variants only.")] = False,
    pairs: Annotated[int, typer.Option("--pairs", min=0, metavar="N", help="Pairs of two faults, drawn.")] = 0,
    clean: Annotated[int, typer.Option("--clean", min=0, metavar="N", help="Healthy runs, drawn.")] = 0,
    others: Annotated[int, typer.Option(
        "--others", min=0, metavar="N", help="Of every fault so many strengths and places that are none of its variants.")] = 0,
    tokens: Annotated[str, typer.Option(
        "--tokens", metavar="N,N,...", help="Rows given of each side, one diagnosis each; all = no limit.")] = "64,256,1024,all",
    served: Annotated[int, typer.Option("--served", min=4, metavar="N", help="Prompts served at most.")] = 16,
    max_new: Annotated[int, typer.Option("--max-new", min=4, metavar="N", help="Tokens of an answer at most.")] = 48,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the pair is called in the table.")] = None,
    shard: Annotated[str, typer.Option("--shard", metavar="I/N", help="Every N-th case from the I-th (1..N) on.")] = "1/1",
    out: Annotated[Path, typer.Option(
        "--out", metavar="DIR", help="Where outcomes are kept, a line each; a rerun goes on from there.")] = Path(
            "draftscope-drill"),
    minutes: Annotated[float | None, typer.Option(
        "--minutes", min=0.1, metavar="N", help="Begin no case after so many minutes.")] = None,
    collect: Annotated[list[Path] | None, typer.Option(
        "--from", metavar="DIR", help="Run nothing: add up what earlier runs kept there; may be given again.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table as Markdown.")] = None,
    calibrate: Annotated[Path | None, typer.Option(
        "--calibrate", metavar="FILE", help="Write the confidence of findings, from cases that the rules were not tuned on.")
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Leave single outcomes out of the JSON.")] = False,
    json: JsonOption = None,
    quiet: QuietOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Plant every known fault in a pair of target and draft, diagnose each from its files alone, and score the diagnosis.

    Exit code 0 whatever the score: it is a measurement.
    """
    outputs = [*([] if markdown is None else [Output("--markdown", markdown, lambda start: start.startswith(b"# The exercise"))]),
               *([] if calibrate is None else [Output("--calibrate", calibrate, own_json("confidence"))])]
    ui = setup(quiet, threads, seed, json, schema="drill", outputs=outputs)
    amounts, (first, step) = read_amounts(tokens), read_shard(shard)
    from draftscope.drilling.calibrating import calibrate as calibrated
    from draftscope.drilling.cases import chosen, plainest
    from draftscope.drilling.exercised import open_pair
    from draftscope.drilling.running import read_outcomes
    from draftscope.drilling.scoring import score
    from draftscope.drilling.table import markdown as page
    from draftscope.drilling.table import table

    which = chosen(faults or [])
    if collect:
        folders = collect
    else:
        folders = [out if step == 1 else out / f"shard-{first + 1}-of-{step}"]
        pair = open_pair(target, draft, prompts, name, ui.note, served=served, max_new=max_new)
        keep(f"outcomes so far are kept in {folders[0]}; the same command goes on")
        cases = _cases(pair, plainest(which) if plain else which, pairs=pairs, clean=clean, others=others, seed=seed)
        _run(ui, pair, cases[first::step], amounts, folders[0], minutes)
    outcomes = [outcome for folder in folders for outcome in read_outcomes(folder)]
    if not outcomes:
        raise UsageError("no outcomes are kept there", where=", ".join(map(str, folders)))
    found = score(outcomes, keep_cases=not brief)
    ui.print(table(found))
    for one in found.scores:
        for miss in one.misses:
            ui.note(f"missed {one.fault}: {miss}")
    told = calibrated(outcomes)
    if calibrate is not None:
        write_json(calibrate, told)
    if markdown is not None:
        write_text(markdown, page(found, told))
    ui.write_json(found)


def read_amounts(text: str) -> list[int | None]:
    """`64,all` as [64, None], the most last."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word == "all" or (word.isdigit() and int(word) >= 2) for word in words):
        raise UsageError(f"--tokens {text} is no list of numbers of rows", remedy="For example 64,256,all")
    return sorted({None if word == "all" else int(word) for word in words}, key=lambda n: float("inf") if n is None else n)


def read_shard(text: str) -> tuple[int, int]:
    """`2/4` as (1, 4): the first case, and every how many."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--shard {text} is no part of a whole", remedy="For example 1/4, 2/4, 3/4, 4/4")
    return int(found[1]) - 1, int(found[2])


def _cases(pair: Pair, which: list, *, pairs: int, clean: int, others: int, seed: int) -> list[Case]:  # type: ignore[type-arg]
    from draftscope.drilling import cases
    from draftscope.eagle3.checkpoint import load_checkpoint
    from draftscope.faults.plant import Plant

    healthy = Plant.healthy(pair.boundaries, pair.theta)
    config = load_checkpoint(pair.draft, target_layers=pair.target.layers).config
    which = [(fault, variant) for fault, variant in which if not fault.beyond(variant, pair.target, config)]
    return cases.spread_evenly([
        list(cases.singles(healthy, which)),
        list(cases.others(healthy, which, pair.target.layers, others, seed)),
        cases.pairs(healthy, which, pairs, seed),
        list(cases.clean(healthy, len(pair.prompts), clean, seed)),
    ])


def _run(
    ui: Ui, pair: Pair, cases: list[Case], amounts: list[int | None], folder: Path, minutes: float | None
) -> None:
    from draftscope.drilling.running import exercise, read_outcomes

    kept = {(o.key, o.tokens) for o in read_outcomes(folder)}
    total = len({(case.key, n) for case in cases for n in amounts} - kept)
    ui.note(f"{pair.name}: {len(cases)} cases at {len(amounts)} amounts of data; {total} diagnoses to make, {len(kept)} kept")
    with ui.progress(pair.name, total=total, unit="diagnoses") as advance:

        def on_outcome(outcome: Outcome) -> None:
            advance(1, what=f"{pair.name}: {outcome.key}")

        exercise(pair, cases, amounts, folder, on_outcome, minutes)
    kept = {(o.key, o.tokens) for o in read_outcomes(folder)}
    left = len({(case.key, n) for case in cases for n in amounts} - kept)
    if left and minutes is not None:
        ui.note(f"{left} diagnoses are left after {minutes:g} minutes; the same command goes on with them")
