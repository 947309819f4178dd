"""What each trainer's preset does, against that trainer restated row by row in float64; a row's loss against torch's own."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import restated
import torch
from restated import Plain
from safetensors import safe_open
from support import VOCAB, WIDTH, random_draft, save_target
from torch import Tensor
from torch.nn import functional as F

from draftscope.cli.main import run
from draftscope.eagle3.collate import Collate
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.loss import Loss, ttt_loss
from draftscope.eagle3.model import Draft
from draftscope.eagle3.recipes import PRESETS
from draftscope.eagle3.rowloss import head_loss, row_losses
from draftscope.eagle3.runstate import STATE, RunFolder
from draftscope.eagle3.settings import LossKind, Settings
from draftscope.eagle3.start import draft_vocabulary
from draftscope.errors import DraftscopeError
from draftscope.states.types import Sample
from draftscope.target.parts import TargetParts

D = 200
KINDS: tuple[LossKind, ...] = ("soft-ce", "kl", "reverse-kl", "jsd", "ce", "tv", "nla", "lk-hybrid")


def ends() -> TargetParts:
    """A target whose logits are small, so that float32 tells them as well as float64 does."""
    draw = torch.Generator().manual_seed(0)
    table = 0.1 * torch.randn(VOCAB, WIDTH, generator=draw)
    norm = 1 + 0.1 * torch.randn(WIDTH, generator=draw)
    return TargetParts(embedding=table, norm_weight=norm, norm_eps=1e-5, norm_offset=0.0, head=table, layers=8, embed_scale=1.0,
                       model_type="llama", folder=Path())


def sample(seed: int, length: int, prompt: int, closed: int = 0) -> Sample:
    """An answer from `prompt` on, but for the last `closed` tokens; and one of a single token inside the prompt."""
    draw = torch.Generator().manual_seed(seed)
    tokens, states = torch.randint(0, VOCAB, (length,), generator=draw), torch.randn(length, 4, WIDTH, generator=draw)
    mask = (torch.arange(length) >= prompt) & (torch.arange(length) < length - closed)
    mask[2] = True
    return Sample(f"sample {seed}", tokens, states, mask, ("",) * 4, seed)


def model(preset: str, **changes: Any) -> tuple[Draft, Tensor, Plain]:
    """A draft of the preset's shape, its target ids, and the same restated."""
    shape = PRESETS[preset].shaped | changes
    draft = random_draft(draft_vocab=D, **shape).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    d2t, _, _ = draft_vocabulary((torch.arange(VOCAB) + 6) % 7, D)
    draft.target_ids, draft.embedding = torch.arange(D) + d2t, torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    config = draft.config
    plain = Plain(
        {name: p.detach() for name, p in draft.named_parameters()}, draft.embedding, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.rms_norm_eps, norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc, norm_output=config.norm_output, window=config.sliding_window,
    )
    return draft, draft.target_ids, plain


def whole(items: list[Sample], parts: TargetParts) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    found = []
    for item in items:
        x = item.states[:, -1].double()
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * parts.norm_weight.double()
        assert item.loss_mask is not None
        found.append((item.states[:, :3].double().flatten(1), item.token_ids, item.loss_mask, normed @ parts.head.double().T))
    return found


def ours(draft: Draft, ids: Tensor, settings: Settings, items: list[Sample], parts: TargetParts) -> Loss:
    batch = Collate.of(parts, ids, settings)(load_examples(items, parts), torch.float64)
    return ttt_loss(draft, batch, settings.decay, kind=settings.loss, normaliser=settings.normaliser,
                    first_position=settings.first_position, window_moves=settings.window_moves)


def settings_of(preset: str) -> Settings:
    return Settings(**PRESETS[preset].chosen)


def check(found: Loss, steps: list[float], decay: float) -> None:
    torch.testing.assert_close(found.steps, steps, rtol=1e-6, atol=0)
    total = sum(decay**k * loss for k, loss in enumerate(steps))
    torch.testing.assert_close(float(found.total.detach()), total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("closed", [0, 2])
def test_safeai_as_restated(closed: int) -> None:
    """Open at the end, the row past it is taught too: token 0 is in the draft vocabulary, or it is not."""
    parts, (draft, ids, plain) = ends(), model("safeai")
    settings, item = settings_of("safeai"), sample(3, 15, 6, closed)
    for kept in (True, False):
        if not kept:
            ids = torch.cat([ids[1:], torch.tensor([i for i in range(VOCAB) if i not in ids.tolist()][:1])]).sort().values
        draft.target_ids = ids
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[ids] = True
        assert bool(t2d[0]) == kept
        ((features, tokens, mask, logits),) = whole([item], parts)
        steps = restated.safeai(plain, features, tokens, mask, logits, t2d)
        assert len(steps) == 7 and min(steps) > 0
        check(ours(draft, ids, settings, [item], parts), steps, 0.8)
        if not closed:
            without = ours(draft, ids, replace(settings, past_end=False), [item], parts)
            assert (without.rows != ours(draft, ids, settings, [item], parts).rows) == kept


def test_specforge_as_restated() -> None:
    parts, (draft, ids, plain) = ends(), model("specforge")
    items = [sample(3, 15, 6), sample(4, 11, 4, 1), sample(5, 9, 3, 3)]
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    steps = restated.specforge(plain, whole(items, parts), t2d)
    assert len(steps) == 7 and steps[0] > steps[6] > 0
    check(ours(draft, ids, settings_of("specforge"), items, parts), steps, 0.8)


@pytest.mark.parametrize("window", [2048, 4])
def test_speculators_as_restated(window: int) -> None:
    parts, (draft, ids, plain) = ends(), model("speculators", sliding_window=window)
    items = [sample(3, 15, 6), sample(4, 11, 4, 1), sample(5, 9, 3, 3)]
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    steps = restated.speculators(plain, whole(items, parts), t2d)
    assert len(steps) == 3 and min(steps) > 0
    settings = settings_of("speculators")
    check(ours(draft, ids, settings, items, parts), steps, 1.0)
    moved = ours(draft, ids, replace(settings, window_moves=True), items, parts).steps
    assert (moved == pytest.approx(steps, rel=1e-6)) == (window == 2048)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("other", [
    {"loss": "reverse-kl"}, {"normaliser": "rows"}, {"normaliser": "positions"}, {"outside": "kept"}, {"outside": "masked"},
    {"alignment": "served"}, {"alignment": "same"}, {"alignment": "next"}, {"past_end": True}, {"decay": 0.5}, {"ttt_steps": 2},
], ids=str)
def test_a_choice_that_differs_gives_another_number(preset: str, other: dict[str, Any]) -> None:
    parts, (draft, ids, _) = ends(), model(preset)
    settings, items = settings_of(preset), [sample(3, 15, 6), sample(4, 15, 4)]
    one, two = (ours(draft, ids, s, items, parts) for s in (settings, replace(settings, **other)))
    same = all(getattr(settings, name) == value for name, value in other.items())
    # What lies past the end is taught only where rows hold the mask of their own token.
    same = same or (other == {"past_end": True} and settings.alignment != "same")
    assert (float(one.total.detach()) == pytest.approx(float(two.total.detach()), rel=1e-9)) == same


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_row_and_its_gradient_are_those_of_torch(kind: LossKind) -> None:
    draw = torch.Generator().manual_seed(0)
    states, head = torch.randn(600, 16, generator=draw).double(), torch.randn(40, 16, generator=draw).double()
    teacher = (2 * torch.randn(90, 40, generator=draw).double()).log_softmax(-1)
    index = torch.randint(0, 90, (600,), generator=draw)
    states.requires_grad_(True)
    head.requires_grad_(True)
    summed, correct = head_loss(kind, states, head, teacher, index, torch.float64)
    summed.backward()
    found = states.grad, head.grad
    states.grad = head.grad = None
    logits, log_p = states @ head.T, teacher[index]
    log_q, p, q = logits.log_softmax(-1), log_p.exp(), logits.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    middle = ((p + q) / 2).log()
    expected = {
        "soft-ce": F.cross_entropy(logits, p, reduction="none"), "kl": kl,
        "reverse-kl": F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1),
        "jsd": (F.kl_div(middle, log_p, reduction="none", log_target=True)
                + F.kl_div(middle, log_q, reduction="none", log_target=True)).sum(-1) / 2,
        "ce": F.cross_entropy(logits, log_p.argmax(-1), reduction="none"), "tv": 1 - alpha, "nla": -alpha.log(),
        "lk-hybrid": torch.exp(-3 * alpha.detach()) * kl + (1 - torch.exp(-3 * alpha.detach())) * (1 - alpha),
    }[kind]
    torch.testing.assert_close(row_losses(kind, logits, log_p), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summed, expected.sum(), rtol=1e-12, atol=1e-10)
    assert int(correct) == int((logits.argmax(-1) == log_p.argmax(-1)).sum())
    expected.sum().backward()
    torch.testing.assert_close(found, (states.grad, head.grad), rtol=1e-10, atol=1e-12)


def test_the_facts_are_whole() -> None:
    known, shapes = {f.name for f in fields(Settings)}, set(DraftConfig.model_fields)
    sets = [{fact.name for fact in preset.settings} for preset in PRESETS.values()]
    common = set.intersection(*sets)
    assert {"ttt_steps", "decay", "loss", "normaliser", "outside", "alignment", "past_end", "noise", "first_position"} <= common
    for preset in PRESETS.values():
        names = [fact.name for fact in (*preset.settings, *preset.shape)]
        assert len(names) == len(set(names)) and all(fact.source for fact in (*preset.settings, *preset.shape))
        assert set(preset.chosen) <= known and set(preset.shaped) <= shapes and preset.beyond
        assert {"norm_output", "norm_before_residual", "norm_before_fc", "fc_norm"} <= set(preset.shaped)
        settings_of(preset.name)


def test_the_command_takes_a_preset_and_what_is_said_besides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    lines = [f'{{"token_ids": {[(7 * i + j * j) % VOCAB for j in range(20)]}, "prompt_length": 5}}' for i in range(6)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    arguments = ["train", str(tmp_path / "c.jsonl"), "--online", "--target", str(target), "--out", str(tmp_path / "run"),
                 "--preset", "speculators", "--decay", "0.9", "--feedback", "pre", "--norms", "fc_norm", "--window", "0",
                 "--epochs", "1", "--draft-vocab", "90"]
    assert run(arguments) == 0
    assert "as speculators 0.9.0" in capsys.readouterr().err
    held = _saved(tmp_path / "run")
    settings = replace(settings_of("speculators"), decay=0.9, epochs=1)
    assert held["settings"] == json.loads(json.dumps(asdict(settings)))
    switches = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm", "sliding_window")
    assert [held["config"][name] for name in switches] == [False, False, False, True, None]
    folder = RunFolder(tmp_path / "run", {"config": held["config"] | {"fc_norm": False}})
    with pytest.raises(DraftscopeError, match="other config: fc_norm was True and is now False"):
        folder.restore()
    for bad in (["--norms", "layer_norm"], ["--past-end"], ["--learning-rate", "0"]):
        assert run([*arguments, *bad]) == 2


def _saved(folder: Path) -> dict[str, Any]:
    with safe_open(folder / STATE, "pt") as f:
        return json.loads(f.metadata()["draftscope"])
