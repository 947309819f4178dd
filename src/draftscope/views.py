"""What the report draws besides its verdict: bounded, typed figures of states, requests, of acceptance and of the training.

Columns of one view are lists of equal length. Figures are rounded to four digits; what is left out of a view is counted in it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["prompt", "own", "accepted", "instead", "bonus", "unknown"]


class View(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SlotChannels(View):
    """Root mean square of single channels over a slot's ordinary rows (neither first tokens nor sinks), on both sides.

    Attributes:
        slot: -1 is the last state.
        width: channels that the slot has; `channel` lists those kept: the outliers, those that differ most, and an even
            choice of the others.
        train_rows, serve_rows: finite rows that the figures are of.
        outliers: those of `channel` that exceed six times their row's root mean square in one row of twenty, on either side.
        alike: of all channels, the share that lies within a factor of 1.25 of the other side.
        correlation: of the logarithms of both sides over all channels; None where one side does not vary.
    """

    slot: int
    width: int
    train_rows: int
    serve_rows: int
    channel: list[int]
    train: list[float]
    serve: list[float]
    outliers: list[int] = Field(default_factory=list)
    alike: float | None = None
    correlation: float | None = None


class SlotComponents(View):
    """Rows of both sides in the plane of the two directions in which they vary most, taken together and equally many.

    `explained` is the share of their variance along each; points are (first, second), with the mean of all at (0, 0).
    """

    slot: int
    explained: tuple[float, float]
    train: list[tuple[float, float]]
    serve: list[tuple[float, float]]


class Request(View):
    """One served request, token by token.

    Attributes:
        why: which request this is among those served.
        recorded: accepted counts are the engine's; else the replay's.
        first: position of the first token shown; cut: tokens after the last one shown.
        ids, text: token ids, and what each stands for (empty without a tokenizer).
        status: `prompt`; `own`, what the target wrote without a draft; `accepted`, drafted and kept; `instead`, the target's own
            in place of a drafted token that it rejected; `bonus`, the target's own after all were kept; `unknown`.
        drafted, drafted_text: at `instead`, the token that was rejected where it was recorded; elsewhere -1 and "".
        cosines: by slot, of what the draft received with the target's own state at the place where the slot was trained; None
            where there is no such state.
        places: by slot, that place in words.
    """

    name: str
    why: str
    recorded: bool
    first: int
    cut: int
    length: float | None
    rounds: int
    ids: list[int]
    text: list[str] = Field(default_factory=list)
    status: list[Status]
    drafted: list[int] = Field(default_factory=list)
    drafted_text: list[str] = Field(default_factory=list)
    cosines: list[list[float | None]] = Field(default_factory=list)
    places: list[str] = Field(default_factory=list)


class Part(View):
    """Acceptance of one part of the rounds; `interval` (95 %, over sequences) is None below 8 sequences."""

    name: str
    rounds: int
    sequences: int
    length: float | None
    interval: tuple[float, float] | None = None
    first: float | None = None


class Breakdown(View):
    """Accept length by the position at which rounds start (`context`) or by what the prompt looks like (`kind`), on one rung."""

    by: Literal["context", "kind"]
    rung: str
    k: int
    parts: list[Part]


class Learning(View):
    """The training's own log, thinned.

    Attributes:
        step, loss: training loss; `rate` the learning rate at the same steps, empty where it was not logged.
        uniform: loss of a draft that knows nothing, None where the vocabulary is not known.
        held_what: what `held` holds by step: accept length, accuracy or loss on held-out data.
        restarts: steps at which the training was resumed, or its loss jumps.
        records: how many the log has.
    """

    format: str
    records: int
    step: list[int]
    loss: list[float]
    rate: list[float | None] = Field(default_factory=list)
    uniform: float | None = None
    held_what: str = ""
    held_step: list[int] = Field(default_factory=list)
    held: list[float] = Field(default_factory=list)
    restarts: list[int] = Field(default_factory=list)


class Views(View):
    channels: list[SlotChannels] = Field(default_factory=list)
    components: list[SlotComponents] = Field(default_factory=list)
    requests: list[Request] = Field(default_factory=list)
    breakdowns: list[Breakdown] = Field(default_factory=list)
    learning: Learning | None = None
