"""A reading: what a consumer makes of a checkpoint. The same object drives serving, replay and counterfactuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

D2T = Literal["offset", "absolute", "zero"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a draft checkpoint is read, where that differs from its own dialect.

    Attributes:
        settings: `DraftConfig` fields in effect, by name.
        d2t: the map's meaning: `offset` (target id = i + d2t[i], every stack's convention), `absolute` (target id =
            d2t[i]), `zero` (map dropped: target id = i).
        feedback: which state is fed back; None = as the checkpoint's `norm_output` says.
        lost: name prefixes of tensors that stay at their initial value (`fc.`, `midlayer.`, `lm_head.`); drawn from `seed`.
        altered: what the loader does to tensors, as `eagle3.altered` names it.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    d2t: D2T = "offset"
    feedback: Literal["pre", "post"] | None = None
    lost: tuple[str, ...] = ()
    seed: int = 0
    altered: tuple[str, ...] = ()
