"""Replay against a serving loop that drafts token by token with growing caches, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import VOCAB, WIDTH, Server, propose, served, small_draft
from torch import Tensor

from draftscope.eagle3.config import LatentAttention
from draftscope.eagle3.matching import answer_rows
from draftscope.eagle3.replay import compare, replay, walk
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.types import Sequence, Steps, Trace, from_trace
from draftscope.target.parts import TargetParts

K = 3


def target_parts(norm_sign: float = -1.0, vocab: int = VOCAB, width: int = WIDTH) -> TargetParts:
    """A head that names the nearest of orthogonal rows, behind a norm whose weight turns every sign around."""
    head = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(5)))[0][:vocab]
    return TargetParts(
        embedding=torch.zeros(vocab, width), norm_weight=torch.full((width,), norm_sign), norm_eps=1e-6, norm_offset=0.0,
        head=head, layers=8, embed_scale=1.0, model_type="llama", folder=Path("target"),
    )


def last_states(parts: TargetParts, chosen: Tensor, *, norm: str = "pre") -> Tensor:
    """Last states after which the target would choose these tokens."""
    state = parts.head[chosen] * 3
    return state * parts.norm_weight[0] if norm == "pre" else state


SWITCHES = [
    {}, {"norm_before_residual": True, "norm_output": True}, {"norm_before_fc": True, "fc_norm": True},
    {"qk_norm": True, "sliding_window": 5}, {"sliding_window": 2}, {"draft_vocab": 5},
    {"layers": 3, "sliding_window": 3, "sliding_layers": (1,), "norm_before_head": False},
    {"layers": 2, "mla": LatentAttention(q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_accepted_equals_a_serving_loop_at_every_row(switches: dict[str, object]) -> None:
    draft = small_draft(**switches)
    sequence = served(draft, 3, rounds=6)
    found = replay(draft, [sequence], k=K).sequences[0]
    tokens = sequence.token_ids.tolist()
    expected, server = [], Server(draft)
    for t in found.answer.rows:
        drafted = server.propose(sequence.features, sequence.token_ids, int(t), K)
        misses = [j for j in range(K) if drafted[j] != tokens[t + 2 + j]]
        expected.append(misses[0] if misses else K)
    assert found.answer.rows.tolist() == [t for t in range(len(tokens)) if t + 1 >= 4 and t + 1 + K < len(tokens)]
    assert found.answer.accepted.tolist() == expected
    assert sum(expected) > 0
    assert found.answer.accepted[np.isin(found.answer.rows, sequence.steps.start.numpy())].tolist() == [
        c for s, c in zip(sequence.steps.start.tolist(), sequence.steps.accepted.tolist(), strict=True) if s + 1 + K < len(tokens)
    ]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 4), prompt=st.integers(1, 6), several=st.integers(1, 3))
def test_engine_readout_equals_recorded_counts_and_walks_the_same_rows(seed: int, k: int, prompt: int, several: int) -> None:
    draft = small_draft(seed % 5)
    sequences = [served(draft, seed + i, k=k, prompt=prompt, rounds=3 + i) for i in range(several)]
    result = replay(draft, sequences, k=k)
    gate = result.gate()
    assert gate.share == 1.0 and gate.passed and not gate.near_ties
    for sequence, one in zip(sequences, result.sequences, strict=True):
        told = one.steps.outcome.accepted >= 0
        assert (one.steps.outcome.accepted[told] == one.steps.recorded[told]).all()
        walked = one.walk.rows.tolist()
        assert walked == sequence.steps.start.tolist()[: len(walked)]
        assert len(walked) >= len(sequence.steps.start) - k
    engine, measured = result.rung("engine"), result.measured()
    assert engine.length == measured.length and engine.joint == measured.joint
    assert gate.steps + gate.left_out == sum(len(s.steps.start) for s in sequences)
    for rung in (engine, result.rung("walk"), result.rung("all")):
        assert all(a >= b for a, b in zip(rung.joint, rung.joint[1:], strict=False))
        if rung.length is not None:
            assert rung.length == pytest.approx(1 + sum(rung.joint), abs=1e-12)
    counted = np.concatenate([s.walk.accepted for s in result.sequences])
    if len(counted):
        assert result.rung("walk").length == pytest.approx((counted + 1).sum() / len(counted), abs=1e-12)


def test_batching_does_not_change_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = small_draft(sliding_window=6)
    sequences = [served(draft, 20 + i, rounds=1 + 3 * (i % 4)) for i in range(7)]
    together = replay(draft, sequences, k=K)
    for name, value in (("replay._BATCH_TOKENS", 30), ("drafting._SCORES", 200), ("drafting._LOGITS", 20),
                        ("replay._BUFFERED_BYTES", 4000)):
        monkeypatch.setattr(f"draftscope.eagle3.{name}", value)
    apart = replay(draft, (served(draft, 20 + i, rounds=1 + 3 * (i % 4)) for i in range(7)), k=K)
    assert [s.name for s in apart.sequences] == [s.name for s in together.sequences] == [f"r{20 + i}" for i in range(7)]
    for a, b in zip(apart.sequences, together.sequences, strict=True):
        assert a.answer.rows.tolist() == b.answer.rows.tolist() and a.answer.lead.tolist() == b.answer.lead.tolist()
        assert np.allclose(a.steps.gap, b.steps.gap, equal_nan=True) and a.likelihood.total == pytest.approx(b.likelihood.total)


@settings(max_examples=60, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=24), k=st.integers(1, 4), seed=st.integers(0, 99), cut=st.integers(0, 3))
def test_answer_rows_and_walk_equal_a_hand_loop(mask: list[bool], k: int, seed: int, cut: int) -> None:
    rows = max(len(mask) - cut, 0)
    found = answer_rows(torch.tensor(mask), rows, len(mask), k)
    wanted = [t for t in range(rows) if t + 1 + k < len(mask) and all(mask[t + 1 : t + k + 2])]
    assert found.tolist() == wanted
    accepted = np.random.default_rng(seed).integers(0, k + 1, len(wanted))
    by_hand = []
    for s in range(1, len(mask)):
        if mask[s] and not mask[s - 1]:
            t = s - 1
            while t in wanted:
                by_hand.append(t)
                t += int(accepted[wanted.index(t)]) + 1
    assert [wanted[i] for i in walk(torch.tensor(mask), np.array(wanted, dtype=np.int64), accepted)] == by_hand


def test_a_step_near_the_end_is_told_only_where_its_first_miss_is_known() -> None:
    draft = small_draft()
    sequence = served(draft, 11, rounds=5)
    start, count = int(sequence.steps.start[-1]), int(sequence.steps.accepted[-1])
    whole = replay(draft, [sequence], k=K).sequences[0].steps
    assert whole.outcome.accepted[-1] == (count if count < K else -1) or count == K
    drafted = propose(draft, sequence.features, sequence.token_ids, start, K)
    for known in range(start + 2, len(sequence.token_ids) + 1):
        cut = Sequence(
            "cut", sequence.token_ids[:known], sequence.features[: known - 1], None, sequence.answer[:known],
            sequence.positions[: known - 1], Steps(sequence.steps.start[-1:], None, sequence.steps.accepted[-1:], None),
        )
        text = cut.token_ids[start + 2 :].tolist()
        misses = [j for j, token in enumerate(text[:K]) if token != drafted[j]]
        told = misses[0] if misses else (K if len(text) >= K else -1)
        result = replay(draft, [cut], k=K)
        assert result.sequences[0].steps.outcome.accepted.tolist() == [told]
        gate = result.gate()
        assert gate is None if told < 0 else (gate.steps, gate.left_out) == (1, 0)


def test_likelihood_and_coverage_in_a_smaller_vocabulary() -> None:
    draft = small_draft(draft_vocab=4)
    sequence = served(draft, 8, rounds=6)
    result = replay(draft, [sequence], k=K)
    one, rung = result.sequences[0], result.rung("all")
    total, inside, server = 0.0, 0, Server(draft)
    for t in one.answer.rows:
        server.propose(sequence.features, sequence.token_ids, int(t), 1)
        column = (draft.target_ids == sequence.token_ids[t + 2]).nonzero()
        if len(column):
            total -= float(server.logits.log_softmax(-1)[column[0, 0]])
            inside += 1
    assert 0 < inside < len(one.answer.rows)
    assert rung.nll == pytest.approx(total / inside, rel=1e-9)
    assert rung.coverage == inside / len(one.answer.rows) and rung.rows == len(one.answer.rows)
    outside = [i for i, t in enumerate(one.answer.rows) if sequence.token_ids[t + 2] not in draft.target_ids]
    assert (one.answer.accepted[outside] == 0).all()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_own_text_is_told_by_last_state_and_head(norm: str) -> None:
    draft, parts = small_draft(), target_parts()
    sequence = served(draft, 4)
    sequence.last = last_states(parts, sequence.token_ids[1:], norm=norm)
    found = replay(draft, [sequence], parts=parts, k=K)
    one = found.sequences[0]
    assert (one.written, one.share, one.last_norm) == ("own", 1.0, norm)
    assert found.text()["own"] == 1 and found.text()["share"] == 1.0 and found.readout == "walk"
    plain = replay(draft, [served(draft, 4)], k=K).sequences[0]
    assert plain.written == "recorded" and one.walk.rows.tolist() == plain.walk.rows.tolist()


def test_other_text_is_matched_with_the_targets_choice_and_judged_only_as_far_as_the_text_follows() -> None:
    draft, parts = small_draft(), target_parts()
    sequence = served(draft, 6, rounds=10)
    tokens = sequence.token_ids
    rng = np.random.default_rng(1)
    server = Server(draft)
    drafts = torch.tensor([0] + [server.propose(sequence.features, tokens, t, 1)[0] for t in range(len(tokens) - 2)])
    choice = torch.where(torch.from_numpy(rng.random(len(tokens) - 1) < 0.6), tokens[1:], drafts)
    sequence.last, steps, sequence.steps = last_states(parts, choice), sequence.steps, None
    found = replay(draft, [sequence], parts=parts, k=K)
    one = found.sequences[0]
    assert one.written == "other" and one.share < 0.9 and one.walk is None and found.readout == "all"
    reached, passed, server = np.zeros(K), np.zeros(K), Server(draft)
    for i, t in enumerate(one.answer.rows):
        drafted = server.propose(sequence.features, tokens, int(t), K)
        lead = limit = 0
        while limit < K and t + 1 + limit < len(choice) and (limit == 0 or choice[t + limit] == tokens[t + 1 + limit]):
            if lead == limit:
                reached[limit] += 1
                if drafted[limit] == choice[t + 1 + limit]:
                    passed[limit] += 1
                    lead += 1
            limit += 1
        assert (one.answer.lead[i], one.answer.limit[i]) == (lead, limit)
    rung = found.rung()
    assert np.allclose(rung.joint, np.cumprod(passed / reached)) and rung.length is None
    assert (one.answer.accepted == -1).any()
    sequence.steps = steps
    assert replay(draft, [sequence], parts=parts, k=K).gate().share == 1.0, "the engine's own starts follow the served text"


def test_the_targets_choices_are_worked_out_once_for_many_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, parts = small_draft(), target_parts()
    sequence = served(draft, 6, rounds=4)
    sequence.last = last_states(parts, (sequence.token_ids[1:] + 1) % VOCAB)
    asked = []
    own = TargetParts.logits
    monkeypatch.setattr(TargetParts, "logits", lambda self, x: asked.append(len(x)) or own(self, x))
    first = replay(draft, [sequence], parts=parts, k=K)
    assert sum(asked) > 0
    asked.clear()
    again = replay(draft, [replace(sequence, features=sequence.features.clone())], parts=parts, k=K)
    assert not asked and again.rung("all") == first.rung("all")
    other = replace(sequence, last=last_states(parts, sequence.token_ids[1:]))
    assert replay(draft, [other], parts=parts, k=K).sequences[0].written == "own" and asked


def test_text_can_be_overridden_and_is_not_guessed() -> None:
    draft, parts = small_draft(), target_parts()
    sequence = served(draft, 4)
    sequence.steps = None
    with pytest.raises(UsageError, match="who wrote the answers"):
        replay(draft, [sequence], k=K)
    assert replay(draft, [sequence], k=K, text="own").sequences[0].walk is not None
    with pytest.raises(UsageError, match=r"another author's text .* the last state"):
        replay(draft, [sequence], parts=parts, k=K, text="other")
    sequence.last = last_states(parts, sequence.token_ids[1:])
    assert replay(draft, [sequence], parts=parts, k=K, text="other").sequences[0].walk is None
    sequence.answer = None
    unknown = replay(draft, [sequence], parts=parts, k=K).sequences[0]
    assert unknown.written == "unknown" and len(unknown.answer.rows) == len(sequence.token_ids) - 2
    sequence.last = None
    with pytest.raises(UsageError, match="without a loss mask"):
        replay(draft, [sequence], parts=parts, k=K)


def test_near_ties_are_listed_with_their_place() -> None:
    engine, ours = small_draft(), small_draft()
    ours.embedding = engine.embedding
    for draft, winner in ((engine, 2), (ours, 5)):
        head = draft.lm_head.weight.data
        head[5] = head[2]
        head[winner] = head[winner] + 1e-9 * head[winner].sign()
        draft.norm.weight.data.abs_()
    sequences = [served(engine, 70 + i) for i in range(4)]
    assert replay(engine, sequences, k=K).gate().share == 1.0
    gate = replay(ours, sequences, k=K).gate()
    assert 0 < len(gate.near_ties) == round((1 - gate.share) * gate.steps)
    for tie in gate.near_ties:
        sequence = next(s for s in sequences if s.name == tie.name)
        drafted = propose(engine, sequence.features, sequence.token_ids, tie.row, K)
        assert tie.gap < 1e-4 and drafted[tie.position] in (2, 5)


def test_a_wrong_reading_fails_the_gate_without_near_ties() -> None:
    draft, broken = small_draft(norm_before_residual=True), small_draft(norm_before_residual=False)
    broken.embedding = draft.embedding
    gate = replay(broken, [served(draft, 40 + i) for i in range(4)], k=K).gate()
    assert gate.share < 0.9 and not gate.passed and not gate.near_ties


def test_a_trace_in_the_plain_capture_comes_to_the_same() -> None:
    draft = small_draft()
    sequence = served(draft, 15, rounds=7)
    starts, counts = sequence.steps.start.tolist(), sequence.steps.accepted.tolist()
    tokens, rows = sequence.token_ids, []
    for t in range(starts[0] + 1):
        rows.append((t, int(tokens[t]), 0, -1, True))
    drafts, server = [], Server(draft)
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        drafted = server.propose(sequence.features, tokens, start, K)
        drafts.append(drafted)
        rows.append((start + 1, int(tokens[start + 1]), 1, number, True))
        rows += [(start + 2 + j, drafted[j], 1, number, j < count) for j in range(K)]
    source = torch.tensor([min(r[0], len(sequence.features) - 1) for r in rows])
    trace = Trace(
        name="served", fc_input=sequence.features[source].flatten(1), token_ids=torch.tensor([r[1] for r in rows]),
        accepted=torch.tensor([r[4] for r in rows]), phase=torch.tensor([r[2] for r in rows], dtype=torch.uint8),
        step=torch.tensor([r[3] for r in rows]), verified_ids=torch.full((len(rows),), int(tokens[-1])),
        draft_token_ids=torch.tensor(drafts), accepted_counts=torch.tensor(counts),
    )
    read = from_trace(trace, 3)
    assert read.token_ids.tolist() == tokens.tolist()
    gate = replay(draft, [read], k=K).gate()
    assert gate.share == 1.0 and gate.steps == len(starts) and gate.left_out == 0


def test_rows_that_see_a_nan_accept_nothing_and_the_others_are_untouched() -> None:
    draft = small_draft()
    clean = replay(draft, [served(draft, 9)], k=K).sequences[0]
    spoilt = served(draft, 9)
    spoilt.features[10, 1, 3] = torch.nan
    found = replay(draft, [spoilt], k=K).sequences[0]
    early = found.answer.rows < 10
    assert early.any() and (found.answer.accepted[early] == clean.answer.accepted[early]).all()
    assert (found.answer.accepted[~early] == 0).all() and found.nonfinite == (~early).sum()
    assert np.isfinite(found.likelihood.total) and found.likelihood.rows == early.sum()


def test_what_does_not_belong_together_is_refused_by_number() -> None:
    draft = small_draft()
    sequence = served(draft, 1)
    sequence.features = sequence.features[:, :2]
    with pytest.raises(DraftscopeError, match="2 slots of width 16, the draft takes 3 of 16"):
        replay(draft, [sequence], k=K)
    sequence = served(draft, 1)
    sequence.token_ids[5] = VOCAB + 2
    with pytest.raises(DraftscopeError, match=rf"r1, row 5: token id {VOCAB + 2} .* {VOCAB}"):
        replay(draft, [sequence], k=K)
    with pytest.raises(DraftscopeError, match=r"vocabulary has 9 tokens, .* 7"):
        replay(draft, [served(draft, 1)], parts=target_parts(vocab=9), k=K)
    with pytest.raises(DraftscopeError, match="8 wide, the draft was made for 16"):
        replay(draft, [served(draft, 1)], parts=target_parts(width=8), k=K)
    draft.embedding = None
    with pytest.raises(UsageError, match="no embedding"):
        replay(draft, [], k=K)


def test_short_and_empty_sequences_count_for_nothing() -> None:
    draft = small_draft()
    states, answer = torch.zeros(3, 3, WIDTH), torch.tensor([False, True, True])
    short = Sequence("short", torch.tensor([1, 2, 3]), states, None, answer, torch.arange(3))
    empty = Sequence("empty", torch.zeros(0).long(), states[:0], None, answer[:0], torch.arange(0))
    result = replay(draft, [short, empty, short], k=K, text="own")
    assert [s.name for s in result.sequences] == ["short", "empty", "short (2)"]
    rung = result.rung("walk")
    assert (rung.length, rung.rounds, rung.rows, rung.nll, rung.conditional) == (None, 0, 0, None, [None] * K)
    assert result.gate() is None and replay(draft, [], k=K).rung().rounds == 0


def test_comparison_pairs_by_sequence() -> None:
    draft = small_draft()
    sequences = [served(draft, 60 + i, rounds=6) for i in range(12)]
    worse = small_draft(norm_before_residual=True)
    worse.embedding = draft.embedding
    first, second = replay(draft, sequences, k=K), replay(worse, [s for s in sequences if s.name != "r60"], k=K)
    lengths, nlls = compare(first, second, "engine")
    assert lengths.sequences == 11 and lengths.unpaired == 1
    paired = first.only({s.name for s in sequences} - {"r60"})
    assert lengths.value == pytest.approx(second.rung("engine").length - paired.rung("engine").length)
    low, high = lengths.interval
    assert low < lengths.value < high < 0
    assert nlls.value == pytest.approx(second.rung("all").nll - paired.rung("all").nll) and nlls.sequences == 11
    assert compare(first, first, "engine")[0].interval == (0.0, 0.0)
    few = first.only({"r61", "r62"})
    assert compare(few, few)[0].interval is None
