"""Speculative decoding against transformers' generate, and against a loop without any cache in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import random_draft, save_target
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Generated, divergence, summarise
from draftscope.eagle3.model import Draft
from draftscope.errors import DraftscopeError, UsageError
from draftscope.target.model import Target, load_target
from draftscope.target.wiring import Wiring

VOCAB = 6  # few tokens, so that a random draft is often right
BOUNDARIES = (2, 4, 5)
WIRING = Wiring.of(BOUNDARIES)
STOP = frozenset({4})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("target"), 3, vocab=VOCAB, tied=False), torch.float64)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in (3, 17, 1, 9, 5, 2, 12)]


def plain_text(target: Target, prompt: list[int], max_new: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    with torch.inference_mode():
        out = target.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=max_new, eos_token_id=sorted(stop_ids) or [VOCAB], pad_token_id=0,
        )
    return out[0, len(prompt):].tolist()


def brute_force(target: Target, draft: Draft, prompt: list[int], k: int, max_new: int, stop_ids: frozenset[int],
                feedback: str | None = None) -> Generated:
    """Every pass over the whole sequence anew, one request at a time."""

    def run(ids: list[int]) -> tuple[Tensor, list[int]]:
        out = target.model(torch.tensor([ids]), output_hidden_states=True)
        return torch.stack([out.hidden_states[b][0] for b in BOUNDARIES], 1), out.logits[0].argmax(-1).tolist()

    def attend(q: Tensor, keys: Tensor, values: Tensor, layer: int = 0) -> Tensor:
        groups = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        hidden = (distance < 0) | (distance >= (draft.config.window(layer) or 10**9))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    result = Generated(0)
    _, chosen = run(prompt)
    result.append([chosen[-1]], stop_ids, max_new, 10**9)
    text = [*prompt, chosen[-1]]
    while result.finish is None:
        features, _ = run(text[:-1])
        hidden, following, drafted = draft.project(features[None]), text[1:], []
        for _ in range(k):
            embeds = draft.embed(torch.tensor([following]))
            output = draft(hidden, embeds, torch.arange(len(following))[None], attend)[:, -1:]
            drafted.append(int(draft.target_ids[draft.logits(output)[0, -1].argmax()]))
            post = draft.config.norm_output if feedback is None else feedback == "post"
            hidden = torch.cat([hidden, draft.norm(output) if post else output], 1)
            following = [*following, drafted[-1]]
        _, chosen = run(text + drafted)
        chosen = chosen[len(text) - 1:]
        count = next((i for i, token in enumerate(drafted) if token != chosen[i]), k)
        result.accepted_counts.append(count)
        result.drafted_ids.append(drafted)
        result.append(chosen[: count + 1], stop_ids, max_new, 10**9)
        text += chosen[: count + 1]
    return result


@pytest.mark.parametrize(("k", "rows", "switches"), [
    (1, 3, {}),
    (2, 1, {}),
    (4, 7, {}),
    (3, 4, {"norm_before_residual": True, "norm_output": True, "fc_norm": True}),
    (4, 2, {"norm_before_fc": True, "qk_norm": True, "sliding_window": 5}),
    (3, 3, {"draft_vocab": 4}),
    (3, 2, {"layers": 3, "sliding_window": 4, "sliding_layers": (0, 2), "attention_bias": True}),
    (3, 2, {"layers": 2, "mla": {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
                                 "v_head_dim": 3}}),
])
def test_counts_and_ids_are_those_of_a_loop_without_caches(
    target: Target, prompts: list[list[int]], k: int, rows: int, switches: dict[str, object],
) -> None:
    draft = random_draft(5, vocab=VOCAB, **switches).double()
    if draft.config.draft_vocab_size == 4:
        draft.target_ids = torch.tensor([0, 2, 3, 5])
    some = prompts[:5]
    found = generate(target, draft, some, wiring=WIRING, k=k, max_new=14, stop_ids=STOP, rows=rows)
    with torch.inference_mode():
        expected = [brute_force(target, draft, prompt, k, 14, STOP) for prompt in some]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.drafted_ids == theirs.drafted_ids
        assert mine.accepted_counts == theirs.accepted_counts
        assert (mine.token_ids, mine.finish, mine.cut) == (theirs.token_ids, theirs.finish, theirs.cut)
    assert sum(sum(g.accepted_counts) for g in found) > 0


@pytest.mark.parametrize("feedback", ["pre", "post"])
def test_the_state_fed_back_can_be_overridden(target: Target, prompts: list[list[int]], feedback: str) -> None:
    draft = random_draft(5, vocab=VOCAB, norm_output=feedback == "pre").double()
    found = generate(target, draft, prompts[:3], wiring=WIRING, k=3, max_new=12, rows=3, feedback=feedback)
    as_configured = generate(target, draft, prompts[:3], wiring=WIRING, k=3, max_new=12, rows=3)
    with torch.inference_mode():
        expected = [brute_force(target, draft, prompt, 3, 12, frozenset(), feedback) for prompt in prompts[:3]]
    assert [g.drafted_ids for g in found] == [g.drafted_ids for g in expected]
    assert [g.drafted_ids for g in found] != [g.drafted_ids for g in as_configured]


@pytest.mark.parametrize(("k", "rows"), [(None, 1), (None, 3), (1, 8), (2, 3), (3, 1), (4, 3)])
def test_text_is_transformers_greedy_text(target: Target, prompts: list[list[int]], k: int | None, rows: int) -> None:
    draft = None if k is None else random_draft(5, vocab=VOCAB).double()
    found = generate(target, draft, prompts, wiring=WIRING, k=k or 3, max_new=16, stop_ids=STOP, rows=rows)
    assert [g.request for g in found] == list(range(len(prompts)))
    for prompt, generated in zip(prompts, found, strict=True):
        assert generated.token_ids == plain_text(target, prompt, 16, STOP)
        assert generated.finish == ("stop" if generated.token_ids[-1] in STOP else "length")
        assert generated.started <= generated.first_token <= generated.ended
    assert {g.finish for g in found} == {"stop", "length"}


def test_float32_text_parts_from_plain_decoding_at_near_ties_only(tmp_path: Path, prompts: list[list[int]]) -> None:
    target = load_target(save_target(tmp_path, 4, vocab=VOCAB, tied=False))
    plain = generate(target, None, prompts, wiring=WIRING, max_new=40, rows=2)
    for k in (2, 3):
        found = generate(target, random_draft(5, vocab=VOCAB), prompts, wiring=WIRING, k=k, max_new=40, rows=5)
        for prompt, one, other in zip(prompts, plain, found, strict=True):
            parted = divergence(target, prompt, one.token_ids, other.token_ids)
            assert parted is None or parted.near_tie


def test_a_divergence_names_the_place_and_the_gap(target: Target, prompts: list[list[int]]) -> None:
    prompt, text = prompts[1], plain_text(target, prompts[1], 10)
    assert divergence(target, prompt, text, text) is None
    changed = [*text[:6], (text[6] + 1) % VOCAB, *text[7:]]
    found = divergence(target, prompt, text, changed)
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*prompt, *text[:6]]])).logits[0, -1].sort(descending=True).values
    assert found is not None
    assert (found.index, found.ids) == (6, (text[6], changed[6]))
    assert found.gap == pytest.approx(float(logits[0] - logits[1]), rel=1e-4)
    assert not found.near_tie
    shorter = divergence(target, prompt, text, text[:4])
    assert shorter is not None
    assert (shorter.index, shorter.ids) == (4, (text[4], None))


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose next token depends on the last one alone: a head over the normed embedding."""
    target = load_target(save_target(tmp_path_factory.mktemp("markov"), 7, vocab=50, tied=False))
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def oracle(target: Target) -> Draft:
    """A draft that knows such a target: it attends to its own row, and passes the embedding on to the target's head."""
    width, vocab = target.width, len(target.parts.embedding)
    draft = Draft(DraftConfig(
        hidden_size=width, target_hidden_size=width, intermediate_size=width, num_attention_heads=4, num_key_value_heads=4,
        head_dim=width // 4, vocab_size=vocab, draft_vocab_size=vocab, sliding_window=1,
    )).eval()
    with torch.no_grad():
        for weight in (draft.fc.weight, draft.midlayer.mlp.down_proj.weight):
            weight.zero_()
        draft.midlayer.self_attn.v_proj.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
        draft.midlayer.self_attn.o_proj.weight.copy_(torch.eye(width))
        draft.midlayer.mlp.down_proj.weight.zero_()
        draft.lm_head.weight.copy_(target.parts.head)
    draft.embedding = target.parts.embedding.float()
    return draft


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_an_oracle_is_accepted_whole(markov: Target, k: int) -> None:
    draft = oracle(markov)
    # Its output takes the fed-back state as residual; norm_before_residual cannot undo that, hence feedback of zeros.
    draft.feedback = torch.zeros_like  # type: ignore[method-assign]
    prompts = [[1, 2, 3], [7], [9, 30, 31, 32, 33]]
    found = generate(markov, draft, prompts, wiring=WIRING, k=k, max_new=21, rows=2)
    for generated in found:
        assert generated.accepted_counts == [k] * len(generated.accepted_counts)
        assert len(generated.accepted_counts) == -(-20 // (k + 1))
        assert len(generated.token_ids) == 21
        assert generated.cut == (20 % (k + 1) != 0)
    summary = summarise(found, k)
    assert summary.accept_length == k + 1
    assert summary.joint == summary.conditional == [1.0] * k
    assert summary.cut_steps == (3 if 20 % (k + 1) else 0)


def test_a_stop_inside_a_chain_cuts_the_text_but_not_the_count(markov: Target) -> None:
    draft = oracle(markov)
    draft.feedback = torch.zeros_like  # type: ignore[method-assign]
    text = generate(markov, None, [[1, 2, 3]], wiring=WIRING, max_new=12)[0].token_ids
    stop = next(token for i, token in enumerate(text) if i % 5 not in (0,) and token not in text[:i])
    place = text.index(stop)
    found = generate(markov, draft, [[1, 2, 3]], wiring=WIRING, k=4, max_new=12, stop_ids=frozenset({stop}))[0]
    assert found.token_ids == text[: place + 1]
    assert found.finish == "stop"
    assert found.accepted_counts == [4] * len(found.accepted_counts)
    assert found.cut
    assert found.drafted_ids[-1][(place - 1) % 5] == stop


def test_the_text_ends_where_the_context_does(target: Target, prompts: list[list[int]]) -> None:
    draft = random_draft(5, vocab=VOCAB).double()
    found = generate(target, draft, prompts, wiring=WIRING, k=3, max_new=50, rows=3, context=20)
    for prompt, generated in zip(prompts, found, strict=True):
        assert generated.finish == "context"
        assert len(prompt) + len(generated.token_ids) == 20
        assert generated.token_ids == plain_text(target, prompt, 20 - len(prompt))


def test_one_new_token_needs_no_step(target: Target, prompts: list[list[int]]) -> None:
    found = generate(target, random_draft(5, vocab=VOCAB).double(), prompts, wiring=WIRING, max_new=1, rows=2)
    assert [g.token_ids for g in found] == [plain_text(target, p, 1) for p in prompts]
    summary = summarise(found, 3)
    assert (summary.steps, summary.accept_length, summary.joint, summary.conditional) == (0, None, [], [None] * 3)
    assert summary.tokens == len(prompts)


def test_no_prompt_no_answer(target: Target) -> None:
    assert generate(target, None, [], wiring=WIRING) == []
    assert summarise([], 3).tokens_per_second is None


@pytest.mark.parametrize("wiring", [
    Wiring.of((1, 3, 4)),
    Wiring(WIRING.slots, scale=(1.0, 8.0, 1.0)),
    Wiring(WIRING.slots, shift=1),
    Wiring(WIRING.slots, shift=-1),
    Wiring(WIRING.slots, poison=2),
    Wiring((Boundary(2, kind="branch"), Boundary(4, kind="partial"), Boundary(8, "post"))),
], ids=["offset", "scale", "shift+1", "shift-1", "poison", "kinds"])
def test_a_fault_changes_what_is_drafted_never_the_text(target: Target, prompts: list[list[int]], wiring: Wiring) -> None:
    draft = random_draft(5, vocab=VOCAB).double()
    healthy = generate(target, draft, prompts, wiring=WIRING, max_new=16, rows=3)
    faulty = generate(target, draft, prompts, wiring=wiring, max_new=16, rows=3)
    assert [g.token_ids for g in faulty] == [g.token_ids for g in healthy]
    assert [g.drafted_ids for g in faulty] != [g.drafted_ids for g in healthy]


def test_summary_pools_all_steps() -> None:
    results = [
        Generated(0, token_ids=[1] * 8, accepted_counts=[3, 0, 1], started=1.0, ended=4.0),
        Generated(1, token_ids=[1] * 3, accepted_counts=[2], cut=True, started=2.0, ended=6.0),
        Generated(2, token_ids=[1], started=2.0, ended=2.5),
    ]
    summary = summarise(results, 3)
    assert (summary.requests, summary.steps, summary.cut_steps, summary.accepted) == (3, 4, 1, [3, 2, 1])
    assert summary.accept_length == 1 + 6 / 4 == 1 + sum(summary.joint)
    assert summary.joint == [0.75, 0.5, 0.25]
    assert summary.conditional == [3 / 4, 2 / 3, 1 / 2]
    assert summary.tokens_per_second == 12 / 5


def test_what_does_not_go_together_is_refused(target: Target) -> None:
    draft = random_draft(5, vocab=VOCAB)
    with pytest.raises(DraftscopeError, match="prompt 1: holds no token"):
        generate(target, draft, [[1], []], wiring=WIRING)
    with pytest.raises(DraftscopeError, match=r"prompt 0: token ids 1\.\.6 do not fit a vocabulary of 6"):
        generate(target, draft, [[1, 6]], wiring=WIRING)
    with pytest.raises(DraftscopeError, match="leave no room for an answer in a context of 8"):
        generate(target, draft, [[1] * 8], wiring=WIRING, context=8)
    with pytest.raises(DraftscopeError, match="takes 3 states 64 wide, the target's wiring gives 2 of 64"):
        generate(target, draft, [[1]], wiring=Wiring.of((2, 4)))
    with pytest.raises(UsageError, match="chains of 0"):
        generate(target, draft, [[1]], wiring=WIRING, k=0)
    draft.target_ids = draft.target_ids + 1
    with pytest.raises(DraftscopeError, match="leads to token 6, the target knows 6"):
        generate(target, draft, [[1]], wiring=WIRING)
