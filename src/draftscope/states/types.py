"""Samples, traces, and what both come down to: sequences of feature rows.

A *sample* is one training sequence, a *trace* one served request, a *source* anything that yields them. Comparison and
replay work on a `Sequence`, which either turns into.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftscope.states.places import Place

Norm = Literal["pre", "post"]


@dataclass(slots=True)
class Sample:
    """One training sequence.

    Attributes:
        name: file (and row) for messages.
        token_ids: [T] int64.
        states: [T, L, Ht], in the dtype stored. The last entry is the last state, the others are the slots.
        loss_mask: [T] bool, true where token t is an answer token; None = unknown.
        labels: L names as found in the file (never believed).
        index: the file's own number (its input line).
        claimed_norm: whether file or format says that the last state is before (`pre`) or after (`post`) the final norm.
        other_last: [T, Ht] the last state on the other side of that norm, where a conversion kept both.
    """

    name: str
    token_ids: Tensor
    states: Tensor
    loss_mask: Tensor | None
    labels: tuple[str, ...]
    index: int = -1
    claimed_norm: Norm | None = None
    other_last: Tensor | None = None

    @property
    def slots(self) -> int:
        return int(self.states.shape[1]) - 1


@dataclass(slots=True)
class Trace:
    """One served request, rows in order (design, section 5, "Plain capture").

    Attributes:
        fc_input: [R, slots * Ht], dtype as received.
        token_ids: [R] int64, the token whose target state the row holds.
        phase: [R] uint8, 0 prefill, 1 verify; None = prompt unknown.
        step: [R] int64, -1 on prefill rows, else the verify step.
        accepted: [R] bool.
        positions: [R] int64, or None for 0, 1, ... over accepted rows.
        verified_ids: [R] int64, the token that the target chose after this row, or None.
        last_hidden: [R, Ht] or None; fc_output: [R, H] or None (what `fc` returned).
        draft_input_ids: [R] int64 or None, the token that the draft was given with the row.
        prefix_token_ids: [P] int64 or None, tokens before the first row that the server took from its prefix cache.
        draft_token_ids: [steps, K] int64, -1 padded; draft_parents: [steps, K] int64, column of the drafted token that each
            goes on from, -1 = the step's first row, or None for chains.
        accepted_counts: [steps] int64, bonus excluded.
        draft_states: [steps, K, H], draft layer's output before its final norm that produced each drafted id.
    """

    name: str
    fc_input: Tensor
    token_ids: Tensor
    accepted: Tensor
    phase: Tensor | None = None
    step: Tensor | None = None
    positions: Tensor | None = None
    verified_ids: Tensor | None = None
    last_hidden: Tensor | None = None
    fc_output: Tensor | None = None
    draft_input_ids: Tensor | None = None
    prefix_token_ids: Tensor | None = None
    draft_token_ids: Tensor | None = None
    draft_parents: Tensor | None = None
    accepted_counts: Tensor | None = None
    draft_states: Tensor | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Steps:
    """Verify steps of one sequence.

    Attributes:
        start: [N] int64, accepted row from which the step drafts.
        drafted: [N, K] int64 target ids, -1 padded; None = not recorded.
        accepted: [N] int64, as the engine counted.
        states: [N, K, H] or None, the draft's states before its final norm.
        parents: [N, K] of trees, column of the drafted token that each goes on from, -1 = none; None = chains.
        left_out: steps of the request that could not be placed, or have no count that could be one.
    """

    start: Tensor
    drafted: Tensor | None
    accepted: Tensor
    states: Tensor | None
    left_out: int = 0
    parents: Tensor | None = None


@dataclass(slots=True)
class Sequence:
    """Accepted feature rows of one sample or trace.

    Attributes:
        token_ids: [T'] int64 with T' >= T: tokens known beyond the last feature row come after it.
        features: [T, slots, Ht], dtype as stored.
        last: [T, Ht] the last state as stored (norm not assumed), or None.
        answer: [T'] bool, true on answer tokens; None = unknown.
        positions: [T] int64.
        steps: recorded verify steps of a trace, else None.
        fc_output: [T, H] or None.
        inputs: [T] int64, the token that the draft was given with row t; None = token t + 1.
    """

    name: str
    token_ids: Tensor
    features: Tensor
    last: Tensor | None
    answer: Tensor | None
    positions: Tensor
    steps: Steps | None = None
    fc_output: Tensor | None = None
    inputs: Tensor | None = None

    def draft_inputs(self, rows: int) -> Tensor:
        """[rows] the tokens that the draft is given with the first rows: those recorded, else the text shifted by one."""
        given = self.token_ids[1 : rows + 1]
        if self.inputs is None:
            return given
        return torch.cat([self.inputs[:rows], given[len(self.inputs) :]])

    @property
    def rows(self) -> int:
        return int(self.features.shape[0])


def from_sample(sample: Sample) -> Sequence:
    """The training sample as feature rows: all entries but the last are slots."""
    return Sequence(
        name=sample.name, token_ids=sample.token_ids, features=sample.states[:, :-1], last=sample.states[:, -1],
        answer=None if sample.loss_mask is None else sample.loss_mask.bool(),
        positions=torch.arange(len(sample.token_ids)),
    )


def from_trace(trace: Trace, slots: int) -> Sequence:
    """The accepted rows of a served request, with its verify steps placed on them.

    A step starts at the last accepted row before its own rows. Accepted rows are numbered 0, 1, ...; the token that the
    target chose after the last of them is appended where it is known.
    """
    kept = trace.accepted.nonzero().squeeze(-1)
    tokens = trace.token_ids[kept]
    if trace.verified_ids is not None and len(kept) and int(trace.verified_ids[kept[-1]]) >= 0:
        tokens = torch.cat([tokens, trace.verified_ids[kept[-1:]].to(tokens.dtype)])
    answer = None
    if trace.phase is not None:
        answer = torch.zeros(len(tokens), dtype=torch.bool)
        answer[: len(kept)] = trace.phase[kept] == 1
        answer[len(kept) :] = True
    width = trace.fc_input.shape[1]
    features = trace.fc_input[kept].unflatten(1, (slots, width // slots))
    positions = torch.arange(len(kept)) if trace.positions is None else trace.positions[kept]
    return Sequence(
        name=trace.name, token_ids=tokens, features=features,
        last=None if trace.last_hidden is None else trace.last_hidden[kept],
        answer=answer, positions=positions, steps=_place_steps(trace, kept),
        fc_output=None if trace.fc_output is None else trace.fc_output[kept],
        inputs=None if trace.draft_input_ids is None else trace.draft_input_ids[kept],
    )


def _place_steps(trace: Trace, kept: Tensor) -> Steps | None:
    if trace.accepted_counts is None or trace.step is None:
        return None
    step_of_kept = trace.step[kept]
    starts, chosen = [], []
    for number in range(len(trace.accepted_counts)):
        own = (step_of_kept == number).nonzero().squeeze(-1)
        if len(own) and int(own[0]) > 0 and int(trace.accepted_counts[number]) >= 0:
            starts.append(int(own[0]) - 1)
            chosen.append(number)
    index = torch.tensor(chosen, dtype=torch.int64)
    return Steps(
        start=torch.tensor(starts, dtype=torch.int64),
        drafted=None if trace.draft_token_ids is None else trace.draft_token_ids[index],
        accepted=trace.accepted_counts[index],
        states=None if trace.draft_states is None else trace.draft_states[index],
        left_out=len(trace.accepted_counts) - len(chosen),
        parents=None if trace.draft_parents is None else trace.draft_parents[index],
    )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or row that was passed over, and why; `row` is -1 for the whole file.

    `cause`: `foreign` = something else lies there; `broken` = cut short or no such file; `layout` = names, ranks or dtypes
    do not fit the format; `rows` = tensors of one file differ in their number of rows.
    """

    path: str
    why: str
    row: int = -1
    cause: Literal["foreign", "broken", "layout", "rows"] = "foreign"


@runtime_checkable
class Source(Protocol):
    """Anything that yields samples or traces, lazily.

    `kind` says which; `meta` is what the files claim about themselves; `skipped` grows while one iterates; `chosen` says
    which format was chosen and why.
    """

    kind: Literal["samples", "traces"]
    path: Place
    format: str
    chosen: str
    meta: dict[str, Any]
    skipped: list[Skipped]

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...
