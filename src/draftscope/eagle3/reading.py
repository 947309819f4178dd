"""A reading: what a consumer makes of a checkpoint. The same object drives serving, replay and counterfactuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

D2T = Literal["offset", "absolute", "zero"]
Fed = Literal["own", "target", "previous", "branch"]
Kept = Literal["", "all", "rejected"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """How an engine runs a draft from row to row and step to step; the defaults are right.

    Row t stands at position t. A *round* drafts from the last accepted row: its first token comes from that row's output, and a
    *drafted step* is each further pass of the draft, on its own state. K tokens are drafted in a round.

    Attributes:
        fed: what a drafted step receives as state: the step before's (`own`); the row's projected target states in the first
            one (`target`); the state of the step before that, from the second on (`previous`); what the last layer's MLP added,
            without the residual (`branch`).
        fed_first: only in a request's first round.
        ahead: positions of drafted steps are too high by so many.
        still: drafted steps stay at the position of the first of them.
        after_prompt: positions of all that comes after the prompt are too high by so many; restart: they begin again at 0;
            padded_to: they are counted from the prompt padded to a multiple of this; 0 = not.
        table: rotary tables end here, and later positions take the last entry; None = they do not end.
        two_way: rows of one pass see each other, later ones too.
        blind_to_prompt: drafted steps do not see the prompt; blind_to_drafted: nor what they themselves drafted before.
        warm: rows of the prompt, its last ones, that the draft's cache holds; None = all. prefix: rows that an earlier prompt
            begins with, too, are missing there, in whole blocks of so many; 0 = none are.
        unrefreshed: from this round on accepted rows keep what was drafted for them, their true features are not run; None =
            never.
        unrewound: entries of drafted steps that stay in the cache and are seen: none, `all`, or those `rejected` that the
            accepted rows do not overwrite. counted: they count in positions, too.
        chunk: the prompt is run in pieces of so many rows, and each but the last ends with the prompt's last token in place of
            its own next one; 0 = in one piece.
    """

    fed: Fed = "own"
    fed_first: bool = False
    ahead: int = 0
    still: bool = False
    after_prompt: int = 0
    restart: bool = False
    padded_to: int = 0
    table: int | None = None
    two_way: bool = False
    blind_to_prompt: bool = False
    blind_to_drafted: bool = False
    warm: int | None = None
    prefix: int = 0
    unrefreshed: int | None = None
    unrewound: Kept = ""
    counted: bool = False
    chunk: int = 0

    @property
    def right(self) -> bool:
        return self == Runtime()

    def of_chains(self) -> bool:
        """Whether it says something that trees, whose entries lie otherwise in the cache, do not have here."""
        chain = (self.fed in ("previous", "branch"), self.blind_to_drafted, self.unrefreshed is not None, bool(self.unrewound))
        return any(chain)


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
        runtime: how the draft is run.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    d2t: D2T = "offset"
    feedback: Literal["pre", "post"] | None = None
    lost: tuple[str, ...] = ()
    seed: int = 0
    altered: tuple[str, ...] = ()
    runtime: Runtime = field(default_factory=Runtime)
