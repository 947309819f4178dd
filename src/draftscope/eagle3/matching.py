"""What a sequence's rows are matched with: who wrote its text, which rows are replayed, which tokens should come.

T feature rows, R rows chosen, K drafted tokens per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from draftscope.eagle3.model import Draft
from draftscope.eagle3.replayed import Side, Written
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.types import Sequence

if TYPE_CHECKING:
    from draftscope.target.parts import TargetParts

Text = Literal["auto", "own", "other"]

OWN_SHARE = 0.9
"""Share of answer tokens equal to the target's argmax from which the text counts as its own greedy text."""
CHECKED = 64
"""Answer tokens per sequence on which that share is measured, evenly spaced."""

_LOGITS = 1 << 24

# The target's choices by its head, then by the tensor of last states: many replays of one case ask for the same ones.
_CHOICES = WeakIdKeyDictionary()


def answer_rows(answer: Tensor | None, rows: int, tokens: int, k: int) -> Tensor:
    """Rows t < `rows` whose tokens t+1..t+1+K are all known and answer tokens, [R] int64; no mask: all known are."""
    mask = torch.ones(tokens, dtype=torch.bool) if answer is None else answer[:tokens].bool()
    if tokens < k + 2:
        return torch.zeros(0, dtype=torch.int64)
    whole = mask[1:].unfold(0, k + 1, 1).all(-1)
    return whole[:rows].nonzero().squeeze(-1)


@dataclass(slots=True)
class Prepared:
    """A sequence with the rows to replay, ascending, each once.

    Attributes:
        to_match: [2, R, K] int64: by answer rows and by step starts, -1 where unknown or where the row is none.
        answers: [A], which of the rows are answer rows.
        steps: [N], which of the rows the recorded steps start from; placed: [N], the number of each such step.
        finite: rows before the first NaN or Inf.
        walked: the answer mask to walk over, or None for no walk.
    """

    sequence: Sequence
    rows: Tensor
    to_match: Tensor
    answers: Tensor
    steps: Tensor
    placed: Tensor
    finite: int
    written: Written
    share: float | None
    checked: int
    last_norm: Side | None
    walked: Tensor | None


class Matcher:
    """Checks sequences against the draft, decides who wrote their text, and lays out rows and tokens to match."""

    def __init__(self, draft: Draft, parts: TargetParts | None, k: int, text: Text) -> None:
        self.config, self.parts, self.k, self.text = draft.config, parts, k, text
        self._norm: Side = "pre"
        self._known = WeakIdKeyDictionary() if parts is None else _CHOICES.setdefault(parts.head, WeakIdKeyDictionary())
        if draft.embedding is None:
            raise UsageError("the draft has no embedding of its own and was lent none", remedy="Give the target (--target)")
        if parts is not None and parts.head.shape[0] != draft.config.vocab_size:
            raise DraftscopeError(
                f"the target's vocabulary has {parts.head.shape[0]} tokens, the draft's target has {draft.config.vocab_size}",
                where=str(parts.folder), remedy="The draft belongs to another target",
            )
        if parts is not None and parts.head.shape[1] != draft.config.target_hidden_size:
            raise DraftscopeError(
                f"the target is {parts.head.shape[1]} wide, the draft was made for {draft.config.target_hidden_size}",
                where=str(parts.folder), remedy="The draft belongs to another target",
            )

    def prepare(self, sequence: Sequence) -> Prepared:
        self._check(sequence)
        known = len(sequence.token_ids)
        mask = sequence.answer
        if mask is None and sequence.steps is not None and len(sequence.steps.start):
            mask = torch.arange(known) > sequence.steps.start.min()
        written, share, checked, norm = self._who_wrote(sequence, mask)
        usable = max(min(sequence.rows, known - 1), 0)
        if written in ("other", "unknown"):
            answers, wanted = self._argmax_rules(sequence, mask, usable, norm)
        else:
            answers = answer_rows(mask, usable, known, self.k)
            wanted = self._text(sequence.token_ids, answers)
        starts = torch.zeros(0, dtype=torch.int64) if sequence.steps is None else sequence.steps.start
        placed = ((starts >= 0) & (starts < usable)).nonzero().squeeze(-1)
        starts = starts[placed]
        rows = torch.cat([answers, starts]).unique()
        by_answer, by_start = torch.searchsorted(rows, answers), torch.searchsorted(rows, starts)
        to_match = torch.full((2, len(rows), self.k), -1, dtype=torch.int64)
        to_match[0, by_answer], to_match[1, by_start] = wanted, self._text(sequence.token_ids, starts)
        return Prepared(
            sequence=sequence, rows=rows, to_match=to_match, answers=by_answer, steps=by_start, placed=placed,
            finite=finite_rows(sequence.features), written=written, share=share, checked=checked, last_norm=norm,
            walked=mask if written in ("own", "recorded") else None,
        )

    def _check(self, sequence: Sequence) -> None:
        config = self.config
        slots, width = sequence.features.shape[1:]
        if (slots, width) != (config.slots, config.target_hidden_size):
            raise DraftscopeError(
                f"states have {slots} slots of width {width}, the draft takes {config.slots} of {config.target_hidden_size}",
                where=sequence.name, remedy="These states are of another target, or the draft is",
            )
        for ids in (sequence.token_ids, sequence.inputs):
            if ids is None or not len(beyond := ((ids < 0) | (ids >= config.vocab_size)).nonzero().squeeze(-1)):
                continue
            row = int(beyond[0])
            raise DraftscopeError(
                f"token id {int(ids[row])} is outside the draft's target vocabulary of {config.vocab_size}",
                where=f"{sequence.name}, row {row}", remedy="The draft belongs to another target, or the file is damaged",
            )
        if sequence.last is not None and self.parts is not None and sequence.last.shape[1] != self.parts.head.shape[1]:
            raise DraftscopeError(
                f"the last state is {sequence.last.shape[1]} wide, the target {self.parts.head.shape[1]}", where=sequence.name,
            )

    def _who_wrote(
        self, sequence: Sequence, mask: Tensor | None,
    ) -> tuple[Written, float | None, int, Side | None]:
        tested = self._share(sequence, mask)
        share, checked, norm = tested if tested is not None else (None, 0, None)
        if self.text == "own":
            return "own", share, checked, norm
        if self.text == "other" or mask is None:
            if self.parts is None or sequence.last is None:
                lacks = "the last state" if sequence.last is None else "the target's final norm and head"
                why = "another author's text" if self.text == "other" else "text without a loss mask"
                raise UsageError(
                    f"{why} is matched with the target's own choice, which needs {lacks}", where=sequence.name,
                    remedy="Give the target (--target), or --text own where it wrote the text greedily",
                )
            return "other" if self.text == "other" else "unknown", share, checked, norm
        if share is not None:
            return ("own" if share >= OWN_SHARE else "other"), share, checked, norm
        if sequence.steps is not None:
            return "recorded", None, 0, None
        if not bool(mask.any()):
            return "own", None, 0, None
        raise UsageError(
            "who wrote the answers cannot be told without the target's final norm and head, and a last state",
            where=sequence.name, remedy="Give the target (--target), or --text own where it wrote them greedily",
        )

    def _share(self, sequence: Sequence, mask: Tensor | None) -> tuple[float, int, Side] | None:
        """Agreement of the text with the target's argmax, under the better reading of the last state."""
        if self.parts is None or sequence.last is None:
            return None
        limit = min(sequence.rows, len(sequence.token_ids) - 1)
        wanted = torch.ones(limit, dtype=torch.bool) if mask is None else mask[1 : limit + 1]
        rows = wanted.nonzero().squeeze(-1)
        if not len(rows):
            return None
        if len(rows) > CHECKED:
            rows = rows[torch.linspace(0, len(rows) - 1, CHECKED).round().long()]
        text = sequence.token_ids[rows + 1]
        best = (-1.0, self._norm)
        for norm in (self._norm, "post" if self._norm == "pre" else "pre"):
            share = float((self._choice(sequence.last, rows, norm) == text).float().mean())
            if share > best[0]:
                best = (share, norm)
            if share >= OWN_SHARE:
                break
        self._norm = best[1]
        return best[0], len(rows), best[1]

    def _choice(self, last: Tensor, rows: Tensor, norm: str) -> Tensor:
        """The target's argmax after the last states [T, Ht] at `rows` [R]: [R] int64. Each is worked out once."""
        assert self.parts is not None
        known = self._known.setdefault(last, {}).setdefault(norm, torch.full((len(last),), -1, dtype=torch.int64))
        lacking = rows[known[rows] < 0].unique()
        for piece in lacking.split(max(1, _LOGITS // self.parts.head.shape[0])) if len(lacking) else ():
            state = last[piece].float()
            known[piece] = self.parts.logits(self.parts.final_norm(state) if norm == "pre" else state).argmax(-1)
        return known[rows]

    def _text(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Recorded tokens t+2..t+1+K, -1 beyond the last known one."""
        index = rows[:, None] + 2 + torch.arange(self.k)
        padded = torch.cat([tokens, tokens.new_full((1,), -1)])
        return padded[index.clamp(max=len(tokens))]

    def _argmax_rules(
        self, sequence: Sequence, mask: Tensor | None, usable: int, norm: Side | None,
    ) -> tuple[Tensor, Tensor]:
        """Rows whose first token is an answer token (where known), and the target's choices as far as the text follows."""
        assert sequence.last is not None
        tokens = sequence.token_ids
        rows = torch.arange(max(min(usable, sequence.rows - 1), 0)) if mask is None else answer_rows(
            mask, usable, len(tokens), self.k,
        )
        if not len(rows):
            return rows, torch.zeros(0, self.k, dtype=torch.int64)
        needed = (rows[:, None] + 1 + torch.arange(self.k)).unique()
        needed = needed[needed < sequence.rows]
        choice = torch.full((len(tokens) + self.k + 1,), -1, dtype=torch.int64)
        choice[needed] = self._choice(sequence.last, needed, norm or self._norm)
        source = rows[:, None] + 1 + torch.arange(self.k)
        wanted = choice[source.clamp(max=len(choice) - 1)]
        text = self._text(tokens, rows)
        follows = ((wanted == text) & (wanted >= 0)).cumprod(-1).bool()
        follows = torch.cat([torch.ones(len(rows), 1, dtype=torch.bool), follows[:, :-1]], -1)
        return rows, torch.where(follows, wanted, -1)


def finite_rows(features: Tensor) -> int:
    """Rows before the first that holds a NaN or Inf; every later one sees it through attention."""
    bad = ~torch.isfinite(features.flatten(1).sum(-1, dtype=torch.float32))
    if not bool(bad.any()):
        return len(features)
    bad = ~torch.isfinite(features.float()).flatten(1).all(-1)
    return int(bad.int().argmax()) if bool(bad.any()) else len(features)
