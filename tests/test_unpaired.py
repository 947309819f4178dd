"""Training states and a capture of other texts, no target: coarse faults are suspected, health is quiet, the rest is open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import TARGET, tiny_rig

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.faults import FAULTS, fault
from draftscope.faults.plant import Plant
from draftscope.faults.unpaired import KINDS
from draftscope.findings import Diagnosis
from draftscope.target.model import load_tokenizer

BOUNDARIES = (2, 4, 5)
PLANTED = {
    "permuted": ("layer-set", "permuted"), "embedding in front": ("layer-set", "embedding in front"),
    "one slot x8": ("scale-mult", "one slot x8"), "branch": ("residual-missing", "branch"),
    "branch in one slot": ("residual-missing", "branch in one slot"), "orthogonal": ("rotated-space", "orthogonal"),
    "one slot turned": ("rotated-space", "one slot"),
}
UNTOLD = {"offset": ("layer-offset", "+1"), "shift": ("token-shift", "+1")}
DOMAINS = {
    "code": ["def area(r):\n    return 3.14 * r * r\n", "for i in range(10):\n    print(i, i * i)\n", "class Node:\n    def"],
    "prose": ["It was a dark and stormy night; the rain fell in torrents", "Call me Ishmael. Some years ago, never mind how"],
    "german": ["Als Gregor Samsa eines Morgens aus unruhigen Traeumen erwachte", "Wer reitet so spaet durch Nacht und Wind?"],
    "digits": ["3141592653589793238462643383279502884197169399375105820974944592", "2718281828459045235360287471352662497757"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Captures by name, and `train` and `draft`: all written once."""
    rig, healthy, out = tiny_rig(16), Plant.healthy(BOUNDARIES), tmp_path_factory.mktemp("unpaired")
    # Without the template that all training texts begin with, no row can be paired.
    shared = next(i for i, ids in enumerate(zip(*rig.prompts, strict=False)) if len(set(ids)) > 1)
    rig = replace(rig, prompts=[ids[shared:] for ids in rig.prompts])
    rig.write_training(healthy, out / "train")
    rig.write_checkpoint(healthy, out / "draft")
    rig.serve(healthy, out / "draft", out / "healthy")
    for name, (known, variant) in (PLANTED | UNTOLD).items():
        rig.serve(fault(known).make(healthy, variant), out / "draft", out / name)
    tokenizer = load_tokenizer(TARGET)
    for name, texts in DOMAINS.items():
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        replace(rig, prompts=prompts).serve(healthy, out / "draft", out / name)
    return {path.name: path for path in out.iterdir()}


def bare(source: Path, folder: Path, rows: int | None = None) -> Path:
    """Tokens and states alone; at most so many rows in all."""
    folder.mkdir()
    left = rows
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        kept = tensors["accepted"].nonzero().squeeze(-1)[:left]
        if len(kept) < 2:
            break
        save_file({n: tensors[n][kept].contiguous() for n in ("fc_input", "token_ids")}, folder / path.name)
        left = None if left is None else left - len(kept)
    return folder


def examine(runs: dict[str, Path], serve: Path, **more: object) -> Diagnosis:
    return diagnose(Inputs(train=runs["train"], serve=serve, draft=runs["draft"], **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("rows", [None, 400])
def test_coarse_faults_are_suspected(runs: dict[str, Path], name: str, rows: int | None, tmp_path: Path) -> None:
    found = examine(runs, bare(runs[name], tmp_path / "capture", rows=rows))
    assert found.findings, (found.next, found.steps)
    assert [f.fault for f in found.findings] == [PLANTED[name][0]], [f.says for f in found.findings]
    first = found.findings[0]
    assert first.strength == "suspected"
    assert "no proof" in " ".join(found.steps)
    assert any("--target" in text and "token-shift" in text for text in found.next)
    slots = {"one slot x8": ["slot 2"], "branch in one slot": ["slot 1"], "one slot turned": ["slot 1"]}
    assert first.where == slots.get(name, ["slot 0", "slot 1", "slot 2"])


@pytest.mark.parametrize("rows", [64, 256, None])
def test_health_is_quiet(runs: dict[str, Path], rows: int | None, tmp_path: Path) -> None:
    found = examine(runs, bare(runs["healthy"], tmp_path / "capture", rows=rows))
    assert (found.findings, found.verdict) == ([], "undecided")
    smallest = found.power["smallest_unpaired"]
    assert len(smallest) == 3
    assert all(value is not None and value > 0 for value in smallest.values())


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize("rows", [64, None])
def test_other_domains_are_quiet(runs: dict[str, Path], name: str, rows: int | None, tmp_path: Path) -> None:
    """Text of another kind moves every slot; it is no fault, and what is far is called unlike, not something."""
    found = examine(runs, bare(runs[name], tmp_path / "capture", rows=rows))
    assert found.findings == [], [f.says for f in found.findings]


def test_fewer_rows_tell_less(runs: dict[str, Path], tmp_path: Path) -> None:
    smallest = [examine(runs, bare(runs["healthy"], tmp_path / str(rows), rows=rows)).power["smallest_unpaired"]["slot 0"]
                for rows in (64, 256, 700)]
    assert smallest == sorted(smallest, reverse=True)
    few = examine(runs, bare(runs["one slot x8"], tmp_path / "few", rows=20))
    assert few.findings == []
    assert "too few rows" in " ".join(few.steps)


@pytest.mark.parametrize("name", UNTOLD)
def test_what_statistics_do_not_tell_is_never_proven(runs: dict[str, Path], name: str, tmp_path: Path) -> None:
    found = examine(runs, bare(runs[name], tmp_path / "capture"))
    assert all(f.strength == "suspected" for f in found.findings)
    assert any("layer-offset" in text and "token-shift" in text for text in found.next)
    if name == "shift":
        assert found.findings == []


def test_parts_prove_what_they_can(runs: dict[str, Path], tmp_path: Path) -> None:
    """With the target's ends the embedding in a slot is proven, and no statistics are needed for it."""
    parts = tmp_path / "parts"
    parts.mkdir()
    tensors = load_file(TARGET / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers." not in n}, parts / "model.safetensors")
    (parts / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    found = examine(runs, bare(runs["embedding in front"], tmp_path / "capture"), target=parts)
    assert (found.findings[0].fault, found.findings[0].strength) == ("layer-set", "proven")
    assert found.matched["train_text"]["last_state"] == "pre"


def test_a_factor_and_an_order_are_tried(runs: dict[str, Path], tmp_path: Path) -> None:
    """Where the draft can be replayed, what it would bring stands beside the suspicion."""
    parts = tmp_path / "parts"
    parts.mkdir()
    tensors = load_file(TARGET / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers." not in n}, parts / "model.safetensors")
    (parts / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    for name in ("one slot x8", "permuted"):
        serve = tmp_path / name
        serve.mkdir()
        for path in sorted(runs[name].glob("*.safetensors")):
            tensors = load_file(path)
            wanted = ("fc_input", "token_ids", "phase", "last_hidden")
            kept = {n: t[tensors["accepted"]].contiguous() for n, t in tensors.items() if n in wanted}
            save_file(kept, serve / path.name)
        first = examine(runs, serve, target=parts).findings[0]
        assert (first.fault, first.strength, first.recovery) == (PLANTED[name][0], "suspected", "replayed")
        assert first.acceptance is not None
        assert first.acceptance.length_if_fixed > first.acceptance.length_now + 0.3


def test_every_rule_is_of_a_fault() -> None:
    assert set(KINDS) <= {known.id for known in FAULTS}
