"""Repair folded into the draft: exact where a matrix is exact, fitted and judged on other rows where not, refused otherwise."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import DRAFT, TARGET, tiny_rig, tiny_target

from draftscope.boundaries import Boundary
from draftscope.cli.main import run
from draftscope.diagnose import absorb
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.ladder import Ladder
from draftscope.diagnose.run import diagnose
from draftscope.diagnose.sides import choosing
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.folding import Linear, fit, fold
from draftscope.eagle3.model import Draft
from draftscope.eagle3.replay import replay
from draftscope.eagle3.replayed import Replay
from draftscope.errors import UsageError
from draftscope.faults import fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Run
from draftscope.states.opening import open_source
from draftscope.states.types import Sequence, from_trace

BOUNDARIES = (2, 4, 5)
REQUESTS = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The pair in health and with faults that are planted in the engine."""
    rig, healthy = tiny_rig(REQUESTS), Plant.healthy(BOUNDARIES)
    planted = {
        "healthy": healthy,
        "order": fault("layer-set").make(healthy, "permuted"),
        "scale": fault("scale-mult").make(healthy, "one slot x8"),
        "rotation": fault("rotated-space").make(healthy, "orthogonal"),
        "offset": fault("layer-offset").make(healthy, "-1"),
        "shift": fault("token-shift").make(healthy, fault("token-shift").variants[0]),
        "train": fault("scale-mult").make(healthy, "train one slot x8"),
    }
    return {name: rig.run(plant, tmp_path_factory.mktemp(name)) for name, plant in planted.items()}


def sequences(run_: Run) -> list[Sequence]:
    return [from_trace(trace, 3) for trace in open_source(run_.serve)]


def command(run_: Run, out: Path, *more: str) -> tuple[int, dict]:
    report = out.parent / "report.json"
    code = run(["diagnose", "--train", str(run_.train), "--serve", str(run_.serve), "--draft", str(run_.draft), "--target",
                str(TARGET), "--absorb", str(out), "--json", str(report), "--quiet", *more])
    return code, json.loads(report.read_text())


# -- the algebra ---------------------------------------------------------------------------------------------------------------


def random_draft(seed: int, **switches: bool) -> Draft:
    torch.manual_seed(seed)
    config = DraftConfig(hidden_size=8, target_hidden_size=6, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2,
                         head_dim=4, vocab_size=10, draft_vocab_size=10, **switches)  # type: ignore[arg-type]
    draft = Draft(config).requires_grad_(False)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return draft


def folded(draft: Draft, repair: Linear) -> tuple[Draft, str]:
    found, made = fold(draft, repair), Draft(draft.config).requires_grad_(False)
    made.load_state_dict(draft.state_dict())
    for name, tensor in found.tensors.items():
        made.get_parameter(name).copy_(tensor)
    return made, found.why_not


SWITCHES = [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_before_fc": True, "fc_norm": True}, {"fc_bias": True}]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SWITCHES), st.permutations(range(3)), st.lists(st.sampled_from([1.0, 8.0, -0.5]), min_size=3, max_size=3),
       st.lists(st.booleans(), min_size=3, max_size=3), st.integers(0, 2**31))
def test_exact_folds_are_exact_and_others_say_so(
    switches: dict[str, bool], order: list[int], factors: list[float], turned: list[bool], seed: int
) -> None:
    draft = random_draft(seed % 100, **switches)
    g = torch.Generator().manual_seed(seed)
    turns = {j: torch.linalg.qr(torch.randn(6, 6, generator=g))[0] for j in range(3) if turned[j]}
    repair = Linear(tuple(order), dict(enumerate(factors)), turns)
    broken = 50 * torch.randn(20, 3, 6, generator=g)
    made, why_not = folded(draft, repair)
    wanted = draft.project(repair.apply(broken))
    # Of most rows: where one slot outweighs the others, the second norm's epsilon counts for these.
    error = ((made.project(broken) - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median()
    assert (error < 1e-3) == (not why_not), (float(error), why_not)
    if not switches.get("norm_before_fc"):
        assert not why_not, "without a norm over all slots everything folds"


def test_a_slot_taken_twice() -> None:
    for switches in ({}, {"fc_norm": True}):
        draft = random_draft(3, **switches)
        repair = Linear((0, 0, 2))
        made, why_not = folded(draft, repair)
        rows = torch.randn(9, 3, 6)
        assert why_not == ""
        assert torch.allclose(made.project(rows), draft.project(repair.apply(rows)), atol=1e-5)


def test_a_map_that_changes_lengths_passes_no_norm() -> None:
    stretch = torch.diag(torch.arange(1.0, 7.0))
    assert fold(random_draft(0), Linear(maps={1: stretch})).why_not == ""
    assert "lengths" in fold(random_draft(0, fc_norm=True), Linear(maps={1: stretch})).why_not


def test_fit_finds_the_matrix_and_leaves_the_rest() -> None:
    g = torch.Generator().manual_seed(0)
    true, start = torch.randn(5, 12, generator=g), torch.zeros(5, 12)
    rows = [torch.randn(40, 12, generator=g) for _ in range(6)]
    found = fit(start, rows, [x @ true.T for x in rows])
    assert (found.weight - true).norm() / true.norm() < 1e-3
    assert found.error < 1e-3 < found.before
    # Directions that no row has keep their start.
    flat = [x * (torch.arange(12) < 6) for x in rows]
    kept = fit(true, flat, [x @ true.T + x[:, :5] for x in flat])
    assert torch.allclose(kept.weight[:, 6:], true[:, 6:], atol=1e-6)
    # Fewer rows than columns.
    few = fit(start, [x[:2] for x in rows], [x[:2] @ true.T for x in rows])
    assert few.rows == 12
    with pytest.raises(ValueError, match="two sequences"):
        fit(start, rows[:1], [rows[0] @ true.T])
    spoilt = [torch.where(torch.arange(40)[:, None] == 3, torch.nan, x) for x in rows]
    assert torch.isfinite(fit(start, spoilt, [x @ true.T for x in spoilt]).weight).all()


# -- the command ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["order", "scale"])
def test_exact_repairs_serve_as_in_health(served: dict[str, Run], name: str, tmp_path: Path) -> None:
    """The copy over broken states gives what the healthy draft gives over the same states repaired."""
    out = tmp_path / "copy"
    code, report = command(served[name], out)
    found = report["absorbed"]
    assert code == 1
    assert found["folder"] == str(out), found["says"]
    assert found["exact"] is True
    assert found["gain_interval"][0] > 0
    assert found["length_after"] == pytest.approx(found["length_if_fixed"], abs=1e-9)
    assert found["rounding"] == 0, "columns moved, or divided by a power of two"
    source, copy = served[name].draft, load_file(out / "model.safetensors")
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    original = load_file(source / "model.safetensors")
    assert copy.keys() == original.keys()
    assert [n for n in copy if not torch.equal(copy[n], original[n])] == ["fc.weight"]
    assert {n: t.dtype for n, t in copy.items()} == {n: t.dtype for n, t in original.items()}
    note = json.loads((out / "absorbed.json").read_text())
    assert (note["schema"], note["faults"]) == ("draftscope.absorbed/1", found["faults"])
    # Against the states themselves put right, without the diagnosis.
    repair = Linear(order=(2, 0, 1)) if name == "order" else Linear(scale={2: 0.125})
    parts = tiny_target().parts
    broken = sequences(served[name])
    over_broken = replay(build_draft(load_checkpoint(out), parts), broken, parts=parts)
    right = [replace(s, features=repair.apply(s.features)) for s in broken]
    over_right = replay(build_draft(load_checkpoint(DRAFT), parts), right, parts=parts)
    for a, b in zip(over_broken.sequences, over_right.sequences, strict=True):
        assert a.answer.lead.tolist() == b.answer.lead.tolist()
        assert a.likelihood.total == pytest.approx(b.likelihood.total, rel=1e-4)


def test_a_rotation_is_taken_back_by_fc(served: dict[str, Run], tmp_path: Path) -> None:
    """The map itself is fitted on half of the sequences; folding it in is exact up to the rounding of bf16."""
    out = tmp_path / "copy"
    code, report = command(served["rotation"], out)
    found = report["absorbed"]
    assert code == 1
    assert (found["folder"], found["faults"]) == (str(out), ["rotated-space"]), found["says"]
    assert found["exact"] is True
    assert found["gain"] > 0.5
    assert 0 < found["rounding"] < 0.01
    assert found["length_after"] == pytest.approx(found["length_if_fixed"], abs=0.05)
    parts = tiny_target().parts
    over_broken = replay(build_draft(load_checkpoint(out), parts), sequences(served["rotation"]), parts=parts)
    healthy = replay(build_draft(load_checkpoint(DRAFT), parts), sequences(served["healthy"]), parts=parts)
    assert over_broken.rung().length == pytest.approx(healthy.rung().length, rel=0.05)


def test_a_neighbouring_boundary_is_fitted_on_other_rows(served: dict[str, Run], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    code, report = command(served["offset"], out)
    found = report["absorbed"]
    assert code == 1
    assert found["faults"] == ["layer-offset"]
    assert found["exact"] is False
    assert "fitted" in found["why_not_exact"]
    assert found["folder"] == str(out), found["says"]
    assert found["sequences"] == REQUESTS // 2
    assert found["length_before"] < found["length_after"]
    assert found["fit"]["error"] < 0.5 * found["fit"]["error_before"]
    assert 0 < found["rounding"] < 0.01
    assert "bfloat16 rounds" in found["says"]


@pytest.mark.parametrize("name", ["rotation", "offset"])
def test_what_is_replayed_no_fit_has_seen(
    name: str, served: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the map of a slot, fitted where repairs are chosen, nor the matrix for another boundary."""
    judged: set[str] = set()
    fitted = set(choosing([sequence.name for sequence in sequences(served[name])]))
    with_draft, rows = Ladder.with_draft, absorb._rows

    def replayed(self: Ladder, draft: Draft, names: Collection[str]) -> Replay:
        judged.update(names)
        return with_draft(self, draft, names)

    def noted(examination: Any, plan: absorb.Plan, seen: set[str]) -> Any:
        fitted.update(seen)
        return rows(examination, plan, seen)

    monkeypatch.setattr(Ladder, "with_draft", replayed)
    monkeypatch.setattr(absorb, "_rows", noted)
    _, report = command(served[name], tmp_path / "copy")
    assert len(judged) == REQUESTS // 2 and judged.isdisjoint(fitted)
    assert "on 12 sequences that no fit has seen" in report["absorbed"]["says"]


def test_a_fit_from_paired_training_rows(served: dict[str, Run], tmp_path: Path) -> None:
    """No target weights: the training data has the same texts."""
    rig = tiny_rig(REQUESTS)
    healthy = Plant.healthy(BOUNDARIES)
    texts = [(trace.token_ids[trace.accepted].tolist(), int((trace.phase == 0).sum())) for trace in
             open_source(served["offset"].serve)]
    from draftscope.faults.rig import Conversation

    again = replace(rig, conversations=[Conversation(*text) for text in texts])
    again.write_training(healthy, tmp_path / "train")
    parts = tmp_path / "parts"
    parts.mkdir()
    tensors = load_file(TARGET / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers." not in n}, parts / "model.safetensors")
    (parts / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    found = diagnose(Inputs(train=tmp_path / "train", serve=served["offset"].serve, draft=served["offset"].draft, target=parts,
                            absorb=tmp_path / "copy")).absorbed
    assert found is not None
    assert found.folder is not None, found.says
    assert found.length_if_fixed is None
    assert found.gain_interval is not None
    assert found.gain_interval[0] > 0


def test_what_no_matrix_undoes_is_refused(served: dict[str, Run], tmp_path: Path) -> None:
    for name, why in (("shift", "token-shift: the rows hold the states of other tokens"), ("train", "training data"),
                      ("healthy", "no fault of the served states")):
        out = tmp_path / name
        code, report = command(served[name], out)
        assert code == (0 if name == "healthy" else 1)
        assert report["absorbed"]["folder"] is None
        assert why in report["absorbed"]["says"]
        assert not out.exists()
    assert not list(tmp_path.glob(".*.part"))


def test_too_few_requests_tell_nothing(served: dict[str, Run], tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted(served["scale"].serve.glob("*"))[:9]:
        (few / path.name).write_bytes(path.read_bytes())
    code, report = command(replace(served["scale"], serve=few), tmp_path / "copy")
    assert code == 1
    assert report["absorbed"]["folder"] is None
    assert "too few" in report["absorbed"]["says"] and "no fit has seen" not in report["absorbed"]["says"]
    assert not (tmp_path / "copy").exists()


def test_what_costs_nothing_is_not_written(served: dict[str, Run], tmp_path: Path) -> None:
    """A factor that hardly costs: the finding stands, but no copy is made whose gain may be chance."""
    rig, healthy = tiny_rig(REQUESTS), Plant.healthy(BOUNDARIES)
    plant = replace(healthy, serve=replace(healthy.serve, scale=(1.03, 1.0, 1.0)))
    made = rig.run(plant, tmp_path / "made")
    code, report = command(made, tmp_path / "copy")
    assert code == 1
    assert [f["fault"] for f in report["findings"]] == ["scale-mult"]
    assert "does not help beyond chance" in report["absorbed"]["says"]
    assert not (tmp_path / "copy").exists()


def test_the_folder_is_never_an_input_nor_full(served: dict[str, Run], tmp_path: Path) -> None:
    one = served["scale"]
    inputs = Inputs(train=one.train, serve=one.serve, draft=one.draft, target=TARGET)
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("mine")
    for out, why in ((full, "is there already"), (one.draft, "is there already"), (one.draft / "new", "among what is read")):
        before = sorted(p.name for p in one.draft.iterdir())
        with pytest.raises(UsageError, match=why):
            diagnose(replace(inputs, absorb=out))
        assert sorted(p.name for p in one.draft.iterdir()) == before
    assert (full / "x").read_text() == "mine"
    with pytest.raises(UsageError, match="--absorb"):
        diagnose(replace(inputs, draft=None, absorb=tmp_path / "copy"))


def test_a_dialect_and_shards_stay_what_they_are(served: dict[str, Run], tmp_path: Path) -> None:
    """Names, shards and further files of the source are those of the copy."""
    one, source = served["scale"], tmp_path / "draft"
    source.mkdir()
    tensors = load_file(one.draft / "model.safetensors")
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        key = "b.safetensors" if name == "fc.weight" else "a.safetensors"
        shards[key][f"module.{name}" if name not in ("d2t", "t2d") else name] = tensor
    for name, held in shards.items():
        save_file(held, source / name, {"format": "pt"})
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_bytes((one.draft / "config.json").read_bytes())
    (source / "README.md").write_text("a draft")
    (source / "optimizer.pt").write_bytes(b"large")
    out = tmp_path / "copy"
    _, report = command(replace(one, draft=source), out)
    assert report["absorbed"]["folder"] == str(out), report["absorbed"]["says"]
    assert report["absorbed"]["changed"] == ["module.fc.weight"]
    assert report["absorbed"]["left"] == ["optimizer.pt"]
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["a.safetensors", "b.safetensors", "model.safetensors.index.json", "config.json", "README.md", "absorbed.json"])
    assert (out / "a.safetensors").read_bytes() == (source / "a.safetensors").read_bytes()
    assert list(load_file(out / "b.safetensors")) == ["module.fc.weight"]


def test_a_residual_that_is_missing_is_fitted_or_left(served: dict[str, Run], tmp_path: Path) -> None:
    rig, healthy = tiny_rig(REQUESTS), Plant.healthy(BOUNDARIES)
    cut = (*healthy.serve.slots[:2], Boundary(5, "pre", "partial"))
    made = rig.run(replace(healthy, serve=replace(healthy.serve, slots=cut)), tmp_path / "made")
    _, report = command(made, tmp_path / "copy")
    found = report["absorbed"]
    assert found["exact"] is False
    assert (found["folder"] is not None) == (found["gain_interval"][0] > 0)
    assert (tmp_path / "copy").exists() == (found["folder"] is not None)
