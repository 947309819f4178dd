"""Faults of slots: named with their phase, two at once, told from each other, undone by name; sound data stays quiet."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_conversations, tiny_prompts, tiny_rig, tiny_target

from draftscope.boundaries import Boundary
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import Examination, diagnose, open_case
from draftscope.faults import FAULTS, fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig, Run
from draftscope.findings import Diagnosis
from draftscope.target.model import load_target
from draftscope.target.wiring import Wiring

BOUNDARIES = (2, 4, 5)
OURS = ("layer-offset", "layer-set", "residual-missing", "final-norm", "scale-mult", "rotated-space", "token-shift",
        "target-quant")


def examine(run: Run) -> Diagnosis:
    return diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET))


def planted(folder: Path, *faults: tuple[str, str], rig: Rig | None = None) -> Diagnosis:
    plant = Plant.healthy(BOUNDARIES)
    for name, variant in faults:
        plant = fault(name).make(plant, variant)
    return examine((rig or tiny_rig()).run(plant, folder))


def told(found: Diagnosis) -> list[tuple[str, str, str]]:
    return [(f.fault, f.strength, f.says) for f in found.findings]


@pytest.mark.parametrize("name", OURS)
def test_a_page_has_a_trace_for_every_variant(name: str) -> None:
    one = fault(name)
    assert one.page is not None
    assert set(one.page.traces) == set(one.variants)
    assert set(one.page.lookalikes) - {f.id for f in FAULTS} <= {
        "req-mix", "graph-capture", "pos-id", "parallel-shard", "tied-head", "data-offpolicy"}
    assert one.page.reports
    with pytest.raises(ValueError, match="no variant"):
        one.make(Plant.healthy(BOUNDARIES), "no such variant")


@pytest.mark.parametrize("name", OURS)
def test_a_mended_plant_is_sound(name: str) -> None:
    """Every fault of the serving side is gone from the set-up once its fix is applied."""
    one = fault(name)
    for variant in one.variants:
        if not variant.startswith("train"):
            mended = one.mend(one.make(Plant.healthy(BOUNDARIES), variant), BOUNDARIES)
            assert mended == Plant.healthy(BOUNDARIES), variant


@pytest.mark.parametrize(("name", "variant", "words"), [
    ("layer-set", "verify rows", "in rows of verify steps"),
    ("layer-offset", "verify rows +1", "in rows of verify steps"),
    ("scale-mult", "verify rows x8", "in rows of verify steps"),
    ("token-shift", "prefill rows +1", "in the prompt's rows"),
    ("rotated-space", "verify rows", "in rows of verify steps"),
])
def test_a_fault_of_one_phase_is_named_with_it(name: str, variant: str, words: str, tmp_path: Path) -> None:
    found = planted(tmp_path, (name, variant))
    assert [f.fault for f in found.findings] == [name], told(found)
    first = found.findings[0]
    assert words in first.says
    assert {figure["phase"] for figure in first.evidence[0].figures.values()} == {"verify" if "verify" in words else "prefill"}
    assert first.acceptance is not None
    assert (first.acceptance.gain or 0) > 0


PAIRS = [
    (("token-shift", "+1"), ("scale-mult", "one slot x8")),
    (("layer-offset", "last slot +1"), ("scale-mult", "one slot x8")),
    (("layer-set", "embedding in front"), ("vocab-map", "engine drops it")),
    (("layer-set", "verify rows"), ("scale-mult", "one slot x1.2")),
    (("rotated-space", "one slot"), ("layer-offset", "last slot +1")),
    (("final-norm", "last slot"), ("layer-offset", "first slot -1")),
    (("residual-missing", "branch in one slot"), ("scale-mult", "one slot x8")),
    (("token-shift", "+1"), ("layer-offset", "+1")),
    (("token-shift", "one slot +1"), ("scale-mult", "one slot x8")),
    (("rotated-space", "one slot"), ("layer-set", "permuted")),
    (("rotated-space", "orthogonal"), ("layer-offset", "+1")),
]


@pytest.mark.parametrize("pair", PAIRS, ids=[" and ".join(f"{name}: {variant}" for name, variant in pair) for pair in PAIRS])
def test_two_faults_are_named_and_ordered(pair: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    found = planted(tmp_path, *pair)
    assert {f.fault for f in found.findings if f.strength == "proven"} == {name for name, _ in pair}, told(found)
    assert [step.fault for step in found.repair] == [f.fault for f in found.findings if f.acceptance is not None]
    effects = [f.acceptance for f in found.findings if f.strength == "proven"]
    assert all(e is not None and e.all_fixed is not None and e.left_in is not None for e in effects)
    reference = found.acceptance.reference
    assert reference is not None
    assert reference.length is not None
    # With both undone the draft does as on the target's own states; the costlier comes first.
    assert found.repair[-1].length == pytest.approx(reference.length, rel=0.15)
    gains = [e.gain for e in effects if e is not None and e.gain_interval is not None and e.gain_interval[0] > 0]
    assert gains == sorted(gains, reverse=True)
    assert any(text.startswith("mend in this order") for text in found.next)


def test_both_faults_of_one_slot_cost_what_they_cost_alone(tmp_path: Path) -> None:
    """Another layer's state times eight: own states with the factor left in are as bad as the factor alone."""
    both = planted(tmp_path / "both", ("layer-offset", "last slot +1"), ("scale-mult", "one slot x8"))
    alone = planted(tmp_path / "alone", ("scale-mult", "one slot x8"))
    left = {f.fault: f.acceptance.left_in for f in both.findings if f.acceptance is not None}
    assert alone.findings[0].acceptance is not None
    assert left["scale-mult"] == pytest.approx(alone.findings[0].acceptance.length_now, abs=0.15)


def test_a_diagnosis_takes_about_twenty_replays(tmp_path: Path) -> None:
    plant = Plant.healthy(BOUNDARIES)
    for name, variant in (("layer-offset", "first slot -1"), ("scale-mult", "one slot x8"), ("token-shift", "+1"),
                          ("vocab-map", "engine drops it")):
        plant = fault(name).make(plant, variant)
    run = tiny_rig().run(plant, tmp_path)
    examination = Examination(open_case(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET)), lambda _: None)
    found = examination.conclude()
    assert len(found.findings) >= 3, told(found)
    assert examination.ladder is not None
    assert examination.ladder.replays <= 22


@pytest.mark.parametrize("dtype", ["bfloat16 on both sides", "bfloat16 served"])
def test_a_bfloat16_target_is_not_a_fault(dtype: str, tmp_path: Path) -> None:
    """Rounding grows with depth as quantisation does, and costs nothing."""
    half = dataclasses.replace(tiny_rig(), target=load_target(TARGET, dtype=torch.bfloat16))
    plant = Plant.healthy(BOUNDARIES)
    trains = half if dtype == "bfloat16 on both sides" else tiny_rig()
    trains.write_training(plant, tmp_path / "train")
    half.serve(plant, DRAFT, tmp_path / "serve")
    found = diagnose(Inputs(train=tmp_path / "train", serve=tmp_path / "serve", draft=DRAFT, target=TARGET))
    assert found.findings == [], told(found)


@pytest.mark.parametrize(("requests", "tokens"), [(1, 4), (2, 12)])
def test_few_tokens_are_not_a_fault(requests: int, tokens: int, tmp_path: Path) -> None:
    target = tiny_target()
    prompts = [prompt[-10:] for prompt in tiny_prompts()["heldout"][:requests]]
    rig = Rig(target, DRAFT, prompts, tiny_conversations()[:2], max_new=tokens, stop_ids=target.stop_ids)
    assert planted(tmp_path, rig=rig).findings == []


@pytest.fixture(scope="module")
def last_layer(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A pair whose last slot is the last layer: fc takes boundary 5 as the best linear guess from boundaries 2, 4 and 8."""
    target, folder = tiny_target(), tmp_path_factory.mktemp("last")
    taps = [Boundary(b) for b in (2, 4, 8, 5)]
    rows = torch.cat([target.forward(torch.tensor([c.token_ids]), taps).taps[0] for c in tiny_conversations()])
    given, wanted = rows[:, :3].flatten(1).double(), rows[:, 3].double()
    guess = torch.linalg.lstsq(given, wanted).solution.T.float()  # [H, 3H]
    tensors = load_file(DRAFT / "model.safetensors")
    fc, width = tensors["fc.weight"].float(), target.width
    refitted = fc[:, 2 * width :] @ guess
    refitted[:, : 2 * width] += fc[:, : 2 * width]
    tensors["fc.weight"] = refitted.to(tensors["fc.weight"].dtype)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((DRAFT / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}
    (folder / "config.json").write_text(json.dumps(config))
    return dataclasses.replace(tiny_rig(), checkpoint=folder)


@pytest.mark.parametrize("side", ["neither", "serve", "train"])
def test_the_last_layer_before_and_after_the_norm(side: str, last_layer: Rig, tmp_path: Path) -> None:
    """A last slot that is the last layer, taken after the norm on one side: final-norm, and not another layer."""
    plant = Plant.healthy((2, 4, 8))
    after = Wiring((Boundary(2), Boundary(4), Boundary(8, "post")))
    if side != "neither":
        plant = dataclasses.replace(plant, **{side: after})
    found = examine(last_layer.run(plant, tmp_path))
    expected = [] if side == "neither" else ["final-norm"]
    assert [f.fault for f in found.findings if f.fault != "train-budget"] == expected, told(found)
    if side == "serve":
        assert (found.findings[0].strength, found.findings[0].where) == ("proven", ["slot 2"])
        effect = found.findings[0].acceptance
        assert effect is not None
        # The refitted draft leans on its last slot too little for accept length to move; -log p does.
        assert effect.nll_gain_interval is not None
        assert effect.nll_gain_interval[0] > 0
