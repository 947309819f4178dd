"""`draftscope extract`: conversations to the states that a draft is trained on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftscope.cli.common import JsonOption, QuietOption, ThreadsOption, keep, setup
from draftscope.errors import UsageError

if TYPE_CHECKING:
    from draftscope.pipeline.conversations import Conversation, Unusable
    from draftscope.target.model import Target

DTypeName = Literal["bfloat16", "float32"]


def command(
    conversations: Annotated[Path, typer.Argument(
        metavar="CONVERSATIONS", help="JSONL of {messages} or {token_ids, loss_mask}; or a folder of answers as token ids.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for hs_{i}.safetensors, i the input line.")],
    target: Annotated[Path | None, typer.Option("--target", metavar="DIR", help="Without it the embedded target.")] = None,
    boundaries: Annotated[str | None, typer.Option(
        "--boundaries", metavar="B,B,B", help="Decoder layers passed, slot by slot; without it 2, n/2 and n-3.")] = None,
    dtype: Annotated[DTypeName, typer.Option("--dtype", help="Of the states in the files.")] = "bfloat16",
    compute: Annotated[DTypeName, typer.Option("--compute", help="What the target runs in.")] = "float32",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Where the target runs: cpu, cuda, cuda:1.")] = "cpu",
    max_length: Annotated[int, typer.Option("--max-length", min=2, metavar="N", help="Longer ones are cut there.")] = 2048,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, metavar="N", help="Tokens of a forward pass.")] = 2048,
    json: JsonOption = None, quiet: QuietOption = False, threads: ThreadsOption = None,
) -> None:
    """Write the target's states for every conversation: plain training data.

    Size is estimated before anything runs. Run the same command again to go on after an interruption.
    """
    ui = setup(quiet, threads, json=json, schema="extract")
    import torch

    from draftscope.pipeline.extract import Extracted, extract
    from draftscope.target.embedded import ensure_target
    from draftscope.target.model import load_target
    from draftscope.target.wiring import Wiring

    if not conversations.exists():
        raise UsageError("does not exist", where=str(conversations))
    wiring = None if boundaries is None else Wiring.of(parse_boundaries(boundaries))
    model = load_target(target or ensure_target(report=ui.note), getattr(torch, compute), device)
    found = conversations_of(conversations, model)

    def plan(result: Extracted, to_write: int) -> None:
        free = shutil.disk_usage(out).free / 2**30
        already = f", {result.kept} of them there already" if result.kept else ""
        ui.note(f"{result.sequences} conversations{already}; {result.tokens} tokens, {result.answer_tokens} of answers; "
                f"{to_write / 2**30:.2f} GiB to write, {free:.1f} GiB free")
        keep(f"finished files are kept in {out}; the same command goes on from there")
        advance(0, what="extracting", total=to_write_tokens(result, to_write))

    def to_write_tokens(result: Extracted, to_write: int) -> int:
        return round(result.tokens * to_write / max(result.bytes, 1))

    with ui.progress("reading", None, "tokens") as advance:
        result = extract(model, found, out, wiring=wiring, dtype=getattr(torch, dtype), max_length=max_length,
                         batch_tokens=batch_tokens, origin=str(conversations), on_plan=plan, on_tokens=advance)
    ui.print(summary(result))
    ui.write_json({
        "schema": "draftscope.extract/1", "folder": str(out), "sequences": result.sequences, "written": result.written,
        "kept": result.kept, "remade": result.remade, "tokens": result.tokens, "answer_tokens": result.answer_tokens,
        "bytes": result.bytes, "cropped": result.cropped, "skipped": result.reasons(),
    })


def conversations_of(path: Path, model: Target) -> Iterator[Conversation | Unusable]:
    """What a JSONL file or a folder of answers holds.

    Raises:
        UsageError: there is nothing.
    """
    from draftscope.pipeline.conversations import Renderer, read_answers, read_lines

    if not path.exists():
        raise UsageError("does not exist", where=str(path))
    if path.is_dir():
        return read_answers(path)
    closing = model.stop_ids
    return read_lines(path, lambda: Renderer(model.tokenizer, closing))


def parse_boundaries(text: str) -> tuple[int, ...]:
    """`2,15,27` as numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--boundaries {text!r} is not a list of numbers", remedy="For example 2,15,27") from None
    return found


def summary(result: Any) -> str:
    """What was done, for people."""
    lines = [f"{result.sequences} conversations in {result.folder}: {result.tokens} tokens, {result.answer_tokens} of answers, "
             f"{result.bytes / 2**20:.0f} MiB ({result.written} written, {result.kept} there already)"]
    if result.remade:
        lines.append(f"{result.remade} unreadable files of an earlier run were made again")
    if result.cropped:
        lines.append(f"{result.cropped} cut at the longest length allowed")
    for why, count in result.reasons().items():
        first = next(s.index for s in result.skipped if s.why == why)
        lines.append(f"skipped {count}: {why} (first: line {first})")
    return "\n".join(lines)
