"""Trees replayed over recorded states: the counts of the engine that drafted them, and of trees grown by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import VOCAB, Growing, small_draft
from tiny import DRAFT, TARGET, tiny_prompts, tiny_target
from torch import Tensor

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import summarise
from draftscope.eagle3.model import Draft
from draftscope.eagle3.replay import replay
from draftscope.eagle3.tree import TreeShape, claimed, claimed_depth
from draftscope.engines.transformers import Capture, description
from draftscope.errors import DraftscopeError
from draftscope.states.opening import open_source
from draftscope.states.types import Sequence, Steps, Trace, from_trace
from draftscope.target.wiring import Wiring

WIRING = Wiring.of((2, 4, 5))


def grown_by_hand(draft: Draft, sequence: Sequence, t: int, shape: TreeShape) -> tuple[list[tuple[int, ...]], float]:
    """The tree from row t, every node run anew behind the true rows, in float64: the kept nodes as paths of target ids, parents
    first, and the least distance in log-probability between what was taken and what was left anywhere."""

    @torch.no_grad()
    def after(path: tuple[int, ...]) -> Tensor:
        cache = Growing(draft.config)
        tokens = sequence.token_ids
        for row in range(t + 1):
            out = draft(draft.project(sequence.features[row])[None, None], draft.embed(tokens[row + 1])[None, None],
                        sequence.positions[row][None, None], cache)
        for depth, token in enumerate(path, 1):
            position = sequence.positions[t][None, None] + depth
            out = draft(draft.feedback(out), draft.embed(torch.tensor([[token]])), position, cache)
        return draft.logits(out)[0, 0].log_softmax(-1)

    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    everyone: list[tuple[float, tuple[int, ...]]] = []
    margins = [float("inf")]

    def best(found: list[tuple[float, tuple[int, ...]]], count: int) -> list[tuple[float, tuple[int, ...]]]:
        ordered = sorted(found, key=lambda n: -n[0])
        margins.extend(ordered[count - 1][0] - other[0] for other in ordered[count : count + 1])
        return ordered[:count]

    for _ in range(shape.steps):
        fresh = []
        for score, path in level:
            scores = after(path).tolist()
            fresh += best([(score + x, (*path, int(draft.target_ids[i]))) for i, x in enumerate(scores)], shape.topk)
        everyone += fresh
        level = best(fresh, shape.topk)
    return sorted((path for _, path in best(everyone, shape.nodes - 1)), key=len), min(margins)


def steps_of(trees: list[list[tuple[int, ...]]], starts: list[int], accepted: list[int]) -> Steps:
    """As an engine that drafted these trees would have recorded them."""
    return Steps(
        torch.tensor(starts), torch.tensor([[p[-1] for p in paths] for paths in trees]), torch.tensor(accepted), None,
        parents=torch.tensor([[paths.index(p[:-1]) if p[:-1] else -1 for p in paths] for paths in trees]),
    )


def followed(paths: list[tuple[int, ...]], text: list[int]) -> int:
    return max((len(p) for p in paths if list(p) == text[: len(p)]), default=0)


def recorded(seed: int, length: int = 22) -> Sequence:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(length - 1, 3, 16, dtype=torch.float64, generator=draw)
    return Sequence(
        name=f"s{seed}", token_ids=torch.randint(0, VOCAB, (length,), generator=draw), features=features, last=None,
        answer=torch.arange(length) > 4, positions=torch.arange(length - 1),
    )


@pytest.mark.parametrize(("shape", "switches"), [
    ((2, 3, 6), {}), ((3, 2, 13), {"norm_output": True}), ((4, 1, 4), {}), ((3, 3, 8), {"sliding_window": 4}),
    ((2, 2, 5), {"draft_vocab": 5}), ((2, 3, 7), {"layers": 2, "sliding_window": 2, "sliding_layers": (1,)}),
], ids=str)
def test_every_row_is_as_a_tree_grown_by_hand(
    shape: tuple[int, int, int], switches: dict[str, object], monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft, tree = small_draft(2, **switches), TreeShape(*shape)
    for layer in (draft.midlayer, *draft.layers.values()):
        layer.self_attn.o_proj.weight.data.mul_(8)  # so that it matters who sees whom
    sequences, expected, margins = [recorded(seed, 14 + 4 * seed) for seed in range(3)], [], []
    for i, sequence in enumerate(sequences):
        tokens, starts = sequence.token_ids.tolist(), list(range(4, sequence.rows - 1))
        grown = [grown_by_hand(draft, sequence, t, tree) for t in starts]
        expected.append([followed(paths, tokens[t + 2 :]) for t, (paths, _) in zip(starts, grown, strict=True)])
        margins.append([margin for _, margin in grown])
        sequences[i] = replace(sequence, steps=steps_of([paths for paths, _ in grown], starts, expected[-1]))
    found = replay(draft, sequences, tree=tree, text="own")
    assert found.k == tree.steps
    for one, counts, gaps in zip(found.sequences, expected, margins, strict=True):
        inside = one.answer.rows - 4
        assert (inside >= 0).any() and one.answer.accepted[inside >= 0].tolist() == [counts[i] for i in inside if i >= 0]
        told = one.steps.outcome.accepted >= 0
        assert one.steps.outcome.accepted[told].tolist() == np.array(counts)[told].tolist()
        assert told.sum() > len(told) - tree.steps
        assert one.steps.gap[:, 0] == pytest.approx(np.array(gaps), abs=1e-9)
    assert sum(map(sum, expected)) > 5 and found.gate().share == 1.0
    for name in ("drafting._SCORES", "treedrafting._LOGITS", "replay._BATCH_TOKENS"):
        monkeypatch.setattr(f"draftscope.eagle3.{name}", 30)
    apart = replay(draft, sequences, tree=tree, text="own")
    assert [s.answer.lead.tolist() for s in apart.sequences] == [s.answer.lead.tolist() for s in found.sequences]
    assert apart.rung("all").nll == pytest.approx(found.rung("all").nll)
    chain = replay(draft, sequences, k=tree.steps, text="own")
    assert chain.rung("all").nll == pytest.approx(found.rung("all").nll)
    assert found.rung("walk").length > chain.rung("walk").length


def test_a_tree_without_siblings_is_replayed_as_the_chain() -> None:
    draft = small_draft(2)
    sequences = [recorded(seed) for seed in range(3)]
    tree, chain = replay(draft, sequences, tree=TreeShape(1, 3, 4), text="own"), replay(draft, sequences, k=3, text="own")
    for a, b in zip(tree.sequences, chain.sequences, strict=True):
        assert a.answer.lead.tolist() == b.answer.lead.tolist() and a.walk.rows.tolist() == b.walk.rows.tolist()


def capture(folder: Path, shape: TreeShape | None, k: int = 3, requests: int = 10) -> tuple[list[Trace], list[int], float]:
    target = tiny_target()
    draft = build_draft(load_checkpoint(DRAFT, target_layers=8), target.parts)
    observer = Capture(folder, description(model=str(TARGET), draft=str(DRAFT), layer_ids=None, k=k, tree=shape))
    answers = generate(
        target, draft, tiny_prompts()["heldout"][:requests], wiring=WIRING, k=k, tree=shape, max_new=32, stop_ids=target.stop_ids,
        rows=5, observer=observer,
    )
    assert observer.close().stopped is None
    summary = summarise(answers, k if shape is None else shape.steps)
    return list(open_source(folder)), [c for a in answers for c in a.accepted_counts], summary.accept_length


@pytest.mark.parametrize("shape", [TreeShape(2, 3, 6), TreeShape(4, 5, 8), TreeShape(3, 4, 24)], ids=str)
def test_replay_gives_the_counts_of_a_captured_tree_run(tmp_path: Path, shape: TreeShape) -> None:
    traces, counts, length = capture(tmp_path / "capture", shape)
    parts = tiny_target().parts
    draft = build_draft(load_checkpoint(DRAFT, target_layers=8), parts)
    sequences = [from_trace(trace, 3) for trace in traces]
    found = replay(draft, sequences, parts=parts, tree=shape)
    gate = found.gate()
    assert gate.steps > 40 and gate.steps + gate.left_out == len(counts)
    differing = round((1 - gate.share) * gate.steps)
    assert differing == len(gate.near_ties) and gate.share > 0.95
    engine, measured = found.rung("engine"), found.measured()
    if not differing:
        assert engine.joint == measured.joint
    assert found.rung("walk").length == pytest.approx(length, abs=0.1)
    # What was recorded is a tree: as a chain, or another shape, it is not compared.
    for other in (replay(draft, sequences, parts=parts, k=3), replay(draft, sequences, parts=parts, tree=TreeShape(2, 2, 4))):
        assert other.gate() is None and all(s.unlike for s in other.sequences if s.name in {t.name for t in traces})


def test_a_captured_tree_holds_its_rows(tmp_path: Path) -> None:
    shape = TreeShape(3, 3, 9)
    traces, counts, _ = capture(tmp_path / "capture", shape)
    source = open_source(tmp_path / "capture")
    assert claimed(source.meta) == shape and claimed_depth(source.meta) == 3
    assert [c for t in traces for c in t.accepted_counts.tolist()] == counts
    for trace in traces:
        assert trace.draft_parents.shape == trace.draft_token_ids.shape == (len(trace.accepted_counts), 8)
        kept = trace.accepted.nonzero().squeeze(-1)
        assert trace.positions[kept].tolist() == list(range(len(kept)))
        assert (trace.verified_ids[kept][:-1] == trace.token_ids[kept][1:])[trace.verified_ids[kept][:-1] >= 0].all()
        for step, count in enumerate(trace.accepted_counts.tolist()):
            own = (trace.step == step).nonzero().squeeze(-1)
            assert len(own) == shape.nodes and int(trace.accepted[own].sum()) == count + 1
            assert trace.token_ids[own[1:]].tolist() == trace.draft_token_ids[step].tolist()
            parents = trace.draft_parents[step].tolist()
            depth = [0]
            for column, parent in enumerate(parents):
                depth.append(depth[parent + 1] + 1)
                row = int(own[parent + 1])
                hit = int(trace.verified_ids[row]) == int(trace.draft_token_ids[step, column])
                assert bool(trace.accepted[own[column + 1]]) == (bool(trace.accepted[row]) and hit)
            assert (trace.positions[own] - trace.positions[own[0]]).tolist() == depth
    # Each drafted token is among the best of the state that it came from.
    draft = build_draft(load_checkpoint(DRAFT, target_layers=8), tiny_target().parts)
    best = draft.target_ids[draft.logits(traces[0].draft_states).topk(3, -1).indices]
    assert (best == traces[0].draft_token_ids[..., None]).any(-1).all()


def test_a_leaf_needs_no_further_text() -> None:
    """Near the end of the text a step is told where the tree has nothing beyond what matches."""
    draft, tree = small_draft(2), TreeShape(2, 3, 4)
    told = 0
    for t, whole in itertools.product(range(6, 18, 2), map(recorded, range(6))):
        paths, _ = grown_by_hand(draft, whole, t, tree)
        text = whole.token_ids.tolist()
        lead = followed(paths, text[t + 2 :])
        known = t + 2 + lead
        leaf = not any(len(p) > lead and list(p[:lead]) == text[t + 2 : known] for p in paths)
        cut = replace(whole, token_ids=whole.token_ids[:known], features=whole.features[: known - 1], answer=whole.answer[:known],
                      positions=whole.positions[: known - 1], steps=steps_of([paths], [t], [lead]))
        outcome = replay(draft, [cut], tree=tree, text="own").sequences[0].steps.outcome
        assert outcome.accepted.tolist() == ([lead] if leaf else [-1])
        told += leaf
    assert 0 < told < 36


def test_parents_that_make_no_tree_are_refused(tmp_path: Path) -> None:
    capture(tmp_path / "capture", TreeShape(2, 2, 4), requests=1)
    file = next((tmp_path / "capture").glob("*.safetensors"))
    for wrong in (7, -2, 2):
        tensors = load_file(file)
        tensors["draft_parents"] = tensors["draft_parents"].clone()
        tensors["draft_parents"][0, 2] = wrong
        save_file(tensors, tmp_path / "spoilt.safetensors")
        with pytest.raises(DraftscopeError, match=r"draft_parents.*does not come before its token"):
            list(open_source(tmp_path / "spoilt.safetensors", "capture"))


def test_claims_are_taken_only_where_they_make_a_tree() -> None:
    told = {"topk": 4, "num_steps": 5, "num_draft_tokens": 8}
    assert claimed(told) == TreeShape(4, 5, 8)
    assert claimed({"topk": 4, "num_spec_tokens": 7, "switches": {"speculative_num_steps": 5}}) == TreeShape(4, 5, 8)
    for other in ({"topk": 1}, {"topk": "4"}, {"num_steps": None}, {"num_draft_tokens": 10**9}, {"num_draft_tokens": True}):
        assert claimed(told | other) is None
    assert claimed_depth({"num_spec_tokens": 7}) == 7
    assert claimed_depth({"num_spec_tokens": 7, **told}) == 5
    assert np.all([claimed_depth({"num_spec_tokens": x}) is None for x in (0, True, "3", None)])
