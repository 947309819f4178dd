"""Training-time test against a row-by-row server in float64, the loss against torch's own, and runs that learn and resume."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learnable import QUICK, learnable, parts_of, shape
from support import VOCAB, WIDTH, random_draft, save_target
from torch import Tensor
from torch.nn import functional as F

from draftscope import stopping
from draftscope.boundaries import Boundary
from draftscope.cli.main import run
from draftscope.eagle3.batches import batch_order
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.choices import Choices
from draftscope.eagle3.collate import Collate
from draftscope.eagle3.corpus import Held, column_rms
from draftscope.eagle3.descent import Descent
from draftscope.eagle3.examples import Example, choices, load_examples
from draftscope.eagle3.heldout import evaluate
from draftscope.eagle3.interrupts import undisturbed
from draftscope.eagle3.loss import pack_rows, supervised_rows, ttt_loss, ttt_outputs
from draftscope.eagle3.model import Draft
from draftscope.eagle3.settings import Optimizer
from draftscope.eagle3.start import draft_vocabulary, folded, new_draft
from draftscope.eagle3.train import Settings, Watch, train
from draftscope.errors import DraftscopeError
from draftscope.states.plain import read_sample, write_sample
from draftscope.states.types import Sample
from draftscope.target.model import load_target

STEPS = 3


def sample(seed: int, length: int, prompt: int, vocab: int = VOCAB, width: int = WIDTH) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    tokens, states = torch.randint(0, vocab, (length,), generator=draw), torch.randn(length, 4, width, generator=draw)
    return Sample(f"sample {seed}", tokens, states, torch.arange(length) >= prompt, ("",) * 4, seed)


class Past:
    """Attention of a server that has one sequence: queries see every key held so far."""

    def __init__(self) -> None:
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        assert layer == 0
        self.k.append(k)
        self.v.append(v)
        groups = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x, 2).repeat_interleave(groups, 1) for x in (self.k, self.v))
        return ((q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1) @ values


def served(draft: Draft, features: Tensor, token_ids: Tensor, row: int, steps: int) -> list[Tensor]:
    """What a server computes that drafts from `row`: features of rows 0..row one by one, then its own states."""
    past = Past()
    states = draft.project(features)
    for t in range(row + 1):
        out = draft(states[None, t : t + 1], draft.embed(token_ids[None, t + 1 : t + 2]), torch.tensor([[t]]), past)
    found = [out[0, 0]]
    for k in range(1, steps):
        embeds = draft.embed(token_ids[None, row + 1 + k : row + 2 + k])
        out = draft(draft.feedback(out), embeds, torch.tensor([[row + k]]), past)
        found.append(out[0, 0])
    return found


@pytest.mark.parametrize("switches", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_fc": True, "qk_norm": True},
                                      {"norm_before_residual": True}])
def test_every_step_is_what_a_server_computes_row_by_row(switches: dict[str, Any]) -> None:
    draft = random_draft(**switches).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    draft.embedding = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    items = [sample(1, 13, 4), sample(2, 9, 3)]
    tokens = torch.zeros(2, 13, dtype=torch.int64)
    features = torch.zeros(2, 13, 3, WIDTH, dtype=torch.float64)
    wanted = torch.zeros(2, 13, dtype=torch.bool)
    for b, item in enumerate(items):
        own = len(item.token_ids)
        tokens[b, :own], features[b, :own] = item.token_ids, item.states[:, :3].double()
        wanted[b, : own - STEPS] = True
        wanted[b, 1] = False
    rows, real = pack_rows(wanted)
    with torch.no_grad():
        outputs = list(ttt_outputs(draft, features, tokens, rows, STEPS))
        for b, r in real.nonzero().tolist():
            expected = served(draft, features[b], tokens[b], int(rows[b, r]), STEPS)
            for k in range(STEPS):
                torch.testing.assert_close(outputs[k][b, r], expected[k], rtol=1e-9, atol=1e-9)


def test_loss_and_its_gradient_are_those_of_torch_over_served_rows() -> None:
    """In float64, with the teacher's softmax over the draft vocabulary, term by term."""
    parts = parts_of()
    d2t, _, _ = draft_vocabulary(torch.arange(VOCAB).flip(0), 200)
    ids = torch.arange(200) + d2t
    draft = random_draft(draft_vocab=200).double().requires_grad_(True)
    assert draft.embedding is not None
    draft.embedding, draft.target_ids = draft.embedding.double(), ids
    examples = load_examples([sample(3, 14, 5), sample(4, 10, 2), sample(5, 12, 9)], parts)
    batch = Collate.of(parts, ids, Settings(ttt_steps=STEPS))(examples, torch.float64)
    loss = ttt_loss(draft, batch, decay=0.7)
    loss.total.backward()
    gradients = {n: p.grad for n, p in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)

    terms: list[list[Tensor]] = [[] for _ in range(STEPS)]
    right = [0] * STEPS
    for example in examples:
        logits = parts.logits(parts.final_norm(example.states[:, -1]))
        for t in range(len(example) - 2):
            outputs = None
            for k in range(STEPS):
                if t + 2 + k >= len(example) or not bool(example.answer[t + 1 : t + 3 + k].all()):
                    break
                if int(logits[t + 1 + k].argmax()) not in ids.tolist():
                    continue
                outputs = outputs or served(draft, example.states[:, :3].double(), F.pad(example.token_ids, (0, STEPS)), t, STEPS)
                said = draft.logits(outputs[k])
                teacher = logits[t + 1 + k, ids].softmax(-1).double()
                terms[k].append(-(teacher * said.log_softmax(-1)).sum())
                right[k] += int(said.argmax()) == int(logits[t + 1 + k, ids].argmax())
    assert [len(x) for x in terms] == loss.rows and min(loss.rows) > 0
    assert right == loss.correct
    means = [torch.stack(x).mean() for x in terms]
    total = sum(0.7**k * mean for k, mean in enumerate(means))
    # The teacher is float32 on both sides, and rounds differently over a part of the vocabulary.
    torch.testing.assert_close(loss.steps, [float(m.detach()) for m in means], rtol=1e-6, atol=0)
    assert isinstance(total, Tensor)
    torch.testing.assert_close(loss.total.detach(), total.detach(), rtol=1e-6, atol=0)
    total.backward()
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


@settings(deadline=None, max_examples=60)
@given(answer=st.lists(st.booleans(), min_size=1, max_size=14), steps=st.integers(1, 4))
def test_supervised_rows_by_their_definition(answer: list[bool], steps: int) -> None:
    mask = torch.tensor(answer)
    length = len(answer)
    for alignment in ("served", "same", "next"):
        rows = supervised_rows(mask, steps, alignment)  # type: ignore[arg-type]
        for k in range(steps):
            for t in range(length):
                inside = t + 1 + k < length
                if alignment == "served":
                    expected = t + 2 + k < length and all(answer[t + 1 : t + 3 + k])
                elif alignment == "same":
                    expected = inside and answer[t + k]
                else:
                    expected = inside and answer[t + 1 + k]
                assert bool(rows[k, t]) == expected, (alignment, k, t)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), tokens=st.integers(20, 200), epoch=st.integers(0, 3))
def test_batches_hold_every_example_once_within_their_size(lengths: list[int], tokens: int, epoch: int) -> None:
    order = batch_order(lengths, tokens, 7, epoch)
    assert sorted(i for batch in order for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= tokens for b in order)
    assert order == batch_order(lengths, tokens, 7, epoch)


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 9), min_size=2, max_size=40), data=st.data())
def test_the_draft_vocabulary_holds_the_most_frequent_tokens_ascending(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    d2t, t2d, coverage = draft_vocabulary(torch.tensor(counts), size)
    ids = (torch.arange(size) + d2t).tolist()
    assert ids == sorted(set(ids)) == t2d.nonzero().squeeze(-1).tolist()
    assert sum(counts[i] for i in ids) == sum(sorted(counts, reverse=True)[:size])
    assert coverage == pytest.approx(sum(counts[i] for i in ids) / sum(counts) if sum(counts) else 1.0)
    with pytest.raises(DraftscopeError):
        draft_vocabulary(torch.tensor(counts), len(counts) + 1)


def test_choices_are_the_argmax_where_a_row_needs_them_and_are_kept(tmp_path: Path) -> None:
    parts = parts_of()
    item = sample(6, 12, 5)
    best = choices(parts, item.states[:, -1], item.loss_mask)  # type: ignore[arg-type]
    x = item.states[:, -1].double()
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * parts.norm_weight.double()
    assert torch.equal(best[4:], (normed @ parts.head.double().T).argmax(-1)[4:])
    assert best[:4].tolist() == [-1] * 4
    with Choices(tmp_path) as kept:
        kept.add("a", best, False)
        kept.add("b", best[:3], True)
    (tmp_path / "choices-0.jsonl").write_text((tmp_path / "choices-0.jsonl").read_text() + '["c", 15, 99, false]\n["d", ')
    with Choices(tmp_path, rank=0) as again:
        assert "c" not in again and "d" not in again, "a line whose data is not all there counts for nothing"
        again.add("e", best[2:6], False)
    whole = Choices(tmp_path, rank=1)
    for key, expected in (("a", best), ("b", best[:3]), ("e", best[2:6])):
        assert torch.equal(whole.read(key), expected) and whole.normed(key) == (key == "b")


def test_column_factors_fold_into_fc_exactly() -> None:
    parts = parts_of()
    examples = load_examples([sample(i, 20, 4) for i in range(6)], parts)
    for example in examples:
        example.states[:, 1] *= torch.linspace(0.5, 40, WIDTH)
    scale = column_rms(Held(examples))
    torch.testing.assert_close(scale[1] / scale[0], torch.linspace(0.5, 40, WIDTH), rtol=0.5, atol=0)
    config = shape(40)
    draft = new_draft(config, parts, torch.arange(40), scale)
    features = examples[0].states[:, :3]
    plain = folded(draft, scale).project(features)
    torch.testing.assert_close(plain, draft.project(features / scale).detach(), rtol=1e-4, atol=1e-4)
    means = (features / scale * (scale / scale.square().mean(1, keepdim=True).sqrt())).mean(1)
    cosine = F.cosine_similarity(plain, means, dim=-1)
    assert float(cosine.min()) > 0.8, "starts near the mean of the slots"


def test_the_shape_follows_the_target() -> None:
    config = shape(40)
    assert (config.boundaries, config.slots, config.draft_vocab_size, config.head_dim) == ((2, 4, 5), 3, 40, 16)


@pytest.mark.parametrize("settings", [
    QUICK, replace(QUICK, optimizer="muon", precision="bfloat16", learning_rate=1e-2),
], ids=["plain", "muon"])
def test_training_learns_what_can_be_learnt_and_exports_what_it_measured(settings: Settings, tmp_path: Path) -> None:
    parts, samples = learnable(36)
    examples, held = load_examples(samples[:28], parts), load_examples(samples[28:], parts)
    d2t, _, _ = draft_vocabulary(torch.bincount(torch.cat([e.token_ids for e in examples]), minlength=24), 20)
    events: list[dict[str, Any]] = []
    result = train(examples, parts, shape(20, 24), d2t, tmp_path, settings=settings, heldout=held, extra={"note": "a test"},
                   on_event=lambda e: events.append(dict(e)))
    steps = [e for e in events if "losses" in e]
    assert result.finished and result.steps == len(steps) == steps[-1]["of"]
    assert sum(result.losses[-5:]) < 0.6 * sum(result.losses[:5])
    assert result.heldout is not None and result.heldout.length > 1.8
    assert all(a >= b for a, b in zip(result.heldout.joint, result.heldout.joint[1:], strict=False))
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == events

    checkpoint = load_checkpoint(tmp_path / "draft", target_layers=8)
    assert checkpoint.missing == () and checkpoint.raw["note"] == "a test" and checkpoint.config.boundaries == (2, 4, 5)
    again = evaluate(build_draft(checkpoint, parts), Held(held),
                     Collate.of(parts, torch.arange(20) + d2t, settings), STEPS)
    assert again.rows == result.heldout.rows
    assert again.length == pytest.approx(result.heldout.length, abs=0.06), "bfloat16, factors folded in"


def test_narrow_products_give_nearly_the_same_gradient() -> None:
    parts, samples = learnable(4)
    draft = new_draft(shape(24, 24), parts, torch.arange(24), None).requires_grad_(True)
    batch = Collate.of(parts, torch.arange(24), Settings(ttt_steps=STEPS))(load_examples(samples, parts))
    found = []
    for precision in (torch.float32, torch.bfloat16):
        draft.zero_grad(set_to_none=True)
        ttt_loss(draft, batch, precision=precision).total.backward()
        found.append({name: p.grad.flatten() for name, p in draft.named_parameters() if p.grad is not None})
    assert all(g.dtype == torch.float32 for g in found[1].values())
    for name, exact in found[0].items():
        assert not torch.equal(exact, found[1][name]), name
        assert F.cosine_similarity(exact, found[1][name], dim=0) > 0.995, name


def test_held_out_acceptance_is_that_of_a_server() -> None:
    parts, samples = learnable(3, seed=3)
    samples[1].token_ids[12:] = samples[1].token_ids[12:].flip(0)
    held = load_examples(samples, parts)
    draft = new_draft(shape(18, 24), parts, torch.arange(18), None)
    found = evaluate(draft, Held(held), Collate.of(parts, torch.arange(18), Settings(ttt_steps=STEPS)), STEPS)
    counts, rows = [0] * STEPS, 0
    for e in held:
        for t in range(len(e) - 1 - STEPS):
            window = e.token_ids[t + 2 : t + 1 + STEPS]
            if not bool(e.answer[t + 1 : t + 2 + STEPS].all()) or not torch.equal(window, e.best[t + 1 : t + STEPS]):
                continue
            rows += 1
            with torch.no_grad():
                outputs = served(draft, e.states[:, :3], e.token_ids, t, STEPS)
            for k in range(STEPS):
                if int(draft.logits(outputs[k]).argmax()) != int(e.best[t + 1 + k]):
                    break
                counts[k] += 1
    assert rows == found.rows and 0 < counts[0] < rows
    assert found.joint == pytest.approx([c / rows for c in counts])
    assert found.length == pytest.approx(1 + sum(counts) / rows)


class Stopped(Exception):
    """Stands for a kill: the run gets no chance to save."""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path, how: str, optimizer: Optimizer) -> None:
    parts, samples = learnable(20)
    examples = load_examples(samples, parts)
    d2t, _, _ = draft_vocabulary(torch.ones(24), 24)
    quick = replace(QUICK, epochs=2, noise=0.05, optimizer=optimizer)

    def training(folder: Path, stop: int | None = None) -> Any:
        def watch(event: Any) -> None:
            if event["step"] == stop:
                raise Stopped if how == "killed" else KeyboardInterrupt

        # Saved after every step, as the time between two saves is never reached.
        return train(examples, parts, shape(24, 24), d2t, folder, settings=quick, watch=Watch(save_minutes=-1), on_event=watch)

    whole = training(tmp_path / "whole")
    if how == "killed":
        with pytest.raises(Stopped):
            training(tmp_path / "parts", stop=4)
    else:
        assert not training(tmp_path / "parts", stop=4).finished
    rest = training(tmp_path / "parts")
    assert rest.finished and rest.steps == whole.steps
    for (name, a), (_, b) in zip(whole.draft.named_parameters(), rest.draft.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    logged = [[json.loads(line) for line in (tmp_path / f / "log.jsonl").read_text().splitlines()] for f in ("whole", "parts")]
    assert [e["loss"] for e in logged[0]] == [e["loss"] for e in logged[1]]
    assert training(tmp_path / "parts").steps == whole.steps, "a finished run has nothing left to do"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["step", "last step", "evaluation", "last evaluation"])
def test_a_signal_at_any_moment_loses_nothing(
    tmp_path: Path, when: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state holds whole steps, and what belongs to a step (log, draft, evaluation) is made up for."""
    parts, samples = learnable(12)
    examples = load_examples(samples, parts)
    quick = replace(QUICK, epochs=2)

    def training(folder: Path) -> Any:
        return train(examples[:8], parts, shape(24, 24), None, folder, settings=quick, heldout=examples[8:],
                     watch=Watch(evaluate_every=2, save_minutes=1e9))

    whole = training(tmp_path / "whole")
    real: dict[str, Any] = {"step": Descent.step, "evaluation": evaluate}
    calls = 0
    of = {"step": 3, "last step": whole.steps, "evaluation": 2, "last evaluation": len(whole.history)}[when]

    def disturbed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == of:
            signal.raise_signal(number)
        return real[when.split()[-1]](*arguments)

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with monkeypatch.context() as patched:
        patched.setattr(stopping, "_wish", None)
        if "step" in when:
            patched.setattr(Descent, "step", disturbed)
        else:
            patched.setattr("draftscope.eagle3.train.evaluate", disturbed)
        try:
            for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(one, signal.SIG_DFL)  # a run without a terminal may ignore some
            stopping.watch()
            assert not training(tmp_path / "parts").finished
        finally:
            for one, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), before, strict=True):
                signal.signal(one, handler)
    rest = training(tmp_path / "parts")
    assert rest.finished and rest.steps == whole.steps
    for (name, a), (_, b) in zip(whole.draft.named_parameters(), rest.draft.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    logs = [[json.loads(line) for line in (tmp_path / f / "log.jsonl").read_text().splitlines()] for f in ("whole", "parts")]
    told = [[(e["step"], e.get("loss"), e.get("heldout"), e.get("best"), e.get("stale")) for e in log] for log in logs]
    assert told[0] == told[1]
    for kept in ("draft", "best"):
        made = [(tmp_path / f / kept / "model.safetensors").read_bytes() for f in ("whole", "parts")]
        assert made[0] == made[1], kept


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_over_other_data_or_another_target_is_not_gone_on_with(tmp_path: Path) -> None:
    parts, samples = learnable(8)
    examples = load_examples(samples, parts)
    d2t, _, _ = draft_vocabulary(torch.ones(24), 12)

    def training(some: Any = examples[:6], target: Any = parts, offsets: Any = d2t, held: Any = examples[6:]) -> Any:
        return train(some, target, shape(12, 24), offsets, tmp_path, settings=replace(QUICK, epochs=1), heldout=held)

    training()
    before = (tmp_path / "training.safetensors").read_bytes()
    spoilt = [replace(e, states=e.states + 1) for e in examples]
    masked = [replace(e, answer=torch.arange(len(e)) >= 1) for e in examples]
    other = replace(parts, norm_weight=parts.norm_weight * 2)
    for kind, changed in {"sample contents": {"some": spoilt[:6]}, "sample  contents": {"some": masked[:6]},
                          "held-out samples": {"held": spoilt[6:]}, "target": {"target": other},
                          "vocabulary map": {"offsets": d2t + 12}}.items():
        with pytest.raises(DraftscopeError, match=f"a run over other {' '.join(kind.split())}"):
            training(**changed)
    assert (tmp_path / "training.safetensors").read_bytes() == before
    training()


def test_a_folder_with_another_run_is_not_overwritten(tmp_path: Path) -> None:
    parts, samples = learnable(6)
    examples = load_examples(samples, parts)
    quick = replace(QUICK, epochs=1)
    train(examples, parts, shape(24, 24), None, tmp_path, settings=quick)
    before = (tmp_path / "training.safetensors").read_bytes()
    with pytest.raises(DraftscopeError, match="settings"):
        train(examples, parts, shape(24, 24), None, tmp_path, settings=replace(quick, seed=1))
    with pytest.raises(DraftscopeError, match="data"):
        train(examples[1:], parts, shape(24, 24), None, tmp_path, settings=quick)
    assert (tmp_path / "training.safetensors").read_bytes() == before
    (tmp_path / "training.safetensors").write_bytes(before[:100])
    with pytest.raises(DraftscopeError, match="not the state of a run"):
        train(examples, parts, shape(24, 24), None, tmp_path, settings=quick)


def test_states_that_are_not_finite_stop_the_run_and_are_named(tmp_path: Path) -> None:
    parts, samples = learnable(6)
    examples = load_examples(samples, parts)
    examples[3].states[7, 1, 5] = float("nan")
    with pytest.raises(DraftscopeError, match="text 3: the states of token 7 are not finite"):
        train(examples, parts, shape(24, 24), None, tmp_path, settings=QUICK)


def test_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    parts, samples = learnable(3)
    with pytest.raises(DraftscopeError, match="nothing to train on"):
        train([], parts, shape(24, 24), None, tmp_path)
    with pytest.raises(DraftscopeError, match="slots"):
        train(load_examples(samples, parts), parts, shape(24, 24, slots=2), None, tmp_path)
    few = [replace(e, states=e.states[:, 1:]) for e in load_examples(samples, parts)]
    with pytest.raises(DraftscopeError, match=r"text 0: states hold 3 entries"):
        train(load_examples(samples, parts), parts, shape(24, 24), None, tmp_path / "held", heldout=few)
    assert not (tmp_path / "held").exists()
    with pytest.raises(DraftscopeError, match="64 wide, the target 32"):
        load_examples(samples, parts_of(1, 24, 32))
    with pytest.raises(DraftscopeError, match="vocabulary of 10"):
        load_examples(samples, parts_of(1, 10))
    silent = Sample("silent", samples[0].token_ids, samples[0].states, torch.zeros(24, dtype=torch.bool), ("",) * 4)
    assert load_examples([silent], parts) == []


def test_an_example_without_a_mask_is_all_answer() -> None:
    parts, samples = learnable(1)
    samples[0].loss_mask = None
    example: Example = load_examples(samples, parts)[0]
    assert bool(example.answer.all())


def test_the_command_trains_from_files_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    loaded = load_target(target)
    draw = torch.Generator().manual_seed(0)
    (tmp_path / "states").mkdir()
    for i in range(8):
        ids = torch.randint(3, VOCAB, (16,), generator=draw)
        found = loaded.forward(ids[None], [Boundary(b) for b in (2, 4, 5, 8)])
        write_sample(tmp_path / "states" / f"hs_{i}.safetensors",
                     Sample("", ids, found.taps[0], torch.arange(16) >= 6, ("",) * 4, i))
    (tmp_path / "states" / "hs_8.safetensors").write_bytes(b"cut off")
    arguments = ["train", str(tmp_path / "states"), "--target", str(target), "--out", str(tmp_path / "run"),
                 "--draft-vocab", "50", "--heldout", str(tmp_path / "states"), "--epochs", "1", "--batch-tokens", "64",
                 "--json", "-"]
    assert run(arguments) == 0
    out, told = capsys.readouterr()
    figures = json.loads(out)
    assert figures["schema"] == "draftscope.train/1" and figures["samples"] == 8 and figures["heldout_samples"] == 8
    assert "hs_8.safetensors" in told and "1 files passed over" in told
    checkpoint = load_checkpoint(tmp_path / "run" / "draft", target_layers=8)
    assert checkpoint.config.draft_vocab_size == 50 and checkpoint.missing == ()
    before = (tmp_path / "run" / "training.safetensors").read_bytes()
    assert run(arguments) == 0
    assert (tmp_path / "run" / "training.safetensors").read_bytes() == before
    capsys.readouterr()
    assert run([*arguments, "--seed", "3"]) == 3
    assert "another folder" in capsys.readouterr().err
    assert run([*arguments, "--clip", "-1"]) == 2
    assert run([*arguments[:-2], "--out", str(tmp_path / "other"), "--boundaries", "2,4"]) == 2
    assert "--boundaries names 2, the states have 3 slots" in capsys.readouterr().err
    for i in range(8):
        held = read_sample(tmp_path / "states" / f"hs_{i}.safetensors", [])
        write_sample(tmp_path / "said" / f"hs_{i}.safetensors", held, {"layer_ids": [1, 3, 6, 8]})
    said = ["train", str(tmp_path / "said"), "--target", str(target), "--out", str(tmp_path / "said-run"), "--draft-vocab", "50",
            "--epochs", "1", "--batch-tokens", "64"]
    assert run(said) == 2
    assert "hold boundaries 1,3,6, and the draft would be written for 2,4,5" in capsys.readouterr().err
    assert not (tmp_path / "said-run" / "draft").exists()
    assert run([*said, "--boundaries", "1,3,6"]) == 0
    assert load_checkpoint(tmp_path / "said-run" / "draft", target_layers=8).config.boundaries == (1, 3, 6)
