"""Faults of a checkpoint and of its loading: their pieces against something independent, `--apply`, and what lint knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spoilt import DRAFT_VOCAB, change, chosen_ids, healthy, speculators, target_config
from support import random_draft
from tiny import DRAFT, TARGET, tiny_rig

from draftscope.cli.main import run as command
from draftscope.consumers import CONSUMERS, ask, config_for, effective
from draftscope.diagnose.applying import _Work
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.checkpoint import grid, tensor_wise
from draftscope.diagnose.explaining import learn, most_frequent
from draftscope.diagnose.run import diagnose
from draftscope.eagle3.altered import altered, codes, fp8, int4, int8, packed
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.model import Draft, StepMask
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults import fault
from draftscope.faults.fixes import capture_boundaries, readers
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig, Run
from draftscope.findings import Finding, Fix, Patch, Placed
from draftscope.linting import lint

BOUNDARIES = (2, 4, 5)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig(count=6, max_new=40)


def planted(rig: Rig, folder: Path, name: str, variant: str) -> Run:
    return rig.run(fault(name).make(Plant.healthy(BOUNDARIES), variant), folder)


def told(run: Run, out: Path, *more: str) -> dict[str, Any]:
    """`diagnose --apply` through the command line, as JSON."""
    report = out.parent / "diagnosis.json"
    code = command(["diagnose", "--train", str(run.train), "--serve", str(run.serve), "--draft", str(run.draft), "--target",
                    str(TARGET), "--apply", str(out), "--json", str(report), "--quiet", *more])
    found: dict[str, Any] = json.loads(report.read_text())
    assert code == 1, found["next"]
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- a copy with the fix in it -------------------------------------------------------------------------------------------------


def test_a_map_of_ids_becomes_one_of_offsets(rig: Rig, tmp_path: Path) -> None:
    run = planted(rig, tmp_path, "vocab-map", "stored as absolute")
    before = files(run.draft)
    found = told(run, tmp_path / "mended")
    applied = found["applied"]
    assert applied["changes"] == ["tensor d2t: from absolute ids"]
    assert applied["rung"] == "as_read"
    assert applied["before"]["length"] < 1.2
    assert applied["after"]["length"] > 2
    own, mended = load_file(DRAFT / "model.safetensors"), load_file(tmp_path / "mended" / "model.safetensors")
    assert set(own) == set(mended)
    assert all(torch.equal(own[name], mended[name]) for name in own)
    assert files(run.draft) == before
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []


def test_swapped_matrices_are_put_right(rig: Rig, tmp_path: Path) -> None:
    run = planted(rig, tmp_path, "weight-missing", "checkpoint: gate and up swapped")
    found = told(run, tmp_path / "mended")
    assert found["findings"][0]["strength"] == "proven"
    assert found["applied"]["after"]["length"] > found["applied"]["before"]["length"] + 0.5
    own, mended = load_file(DRAFT / "model.safetensors"), load_file(tmp_path / "mended" / "model.safetensors")
    assert all(torch.equal(own[name], mended[name]) for name in own)


def test_an_engines_fault_is_not_in_the_checkpoint(rig: Rig, tmp_path: Path) -> None:
    run = planted(rig, tmp_path, "vocab-map", "engine drops it")
    applied = told(run, tmp_path / "mended")["applied"]
    assert applied["folder"] is None
    assert applied["says"].startswith("nothing was written")
    assert "not in the checkpoint" in applied["left"][0]
    assert not (tmp_path / "mended").exists()


def test_what_the_source_has_is_restored(rig: Rig, tmp_path: Path) -> None:
    plant = fault("quant-inherit").make(Plant.healthy(BOUNDARIES), "checkpoint: one scale lost")
    run = rig.run(plant, tmp_path)
    applied = told(run, tmp_path / "mended", "--source-draft", str(DRAFT))["applied"]
    assert "tensor midlayer.self_attn.o_proj.weight: from source" in applied["changes"]
    name = "midlayer.self_attn.o_proj.weight"
    assert torch.equal(load_file(tmp_path / "mended" / "model.safetensors")[name], load_file(DRAFT / "model.safetensors")[name])
    assert applied["after"]["length"] > applied["before"]["length"]


@pytest.mark.parametrize("consumer", ["vllm@0.32", "vllm", "sglang@0.5.10"])
def test_layer_ids_in_the_consumers_own_convention(consumer: str, rig: Rig, tmp_path: Path) -> None:
    """The states are re-made where the copy, read as that consumer reads it, has them captured."""
    run = planted(rig, tmp_path, "layer-offset", "+1")
    found = told(run, tmp_path / "mended", "--for", consumer)
    raw = json.loads((tmp_path / "mended" / "config.json").read_text())
    if consumer.startswith("vllm"):
        assert raw["eagle_aux_hidden_state_layer_ids"] == list(BOUNDARIES)
    assert effective(load_checkpoint(tmp_path / "mended"), consumer, 8).boundaries == BOUNDARIES
    assert next(iter(found["findings"][0]["fix"]["config"])) == ask(consumer).known.id
    applied = found["applied"]
    assert applied["after"]["length"] > applied["before"]["length"]


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_fix_names_who_reads_the_checkpoint_and_the_newest_engines(consumer: str) -> None:
    newest = [ask(name).known.id for name in ("vllm", "sglang")]
    assert readers(None) == tuple(newest)
    assert readers(consumer) == tuple(dict.fromkeys([consumer, *newest]))
    m = Measurements(layers=61, model_type="kimi_k25", consumer=consumer,
                     reference=tuple(Placed(slot=i, label="", boundary=b, norm="pre", kind="stream", margin=None)
                                     for i, b in enumerate((2, 30, 58))))
    assert capture_boundaries("serve", m, "").config == {
        name: config_for(name, (2, 30, 58), 61, "kimi_k25") for name in readers(consumer)}


def test_a_theta_is_mended_wherever_the_file_has_it(rig: Rig, tmp_path: Path) -> None:
    run = planted(rig, tmp_path, "rope", "checkpoint: another theta")
    found = told(run, tmp_path / "mended")
    assert found["findings"][0]["fault"] == "rope"
    right = {"rope_type": "default", "rope_theta": 1e4}
    keys = list(found["findings"][0]["fix"]["config"].values())
    assert keys and all(one == {"rope_theta": 1e4, "rope_parameters": right} for one in keys)
    raw = json.loads((tmp_path / "mended" / "config.json").read_text())
    assert (raw["rope_theta"], raw["rope_parameters"]) == (1e4, right) and "rope_parameters.rope_theta" not in raw
    assert load_checkpoint(tmp_path / "mended").config.rope_parameters == right
    changed = ("rope_theta", "rope_parameters.rope_theta")
    assert found["applied"]["changes"] == [f"config.json: {key} = 10000.0" for key in changed]


WRONG = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("raw", [
    {"rope_theta": 1e6, "rope_parameters": None}, {"rope_parameters": WRONG}, {"rope_parameters": WRONG, "rope_theta": 1e6},
    {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"sliding_attention": WRONG, "full_attention": {**WRONG, "rope_type": "linear", "factor": 2.0}}},
], ids=lambda raw: "+".join(raw))
def test_a_dotted_key_is_set_where_it_lies(raw: dict[str, Any], tmp_path: Path) -> None:
    _mends(change(healthy(tmp_path / "draft"), raw), tmp_path / "mended", {"rope_theta"})


def test_a_dotted_key_is_set_in_the_configuration_of_the_layers(tmp_path: Path) -> None:
    draft = speculators(tmp_path / "draft")
    raw = json.loads((draft / "config.json").read_text())
    raw["transformer_layer_config"]["rope_parameters"] = WRONG
    (draft / "config.json").write_text(json.dumps(raw))
    _mends(draft, tmp_path / "mended", set())


def _mends(draft: Path, out: Path, more: set[str]) -> None:
    """The fix gives the theta in effect; at the top of the file it adds no other keys than these."""
    before = load_checkpoint(draft).config.rope_parameters
    patch = Patch(config={"rope_theta": 2e4, "rope_parameters.rope_theta": 2e4})
    keys = {"vllm@0.33": {"rope_theta": 2e4, "rope_parameters": {**before, "rope_theta": 2e4}}}
    work = _Work(draft, _examination("vllm"))
    assert work.take(Finding(fault="rope", where=["config rope_theta"], says="", strength="supported", recovery="replayed",
                             fix=Fix(says="", config=keys, patch=patch)))
    assert work.write(out).config.rope_parameters == {**before, "rope_theta": 2e4}
    written, had = (json.loads((folder / "config.json").read_text()) for folder in (out, draft))
    assert set(written) - set(had) <= more


def _examination(consumer: str | None) -> Any:
    return SimpleNamespace(m=SimpleNamespace(consumer=consumer), case=SimpleNamespace(layers=None, source=None))


def test_a_copy_that_does_not_say_what_it_should_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = change(healthy(tmp_path / "draft"), {"rope_parameters": WRONG})
    work = _Work(draft, _examination(None))
    monkeypatch.setattr(work, "_set_below", lambda *_: None)
    work.take(Finding(fault="rope", where=[], says="", strength="supported", recovery="replayed",
                      fix=Fix(says="", patch=Patch(config={"rope_parameters.rope_theta": 2e4}))))
    with pytest.raises(DraftscopeError, match=r"rope_parameters\.rope_theta is 1000000\.0, not 20000\.0"):
        work.write(tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_a_checkpoint_that_contradicts_itself_is_mended(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    draft, out = tmp_path / "draft", tmp_path / "mended"
    plant = fault("config-flag").make(Plant.healthy(BOUNDARIES), "checkpoint: head_dim")
    rig.write_checkpoint(plant, draft)
    report = tmp_path / "found.json"
    assert command(["diagnose", "--draft", str(draft), "--apply", str(out), "--json", str(report)]) == 1
    found = json.loads(report.read_text())
    assert [(one["fault"], one["strength"]) for one in found["findings"]] == [("config-flag", "proven")]
    assert found["applied"]["before"] is None
    assert load_checkpoint(out).config.head_dim == 16
    printed = capsys.readouterr().out
    assert "Applied" in printed and "head_dim = 16" in printed


def test_short_and_few_is_healthy(tmp_path: Path) -> None:
    """Few short sequences of a sound draft: nothing is found in its file, its loading or its training states."""
    few = tiny_rig(count=2, max_new=12)
    run = replace(few, conversations=few.conversations[:2]).run(Plant.healthy(BOUNDARIES), tmp_path)
    found = diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET, loaded=few.target))
    assert found.findings == []


@pytest.mark.parametrize("where", ["the draft itself", "inside it", "a full folder", "a link"])
def test_no_input_and_no_full_folder_is_written_to(where: str, tmp_path: Path) -> None:
    draft = healthy(tmp_path / "draft")
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    out = {"the draft itself": draft, "inside it": draft / "new", "a full folder": full, "a link": tmp_path / "link"}[where]
    before = files(draft)
    assert command(["diagnose", "--draft", str(draft), "--apply", str(out), "--quiet"]) == 2
    assert files(draft) == before
    assert files(full) == {"kept": b"x"}
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("option", ["absorb", "apply"])
def test_a_copy_lies_outside_of_the_inputs(option: str, tmp_path: Path) -> None:
    draft = healthy(tmp_path / "draft")
    before = files(draft)
    for out, why in ((draft, "is there already"), (draft / "new", "among what is read"), (tmp_path, "is there already")):
        with pytest.raises(UsageError, match=why):
            diagnose(Inputs(serve=tmp_path / "capture", draft=draft, **{option: out}))  # type: ignore[arg-type]
    assert files(draft) == before


def test_apply_needs_a_draft(tmp_path: Path) -> None:
    assert command(["diagnose", "--serve", str(tmp_path), "--apply", str(tmp_path / "new"), "--quiet"]) == 2


# -- a checkpoint and a consumer alone -----------------------------------------------------------------------------------------

SPOILT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "norm_before_residual": {"keys": {"norm_before_residual": True}},
    "tied": {"keys": {"tie_word_embeddings": True}},
    "absolute": {"put": {"d2t": chosen_ids()}},
    "zero map": {"put": {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64)}},
    "no head": {"drop": ("lm_head.",)},
    "gain left at 1": {"put": {"midlayer.hidden_norm.weight": torch.ones(64)}},
    "another norm unread": {"put": {"input_norm.weight": torch.full((192,), 1.5)}},
    "quantised by name": {"keys": {"quantization_config": {"quant_method": "fp8"}}},
    "layer ids": {"keys": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}},
    "positions": {"keys": {"max_position_embeddings": 512}},
}


@pytest.mark.parametrize("consumer", ["vllm@0.32", "sglang@0.5.23", "sglang@0.5.10"])
@pytest.mark.parametrize("case", SPOILT)
def test_what_lint_finds_the_diagnosis_finds(case: str, consumer: str, tmp_path: Path) -> None:
    draft = change(healthy(tmp_path / "draft"), **SPOILT[case])
    by_lint, by_diagnosis = lint(draft, [consumer]), diagnose(Inputs(draft=draft, consumer=consumer))
    strength = {"proven": 0, "supported": 1, "suspected": 2}
    named = {one.fault: min(strength[other.strength] for other in by_diagnosis.findings if other.fault == one.fault)
             for one in by_diagnosis.findings}
    wanted = {one.fault: min(strength[other.strength] for other in by_lint.findings if other.fault == one.fault)
              for one in by_lint.findings}
    assert set(named) == set(wanted), (by_diagnosis.findings, by_lint.findings)
    assert all(named[name] <= wanted[name] for name in wanted), (named, wanted)
    assert by_diagnosis.verdict == ("undecided" if not wanted else by_diagnosis.verdict)


def test_the_command_line_says_it_too(tmp_path: Path) -> None:
    draft = change(healthy(tmp_path / "draft"), {"norm_before_residual": True})
    report = tmp_path / "found.json"
    assert command(["diagnose", "--draft", str(draft), "--for", "sglang@0.5.23", "--json", str(report), "--quiet"]) == 1
    found = json.loads(report.read_text())
    assert found["findings"][0]["fault"] == "config-flag"
    assert found["findings"][0]["fix"]["config"]["sglang@0.5.23"]


# -- small pieces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 192), (176, 64), (512, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grids_are_known_and_trained_matrices_have_none(shape: tuple[int, int], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    rows = torch.exp(0.5 * torch.randn(shape[0], 1, generator=draw))
    matrix = (torch.randn(shape, generator=draw) * 0.05 * rows).to(dtype)
    assert grid(matrix) is None
    assert grid(fp8(matrix)) == "fp8"
    assert grid(int8(matrix)) == "int8"
    assert grid(int4(matrix)) == "int4"
    assert grid(codes(matrix)) == "codes"


def test_no_matrix_of_a_trained_draft_lies_on_a_grid() -> None:
    for folder in (DRAFT, TARGET):
        for name, tensor in load_file(folder / "model.safetensors").items():
            if tensor.ndim == 2:
                assert grid(tensor) is None, name


def test_rounding_is_what_its_names_say() -> None:
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    assert (int8(matrix) - matrix).abs().max() <= float((matrix.abs().amax(1) / 127 / 2).max()) * 1.001
    grouped = matrix.unflatten(1, (-1, 32))
    assert bool(((int4(matrix) - matrix).unflatten(1, (-1, 32)).abs() <= grouped.abs().amax(-1, keepdim=True) / 14 * 1.001).all())
    held = packed(matrix)
    assert held.shape == (32, 32) and held.dtype == torch.uint8
    unpacked = torch.stack([held & 15, held >> 4], -1).flatten(1).float() - 8
    assert torch.equal(unpacked, (matrix / (matrix.abs().amax(1, keepdim=True) / 7)).round())


def test_an_unknown_alteration_is_refused() -> None:
    with pytest.raises(ValueError, match="no alteration"):
        altered({}, ["melt fc."], random_draft(1).config)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_lost_residual_is_exactly_the_residual(layers: int) -> None:
    """What `branch` leaves out is the stream before the last feed-forward block; `entry` differs by what went in."""
    own = random_draft(2, layers=layers)
    weights = own.state_dict()
    outputs = {}
    hidden, embeds = torch.randn(1, 5, own.config.hidden_size), torch.randn(1, 5, own.config.hidden_size)
    for how in ("kept", "branch", "entry"):
        draft = Draft(DraftConfig.model_validate(own.config.model_dump() | {"residual": how})).eval()
        draft.load_state_dict(weights)
        seen: list[torch.Tensor] = []
        last = draft.midlayer if layers == 1 else draft.layers["1"]
        last.post_attention_layernorm.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))  # type: ignore[misc]
        with torch.no_grad():
            outputs[how] = (draft(hidden, embeds, torch.arange(5)[None], StepMask.of(draft.config)), seen[0])
    whole, stream = outputs["kept"]
    torch.testing.assert_close(whole - outputs["branch"][0], stream)
    if layers == 1:
        torch.testing.assert_close(stream - outputs["entry"][1], hidden)
    else:
        assert not torch.allclose(whole, outputs["entry"][0])


def test_a_map_is_learned_only_where_there_is_one() -> None:
    draw = torch.Generator().manual_seed(4)
    stored = torch.arange(40) * 2
    best = torch.randint(40, (400,), generator=draw)
    for name, tokens in {"moved": stored[best] + 1, "other": (best * 7) % 97, "stored": stored[best],
                         "unrelated": torch.randint(100, (400,), generator=draw)}.items():
        pairs = torch.stack([best, tokens], 1)
        found = learn("engine", ([pairs[:200]], [pairs[200:]]), stored)
        assert found is not None
        assert (found.learned > 0.95) == (name != "unrelated"), name
        assert found.shift == {"moved": 1, "stored": 0}.get(name)
        assert (found.stored > 0.95) == (name == "stored")


def test_a_map_is_learned_from_pairs_and_not_from_a_table_of_all() -> None:
    draw = torch.Generator().manual_seed(5)
    pairs = torch.stack([torch.randint(30, (600,), generator=draw), torch.randint(7, (600,), generator=draw)], 1)
    stored = torch.arange(32) + 100
    table = torch.zeros(32, 7, dtype=torch.int64)
    for which, token in pairs.tolist():
        table[which, token] += 1
    ids, seen = most_frequent(pairs, stored)
    assert seen.tolist() == table.sum(1).tolist() and ids[30:].tolist() == [130, 131]
    assert all(table[i, ids[i]] == table[i].max() for i in range(30))
    # A table of these would take a terabyte.
    wide = torch.arange(10**6)
    moved = torch.stack([wide[:500], wide[:500] + 3], 1)
    found = learn("engine", ([moved], [moved]), wide)
    assert found is not None and found.shift == 3


def test_two_checkpoints_tensor_by_tensor(tmp_path: Path) -> None:
    healthy(tmp_path / "a")
    one = load_checkpoint(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    (tmp_path / "b").mkdir()
    tensors["fc.weight"] = tensors["fc.weight"] * 2
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    found = tensor_wise(one, load_checkpoint(tmp_path / "b"))
    assert found.differing == {"fc.weight": pytest.approx(1.0)}
    assert found.absent == ("norm.weight",) and found.added == () and found.settings == {}
    same = tensor_wise(one, one)
    assert not same.differing and same.tensors == len(one.tensors)


def test_a_consumer_facts_target(tmp_path: Path) -> None:
    """The target's config alone is enough for lint; the diagnosis takes a target with its ends."""
    found = lint(healthy(tmp_path / "draft"), ["vllm@0.32"], target_config=target_config(tmp_path / "target"))
    assert found.verdict == "clean"
