"""`draftscope replay` on files: side by side, paired, as JSON, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import VOCAB, WIDTH, K, served, small_draft

from draftscope.cli.main import run
from draftscope.counterfactual import Replays, counterfactuals
from draftscope.eagle3.checkpoint import save_native
from draftscope.eagle3.model import Draft
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.capture import write_trace
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample, Sequence, Trace


def save_draft(folder: Path, draft: Draft, *, embedding: bool = True, extra: dict[str, Any] | None = None) -> Path:
    save_native(folder, draft, None, dtype=torch.float32, extra=extra)
    if embedding:
        file = folder / "model.safetensors"
        save_file(load_file(file) | {"embed_tokens.weight": draft.embedding.float()}, file)
    return folder


def save_capture(folder: Path, sequences: list[Sequence], *, k: int | None = K, flip: bool = False) -> Path:
    """As an engine leaves it: without the rejected rows, the last token known only as the target's choice."""
    folder.mkdir()
    for i, sequence in enumerate(sequences):
        rows, steps = sequence.rows, sequence.steps
        step = torch.full((rows,), -1)
        for number, start in enumerate(steps.start.tolist()):
            step[start + 1 :] = number
        verified = torch.full((rows,), -1)
        verified[-1] = sequence.token_ids[-1]
        slots = sequence.features.flip(1) if flip else sequence.features
        write_trace(folder / f"{i:03d}.safetensors", Trace(
            name="", fc_input=slots.flatten(1).float(), token_ids=sequence.token_ids[:rows],
            accepted=torch.ones(rows, dtype=torch.bool), phase=(step >= 0).to(torch.uint8), step=step, verified_ids=verified,
            draft_token_ids=steps.drafted, accepted_counts=steps.accepted, meta={} if k is None else {"num_spec_tokens": k},
        ))
    return folder


def save_samples(folder: Path, sequences: list[Sequence], last: list[torch.Tensor]) -> Path:
    folder.mkdir()
    for i, (sequence, state) in enumerate(zip(sequences, last, strict=True)):
        rows = sequence.rows
        write_sample(folder / f"hs_{i}.safetensors", Sample(
            name="", token_ids=sequence.token_ids[:rows],
            states=torch.cat([sequence.features.float(), state[:, None].float()], 1), loss_mask=sequence.answer[:rows],
            labels=("a", "b", "c", "last"), index=i,
        ))
    return folder


def save_parts(folder: Path, embedding: torch.Tensor) -> tuple[Path, torch.Tensor]:
    """A target that is nothing but its ends; returns its head."""
    folder.mkdir()
    orthogonal = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)))[0]
    head = orthogonal[: len(embedding)].contiguous()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }))
    save_file({"model.embed_tokens.weight": embedding.float().contiguous(), "model.norm.weight": torch.ones(WIDTH),
               "lm_head.weight": head}, folder / "model.safetensors")
    return folder, head


@pytest.fixture
def draft() -> Draft:
    return small_draft(2)


@pytest.fixture
def sequences(draft: Draft) -> list[Sequence]:
    return [served(draft, 200 + i, rounds=5) for i in range(9)]


def test_a_capture_passes_the_gate_and_its_faults_are_undone_by_name(tmp_path: Path, draft: Draft, sequences: list) -> None:
    folder = save_draft(tmp_path / "draft", draft)
    clean = counterfactuals([folder], save_capture(tmp_path / "clean", sequences))
    flipped = save_capture(tmp_path / "flipped", sequences, flip=True)
    found = counterfactuals([folder], flipped, sets=["slots=2,1,0", "slots=2,1,0 feedback=post"])
    assert found.k == K and clean.readout == found.readout == "walk"
    first, repaired, both = found.rungs
    assert [rung.set for rung in found.rungs] == [[], ["slots=2,1,0"], ["slots=2,1,0", "feedback=post"]]
    assert clean.rungs[0].gate.passed and clean.rungs[0].gate.share == 1.0 and not first.gate.passed
    assert repaired.gate.share == 1.0 and repaired.joint == clean.rungs[0].joint and repaired.length > first.length
    low, high = repaired.change.interval
    assert low <= repaired.change.value <= high and repaired.change.sequences == 9 and first.change is None
    assert repaired.change.value == pytest.approx(repaired.length - first.length)
    assert both.gate.share < 1 and repaired.nll_change.value == pytest.approx(repaired.nll - first.nll)
    engine = counterfactuals([folder], tmp_path / "clean", readout="engine").rungs[0]
    counts = torch.cat([s.steps.accepted for s in sequences])
    assert engine.length == pytest.approx(float((counts + 1).double().mean()), abs=0.25) and engine.rounds <= len(counts)


def test_k_is_what_was_recorded_where_nothing_claims_it(tmp_path: Path, draft: Draft, sequences: list) -> None:
    folder = save_draft(tmp_path / "draft", draft)
    short = [replace(s, steps=replace(s.steps, drafted=s.steps.drafted[:, :2], accepted=s.steps.accepted.clamp(max=2)))
             for s in sequences]
    claimed = counterfactuals([folder], save_capture(tmp_path / "claimed", short, k=2))
    bare = counterfactuals([folder], save_capture(tmp_path / "bare", short, k=None))
    assert (bare.k, bare.rungs[0].joint) == (2, claimed.rungs[0].joint) and not any("give --k" in note for note in bare.notes)
    counts = torch.cat([s.steps.accepted for s in short])
    clipped = counterfactuals([folder], tmp_path / "bare", k=1)
    assert any(f"{int((counts > 1).sum())} of {len(counts)} recorded steps accepted more than K = 1" in note
               for note in clipped.notes), clipped.notes


def test_several_drafts_on_training_states_with_the_targets_ends(tmp_path: Path, draft: Draft, sequences: list) -> None:
    other = small_draft(2, norm_before_residual=True)
    target, head = save_parts(tmp_path / "target", draft.embedding)
    states = save_samples(tmp_path / "train", sequences, [head[s.token_ids[1:]] * 3 for s in sequences])
    drafts = [save_draft(tmp_path / "a", draft, embedding=False), save_draft(tmp_path / "b", other, embedding=False)]
    found = counterfactuals(drafts, states, target=target)
    assert found.readout == "walk" and [r.draft for r in found.rungs] == [str(d) for d in drafts]
    assert found.rungs[0].text["share"] == 1.0 and found.rungs[0].text["own"] == 9
    assert found.rungs[0].length > found.rungs[1].length and found.rungs[0].gate is None
    same = counterfactuals([drafts[1]], states, target=target, sets=["norm_before_residual=false"])
    assert same.rungs[1].joint == found.rungs[0].joint
    with pytest.raises(UsageError, match="no embedding, and without the target"):
        counterfactuals([drafts[0]], states)
    own = counterfactuals([save_draft(tmp_path / "c", draft)], states, text="own")
    assert own.rungs[0].joint == found.rungs[0].joint
    assert counterfactuals([drafts[0]], states, target=target, max_tokens=40).rungs[0].sequences < 9


def test_a_consumers_reading_is_the_starting_point(tmp_path: Path) -> None:
    draft = small_draft(2, norm_before_residual=True)
    folder = save_draft(tmp_path / "draft", draft)
    states = save_capture(tmp_path / "capture", [served(draft, 300 + i, rounds=5) for i in range(3)])
    found = counterfactuals([folder], states, consumer="sglang", sets=["norm_before_residual=true"])
    assert [rung.gate.passed for rung in found.rungs] == [False, True]
    assert any("does not implement norm_before_residual" in note for note in found.notes)
    assert counterfactuals([folder], states, consumer="vllm").rungs[0].gate.passed


def test_the_command_prints_a_table_and_writes_the_contract(
    tmp_path: Path, draft: Draft, sequences: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    folder, states = save_draft(tmp_path / "draft", draft), save_capture(tmp_path / "capture", sequences, k=None)
    line = ["replay", "--draft", str(folder), "--states", str(states), "--set", "d2t=zero feedback=post", "--set", "scale.1=4"]
    assert run([*line, "--json", str(tmp_path / "out.json")]) == 0
    shown = "".join(capsys.readouterr().out.split())  # cells wrap where paths are long
    assert "9sequences,asaserverwalks,K=3" in shown
    assert "feedback=post" in shown
    assert "gate" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["schema"] == "draftscope.replay/1" and len(written["rungs"]) == 3
    rung = written["rungs"][1]
    promised = {"k", "length", "interval", "joint", "conditional", "nll", "coverage", "rounds", "rows", "readout", "held_out"}
    assert promised <= set(rung)
    assert rung["draft"] == str(folder) and rung["set"] == ["d2t=zero", "feedback=post"]
    assert Replays.model_validate(written).rungs[0].length == pytest.approx(1 + sum(written["rungs"][0]["joint"]))
    assert run([*line[:5], "--readout", "all", "--k", "2", "--json", "-"]) == 0
    captured = capsys.readouterr()
    alone = json.loads(captured.out)
    assert alone["rungs"][0]["length"] is None and alone["k"] == 2 and "no accept length" in captured.err


@pytest.mark.parametrize(
    ("extra", "code", "says"),
    [(["--set", "nrom_output=1"], 2, "no key 'nrom_output'"), (["--for", "vllm@0.1"], 2, "Known: vllm@0.33"),
     (["--readout", "some"], 2, "some"), (["--set", "slots=0,1,7"], 3, "there is no slot 7"),
     (["--k", "0"], 2, "greater than or equal to 1")],
)
def test_refusals(tmp_path: Path, draft: Draft, sequences: list, capsys: pytest.CaptureFixture[str], extra: list[str], code: int,
                  says: str) -> None:
    folder, states = save_draft(tmp_path / "draft", draft), save_capture(tmp_path / "capture", sequences[:1])
    assert run(["replay", "--draft", str(folder), "--states", str(states), *extra]) == code
    assert says in capsys.readouterr().err


def test_what_does_not_belong_together_is_refused_by_number(tmp_path: Path, draft: Draft, sequences: list) -> None:
    folder = save_draft(tmp_path / "draft", draft)
    narrow = [replace(s, features=s.features[..., : WIDTH // 2]) for s in sequences[:1]]
    with pytest.raises(DraftscopeError, match=rf"fc_input is {3 * WIDTH // 2} wide, .* = {3 * WIDTH}"):
        counterfactuals([folder], save_capture(tmp_path / "narrow", narrow))
    target, _ = save_parts(tmp_path / "target", torch.randn(VOCAB + 2, WIDTH))
    with pytest.raises(DraftscopeError, match=rf"vocabulary has {VOCAB + 2} tokens, .* {VOCAB}"):
        counterfactuals([folder], save_capture(tmp_path / "capture", sequences[:1]), target=target)
    assert run(["replay", "--draft", str(folder), "--states", str(tmp_path / "none"), "--json", str(tmp_path / "out.json")]) == 3
    assert "does not exist" in json.loads((tmp_path / "out.json").read_text())["next"][0]
