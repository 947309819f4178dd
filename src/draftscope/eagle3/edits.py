"""Counterfactual edits of the states and of how the draft is read, by name: `--set KEY=VALUE`.

    norm_output=true, sliding_window=64   any `DraftConfig` field
    slots=1,2,0                           slot i of the replay takes recorded slot 1, 2, 0
    scale.2=8                             slot 2 is multiplied by 8
    shift=-1                              feature row t takes recorded row t-1
    d2t=zero | absolute | offset          the meaning of the vocabulary map
    feedback=pre | post                   the state fed back, before or after the final norm
    lost=lm_head.                         tensors of that prefix stay at their initial value
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.reading import D2T, Reading
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.types import Sequence, Steps

States = Callable[[Sequence], Tensor]
"""States [T, Ht] that take a slot's place in one sequence, row by row."""

FEEDBACK = ("pre", "post")
_SPECIAL = ("slots", "scale.N", "shift", "d2t", "feedback", "lost")


@dataclass(frozen=True, slots=True)
class Edits:
    """What a counterfactual changes; everything not named stays as recorded.

    Attributes:
        settings: `DraftConfig` fields by name.
        slots: recorded slot that each slot takes, () = as recorded. Applied first, so that all others count slots of the
            replay.
        states: slots whose states are replaced by others.
        scale: factor by slot.
        shift: d: feature row t takes row t+d. Rows without one have their own and are no answer rows (d < 0), or are dropped
            with all that follows (d > 0).
        d2t, feedback: None = as the reading has it that the edits are applied to.
        lost: prefixes of tensors that stay at their initial value.
        words: the edits as they were written, for reports.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    slots: tuple[int, ...] = ()
    states: Mapping[int, States] = field(default_factory=dict)
    scale: Mapping[int, float] = field(default_factory=dict)
    shift: int = 0
    d2t: D2T | None = None
    feedback: Literal["pre", "post"] | None = None
    lost: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: list[str]) -> Edits:
        """Edits from `KEY=VALUE` strings; a string may hold several, separated by blanks. A later one wins.

        Raises:
            UsageError: an unknown key (the message lists the known ones) or a value that does not fit it.
        """
        settings: dict[str, Any] = {}
        scale: dict[int, float] = {}
        other: dict[str, Any] = {}
        single = [word for line in words for word in line.split()]
        for word in single:
            key, equals, value = word.partition("=")
            if not equals or not value:
                raise UsageError(f"--set {word!r} is not KEY=VALUE")
            if key == "slots":
                other["slots"] = tuple(_integer(key, part) for part in value.split(","))
            elif key == "shift":
                other["shift"] = _integer(key, value)
            elif key.startswith("scale."):
                scale[_integer(key, key.removeprefix("scale."))] = _number(key, value)
            elif key == "d2t":
                other["d2t"] = _choice(key, value, get_args(D2T))
            elif key == "feedback":
                other["feedback"] = _choice(key, value, FEEDBACK)
            elif key == "lost":
                other["lost"] = (*other.get("lost", ()), *value.split(","))
            elif key in DraftConfig.model_fields:
                settings[key] = _setting(key, value)
            else:
                known = ", ".join(sorted({*DraftConfig.model_fields, *_SPECIAL}))
                raise UsageError(f"--set knows no key {key!r}", remedy=f"Known: {known}")
        return cls(settings=settings, scale=scale, words=tuple(single), **other)

    def __bool__(self) -> bool:
        return replace(self, words=()) != Edits()

    def reading(self, base: Reading | None = None) -> Reading:
        """The reading `base` (the checkpoint's own if None) with these edits."""
        base = base or Reading()
        settings = {**base.settings, **self.settings}
        feedback = self.feedback or base.feedback
        if self.feedback is None and "norm_output" in self.settings:
            feedback = None
        return replace(base, settings=settings, d2t=self.d2t or base.d2t, feedback=feedback, lost=(*base.lost, *self.lost))

    @property
    def touches_states(self) -> bool:
        return bool(self.slots or self.states or self.scale or self.shift)

    def apply(self, sequence: Sequence) -> Sequence:
        """The sequence with its features edited (in float32 where values change); itself where no edit touches states.

        What `fc` returned is no longer known then. Raises DraftscopeError for a slot that the states do not have, or for
        states of another shape.
        """
        if not self.touches_states:
            return sequence
        features = sequence.features
        self._check(sequence)
        if self.slots:
            features = features[:, list(self.slots)]
        if self.states or self.scale:
            features = features.float().clone() if features.dtype != torch.float64 else features.clone()
        for slot, states in self.states.items():
            own = states(sequence)
            if own.shape != features[:, slot].shape:
                raise DraftscopeError(
                    f"states for slot {slot} are {list(own.shape)}, the recorded ones {list(features[:, slot].shape)}",
                    where=sequence.name,
                )
            features[:, slot] = own.to(features.dtype)
        for slot, factor in self.scale.items():
            features[:, slot] *= factor
        edited = replace(sequence, features=features, fc_output=None)
        return _shifted(edited, self.shift) if self.shift else edited

    def _check(self, sequence: Sequence) -> None:
        recorded = sequence.features.shape[1]
        beyond = [slot for slot in self.slots if not 0 <= slot < recorded]
        slots = len(self.slots) or recorded
        beyond += [slot for slot in (*self.scale, *self.states) if not 0 <= slot < slots]
        if beyond:
            raise DraftscopeError(f"there is no slot {beyond[0]}; these states have {recorded}", where=sequence.name)


def _shifted(sequence: Sequence, by: int) -> Sequence:
    """Feature row t takes row t + `by`."""
    rows = sequence.rows
    if by > 0:
        kept = max(rows - by, 0)
        return replace(
            sequence, features=sequence.features[by:], positions=sequence.positions[:kept],
            last=None if sequence.last is None else sequence.last[:kept], steps=_steps(sequence.steps, 0, kept),
        )
    features = torch.cat([sequence.features[:-by], sequence.features[:by]])[:rows]
    answer = sequence.answer
    if answer is not None:
        answer = answer.clone()
        answer[: 1 - by] = False
    return replace(sequence, features=features, answer=answer, steps=_steps(sequence.steps, -by, rows))


def _steps(steps: Steps | None, first: int, end: int) -> Steps | None:
    """Steps that start on rows first..end-1; the others count as left out."""
    if steps is None:
        return None
    kept = ((steps.start >= first) & (steps.start < end)).nonzero().squeeze(-1)
    return Steps(
        start=steps.start[kept], drafted=None if steps.drafted is None else steps.drafted[kept], accepted=steps.accepted[kept],
        states=None if steps.states is None else steps.states[kept], left_out=steps.left_out + len(steps.start) - len(kept),
        parents=None if steps.parents is None else steps.parents[kept],
    )


def _setting(key: str, value: str) -> Any:
    """A value of a `DraftConfig` field: JSON, or a plain word or list."""
    spelt = {"true": True, "false": False, "none": None, "null": None}
    parsed: Any = spelt.get(value.lower(), value)
    if parsed is value:
        for text in (value, f"[{value}]"):
            try:
                parsed = json.loads(text)
                break
            except ValueError:
                continue
    expected: Any = DraftConfig.model_fields[key]
    try:
        return TypeAdapter[Any](expected.annotation).validate_python(parsed)
    except ValidationError as error:
        raise UsageError(f"--set {key}={value}: {error.errors()[0]['msg'].lower()}") from None


def _integer(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--set {key}: {value!r} is not a whole number") from None


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"--set {key}: {value!r} is not a number") from None


def _choice(key: str, value: str, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise UsageError(f"--set {key}: {value!r} is none of {', '.join(choices)}")
    return value
