"""Where in the target a state was taken, and every stack's layer ids to and from it.

A boundary `b` is the residual stream after `b` decoder layers: 0 is the embedding, n the last layer's output, there with
norm `pre` or `post`. It is the only way in which draftscope stores or prints a place; a stack's own layer id stands beside
it. Sources of the rules: sglang 0.5.23 `srt/models/llama.py` `set_eagle3_layers_to_capture` and `spec_aux_hidden_state.py`;
vllm 0.32/0.33 `model_executor/models/interfaces.py` and `v1/worker/gpu_model_runner.py`; speculators 0.9.0
`scripts/launch_vllm.py`, and its tag v0.4.0 `data_generation/custom_worker.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Norm = Literal["pre", "post"]
Kind = Literal["stream", "branch", "partial"]


@dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A place in the target.

    Attributes:
        index: decoder layers passed, 0..n.
        norm: `post` only for index n after the final norm.
        kind: `stream` is the residual stream; `branch` what layer index-1 added to it; `partial` the stream at index
            without layer index-1's MLP.
        ranks: of a partial stream: what the first of so many tensor-parallel ranks gave to that MLP's output is in it, as before
            their sum; 0 = nothing of it.
    """

    index: int
    norm: Norm = "pre"
    kind: Kind = "stream"
    ranks: int = 0

    def __str__(self) -> str:
        text = "embedding (boundary 0)" if self.index == 0 and self.kind == "stream" else f"boundary {self.index}"
        if self.norm == "post":
            text += " after the final norm"
        if self.kind == "branch":
            text = f"what layer {self.index - 1} added (branch at boundary {self.index})"
        elif self.kind == "partial":
            text = f"boundary {self.index} without layer {self.index - 1}'s MLP"
            text += f", but for the first of {self.ranks} ranks' share" if self.ranks else ""
        return text


def default_boundaries(layers: int) -> tuple[int, int, int]:
    """Low, middle and high boundary that every stack takes when nothing is configured: {2, n//2, n-3}."""
    return (2, layers // 2, layers - 3)


Stack = Literal["sglang", "vllm", "speculators", "specforge", "boundary"]

_OFFSET: dict[str, int] = {"sglang": 1, "specforge": 1, "vllm": 0, "speculators": 0, "boundary": 0}


def ids_to_boundaries(stack: Stack, ids: Sequence[int]) -> tuple[int, ...]:
    """Boundaries that explicitly configured layer ids name in a stack (Llama-like targets)."""
    return tuple(i + _OFFSET[stack] for i in ids)


def boundaries_to_ids(stack: Stack, boundaries: Sequence[int]) -> tuple[int, ...]:
    """Layer ids that name these boundaries in a stack; boundary 0 is id -1 where the stack adds one."""
    return tuple(b - _OFFSET[stack] for b in boundaries)
