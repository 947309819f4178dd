"""Faults at strengths that are none of their variants: sizes that are no power of two, halves, one slot alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_rig

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.drilling.running import inputs_of
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.train import Settings, train
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig
from draftscope.faults.runtimes import reads_otherwise
from draftscope.findings import Diagnosis
from draftscope.states import plain
from draftscope.target.rows import Channels, Interleaved, On
from draftscope.target.spoiling import Spoiler
from draftscope.target.wiring import Wiring

HEALTHY = Plant.healthy((2, 4, 5))


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig()


def told(rig: Rig, plant: Plant, folder: Path) -> Diagnosis:
    return diagnose(inputs_of(rig.run(plant, folder), plant, rig.target))


def spoilt(wiring: Wiring, spoiler: Spoiler) -> Wiring:
    return replace(wiring, spoilers=(*wiring.spoilers, spoiler))


@pytest.mark.parametrize("size", [12, 27, 48, 53])
def test_a_window_of_any_size_is_read_off_the_rounds(rig: Rig, size: int, tmp_path: Path) -> None:
    found = told(rig, reads_otherwise(HEALTHY, sliding_window=size), tmp_path)
    assert found.findings[0].fault == "attn-mask", (found.next, found.findings)
    assert str(size) in found.findings[0].says


def test_a_window_of_any_size_in_place_of_the_drafts_own(rig: Rig, tmp_path: Path) -> None:
    own = replace(HEALTHY, config=(*HEALTHY.config, ("sliding_window", 56), ("layer_types", ["sliding_attention"])))
    found = told(rig, reads_otherwise(own, sliding_window=42), tmp_path)
    assert found.findings[0].fault == "attn-mask" and "42" in found.findings[0].says, (found.next, found.findings)


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_shard_in_one_slot_alone(rig: Rig, ranks: int, tmp_path: Path) -> None:
    plant = replace(HEALTHY, serve=spoilt(HEALTHY.serve, On(Channels(ranks), slots=(2,))))
    found = told(rig, plant, tmp_path)
    assert found.findings and found.findings[0].fault == "parallel-shard", found.next
    assert found.findings[0].where == ["slot 2"]


def test_slots_written_behind_channels_beside_a_last_state_of_its_own(rig: Rig, tmp_path: Path) -> None:
    found = told(rig, replace(HEALTHY, train=spoilt(HEALTHY.train, Interleaved())), tmp_path)
    assert found.findings and found.findings[0].fault == "schema-width", found.next
    assert found.findings[0].strength == "proven" and found.findings[0].where[0].startswith("train:")


def test_a_dump_that_ends_early(rig: Rig, tmp_path: Path) -> None:
    """Half of the lines without a sample, all behind the last one: fewer may have been asked for, so that it is suspected."""
    found = told(rig, replace(HEALTHY, dump="part missing", part=2), tmp_path)
    assert [(f.fault, f.strength) for f in found.findings] == [("run-ops", "suspected")], found.next


def test_texts_learned_by_heart_are_no_fault_of_the_head(rig: Rig, tmp_path: Path) -> None:
    """Two conversations, a hundred times: well on them, badly on others; the head and the vocabulary are as they should be."""
    few = replace(rig, conversations=rig.conversations[:2])
    few.write_training(HEALTHY, tmp_path / "train")
    replace(rig, conversations=rig.conversations[2:12]).write_training(HEALTHY, tmp_path / "heldout")
    checkpoint = load_checkpoint(rig.checkpoint, target_layers=rig.target.layers)
    train(load_examples(plain.open(tmp_path / "train"), rig.target.parts), rig.target.parts, checkpoint.config,
          checkpoint.tensors.get("d2t"), tmp_path / "run", settings=Settings(epochs=100, batch_tokens=512, learning_rate=1e-2,
                                                                           warmup=4, head_rate=1.0))
    found = diagnose(Inputs(train=tmp_path / "train", train_heldout=tmp_path / "heldout", draft=tmp_path / "run" / "draft",
                            target=rig.target.folder, loaded=rig.target))
    assert [(f.fault, f.strength) for f in found.findings] == [("train-budget", "supported")], found.findings
    assert "by heart" in found.findings[0].says and found.verdict == "training"
