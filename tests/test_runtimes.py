"""Wrong runtimes of the draft: served by the drafter as they would be by hand, replayed as served, and told from each other."""

from __future__ import annotations

import pytest
import torch
from serving import K, Server, served, small_draft
from torch import Tensor

from draftscope.diagnose.likeness import Recorded, likeness
from draftscope.eagle3.drafter import Drafter
from draftscope.eagle3.habits import Shared, new_drafter
from draftscope.eagle3.model import Draft
from draftscope.eagle3.reading import Runtime
from draftscope.eagle3.replay import replay
from draftscope.eagle3.tree import TreeShape
from draftscope.errors import UsageError
from draftscope.faults.plant import Plant

HEALTHY = Plant.healthy((2, 4, 5))

BY_HAND = {
    "ahead": Runtime(ahead=1), "behind": Runtime(ahead=-1), "still": Runtime(still=True), "after": Runtime(after_prompt=1),
    "restart": Runtime(restart=True), "padded": Runtime(padded_to=16), "table": Runtime(table=7), "target": Runtime(fed="target"),
    "target first": Runtime(fed="target", fed_first=True), "previous": Runtime(fed="previous"), "branch": Runtime(fed="branch"),
    "warm": Runtime(warm=3), "unrefreshed": Runtime(unrefreshed=0), "later": Runtime(unrefreshed=2),
    "unrewound": Runtime(unrewound="all"), "counted": Runtime(unrewound="all", counted=True), "chunk": Runtime(chunk=3),
}


class ByHand(Server):
    """The same habits token by token, over lists of keys that grow and are cut: no slots, no batches, no masks."""

    def __init__(self, draft: Draft, habits: Runtime) -> None:
        super().__init__(draft)
        self.habits, self.round, self.extra, self.prompt = habits, 0, 0, 0
        self.drafted: list[tuple[Tensor, Tensor]] = []

    def position(self, place: int) -> Tensor:
        """Of what stands at a place of the text, as this engine counts."""
        habits = self.habits
        counted = place + (self.extra if habits.counted else 0)
        if place >= self.prompt:
            counted += habits.after_prompt - (self.prompt if habits.restart else 0)
            counted += (-self.prompt) % habits.padded_to if habits.padded_to else 0
        return torch.tensor([[counted if habits.table is None else min(counted, habits.table - 1)]])

    def run(self, state: Tensor, token: int, position: Tensor) -> tuple[Tensor, Tensor]:
        embeds = self.draft.embed(torch.tensor([[token]]))
        stream, added = self.draft.halves(state[None, None], embeds, position, self.cache)
        return stream[0, 0] + added[0, 0], added[0, 0]

    @torch.no_grad()
    def propose(self, features: Tensor, tokens: Tensor, t: int, k: int) -> list[int]:
        draft, habits = self.draft, self.habits
        first = self.rows
        if not first:
            self.prompt = t + 1
        elif habits.unrefreshed is not None and self.round > habits.unrefreshed:
            for key, value in self.drafted[: t - first]:
                self.cache.k[0].append(key)
                self.cache.v[0].append(value)
                first += 1
        for row in range(first, t + 1):
            if row < self.prompt - (habits.warm or self.prompt):
                continue
            chunk_ends = habits.chunk and row + 1 < self.prompt and (row + 1) % habits.chunk == 0
            given = draft.project(features[row])
            out, added = self.run(given, int(tokens[self.prompt - 1 if chunk_ends else row + 1]), self.position(row))
        self.rows, length = t + 1, len(self.cache.k[0])
        self.states, found = [out], [int(draft.target_ids[draft.logits(out).argmax()])]
        for step in range(1, k):
            fed = self.states[-1]
            if not (habits.fed_first and self.round):
                fed = {"own": fed, "target": given if step == 1 else fed, "previous": self.states[max(step - 2, 0)],
                       "branch": added}[habits.fed]
            out, added = self.run(fed, found[-1], self.position(t + (1 if habits.still else step)) + habits.ahead)
            self.states.append(out)
            found.append(int(draft.target_ids[draft.logits(out).argmax()]))
        self.drafted = list(zip(self.cache.k[0][length:], self.cache.v[0][length:], strict=True))
        self.round += 1
        if habits.unrewound == "all":
            self.extra += k - 1
        else:
            self.cache.cut(length)
        return found


@pytest.mark.parametrize("name", BY_HAND)
def test_the_drafter_runs_a_habit_as_it_would_be_run_by_hand(name: str) -> None:
    draft = small_draft()
    habits = BY_HAND[name]
    sequences = [served(draft, seed, prompt=5 + seed, server=ByHand(draft, habits)) for seed in range(3)]
    recorded = Recorded(draft, sequences, None, K, None)
    other = likeness(recorded.rounds(draft), K)
    found = likeness(recorded.rounds(draft.view(habits, {})), K)
    assert (found.rounds, found.states, found.ids) == (24, 1.0, 1.0) and max(found.errors) < 1e-9
    assert other.states is not None and other.states < 1.0


def test_hidden_rows_change_drafted_steps_alone() -> None:
    draft = small_draft()
    recorded = Recorded(draft, [served(draft, seed) for seed in range(3)], None, K, None)
    for habits in (Runtime(blind_to_prompt=True), Runtime(blind_to_drafted=True)):
        found = likeness(recorded.rounds(draft.view(habits, {})), K)
        first, second, third = found.off
        assert (first, second > 0, third > 0) == (0.0, habits.blind_to_prompt, True), habits


def test_rows_that_see_each_other_count_in_deeper_drafts_alone() -> None:
    for layers, alike in ((1, True), (2, False)):
        draft = small_draft(layers=layers)
        found = Recorded(draft, [served(draft, 1)], None, K, None).rounds(draft.view(Runtime(two_way=True), {}))
        assert (likeness(found, K).off[0] == 0) is alike


def test_a_prefix_is_shared_in_whole_blocks_and_never_to_the_last_row() -> None:
    shared = Shared(4)
    asked = [shared.rows(list(range(10))), shared.rows([*range(9), 77]), shared.rows(list(range(8))), shared.rows([9, 1])]
    assert asked == [0, 8, 4, 0]
    assert Shared(0).rows([1, 2]) == 0


def test_replay_of_a_wrong_runtime_walks_and_steps() -> None:
    draft = small_draft()
    habits = Runtime(fed="target")
    sequences = [served(draft, seed, server=ByHand(draft, habits)) for seed in range(4)]
    found = replay(draft.view(habits, {}), sequences, k=K)
    gate = found.gate()
    assert gate is not None and (gate.share, gate.steps, gate.left_out) == (1.0, 32, 0)
    right = replay(draft, sequences, k=K).gate()
    assert right is not None and right.share < 1
    walked = found.sequences[0].walk
    assert walked is not None and list(walked.rows[1:]) == list(walked.rows[:-1] + walked.accepted[:-1] + 1)
    assert found.rung().nll is None


def test_trees_refuse_habits_that_are_not_known_of_them() -> None:
    draft = small_draft()
    with pytest.raises(UsageError, match="unrefreshed"):
        new_drafter(draft.view(Runtime(unrefreshed=0), {}), 4, 1, 40, shape=TreeShape(2, 2, 5))
    assert type(new_drafter(draft, 3, 1, 40)) is Drafter
