"""The draft as wrong engines run it: the serving drafter with every habit that a `Runtime` names.

One piece of code for serving with a fault and for replaying one. Shapes as in `drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.drafter import DraftCache, Drafter
from draftscope.eagle3.model import Draft
from draftscope.eagle3.reading import Runtime
from draftscope.eagle3.sampling import Draws, Sampling
from draftscope.eagle3.tree import TreeShape
from draftscope.eagle3.verifying import Proposal
from draftscope.errors import UsageError
from draftscope.target.cache import Branches


def new_drafter(draft: Draft, k: int, rows: int, capacity: int, feedback: Literal["pre", "post"] | None = None,
                shape: TreeShape | None = None, sampling: Sampling | None = None) -> Drafter:
    """The drafter that runs a draft as its `runtime` says.

    Raises:
        UsageError: a habit that is not known of trees.
    """
    if draft.runtime.right:
        return Drafter(draft, k, rows, capacity, feedback, shape, sampling)
    return WrongDrafter(draft, k, rows, capacity, feedback, shape, sampling)


class Shared:
    """Rows of a prompt that a prefix cache would have from an earlier one: whole blocks, and never the last row.

    Args:
        block: rows of a block; 0 = no prompt shares any.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._seen: list[Sequence[int]] = []

    def rows(self, prompt: Sequence[int]) -> int:
        """How many, and remember this prompt."""
        if not self.block:
            return 0
        most = 0
        for earlier in self._seen:
            pairs = enumerate(zip(prompt, earlier, strict=False))
            most = max(most, next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(earlier))))
        self._seen.append(prompt)
        return min(most, len(prompt) - 1) // self.block * self.block


class WrongCache(DraftCache):
    """A draft's cache whose slots are not positions: entries are missing, or stay where they should have gone.

    Attributes:
        slip: [rows], slot less position of what comes next; prompt: [rows], rows of the prompt; held: [rows], those of them
            that have a slot.
        drafting: the pass is a drafted step, and base [R] the slots before the first one of its round.
        block: [R], rows of the pass that count, where they see each other.
    """

    def __init__(self, config: DraftConfig, rows: int, capacity: int, runtime: Runtime) -> None:
        super().__init__(config, rows, capacity)
        self.runtime = runtime
        self.slip = torch.zeros(rows, dtype=torch.int64)
        self.prompt = torch.zeros(rows, dtype=torch.int64)
        self.held = torch.zeros(rows, dtype=torch.int64)
        self.drafting = False
        self.base = torch.zeros(0, dtype=torch.int64)
        self.block: Tensor | None = None

    def begin(self, width: int, rows: Tensor | None = None, branches: Branches | None = None) -> tuple[Tensor, Tensor]:
        slots, mask = super().begin(width, rows, branches)
        chosen = slice(None) if rows is None else rows
        slip, prompt = self.slip[chosen][:, None], self.prompt[chosen][:, None]
        self._change_masks(slots, self.held[chosen][:, None])
        habits = self.runtime
        places = slots if habits.counted else slots - slip
        if self.drafting:
            first = self.base[:, None] if habits.counted else self.base[:, None] - slip
            places = (first.expand_as(places) if habits.still else places) + habits.ahead
        behind = (slots - slip) >= prompt
        if habits.restart:
            places = torch.where(behind, places - prompt, places)
        if habits.padded_to:
            places = torch.where(behind, places + (-prompt) % habits.padded_to, places)
        places = torch.where(behind, places + habits.after_prompt, places)
        if habits.table is not None:
            places = places.clamp(max=habits.table - 1)
        return places.clamp(min=0), mask

    def _change_masks(self, slots: Tensor, held: Tensor) -> None:
        habits = self.runtime
        keys = torch.arange(self._span)
        for window, mask in self._masks.items():
            if habits.two_way and self.block is not None:
                inside = keys < (slots[:, :1] + self.block[:, None])
                mask = mask | (inside & (keys >= slots[:, :1]))[:, None, None, :]
            if self.drafting and habits.blind_to_prompt:
                mask = mask & (keys >= held)[:, None, None, :]
            if self.drafting and habits.blind_to_drafted:
                own = keys == slots[..., None]
                mask = mask & ((keys < self.base[:, None])[:, None, :] | own)[:, None]
            self._masks[window] = mask


class WrongDrafter(Drafter):
    """Drafts as `draft.runtime` says."""

    cache: WrongCache

    def __init__(self, draft: Draft, k: int, rows: int, capacity: int, feedback: Literal["pre", "post"] | None,
                 shape: TreeShape | None = None, sampling: Sampling | None = None) -> None:
        self.habits = draft.runtime
        if shape is not None and self.habits.of_chains():
            raise UsageError(f"trees are not drafted with {self.habits}")
        # What is never taken back adds to every round.
        super().__init__(draft, k, rows, capacity * (k + 1) if self.habits.unrewound else capacity, feedback, shape, sampling)
        self._given = torch.zeros_like(self._output)
        self._added = torch.zeros_like(self._output)
        self._rounds = torch.zeros(rows, dtype=torch.int64)

    def _new_cache(self, rows: int, capacity: int) -> DraftCache:
        return WrongCache(self.draft.config, rows, capacity, self.habits)

    def begin(self, hidden: Tensor, following: Tensor, counts: Tensor, at: Tensor, shared: Tensor) -> None:
        habits, cache = self.habits, self.cache
        cache.clear(at)
        cache.prompt[at], self._rounds[at] = counts, 0
        if habits.chunk:
            index = torch.arange(hidden.shape[1])
            ends = ((index + 1) % habits.chunk == 0) & (index + 1 < counts[:, None])
            # Row t is given token t + 1, so the prompt's last token is what its last row but one is given.
            last = following.gather(1, (counts - 2).clamp(min=0)[:, None])
            following = torch.where(ends, last, following)
        left_out = shared if habits.warm is None else (counts - habits.warm).clamp(min=0)
        cache.slip[at], cache.held[at] = -left_out, counts - left_out
        self._run(_moved(hidden, left_out), _moved(following, left_out), counts - left_out, at)

    def extend(self, hidden: Tensor, following: Tensor, counts: Tensor, at: Tensor | None) -> None:
        habits = self.habits
        chosen = slice(None) if at is None else at
        rounds = self._rounds[chosen]
        if habits.unrefreshed is not None:
            kept = torch.where(rounds > habits.unrefreshed, (counts - 1).clamp(max=self.k - 1), 0)
            self.cache.commit(kept, at)
            hidden, following, counts = _moved(hidden, kept), _moved(following, kept), counts - kept
        drafted = self.k - 1
        if habits.unrewound == "all":
            self._leave(torch.full_like(counts, drafted), at)
        if habits.unrewound != "rejected":
            self._run(hidden, following, counts, at)
            return
        for count in counts.unique():  # padding would overwrite what stays
            some = (counts == count).nonzero().squeeze(-1)
            rows = some if at is None else at[some]
            self._run(hidden[some], following[some], counts[some], rows)
            self._leave((drafted - counts[some]).clamp(min=0), rows)

    def _leave(self, entries: Tensor, at: Tensor | None) -> None:
        """Keep entries that stand for no row of the text."""
        self.cache.commit(entries, at)
        self.cache.slip[slice(None) if at is None else at] += entries

    def _run(self, hidden: Tensor, following: Tensor, counts: Tensor, at: Tensor | None) -> None:
        width = int(counts.max())
        hidden, following = hidden[:, :width], following[:, :width]
        self.cache.block = counts
        positions, _ = self.cache.begin(width, at)
        embeds = self.draft.embed(following.to(hidden.device))
        stream, added = self.draft.halves(hidden, embeds, positions.to(hidden.device), self.cache)
        self.cache.block = None
        self.cache.commit(counts, at)
        chosen = slice(None) if at is None else at
        ends = torch.arange(len(counts)), counts - 1
        self._output[chosen] = stream[ends] + added[ends]
        self._given[chosen], self._added[chosen] = hidden[ends], added[ends]

    def propose(self, at: Tensor | None, draws: Sequence[Draws] = (), given: Tensor | None = None) -> Proposal:
        chosen = slice(None) if at is None else at
        self.cache.drafting, self.cache.base = True, self.cache.lengths[chosen].clone()
        found = self._chain(at, given) if self.shape is None else self._tree_of(self.shape, at, draws)
        self.cache.drafting = False
        self._rounds[chosen] += 1
        return found

    def _chain(self, at: Tensor | None, given: Tensor | None) -> Proposal:
        chosen = slice(None) if at is None else at
        state, added = self._output[chosen], self._added[chosen]
        states, drafted = [state], [self._pick(state, given, 0)]
        for step in range(1, self.k):
            positions, _ = self.cache.begin(1, at)
            fed = self._fed(states, added, step, chosen)[:, None]
            stream, branch = self.draft.halves(fed, self.draft.embed(drafted[-1])[:, None], positions.to(fed.device), self.cache)
            self.cache.commit(1, at)
            state, added = (stream + branch)[:, 0], branch[:, 0]
            states.append(state)
            drafted.append(self._pick(state, given, step))
        self.cache.commit(1 - self.k, at)
        return Proposal(torch.stack(drafted, 1).cpu(), torch.stack(states, 1))

    def _fed(self, states: list[Tensor], added: Tensor, step: int, chosen: Tensor | slice) -> Tensor:
        """What a drafted step receives, the first of them being step 1."""
        habit = self.habits.fed
        right = self._feed(states[-1])
        other = {"own": right, "target": self._given[chosen] if step == 1 else right,
                 "previous": self._feed(states[max(step - 2, 0)]), "branch": self._feed(added)}[habit]
        if not self.habits.fed_first:
            return other
        return torch.where((self._rounds[chosen] == 0)[:, None].to(right.device), other, right)

    def _tree_of(self, shape: TreeShape, at: Tensor | None, draws: Sequence[Draws]) -> Proposal:
        if self.habits.fed != "target":
            return self._tree(shape, at, draws)
        chosen = slice(None) if at is None else at
        right, given = self._feed, self._given[chosen][:, None]
        wrong = torch.ones(len(given), dtype=torch.bool) if not self.habits.fed_first else self._rounds[chosen] == 0
        first = [True]

        def feed(states: Tensor) -> Tensor:
            found = right(states)
            if first.pop() if first else False:
                found = torch.where(wrong[:, None, None].to(found.device), given.expand_as(found), found)
            return found

        self._feed = feed
        try:
            return self._tree(shape, at, draws)
        finally:
            self._feed = right


def _moved(values: Tensor, by: Tensor) -> Tensor:
    """Rows [R, W, ...] moved to the left by [R], what comes in from the right being of no account."""
    if not bool(by.any()):
        return values
    index = (torch.arange(values.shape[1]) + by[:, None]).clamp(max=values.shape[1] - 1)
    return values[torch.arange(len(values))[:, None], index]
