"""Options of how a draft proposes and how tokens are drawn, shared by the commands that speculate or replay it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftscope.errors import UsageError

if TYPE_CHECKING:
    from draftscope.eagle3.sampling import Sampling
    from draftscope.eagle3.tree import TreeShape

TREE = "Trees instead of chains"
SAMPLING = "Sampling instead of the best token"

DEFAULT_K = 3
DEFAULT_TREE = (4, 5, 8)
"""topk, steps, nodes: SGLang's own choice for Llama (0.5.10 `server_args.py`, `auto_choose_speculative_params`)."""

KOption = Annotated[int | None, typer.Option(
    "-k", min=1, max=16, metavar="K", help=f"Tokens drafted per verify step, in a chain; without it {DEFAULT_K}.")]
TopkOption = Annotated[int | None, typer.Option(
    "--topk", min=1, max=64, metavar="N", rich_help_panel=TREE,
    help="Draft trees: tokens tried after a node, and nodes expanded per level (SGLang's speculative-eagle-topk).")]
StepsOption = Annotated[int | None, typer.Option(
    "--steps", min=1, max=32, metavar="N", rich_help_panel=TREE,
    help="Draft trees: levels, so most tokens accepted per step (SGLang's speculative-num-steps).")]
NodesOption = Annotated[int | None, typer.Option(
    "--nodes", min=2, max=1024, metavar="N", rich_help_panel=TREE,
    help="Draft trees: tokens the target reads per step, the last chosen one included (SGLang's speculative-num-draft-tokens).")]
TemperatureOption = Annotated[float, typer.Option(
    "--temperature", min=0, metavar="T", rich_help_panel=SAMPLING, help="Draw tokens at this temperature; 0 = the best.")]
TopPOption = Annotated[float | None, typer.Option(
    "--top-p", min=0, max=1, metavar="P", rich_help_panel=SAMPLING,
    help="Of the target's tokens the fewest whose probability reaches P.")]
TopKOption = Annotated[int | None, typer.Option(
    "--top-k", min=1, metavar="N", rich_help_panel=SAMPLING, help="Of the target's tokens the best N (--topk is the tree's).")]
DraftSamplingOption = Annotated[Literal["greedy", "probabilistic"] | None, typer.Option(
    "--draft-sampling", rich_help_panel=SAMPLING,
    help="The draft proposes its best tokens (default), or draws them under the same settings.")]


def shape_of(k: int | None, topk: int | None, steps: int | None, nodes: int | None) -> tuple[int, TreeShape | None]:
    """The chain's length and the tree to draft instead; a tree's options that are left out are SGLang's for Llama.

    Raises:
        UsageError: chains and trees asked for at once, or a tree that cannot be.
    """
    from draftscope.eagle3.tree import TreeShape

    if topk is None and steps is None and nodes is None:
        return k or DEFAULT_K, None
    if k is not None:
        raise UsageError("-k asks for chains, --topk, --steps and --nodes for trees", remedy="Give one or the other")
    chosen_topk, chosen_steps = topk or DEFAULT_TREE[0], steps or DEFAULT_TREE[1]
    most = 1 + chosen_topk + (chosen_steps - 1) * chosen_topk**2
    shape = TreeShape(chosen_topk, chosen_steps, nodes or min(DEFAULT_TREE[2], most))
    return shape.steps, shape


def sampling_of(temperature: float, top_p: float | None, top_k: int | None, draft: Literal["greedy", "probabilistic"] | None,
                seed: int) -> Sampling | None:
    """How to draw, None for greedy.

    Raises:
        UsageError: settings that say nothing without a temperature.
    """
    from draftscope.eagle3.sampling import Sampling

    if temperature:
        return Sampling(temperature, 1.0 if top_p is None else top_p, top_k or 0, draft or "greedy", seed)
    given = [name for name, value in (("--top-p", top_p), ("--top-k", top_k), ("--draft-sampling", draft)) if value is not None]
    if given:
        raise UsageError(f"{given[0]} says how tokens are drawn, but the best one is taken", remedy="Give --temperature above 0")
    return None
