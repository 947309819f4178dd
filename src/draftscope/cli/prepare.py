"""`draftscope prepare`: prompts to the target's own answers, as conversations that `extract` and `train` take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftscope.cli.common import JsonOption, QuietOption, SeedOption, ThreadsOption, Ui, keep, setup
from draftscope.errors import DraftscopeError, UsageError
from draftscope.text import percent, visible

if TYPE_CHECKING:
    from draftscope.pipeline.answering import Answerer, Asked
    from draftscope.pipeline.prepared import Prepared
    from draftscope.target.model import Target

By = Literal["loop", "transformers"]


def command(
    prompts: Annotated[Path, typer.Argument(
        metavar="PROMPTS", help='JSONL of {"messages"}, {"conversations"}, {"prompt"} or {"token_ids"}, one a line.')],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for conversations.jsonl and its record.")],
    target: Annotated[Path | None, typer.Option(
        "--target", metavar="DIR", help="The target (with --server its tokenizer will do); without it the embedded one.")] = None,
    server: Annotated[str | None, typer.Option(
        "--server", metavar="URL", help="Have a running server answer: vLLM, SGLang, any with /v1/completions.")] = None,
    by: Annotated[By, typer.Option("--by", help="Who answers without --server.")] = "loop",
    keep_answers: Annotated[bool, typer.Option(
        "--keep-answers", help="Render the answers that are there instead of writing new ones.")] = False,
    max_new: Annotated[int, typer.Option("--max-new", min=1, metavar="N", help="Tokens of an answer at most.")] = 512,
    max_length: Annotated[int, typer.Option("--max-length", min=8, metavar="N", help="Tokens of a conversation at most.")] = 2048,
    temperature: Annotated[float, typer.Option("--temperature", min=0, metavar="T", help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, metavar="P", help="Nucleus of sampled answers.")] = 0.95,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Conversations answered at once.")] = 32,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, metavar="N", help="Stop at so many answer tokens.")] = None,
    draft_vocab: Annotated[int, typer.Option(
        "--draft-vocab", min=1, metavar="N", help="Tells how much of the answers a draft of so many tokens could say.")] = 8192,
    json: JsonOption = None, quiet: QuietOption = False, seed: SeedOption = 0, threads: ThreadsOption = None,
) -> None:
    """Write the conversations that a draft should be trained on: answered by its own target, with masks.

    Finished conversations are kept; the same command goes on after an interruption. A draft learns what its target would say,
    so the share of answer tokens that are the target's own is measured and told.
    """
    ui = setup(quiet, threads, seed, json=json, schema="prepare")
    if server is not None and keep_answers:
        raise UsageError("--server writes answers, --keep-answers keeps them", remedy="Leave one away")
    if not prompts.is_file():
        raise UsageError("is no file", where=str(prompts))
    from draftscope.eagle3.sampling import Sampling
    from draftscope.pipeline.answering import Asked
    from draftscope.pipeline.conversations import Renderer
    from draftscope.pipeline.prepare import answer_all, own_share, read_wanted
    from draftscope.pipeline.prepare import keep_answers as keep_all
    from draftscope.pipeline.prepared import Folder
    from draftscope.target.embedded import ensure_target
    from draftscope.target.model import load_target, load_tokenizer

    asked = Asked(max_new, Sampling(temperature, top_p, seed=seed) if temperature else None)
    where = target or ensure_target(report=ui.note)
    # Behind a server the target may be too large to load here; its tokenizer is enough.
    model = None if server is not None else load_target(where)
    tokenizer = load_tokenizer(where) if model is None else model.tokenizer
    stop_ids = _stop_ids(tokenizer) if model is None else model.stop_ids
    settings = {"prompts": prompts.name, "target": where.name, "by": "kept" if keep_answers else "server" if server else by,
                "max_new": max_new, "max_length": max_length, "temperature": temperature, "top_p": top_p, "seed": seed,
                **({} if model is None else {"weights": model.parts.fingerprint()})}
    folder = Folder(out, settings, len(tokenizer))
    prepared = folder.prepared
    if prepared.kept:
        ui.note(f"{prepared.kept} conversations are there already")
    keep(f"finished conversations are kept in {out}; the same command goes on from there")
    finished = False
    try:
        with ui.progress("rendering" if keep_answers else "answering", tokens, "tokens") as advance:
            wanted = read_wanted(prompts, prepared, len(tokenizer) if model is None else len(model.parts.embedding))
            if keep_answers:
                keep_all(folder, wanted, Renderer(tokenizer, stop_ids))
            else:
                answerer = _answerer(server, by, model, asked, tokenizer, stop_ids, rows, max_length, advance)
                renderer = Renderer(tokenizer, stop_ids) if tokenizer.chat_template else None

                def decode(ids: Sequence[int]) -> str:
                    return str(tokenizer.decode(ids, skip_special_tokens=True))

                answer_all(folder, wanted, renderer, answerer, decode, stop_ids, longest=max_length, tokens=tokens)
        if model is not None and prepared.conversations:
            ui.note("holding answers against the target")
            own_share(folder, model)
        finished = True
    finally:
        folder.close(finished=finished)
    _refuse_nothing(prepared, prompts)
    _report(ui, prepared, draft_vocab)


def _stop_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)})


def _answerer(server: str | None, by: By, model: Target | None, asked: Asked, tokenizer: Any, stop_ids: frozenset[int],
              rows: int, longest: int, on_tokens: Callable[..., None]) -> Answerer:
    from draftscope.engines.server import connect
    from draftscope.pipeline.answering import by_server, by_transformers, own_loop

    if server is not None:
        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        return by_server(connect(server), asked, encode, stop_ids, at_once=rows, on_tokens=on_tokens)
    assert model is not None
    if by == "transformers":
        return by_transformers(model, asked, rows=rows, on_tokens=on_tokens)
    return own_loop(model, asked, rows=rows, longest=longest, on_tokens=on_tokens)


def _refuse_nothing(prepared: Prepared, prompts: Path) -> None:
    if not prepared.answer_tokens:
        reasons = "; ".join(f"{why} ({count})" for why, (count, _) in list(prepared.skipped.items())[:3]) or "it is empty"
        raise DraftscopeError(f"gives not one answer token: {reasons}", where=str(prompts),
                              remedy="A draft learns from answers: look at the chat template and at the roles of the messages")


def _report(ui: Ui, prepared: Prepared, draft_vocab: int) -> None:
    from draftscope.eagle3.start import draft_vocabulary

    size = min(draft_vocab, len(prepared.counts))
    _, _, coverage = draft_vocabulary(prepared.counts, size)
    ui.print(f"{prepared.conversations} conversations in {visible(str(prepared.folder))} ({prepared.kept} there already): "
             f"{prepared.tokens:,} tokens, {prepared.answer_tokens:,} of answers")
    if prepared.compared:
        ui.print(f"{percent(prepared.own / prepared.compared)} of {prepared.compared:,} answer tokens looked at are the target's "
                 "own first choice")
    else:
        ui.print("whose answers these are was not measured: a server wrote them")
    ui.print(f"a draft vocabulary of {size} covers {coverage:.2%} of the answer tokens")
    if prepared.cut:
        ui.print(f"{prepared.cut} answers were cut at their longest length")
    for why, (lines, first) in prepared.skipped.items():
        ui.print(f"skipped {lines}: {visible(why)} (first: line {first + 1})")
    ui.write_json({
        "schema": "draftscope.prepare/1", "folder": str(prepared.folder), "conversations": prepared.conversations,
        "kept": prepared.kept, "tokens": prepared.tokens, "answer_tokens": prepared.answer_tokens, "cut": prepared.cut,
        "own_share": prepared.own / prepared.compared if prepared.compared else None, "compared": prepared.compared,
        "draft_vocab": size, "coverage": coverage,
        "skipped": {why: lines for why, (lines, _) in prepared.skipped.items()},
    })
