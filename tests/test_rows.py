"""The small pieces behind the faults of rows: blocks of channels, counts of rows, and what kinds of rows speak for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.compare.rowwise import blocks_alone, blocks_of
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.faults import fault
from draftscope.faults.facts_rows import Counted, SlotRows
from draftscope.faults.plant import Plant
from draftscope.faults.rowcause import cause_of, displaced, phases

ROWS = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_channels_of_one_rank(ranks: int) -> None:
    shard = ROWS.chunk(ranks, -1)[0]
    alone = torch.cat([shard, torch.zeros(32, 32 - shard.shape[1])], -1)
    assert blocks_alone(alone) == (ranks, (0, *[None] * (ranks - 1)))
    assert blocks_alone(ROWS) is None
    turned = torch.cat(ROWS.chunk(ranks, -1)[::-1], -1)
    found = blocks_of(turned, ROWS)
    assert found is not None
    assert found[:2] == (ranks, tuple(reversed(range(ranks))))
    assert blocks_of(ROWS.flip(-1), ROWS) is None, "channels in reverse are no blocks"
    assert blocks_of(ROWS, ROWS) is None


def test_counts_of_rows() -> None:
    halves = Counted((("a", 5, 10), ("b", 4, 7)), 2)
    assert (halves.fraction(), halves.padded()) == (2, None)
    assert Counted(halves.files, 3).fraction() is None, "one file is whole: no rank's share"
    padded = Counted((("a", 64, 40), ("b", 96, 90)), 2)
    assert (padded.fraction(), padded.padded(), padded.fewer()) == (None, 32, [])
    assert Counted((("a", 63, 40),), 1).padded() is None
    assert Counted((("a", 4, 40),), 1, turned=1).fewer() == []


@pytest.mark.parametrize(("rows", "cause"), [
    (SlotRows(0, 2, {"right": 100}), None),
    (SlotRows(0, 2, {"right": 50, "another sequence": 50}), "req-mix"),
    (SlotRows(0, 2, {"right": 99, "another sequence": 1}), None),
    (SlotRows(0, 2, {"right": 5, "same sequence": 95}, offsets={1: 95}), None),  # token-shift
    (SlotRows(0, 2, {"right": 5, "same sequence": 95}, offsets={-9: 95}), "req-mix"),
    (SlotRows(0, 2, {"right": 50, "same sequence": 50}, offsets={-1: 20, -3: 30}, steps=50, last_step=50), "graph-capture"),
    (SlotRows(0, 2, {"right": 50, "zeros": 50}), "graph-capture"),
    (SlotRows(0, 2, {"right": 50, "zeros": 50}, shard=2), "parallel-shard"),
    (SlotRows(0, 2, {"right": 50, "another place": 50}, later=50, beside=4), "capture-alias"),
    (SlotRows(0, 2, {"right": 50, "another place": 50}, later=0, beside=4), None),  # earlier states are no buffer's future
    (SlotRows(0, 2, {"right": 50, "another place": 50}, later=50, whole=2), "parallel-shard"),
    (SlotRows(0, 2, {"right": 50, "another place": 50}, later=50), None),  # one phase: layer-set
    (SlotRows(0, 2, {"unknown": 100}), None),
])
def test_what_rows_speak_for(rows: SlotRows, cause: str | None) -> None:
    assert cause_of(rows) == cause


@pytest.mark.parametrize(("verify", "said"), [
    ({}, ""), ({"zeros": 0, "right": 0}, ", only in prefill rows"), ({"zeros": 50, "right": 9}, ", only in verify steps"),
    ({"zeros": 20}, ", in both phases"),
])
def test_phases_are_named_where_they_are_known(verify: dict[str, int], said: str) -> None:
    assert phases([SlotRows(0, 2, {"right": 50, "zeros": 50}, verify=verify)], "zeros") == said


@pytest.mark.parametrize(("fault_name", "variant"), [
    ("req-mix", "of the next request, every fourth row"), ("graph-capture", "zeros in verify rows"),
    ("capture-alias", "a later state in some rows")])
def test_a_capture_without_phases_has_none_named(fault_name: str, variant: str, tmp_path: Path) -> None:
    run = tiny_rig(8, 32).run(fault(fault_name).make(Plant.healthy((2, 4, 5)), variant), tmp_path / "run")
    (tmp_path / "bare").mkdir()
    for path in run.serve.glob("*.safetensors"):
        tensors = load_file(path)
        kept = tensors["accepted"].bool()
        save_file({name: tensors[name][kept].contiguous() for name in ("fc_input", "token_ids")}, tmp_path / "bare" / path.name)
    found = diagnose(Inputs(serve=tmp_path / "bare", draft=DRAFT, target=TARGET))
    assert found.findings[0].fault == fault_name, [one.says for one in found.findings]
    assert not any(word in found.findings[0].says for word in ("prefill", "verify", "phase")), found.findings[0].says


def test_a_distance_is_one_that_most_share() -> None:
    assert displaced(SlotRows(0, 2, {"same sequence": 20}, offsets={-9: 15, 4: 5})) == -9
    assert displaced(SlotRows(0, 2, {"same sequence": 20}, offsets={-9: 5, 4: 5, 7: 5, 3: 5})) is None
