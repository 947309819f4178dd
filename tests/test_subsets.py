"""Any subset of inputs, down to two requests of 64 tokens: nothing crashes, nothing healthy is accused, nothing more is claimed
than the inputs show, and `next` names what would settle it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import TARGET, tiny_rig

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.findings import Diagnosis

HEALTHY = Plant.healthy((2, 4, 5))
SUBSETS = (
    "serve", "train", "draft", "metrics", "serve draft", "serve parts", "serve target", "serve metrics", "draft target",
    "draft metrics", "train draft", "train target", "train draft target", "serve draft parts", "serve draft target",
    "train serve", "train serve draft", "train serve draft parts", "train serve target", "train serve draft target",
    "train serve draft target metrics",
)
CLEAN = ("serve draft target", "train serve draft target", "train serve draft target metrics")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    save_file({n: t for n, t in load_file(TARGET / "model.safetensors").items() if ".layers." not in n},
              folder / "model.safetensors")
    shutil.copy(TARGET / "config.json", folder)
    return folder


def served(plant: Plant, folder: Path) -> Run:
    """Two requests of 32 tokens each, and four training samples."""
    rig = tiny_rig(2, 32)
    return dataclasses.replace(rig, conversations=rig.conversations[:4], rows=2).run(plant, folder)


def given(run: Run, subset: str, parts: Path) -> Diagnosis:
    places = {name: getattr(run, name) for name in ("train", "serve", "draft", "metrics") if name in subset.split()}
    target = TARGET if "target" in subset else parts if "parts" in subset else None
    return diagnose(Inputs(**places, target=target))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return served(HEALTHY, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return served(fault("layer-set").make(HEALTHY, "permuted"), tmp_path_factory.mktemp("permuted"))


@pytest.mark.parametrize("subset", SUBSETS)
def test_nothing_is_found_in_a_healthy_pair(healthy: Run, parts: Path, subset: str) -> None:
    found = given(healthy, subset, parts)
    assert [(f.fault, f.says) for f in found.findings] == []
    assert found.matched["contradictions"] == []
    assert found.verdict == ("clean" if subset in CLEAN else "undecided")
    wanted = {"serve": "--serve", "draft": "--draft", "target": "--target"}
    for name, option in wanted.items():
        if name not in subset.split():
            assert found.verdict == "clean" or any(option in text for text in found.next), (option, found.next)


@pytest.mark.parametrize(("subset", "strength"), [
    ("serve", None), ("serve draft", None), ("train draft target", None), ("serve target", None), ("serve draft parts", None),
    ("train serve", "suspected"), ("train serve draft", "suspected"), ("serve draft target", "supported"),
    ("train serve draft parts", "proven"), ("train serve target", "proven"), ("train serve draft target metrics", "proven"),
])
def test_a_coarse_fault_is_claimed_as_far_as_the_inputs_show_it(permuted: Run, parts: Path, subset: str,
                                                                strength: str | None) -> None:
    found = given(permuted, subset, parts)
    named = {f.fault: f.strength for f in found.findings}
    assert named == ({} if strength is None else {"layer-set": strength}), [(f.fault, f.says) for f in found.findings]
    if strength != "proven":
        assert found.next, "what would settle it"


@pytest.mark.parametrize(("name", "variant", "subset", "strength"), [
    ("graph-capture", "zeros in verify rows", "serve", "supported"),
    ("graph-capture", "zeros in verify rows", "serve draft target", "proven"),
    ("parallel-shard", "first half of the channels", "serve", "proven"),
    ("req-mix", "of the next request", "serve draft target", "proven"),
    ("nonfinite", "one slot", "serve", "proven"),
    ("schema-width", "a slot too few", "serve draft parts", "proven"),
])
def test_what_rows_show_by_themselves(parts: Path, name: str, variant: str, subset: str, strength: str, tmp_path: Path) -> None:
    found = given(served(fault(name).make(HEALTHY, variant), tmp_path), subset, parts)
    assert [(f.fault, f.strength) for f in found.findings if f.strength != "suspected"] == [(name, strength)]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kept", [(slice(1, None), slice(None)), (slice(None), slice(32)), (slice(2, None), slice(32))],
                         ids=["slots", "width", "both"])
def test_held_out_samples_of_another_shape_are_left_out(kept: tuple[slice, slice], train: bool, healthy: Run,
                                                        parts: Path, tmp_path: Path) -> None:
    for file in healthy.train.glob("*.safetensors"):
        tensors = load_file(file)
        tensors["hidden_states"] = tensors["hidden_states"][:, kept[0], kept[1]].contiguous()
        save_file(tensors, tmp_path / file.name)
    own = healthy.train if train else None
    alone = diagnose(Inputs(train=own, draft=healthy.draft, target=parts))
    found = diagnose(Inputs(train=own, train_heldout=tmp_path, draft=healthy.draft, target=parts))
    said = [text for text in found.next if "--train-heldout" in text and str(tmp_path) in text]
    assert len(said) == 1 and "the draft takes 3 of 64" in said[0]
    assert (found.findings, found.acceptance.trained) == (alone.findings, alone.acceptance.trained)
    assert (found.acceptance.trained is not None) == train
