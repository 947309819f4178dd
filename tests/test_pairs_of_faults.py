"""Two faults at once, of unlike families: both named, nothing else proven, with the order in which to mend them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_rig

from draftscope.diagnose.run import diagnose
from draftscope.drilling.cases import Case, together
from draftscope.drilling.exercised import open_pair
from draftscope.drilling.report import Planted
from draftscope.drilling.running import exercise, inputs_of, read_outcomes
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig

HEALTHY = Plant.healthy((2, 4, 5))
PAIRS = [
    ("layer-offset", "+1", "data-offpolicy", "train other model"),
    ("draft-kv", "prompt missing", "lossmask-span", "five tokens early"),
    ("parallel-shard", "first half of the channels", "lossmask-empty", "many"),
    ("token-shift", "one slot +1", "template", "system turn"),
    ("scale-mult", "one slot x8", "pos-id", "one too high after the prompt"),
    ("vocab-map", "engine: off by one", "final-norm", "last slot"),
    ("attn-mask", "window of 32 applied", "residual-missing", "partial in one slot"),
    ("req-mix", "of the next request, every fourth row", "weight-missing", "checkpoint: gate and up swapped"),
    ("graph-capture", "zeros in verify rows", "vocab-map", "off by one in the checkpoint"),
    ("layer-set", "permuted", "rope", "another theta"),
    ("rotated-space", "orthogonal", "weight-missing", "engine: gain of hidden_norm"),
    ("scale-mult", "half of the channels x1.2", "recur-state", "post-norm fed back"),
    ("layer-offset", "last slot +1", "quant-inherit", "engine: fp8 without scales"),
    ("capture-alias", "a later state in some rows", "rope", "another theta"),
    ("scale-mult", "one slot x8", "parallel-shard", "train partial sums"),
]
"""Where one is of the training side, it is the second: it is mended last."""
OF_TRAINING = {"data-offpolicy", "lossmask-span", "lossmask-empty"}


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig()


@pytest.mark.parametrize(("first", "one", "second", "other"), PAIRS, ids=[f"{a} and {b}" for a, _, b, _ in PAIRS])
def test_neither_hides_the_other(rig: Rig, first: str, one: str, second: str, other: str, tmp_path: Path) -> None:
    plant = together(HEALTHY, (fault(first), one), (fault(second), other))
    assert plant is not None
    found = diagnose(inputs_of(rig.run(plant, tmp_path), plant, rig.target))
    told = [(f.fault, f.strength, f.says) for f in found.findings]
    strong = {f.fault for f in found.findings if f.strength != "suspected"}
    assert strong == {first, second}, told
    assert found.findings[0].fault in (first, second)
    (order,) = [text for text in found.next if text.startswith("mend in this order")]
    assert first in order and second in order
    assert second not in OF_TRAINING or order.index(first) < order.index(second), "what takes training comes last"
    assert not any("no known runtime fault explains" in text for text in found.next), "it is explained"


def test_whole_streams_of_a_sound_server_are_no_fault_of_it(tmp_path: Path) -> None:
    """Training states short of other ranks' parts, beside a served slot that is off: only what is wrong is named."""
    data = Path(__file__).parent / "data" / "tiny-qwen3"
    pair = open_pair(data / "target", data / "draft", data / "prompts.json", "qwen", lambda _: None)
    planted = ("scale-mult", "one slot x8"), ("parallel-shard", "train partial sums")
    plant = together(Plant.healthy((2, 4, 6)), *((fault(name), variant) for name, variant in planted))
    assert plant is not None
    case = Case("both", "pair", plant, tuple(Planted(fault=name, variant=variant) for name, variant in planted))
    exercise(pair, [case], [None], tmp_path)
    (told,) = read_outcomes(tmp_path)
    assert {named.fault for named in told.findings} == {"scale-mult", "parallel-shard"}, told
