"""Training examples whose states the target computes when a batch asks for them: no states on the disk.

The conversations' token ids are held in memory (4 bytes a token). Every pass over the data runs the target again.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from draftscope.boundaries import default_boundaries
from draftscope.eagle3.examples import Example, choices
from draftscope.errors import DraftscopeError
from draftscope.pipeline.conversations import Conversation, Unusable
from draftscope.pipeline.extract import Extracted, states_of, usable
from draftscope.target.model import Target
from draftscope.target.sweep import batches
from draftscope.target.wiring import Wiring


@dataclass
class OnlineCorpus:
    """Examples of conversations, as `extract` would have written them.

    Attributes:
        batch_tokens: tokens of a forward pass of the target, padding included.
        skipped: lines that give nothing, and why.
    """

    target: Target
    conversations: list[Conversation]
    wiring: Wiring
    batch_tokens: int = 2048
    skipped: list[Unusable] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, target: Target, conversations: Iterable[Conversation | Unusable], *, wiring: Wiring | None = None,
           max_length: int = 2048, batch_tokens: int = 2048, origin: str = "conversations") -> OnlineCorpus:
        """The usable ones of some conversations.

        Raises:
            DraftscopeError: none can be used.
        """
        wiring = wiring or Wiring.of(default_boundaries(target.layers))
        target.check_taps(wiring.slots)
        done = Extracted(Path())
        found = [c for c in usable(conversations, max_length, False, target.parts.embedding.shape[0], done)
                 if int(c.loss_mask[1:].sum()) >= 2]
        if not found:
            reasons = "; ".join(f"{why} ({count})" for why, count in list(done.reasons().items())[:3])
            raise DraftscopeError(f"no conversation can be used: {reasons or 'none has two answer tokens'}", where=origin)
        return cls(target, found, wiring, batch_tokens, done.skipped)

    @property
    def lengths(self) -> Sequence[int]:
        return [len(c.token_ids) for c in self.conversations]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.wiring.slots) + 1, self.target.width

    @property
    def itemsize(self) -> int:
        return self.target.dtype.itemsize

    def name(self, number: int) -> str:
        return f"line {self.conversations[number].index + 1}"

    def mark(self, number: int) -> str:
        one = self.conversations[number]
        return f"{zlib.crc32(one.token_ids.int().numpy().tobytes() + one.loss_mask.bool().numpy().tobytes()):08x}"

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        conversation = self.conversations[number]
        return conversation.token_ids.long(), conversation.loss_mask

    def load(self, numbers: Sequence[int]) -> list[Example]:
        """Run the target over some conversations."""
        made: dict[int, Example] = {}
        asked = sorted(set(numbers), key=lambda i: len(self.conversations[i].token_ids))
        with self._lock:
            for group in batches(((str(i), self.conversations[i].token_ids) for i in asked), self.batch_tokens):
                held = [int(name) for name, _ in group]
                some = [self.conversations[i] for i in held]
                for number, conversation, states in zip(held, some, states_of(self.target, some, self.wiring), strict=True):
                    states = states.clone()  # not a view that keeps the whole pass
                    best = choices(self.target.parts, states[:, -1], conversation.loss_mask)
                    made[number] = Example(self.name(number), conversation.token_ids.long(), states, conversation.loss_mask, best)
        return [made[i] for i in numbers]

