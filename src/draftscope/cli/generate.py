"""`draftscope generate`: speculative decoding with a draft, counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftscope.cli.common import JsonOption, QuietOption, SeedOption, ThreadsOption, Ui, setup
from draftscope.cli.speculation import (
    DraftSamplingOption,
    KOption,
    NodesOption,
    StepsOption,
    TemperatureOption,
    TopKOption,
    TopkOption,
    TopPOption,
    sampling_of,
    shape_of,
)
from draftscope.errors import UsageError
from draftscope.text import count, number, percent, visible

if TYPE_CHECKING:
    from draftscope.eagle3.counting import Acceptance, Bucket
    from draftscope.eagle3.generate import Observer
    from draftscope.eagle3.generated import Divergence, Generated, Summary
    from draftscope.eagle3.model import Draft
    from draftscope.eagle3.sampling import Sampling
    from draftscope.eagle3.stopping import StopStrings
    from draftscope.eagle3.tree import TreeShape
    from draftscope.pipeline.prompts import Prompt
    from draftscope.target.model import Target
    from draftscope.target.wiring import Wiring

PromptsArgument = Annotated[Path | None, typer.Argument(
    metavar="PROMPTS", show_default=False,
    help='JSONL of {"messages"}, {"prompt"} (text as it stands, without the chat template) or {"token_ids"}; without it held-out '
         'prompts that the embedded draft has not seen.')]
TargetOption = Annotated[Path | None, typer.Option("--target", metavar="DIR", help="Without it the embedded target.")]
DraftOption = Annotated[Path | None, typer.Option(
    "--draft", metavar="DIR", help="Without it, and without --target, the embedded draft.")]
MaxNewOption = Annotated[int, typer.Option("--max-new", min=1, metavar="N", help="Most tokens of an answer.")]
RowsOption = Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Prompts answered at once.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N prompts.")]
BoundariesOption = Annotated[str | None, typer.Option(
    "--boundaries", metavar="B,B,B",
    help="Where the draft's states are taken, in decoder layers passed; without it where the draft says.")]


def command(
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
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    draft_sampling: DraftSamplingOption = None,
    stop: Annotated[list[str] | None, typer.Option(
        "--stop", metavar="TEXT", help="End an answer before this text; may be given again.")] = None,
    context: Annotated[int | None, typer.Option(
        "--context", min=2, metavar="N", help="Most tokens of prompt and answer together; else what the target can.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without a draft.")] = False,
    compare_plain: Annotated[bool, typer.Option(
        "--compare-plain", help="Decode without the draft too, by the same code: are the texts equal, what is gained?")] = False,
    text: Annotated[bool, typer.Option("--text", help="Print the answers.")] = False,
    json: JsonOption = None, quiet: QuietOption = False, seed: SeedOption = 0, threads: ThreadsOption = None,
) -> None:
    """Answer prompts with a draft's help, and count what the target accepts.

    Greedily the texts are those of plain decoding; with a temperature they are distributed as its. Each prompt draws by a seed
    of its own, made of --seed and its line. The JSON holds the counts; `diagnose --metrics` reads it.
    """
    ui = setup(quiet, threads, seed, json=json, schema="generate")
    if plain and (draft is not None or compare_plain):
        raise UsageError("--plain decodes without a draft", remedy="Leave out --draft and --compare-plain, or --plain")
    depth, tree = shape_of(k, topk, steps, nodes)
    sampling = sampling_of(temperature, top_p, top_k, draft_sampling, seed)
    job = prepare(ui, prompts, target, draft, boundaries, limit, plain=plain, can_be_plain=True)
    way = Way(depth, max_new, rows, tree, sampling, stop_strings(job, stop or []), context)
    results = answer(ui, job, job.draft, way)
    without = answer(ui, job, None, way) if compare_plain else None
    report(ui, job, results, without, way, text=text)


@dataclass(frozen=True, slots=True)
class Way:
    """How prompts are answered. `k`: the chain's length, or the tree's depth."""

    k: int
    max_new: int
    rows: int
    tree: TreeShape | None = None
    sampling: Sampling | None = None
    stop: StopStrings | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A pair with its prompts; no draft: plain decoding."""

    target: Target
    draft: Draft | None
    draft_name: str
    wiring: Wiring
    prompts: list[Prompt]


def prepare(ui: Ui, prompts: Path | None, target: Path | None, draft: Path | None, boundaries: str | None,
            limit: int | None, *, plain: bool = False, can_be_plain: bool = False) -> Job:
    """Load what the options name; what they leave out is the embedded pair's."""
    from draftscope.boundaries import Boundary, default_boundaries
    from draftscope.cli.extract import parse_boundaries
    from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
    from draftscope.embedded import pair
    from draftscope.pipeline.prompts import read_prompts
    from draftscope.target.embedded import ensure_target
    from draftscope.target.model import load_target
    from draftscope.target.packed import pack
    from draftscope.target.parts import read_config
    from draftscope.target.wiring import Wiring

    asked = None if boundaries is None else parse_boundaries(boundaries)
    if draft is None and target is not None and not plain:
        raise UsageError("the target has no draft", remedy="Name one with --draft" + (
            ", or decode with --plain" if can_be_plain else ""))
    folder = target or ensure_target(report=ui.note)
    # A broken draft is told before time goes into the target.
    checkpoint = None
    if not plain:
        checkpoint = load_checkpoint(draft or pair.DRAFT, target_layers=int(read_config(folder)["num_hidden_layers"]))
    model = load_target(folder)
    found = read_prompts(prompts or pair.HERE / "heldout.jsonl", model, limit=limit)
    raw = sum(prompt.raw for prompt in found)
    if raw and getattr(model.tokenizer, "chat_template", None):
        ui.note(f"{raw} of {len(found)} prompts are text as it stands, without the target's chat template: give "
                '{"messages": [{"role": "user", "content": ...}]} for what a chat server would see')
    if checkpoint is None:
        pack(model)
        return Job(model, None, "", Wiring.of(()), found)
    places = asked or checkpoint.config.boundaries or default_boundaries(model.layers)
    made = build_draft(checkpoint, model.parts)
    pack(model, made)
    wiring = Wiring.of(places) if made.config.use_aux_hidden_state else Wiring((Boundary(model.layers, "post"),))
    return Job(model, made, checkpoint.folder.name, wiring, found)


def stop_strings(job: Job, strings: Sequence[str]) -> StopStrings | None:
    """Stop strings over the target's own decoding.

    Raises:
        DraftscopeError: the target comes without a tokenizer.
    """
    from draftscope.eagle3.stopping import StopStrings

    if not strings:
        return None
    tokenizer = job.target.tokenizer
    return StopStrings(strings, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))


def answer(ui: Ui, job: Job, draft: Draft | None, way: Way, observer: Observer | None = None) -> list[Generated]:
    """Answer the prompts, showing progress."""
    from draftscope.eagle3.generate import generate

    seeds = None if way.sampling is None else [way.sampling.seed_of(prompt.index) for prompt in job.prompts]
    with ui.progress("plain decoding" if draft is None else "speculating", None, "tokens") as advance:
        return generate(
            job.target, draft, [prompt.token_ids for prompt in job.prompts], wiring=job.wiring, k=way.k, tree=way.tree,
            sampling=way.sampling, max_new=way.max_new, stop_ids=job.target.stop_ids, stop=way.stop, rows=way.rows,
            context=way.context, seeds=seeds, observer=observer, on_tokens=advance,
        )


def report(ui: Ui, job: Job, results: Sequence[Generated], plain: Sequence[Generated] | None, way: Way, *, text: bool = False,
           capture: dict[str, Any] | None = None) -> None:
    """Print and write what came out."""
    from draftscope.eagle3.counting import Acceptance, by_context, by_kind
    from draftscope.eagle3.generated import divergence, summarise

    k, tree, sampling = (0, None, way.sampling) if job.draft is None else (way.k, way.tree, way.sampling)
    summary = summarise(results, k)
    contexts = by_context(results, [len(prompt.token_ids) for prompt in job.prompts], k)
    kinds = by_kind(results, [prompt.kind for prompt in job.prompts], k)
    other = None if plain is None else summarise(plain, 0)
    parted: dict[int, Divergence] = {}
    for one, two in zip(plain or (), results, strict=False) if sampling is None else ():
        found = divergence(job.target, job.prompts[two.request].token_ids, one.token_ids, two.token_ids)
        if found is not None:
            parted[two.request] = found
    decode = (job.target.folder / "tokenizer.json").is_file()
    texts = [job.target.tokenizer.decode(g.token_ids, skip_special_tokens=True) if decode else None for g in results]
    if way.stop is not None:
        texts = [way.stop.cut(written) if written is not None and g.stopped_by is not None else written
                 for written, g in zip(texts, results, strict=True)]
    if text:
        for prompt, answered, written in zip(job.prompts, results, texts, strict=True):
            ui.print(f"[{visible(prompt.id)}] {visible(written if written is not None else answered.token_ids)}")
    ui.print("\n".join([
        *lines(summary, None if job.draft is None else tree), *(table(contexts, kinds) if k else []),
        *compared(summary, other, parted, drawn=sampling is not None),
    ]))
    ui.write_json({
        "schema": "draftscope.generate/1", "target": job.target.folder.name, "draft": job.draft_name or None, "k": k,
        "tree": None if tree is None else asdict(tree), "sampling": None if sampling is None else {
            key: value for key, value in asdict(sampling).items() if key not in ("equality", "draft_temperature")},
        "rows": way.rows, "max_new": way.max_new, "boundaries": [slot.index for slot in job.wiring.slots],
        "drafts": summary.steps, "cut_steps": summary.cut_steps, "accepted_per_position": summary.accepted,
        "accept_length": summary.accept_length, "joint": summary.joint, "conditional": summary.conditional,
        "tokens_per_verify": summary.accept_length,
        "by_context": [bucket.as_json() for bucket in contexts] if k else [],
        "by_kind": {kind: acceptance.as_json() for kind, acceptance in kinds.items()} if k else {},
        "tokens": summary.tokens, "seconds": summary.seconds, "tokens_per_second": summary.tokens_per_second,
        "plain": None if other is None else {
            "tokens": other.tokens, "seconds": other.seconds, "tokens_per_second": other.tokens_per_second,
            "speedup": speedup(summary, other),
            "divergences": None if sampling is not None else [
                {"request": i, **asdict(d), "near_tie": d.near_tie} for i, d in parted.items()],
        },
        "capture": capture,
        "requests": [
            {"id": prompt.id, "line": prompt.index, "kind": prompt.kind, "prompt_tokens": len(prompt.token_ids),
             "token_ids": g.token_ids, "text": written, "accepted_counts": g.accepted_counts,
             "acceptance": Acceptance.of(g.accepted_counts, k).as_json() if k else None,
             "finish": g.finish, "stopped_by": g.stopped_by, "cut": g.cut,
             "seed": None if sampling is None else sampling.seed_of(prompt.index),
             "seconds": g.ended - g.started, "first_token_seconds": g.first_token - g.started}
            for prompt, g, written in zip(job.prompts, results, texts, strict=True)
        ],
    })


def lines(summary: Summary, tree: TreeShape | None) -> list[str]:
    """The story for people: how many tokens, how many of them drafted."""
    told = [f"{count(summary.requests, 'request')}, {count(summary.tokens, 'token')} in {summary.seconds:.1f} s: "
            f"{number(summary.tokens_per_second, 1)} tokens/s"]
    if summary.k:
        beyond = f", {summary.cut_steps} of them going beyond the end of a text" if summary.cut_steps else ""
        shape = f"K = {summary.k}" if tree is None else f"trees of {tree}"
        told += [
            f"accept length {number(summary.accept_length)} (bonus included) over {count(summary.steps, 'verify step')} "
            f"with {shape}{beyond}",
            ("position     " if tree is None else "depth        ") + "".join(f"{i + 1:>7}" for i in range(summary.k)),
            "joint        " + "".join(f"{percent(p):>7}" for p in summary.joint),
            "conditional  " + "".join(f"{percent(p):>7}" for p in summary.conditional),
        ]
    return told


def table(contexts: Sequence[Bucket], kinds: Mapping[str, Acceptance]) -> list[str]:
    """Accept length and joint acceptance by context and by kind of prompt, where there are several."""
    groups: list[tuple[str, list[tuple[str, Acceptance]]]] = [
        ("tokens read", [(f"{bucket.low}..{bucket.high - 1}", bucket.acceptance) for bucket in contexts]),
        ("kind", [(visible(kind), acceptance) for kind, acceptance in kinds.items()]),
    ]
    told = []
    for title, rows in groups:
        if len(rows) < 2:
            continue
        width = max(len(title), *(len(name) for name, _ in rows))
        told.append(f"{title:<{width}}    steps  length  joint")
        told += [f"{name:<{width}}  {one.steps:>7,}  {number(one.length):>6}" + "".join(f"{percent(p):>7}" for p in one.joint)
                 for name, one in rows]
    return told


def compared(summary: Summary, plain: Summary | None, parted: Mapping[int, Divergence], *, drawn: bool) -> list[str]:
    """Against plain decoding."""
    if plain is None:
        return []
    told = [f"plain decoding by the same code: {number(plain.tokens_per_second, 1)} tokens/s; "
            f"with the draft {number(speedup(summary, plain))} times as many"]
    real = [d for d in parted.values() if not d.near_tie]
    if drawn:
        told.append("the texts are drawn from one distribution, and differ")
    elif not parted:
        told.append("the texts are equal, token for token")
    else:
        widest = f"; widest gap of the others {max(d.gap for d in real):.2g}" if real else ""
        told.append(f"{len(parted)} of {summary.requests} texts part from plain decoding, {len(parted) - len(real)} of them "
                    f"where the target's two best logits are closer than 1e-4{widest}")
    return told


def speedup(summary: Summary, plain: Summary) -> float | None:
    """Ratio of the tokens per second."""
    one, other = summary.tokens_per_second, plain.tokens_per_second
    return one / other if one and other else None
