"""Draft trees against a loop that builds them node by node, without caches, masks or batches, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_draft, save_target
from torch import Tensor

from draftscope.eagle3.generate import Rows, generate
from draftscope.eagle3.generated import Generated, summarise
from draftscope.eagle3.model import Draft
from draftscope.eagle3.tree import Growth, Tree, TreeShape, longest
from draftscope.errors import UsageError
from draftscope.target.cache import Branches, RaggedCache
from draftscope.target.model import Target, load_target
from draftscope.target.wiring import Wiring

VOCAB = 6
BOUNDARIES = (2, 4, 5)
WIRING = Wiring.of(BOUNDARIES)
STOP = frozenset({4})


@dataclass
class Node:
    """A node of the tree built by hand. Its path: the tokens from the root's children down to it."""

    path: tuple[int, ...]
    score: float


def by_hand(children: Callable[[tuple[int, ...]], Tensor], shape: TreeShape) -> list[Node]:
    """The kept nodes: EAGLE-2's two phases word by word. `children`: log-probabilities over target ids after a path."""
    level, everyone = [Node((), 0.0)], []
    for _ in range(shape.steps):
        fresh = []
        for node in level:
            scores = children(node.path)
            for token in scores.argsort(descending=True)[: shape.topk].tolist():
                fresh.append(Node((*node.path, token), node.score + float(scores[token])))
        everyone += fresh
        level = sorted(fresh, key=lambda n: -n.score)[: shape.topk]
    return sorted(everyone, key=lambda n: -n.score)[: shape.nodes - 1]


def as_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("target"), 3, vocab=VOCAB, tied=False), torch.float64)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in (3, 17, 1, 9, 5, 2, 12)]


def run_target(target: Target, ids: list[int]) -> tuple[Tensor, list[int]]:
    out = target.model(torch.tensor([ids]), output_hidden_states=True)
    return torch.stack([out.hidden_states[b][0] for b in BOUNDARIES], 1), out.logits[0].argmax(-1).tolist()


def draft_output(draft: Draft, features: Tensor, text: list[int], path: tuple[int, ...]) -> Tensor:
    """The draft's output [1, 1, H] after text + path, its own states fed back."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, layer: int = 0) -> Tensor:
        groups = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        hidden = (distance < 0) | (distance >= (draft.config.window(layer) or 10**9))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    hidden, following = draft.project(features[None]), text[1:]
    for number in range(len(path) + 1):
        embeds = draft.embed(torch.tensor([following]))
        output = draft(hidden, embeds, torch.arange(len(following))[None], attend)[:, -1:]
        if number < len(path):
            hidden, following = torch.cat([hidden, draft.feedback(output)], 1), [*following, path[number]]
    return output


def draft_after(draft: Draft, features: Tensor, text: list[int], path: tuple[int, ...]) -> Tensor:
    """Log-probabilities [V] over target ids of the token after text + path."""
    output = draft_output(draft, features, text, path)
    scores = torch.full((draft.config.vocab_size,), -torch.inf, dtype=torch.float64)
    scores[draft.target_ids] = draft.logits(output)[0, -1].log_softmax(-1)
    return scores


def brute_force(target: Target, draft: Draft, prompt: list[int], shape: TreeShape, max_new: int) -> tuple[Generated, list]:
    result, trees = Generated(0), []
    _, chosen = run_target(target, prompt)
    result.append([chosen[-1]], STOP, max_new, 10**9)
    text = [*prompt, chosen[-1]]
    while result.finish is None:
        features, _ = run_target(target, text[:-1])
        kept = by_hand(lambda path, f=features, t=text: draft_after(draft, f, t, path), shape)
        trees.append(sorted(node.path for node in kept))
        accepted: tuple[int, ...] = ()
        while True:
            bonus = run_target(target, [*text, *accepted])[1][-1]
            if (*accepted, bonus) not in trees[-1]:
                break
            accepted = (*accepted, bonus)
        result.accepted_counts.append(len(accepted))
        result.append([*accepted, bonus], STOP, max_new, 10**9)
        text += [*accepted, bonus]
    return result, trees


class Watching:
    """Keeps what each token of each tree was read from."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[list[tuple[int, ...]], Tensor]]] = {}

    def prefill(self, request: int, rows: Rows) -> None:
        self.seen[request] = []

    def step(self, request: int, rows: Rows, accepted: int, drafted: Tensor, states: Tensor) -> None:
        self.seen[request].append((as_paths(drafted.tolist(), rows.parents.tolist()), states.clone()))

    def done(self, generated: Generated) -> None:
        pass


@pytest.mark.parametrize("switches", [
    {}, {"norm_output": True, "layers": 2}, {"sliding_window": 4}, {"layers": 2, "sliding_window": 3, "sliding_layers": (1,)},
], ids=str)
def test_every_node_sees_its_ancestors_and_nobody_else(
    target: Target, prompts: list[list[int]], switches: dict[str, object],
) -> None:
    """The draft's output behind each drafted token against a pass over its own path alone."""
    draft = random_draft(5, vocab=VOCAB, **switches).double()
    for layer in (draft.midlayer, *draft.layers.values()):
        layer.self_attn.o_proj.weight.data.mul_(8)
    some, watching = prompts[:3], Watching()
    found = generate(target, draft, some, wiring=WIRING, tree=TreeShape(3, 4, 26), max_new=6, rows=2, observer=watching)
    deepest = 0
    with torch.inference_mode():
        for prompt, one in zip(some, found, strict=True):
            text = [*prompt, one.token_ids[0]]
            for (paths, states), count in zip(watching.seen[one.request], one.accepted_counts, strict=True):
                features, _ = run_target(target, text[:-1])
                for path, state in zip(paths, states, strict=True):
                    assert torch.allclose(draft_output(draft, features, text, path[:-1])[0, 0], state, atol=1e-9)
                    deepest = max(deepest, len(path))
                read = len(text) - len(prompt)
                text += one.token_ids[read : read + count + 1]
    assert deepest == 4


SHAPES = [(2, 2, 4), (3, 3, 9), (2, 4, 6), (4, 1, 4), (1, 3, 4), (3, 2, 13)]


@pytest.mark.parametrize(("shape", "rows", "switches"), [
    (SHAPES[0], 1, {}),
    (SHAPES[1], 3, {}),
    (SHAPES[2], 2, {"norm_before_residual": True, "norm_output": True, "fc_norm": True}),
    (SHAPES[3], 2, {}),
    (SHAPES[5], 5, {"draft_vocab": 4}),
    (SHAPES[1], 2, {"sliding_window": 4}),
    (SHAPES[2], 2, {"layers": 2, "sliding_window": 3, "sliding_layers": (1,), "qk_norm": True}),
    (SHAPES[1], 2, {"layers": 2, "mla": {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
                                         "v_head_dim": 3}}),
])
def test_trees_and_counts_are_those_of_a_loop_without_caches(
    target: Target, prompts: list[list[int]], shape: tuple[int, int, int], rows: int, switches: dict[str, object],
) -> None:
    draft = random_draft(5, vocab=VOCAB, **switches).double()
    if draft.config.draft_vocab_size == 4:
        draft.target_ids = torch.tensor([0, 2, 3, 5])
    tree, some = TreeShape(*shape), prompts[:4]
    found = generate(target, draft, some, wiring=WIRING, tree=tree, max_new=9, stop_ids=STOP, rows=rows)
    with torch.inference_mode():
        expected = [brute_force(target, draft, prompt, tree, 9) for prompt in some]
    for mine, (theirs, trees) in zip(found, expected, strict=True):
        grown = [as_paths(t, p) for t, p in zip(mine.drafted_ids, mine.draft_parents, strict=True)]
        assert [sorted(paths) for paths in grown] == trees
        assert mine.accepted_counts == theirs.accepted_counts
        assert (mine.token_ids, mine.finish, mine.cut) == (theirs.token_ids, theirs.finish, theirs.cut)
    assert sum(sum(g.accepted_counts) for g in found) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_text_is_that_of_plain_decoding(target: Target, prompts: list[list[int]], shape: tuple[int, int, int]) -> None:
    draft = random_draft(5, vocab=VOCAB).double()
    plain = generate(target, None, prompts, wiring=WIRING, max_new=24, stop_ids=STOP, rows=7)
    for rows in (1, 3):
        found = generate(target, draft, prompts, wiring=WIRING, tree=TreeShape(*shape), max_new=24, stop_ids=STOP, rows=rows)
        assert [(g.token_ids, g.finish) for g in found] == [(g.token_ids, g.finish) for g in plain]
        assert {g.finish for g in found} == {"stop", "length"}


def test_a_tree_without_siblings_is_the_chain(target: Target, prompts: list[list[int]]) -> None:
    draft = random_draft(5, vocab=VOCAB, sliding_window=6).double()
    chain = generate(target, draft, prompts, wiring=WIRING, k=3, max_new=20, rows=3)
    tree = generate(target, draft, prompts, wiring=WIRING, tree=TreeShape(1, 3, 4), max_new=20, rows=3)
    assert [g.drafted_ids for g in tree] == [g.drafted_ids for g in chain]
    assert [g.accepted_counts for g in tree] == [g.accepted_counts for g in chain]
    assert all(parents == [-1, 0, 1] for g in tree for parents in g.draft_parents)


def test_more_siblings_accept_more(target: Target, prompts: list[list[int]]) -> None:
    draft = random_draft(5, vocab=VOCAB).double()
    whole = TreeShape(VOCAB, 1, VOCAB + 1)
    found = generate(target, draft, prompts, wiring=WIRING, tree=whole, max_new=12, rows=3)
    assert all(count == 1 for g in found for count in g.accepted_counts)
    assert summarise(found, 1).accept_length == 2.0


def test_the_text_ends_where_the_context_does(target: Target, prompts: list[list[int]]) -> None:
    draft = random_draft(5, vocab=VOCAB).double()
    plain = generate(target, None, prompts, wiring=WIRING, max_new=50, rows=3, context=20)
    found = generate(target, draft, prompts, wiring=WIRING, tree=TreeShape(3, 3, 9), max_new=50, rows=3, context=20)
    assert [(g.token_ids, g.finish) for g in found] == [(g.token_ids, "context") for g in plain]


@pytest.mark.parametrize("wiring", [Wiring(WIRING.slots, scale=(1.0, 8.0, 1.0)), Wiring(WIRING.slots, shift=1),
                                    Wiring(WIRING.slots, shift=-1), Wiring(WIRING.slots, poison=2)],
                         ids=["scale", "shift+1", "shift-1", "poison"])
def test_a_fault_changes_what_is_drafted_never_the_text(target: Target, prompts: list[list[int]], wiring: Wiring) -> None:
    draft, shape = random_draft(5, vocab=VOCAB).double(), TreeShape(2, 3, 6)
    healthy = generate(target, draft, prompts, wiring=WIRING, tree=shape, max_new=16, rows=3)
    faulty = generate(target, draft, prompts, wiring=wiring, tree=shape, max_new=16, rows=3)
    assert [g.token_ids for g in faulty] == [g.token_ids for g in healthy]
    assert [g.drafted_ids for g in faulty] != [g.drafted_ids for g in healthy]


def test_a_target_with_windows_sees_the_same_in_a_tree(tmp_path: Path, prompts: list[list[int]]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(2)
    MistralForCausalLM(MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, sliding_window=5, initializer_range=0.2,
    )).eval().save_pretrained(tmp_path)
    windowed = load_target(tmp_path, torch.float64)
    draft = random_draft(5, vocab=VOCAB).double()
    plain = generate(windowed, None, prompts, wiring=WIRING, max_new=16, rows=3)
    found = generate(windowed, draft, prompts, wiring=WIRING, tree=TreeShape(3, 3, 12), max_new=16, rows=3)
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]
    assert sum(sum(g.accepted_counts) for g in found) > 10


class Tables:
    """Random log-probabilities after every path of draft tokens, over `vocab` tokens."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.seed, self.vocab, self.known = seed, vocab, {}

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        if path not in self.known:
            draw = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
            logits = 2 * torch.randn(self.vocab, dtype=torch.float64, generator=draw)
            self.known[path] = logits.log_softmax(-1)
        return self.known[path]


def grow(tables: list[Tables], shape: TreeShape) -> Tree:
    growth = Growth(shape)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in tables]
    for _ in range(shape.steps):
        scores = torch.stack([torch.stack([t(path) for path in p]) for t, p in zip(tables, paths, strict=True)])
        best = scores.topk(shape.topk, -1)
        tokens, above = growth.level(best.values, best.indices)
        paths = [[(*p[a], t) for t, a in zip(ts, ups, strict=True)]
                 for p, ts, ups in zip(paths, tokens.tolist(), above.tolist(), strict=True)]
    return growth.tree()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), topk=st.integers(1, 4), steps=st.integers(1, 4), part=st.floats(0, 1), n=st.integers(1, 3))
def test_growth_keeps_the_best_nodes_and_who_they_are(seed: int, topk: int, steps: int, part: float, n: int) -> None:
    most = topk + (steps - 1) * topk**2
    shape = TreeShape(topk, steps, 2 + int(part * (most - 1)))
    tables = [Tables(seed + i, 5) for i in range(n)]
    tree = grow(tables, shape)
    seen = tree.seen()
    for i, table in enumerate(tables):
        paths = as_paths(tree.tokens[i].tolist(), tree.parents[i].tolist())
        assert sorted(paths) == sorted(node.path for node in by_hand(table, shape))
        assert tree.depths[i].tolist() == [len(path) for path in paths]
        whole = [(), *paths]
        for a, b in itertools.product(range(len(whole)), repeat=2):
            assert bool(seen[i, a, b]) == (whole[a][: len(whole[b])] == whole[b])
        # A node's source is the node that its parent was when it was expanded.
        for column, parent in enumerate(tree.parents[i].tolist()):
            assert tree.sources[i, column] == (tree.expansions[i, parent] if parent >= 0 else 0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), topk=st.integers(1, 3), steps=st.integers(1, 4))
def test_the_longest_path_is_found(seed: int, topk: int, steps: int) -> None:
    shape = TreeShape(topk, steps, min(topk + (steps - 1) * topk**2, 12) + 1)
    tree = grow([Tables(seed, 4), Tables(seed + 1, 4)], shape)
    draw = torch.Generator().manual_seed(seed)
    hit = torch.rand(tree.parents.shape, generator=draw) < 0.7
    path, counts = longest(tree.parents, hit, steps)
    for i in range(2):
        parents, hits = tree.parents[i].tolist(), hit[i].tolist()
        best: list[int] = []
        for column in range(len(parents)):
            climbed, at = [], column
            while at >= 0 and hits[at]:
                climbed.append(at + 1)
                at = parents[at]
            if at < 0 and len(climbed) > len(best):
                best = climbed[::-1]
        assert counts[i] == len(best)
        assert path[i].tolist() == [0, *best] + (best[-1:] or [0]) * (steps - len(best))


def test_the_cache_keeps_the_path_and_nothing_else(target: Target) -> None:
    """Rows of two trees written together; what is kept equals a cache that read the text alone."""
    prompts, branch = [[1, 2, 3, 4, 5], [5, 1, 0, 2]], [[2, 0, 3, 1, 4], [0, 4, 1, 2, 3]]
    parents = torch.tensor([[0, 0, 1, 1, 4], [0, 1, 1, 3, 0]])  # of nodes 1.., as nodes
    paths, counts = torch.tensor([[0, 1, 4], [0, 1, 3]]), torch.tensor([3, 2])
    for rows in (None, torch.tensor([0, 2])):
        cache = target.new_cache(2 if rows is None else 3, 24)
        for row, prompt in enumerate(prompts):
            at = torch.tensor([row if rows is None else int(rows[row])])
            target.forward(torch.tensor([prompt]), (), cache=cache, rows=at)
            cache.commit(torch.tensor([len(prompt)]), at)
        seen = torch.eye(6, dtype=torch.bool).repeat(2, 1, 1)
        depths = torch.zeros(2, 6, dtype=torch.int64)
        for i, node in itertools.product(range(2), range(1, 6)):
            seen[i, node] |= seen[i, parents[i, node - 1]]
            depths[i, node] = depths[i, parents[i, node - 1]] + 1
        ids = torch.tensor([[3, *b] for b in branch])
        out = target.forward(ids, (), cache=cache, rows=rows, branches=Branches(depths, seen))
        cache.keep(paths, counts, rows)
        for i in range(2):
            tokens = [*prompts[i], *ids[i, paths[i, : counts[i]]].tolist()]
            alone = target.new_cache(1, 24)
            straight = target.forward(torch.tensor([tokens]), (), cache=alone)
            alone.commit(len(tokens))
            row = i if rows is None else int(rows[i])
            assert int(cache.lengths[row]) == len(tokens)
            for mine, theirs in zip((*cache._keys, *cache._values), (*alone._keys, *alone._values), strict=True):
                assert torch.allclose(mine[row, :, : len(tokens)], theirs[0, :, : len(tokens)], atol=1e-10)
            kept = out.post[i, paths[i, : counts[i]]]
            assert torch.allclose(kept, straight.post[0, len(prompts[i]):], atol=1e-10)


def test_distances_count_positions_not_places() -> None:
    cache = RaggedCache(1, 1, 16)
    cache.begin(4)
    cache.commit(4)
    depths, seen = torch.tensor([[0, 1, 1]]), torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    positions, mask = cache.begin(3, None, Branches(depths, seen))
    assert positions.tolist() == [[4, 5, 5]]
    assert cache.distances(positions)[0, 0].tolist() == [
        [4, 3, 2, 1, 0, -1, -1], [5, 4, 3, 2, 1, 0, 0], [5, 4, 3, 2, 1, 0, 0]]
    assert mask[0, 0].tolist() == [[True] * 5 + [False] * 2, [True] * 6 + [False], [True] * 5 + [False, True]]


def test_shapes_that_draft_nothing_or_too_much_are_refused(target: Target) -> None:
    with pytest.raises(UsageError, match="has 7 nodes at most, not 8"):
        TreeShape(2, 2, 8)
    with pytest.raises(UsageError, match="drafts nothing"):
        TreeShape(2, 2, 1)
    with pytest.raises(UsageError, match="topk 5 with a draft vocabulary of 4"):
        generate(target, random_draft(5, vocab=VOCAB, draft_vocab=4), [[1]], wiring=WIRING, tree=TreeShape(5, 1, 3))
