"""Two faults at once, of unlike families: both named, nothing else proven, with the order in which to mend them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_rig

from draftscope.diagnose.run import diagnose
from draftscope.drilling.cases import together
from draftscope.drilling.running import inputs_of
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
