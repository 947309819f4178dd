"""Lint: every trap of a checkpoint and its consumer, planted and found; and nothing found where nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from spoilt import DRAFT_VOCAB, IDS, VOCAB, WIDTH, change, chosen_ids, healthy, speculators, target_config, trained_looking
from support import random_target

from draftscope.cli.main import run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.findings import Finding
from draftscope.linting import lint
from draftscope.linting.report import Lint


def faults(result: Lint) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in result.findings:
        found.setdefault(one.fault, set()).update(one.where)
    return found


def only(result: Lint, fault: str) -> Finding:
    assert set(faults(result)) == {fault}, faults(result)
    return result.findings[0]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return healthy(tmp_path / "draft")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_config(tmp_path / "target")


@pytest.mark.parametrize("name", ["vllm@0.33", "vllm@0.33:v1", "vllm@0.32", "vllm@0.20", "sglang@0.5.23", "sglang@0.5.14",
                                  "sglang@0.5.10", "sglang@0.5.5", "specforge@0.2"])
def test_a_healthy_draft_is_read_as_it_was_trained(draft: Path, target: Path, name: str) -> None:
    result = lint(draft, [name], target_config=target)
    assert result.verdict == "clean" and not result.findings
    (reading,) = result.readings
    assert reading.loads and reading.boundaries == [2, 15, 27] and not reading.initial
    assert all(row.state in ("as trained", "not said") for row in reading.rows), reading.rows


def test_a_healthy_draft_of_speculators(tmp_path: Path, target: Path) -> None:
    made = speculators(tmp_path / "s")
    for name in ("vllm@0.33", "vllm@0.20", "speculators@0.9"):
        assert lint(made, [name], target_config=target).verdict == "clean", name
    for name in ("sglang@0.5.23", "specforge@0.2"):
        finding = only(lint(made, [name], target_config=target), "config-flag")
        assert "speculators dialect" in finding.says and not lint(made, [name]).readings[0].loads


def test_the_embedded_draft_is_clean() -> None:
    folder = Path(__file__).parents[1] / "src" / "draftscope" / "embedded" / "draft"
    assert lint(folder).verdict == "clean"


@pytest.mark.parametrize(("keys", "name", "fault", "boundaries"), [
    ({IDS: [4, 10, 20]}, "sglang", "layer-set", [2, 15, 27]),
    ({"eagle_config": {IDS: [3, 9, 19]}}, "vllm@0.33", "layer-set", [2, 15, 27]),
    ({"eagle_config": {IDS: [3, 9, 19]}}, "vllm@0.33:v1", "layer-offset", [3, 9, 19]),
    ({"eagle_config": {IDS: [3, 9, 19]}}, "vllm@0.20", "layer-set", [2, 15, 27]),
    ({"eagle_config": {IDS: [1, 14, 26]}}, "vllm@0.33:v1", "layer-offset", [1, 14, 26]),
    ({"eagle_config": {IDS: [1, 14, 26]}}, "vllm@0.33", None, [2, 15, 27]),
    ({"eagle_config": {IDS: [3, 9, 19]}}, "sglang@0.5.14", None, [4, 10, 20]),
    ({IDS: [4, 10, 20]}, "vllm@0.20", None, [4, 10, 20]),
    ({IDS: [4, 10, 20]}, "specforge@0.2", "layer-set", [2, 15, 27]),
])
def test_layer_ids(draft: Path, target: Path, keys: dict, name: str, fault: str | None, boundaries: list[int]) -> None:
    result = lint(change(draft, keys), [name], target_config=target)
    assert result.readings[0].boundaries == boundaries
    assert set(faults(result)) == ({fault} if fault else set())
    if fault:
        known = result.readings[0].consumer
        repaired = result.findings[0].fix.config[known]
        assert lint(change(draft, repaired), [name], target_config=target).verdict == "clean"


def test_ids_that_read_as_the_other_conventions_default_are_only_suspected(draft: Path, target: Path) -> None:
    result = lint(change(draft, {"eagle_config": {IDS: [2, 15, 27]}}), ["vllm@0.33:v1"], target_config=target)
    assert only(result, "layer-offset").strength == "suspected"
    assert any("may have meant" in caveat for caveat in result.findings[0].caveats)


def test_boundaries_by_the_kind_of_target(draft: Path, tmp_path: Path) -> None:
    change(draft, {"eagle_config": {IDS: [2, 15, 30]}})
    gpt = target_config(tmp_path / "gpt", model_type="gpt_oss")
    assert lint(draft, ["sglang@0.5.23"], target_config=gpt).readings[0].boundaries == [2, 15, 30]
    old = lint(draft, ["sglang@0.5.14"], target_config=gpt)
    assert old.readings[0].boundaries == [3, 16] and {"layer-set", "schema-width"} <= set(faults(old))
    assert "captures boundaries 0 to 29" in str(old.findings[0].fix) or "31" in str(old.findings)
    moe = target_config(tmp_path / "moe", model_type="qwen3_moe")
    change(draft, {"eagle_config": {IDS: [1, 14, 29]}})
    refused = lint(draft, ["sglang@0.5.23"], target_config=moe)
    assert not refused.readings[0].loads and "past the last layer" in refused.findings[0].says
    minimax = lint(change(draft, {"eagle_config": None}), ["sglang@0.5.23"],
                   target_config=target_config(tmp_path / "minimax", model_type="minimax_m3_vl"))
    assert minimax.readings[0].boundaries == [3, 16, 28] and only(minimax, "layer-offset").strength == "supported"


def test_the_eagle_flag(draft: Path, target: Path) -> None:
    for version in ("0.5.5", "0.5.10", "0.5.14", "0.5.23"):
        result = lint(draft, [f"sglang@{version}:eagle"], target_config=target)
        assert result.readings[0].boundaries == [] and result.readings[0].head == "target"
        assert "EAGLE3" in only(result, "config-flag").fix.says


@pytest.mark.parametrize(("switches", "keys", "name", "where"), [
    ({"norm_before_residual": True}, {}, "sglang@0.5.23", "config norm_before_residual"),
    ({"norm_before_residual": True}, {}, "vllm@0.33", None),
    ({"norm_before_fc": True}, {}, "sglang@0.5.14", "config norm_before_fc"),
    ({"norm_before_fc": True}, {}, "sglang@0.5.23", None),
    ({"norm_before_fc": True}, {"norm_before_fc": None, "eagle_config": {"norm_before_fc": True}}, "vllm@0.20",
     "config norm_before_fc"),
    ({"norm_before_fc": True}, {"norm_before_fc": None, "eagle_config": {"norm_before_fc": True}}, "vllm@0.33", None),
    ({"fc_norm": True}, {}, "sglang@0.5.10", "config fc_norm"),
    ({"fc_norm": True}, {}, "vllm@0.20", "config fc_norm"),
    ({"fc_norm": True}, {"fc_norm": None, "use_aux_norm": True}, "vllm@0.33", "config fc_norm"),
    ({"fc_norm": True}, {"fc_norm": None, "use_aux_norm": True}, "sglang@0.5.14", None),
    ({"norm_output": True}, {}, "sglang@0.5.10", "config norm_output"),
    ({"norm_output": True}, {}, "sglang@0.5.14", None),
    ({"norm_output": True}, {}, "vllm@0.20", "config norm_output"),
    ({"sliding_window": 64}, {}, "sglang@0.5.23", "config sliding_window"),
    ({"sliding_window": 64}, {}, "vllm@0.33", None),
    ({"qk_norm": True}, {"architectures": ["LlamaForCausalLMEagle3"]}, "sglang@0.5.23", "config qk_norm"),
])
def test_switches(tmp_path: Path, target: Path, switches: dict, keys: dict, name: str, where: str | None) -> None:
    made = change(healthy(tmp_path / "d", **switches), keys)
    result = lint(made, [name], target_config=target)
    if where is None:
        assert result.verdict == "clean", faults(result)
    else:
        assert set(faults(result)) == {"config-flag"} and where in faults(result)["config-flag"]
        row = next(r for r in result.readings[0].rows if f"config {r.question}" == where)
        assert row.state == "differs" and row.source.count(".py")


def test_a_key_unsaid_in_speculators_dialect_is_on_in_vllm(tmp_path: Path, target: Path) -> None:
    made = speculators(tmp_path / "s")
    raw = json.loads((made / "config.json").read_text())
    del raw["norm_before_residual"]
    (made / "config.json").write_text(json.dumps(raw))
    result = lint(made, ["vllm@0.33"], target_config=target)
    assert only(result, "config-flag").strength == "supported"
    assert result.findings[0].fix.config == {"vllm@0.33": {"norm_before_residual": False}}
    assert lint(made, ["speculators"], target_config=target).verdict == "clean"


@pytest.mark.parametrize(("prefix", "refused", "unread"), [
    ("draft_model.", ["vllm@0.33", "specforge"], ["sglang@0.5.23", "sglang@0.5.5"]),
    ("module.", ["vllm@0.20"], ["sglang@0.5.10"]),
    ("_orig_mod.", ["vllm@0.33"], ["sglang@0.5.14"]),
    ("model.", ["vllm@0.33"], []),
])
def test_prefixes(draft: Path, target: Path, prefix: str, refused: list[str], unread: list[str]) -> None:
    change(draft, prefix=prefix)
    for name in refused:
        assert not lint(draft, [name], target_config=target).readings[0].loads, name
    for name in unread:
        result = lint(draft, [name], target_config=target)
        assert result.readings[0].loads and set(faults(result)) == {"weight-missing"}
        assert {"fc.weight", "lm_head.weight", "midlayer.mlp.down_proj.weight"} <= set(result.readings[0].initial)
        assert "d2t" not in result.readings[0].initial  # found by its letters anywhere in the name
    if prefix == "model.":
        kept = lint(draft, ["sglang@0.5.23"], target_config=target)
        assert kept.readings[0].initial == ["lm_head.weight"] and "model.lm_head.weight" in kept.findings[0].says


def test_names_of_the_layer(draft: Path, target: Path) -> None:
    change(draft, rename={"midlayer.": "layers.0."})
    for name in ("sglang@0.5.10", "sglang@0.5.5"):
        result = lint(draft, [name], target_config=target)
        assert result.readings[0].loads and "midlayer.self_attn.q_proj.weight" in result.readings[0].initial
        assert set(faults(result)) == {"weight-missing"}
    assert lint(draft, ["sglang@0.5.14"], target_config=target).verdict == "clean"
    assert lint(draft, ["vllm@0.20"], target_config=target).verdict == "clean"
    assert not lint(draft, ["specforge"], target_config=target).readings[0].loads


@pytest.mark.parametrize("name", ["sglang@0.5.23", "vllm@0.33"])
def test_missing_tensors(draft: Path, target: Path, name: str) -> None:
    result = lint(change(draft, drop=("fc.", "d2t")), [name], target_config=target)
    assert {"weight-missing", "vocab-map"} == set(faults(result))
    assert set(result.readings[0].initial) == {"fc.weight", "d2t"} and result.findings[0].strength == "proven"
    assert len(result.findings) == 2, "one finding for each, not one of the files and one of the consumer"


def vocabulary_map(kind: str) -> dict[str, torch.Tensor]:
    ids, own = chosen_ids(), torch.arange(DRAFT_VOCAB)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    if kind == "zero":
        return {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64), "t2d": t2d}
    if kind == "absolute":
        return {"d2t": ids, "t2d": t2d}
    if kind == "contradicts":
        return {"d2t": ids - own, "t2d": ~t2d}
    if kind == "beyond":
        return {"d2t": ids - own + torch.where(own == 7, VOCAB, 0)}
    if kind == "twice":
        return {"d2t": torch.where(own == 7, ids[8] - 7, ids - own)}
    if kind == "mask count":
        return {"d2t": ids - own, "t2d": t2d | (torch.arange(VOCAB) == int((~t2d).nonzero()[0]))}
    shuffled = ids[torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(1))]
    return {"d2t": shuffled - own, "t2d": t2d}


@pytest.mark.parametrize(("kind", "says"), [
    ("zero", "all zero"), ("absolute", "holds target ids"), ("contradicts", "contradict"), ("beyond", "beyond the vocabulary"),
    ("twice", "twice"), ("mask count", "true entries"),
])
def test_vocabulary_maps(draft: Path, target: Path, kind: str, says: str) -> None:
    made = change(draft, drop=("d2t", "t2d"), put=vocabulary_map(kind))
    for consumers in ([], ["vllm@0.33"]):
        assert says in only(lint(made, consumers, target_config=target), "vocab-map").says


def test_an_unsorted_map_is_no_fault_but_said(draft: Path, target: Path) -> None:
    result = lint(change(draft, drop=("d2t", "t2d"), put=vocabulary_map("unsorted")), ["vllm@0.33"], target_config=target)
    assert result.verdict == "clean" and result.facts["map_ascending"] is False
    assert any("not ascending" in line for line in result.unknown)


def test_coverage(draft: Path, target: Path, tmp_path: Path) -> None:
    counts = {int(i): 3 for i in range(VOCAB)}
    inside = int(chosen_ids()[0])
    counts[inside] = 3 + 600
    torch.save(counts, draft / "token_freq.pt")
    expected = (3 * DRAFT_VOCAB + 600) / (3 * VOCAB + 600)
    assert lint(draft).facts["coverage"] == pytest.approx(expected, abs=1e-6)
    (tmp_path / "f.json").write_text(json.dumps({"0": 1}))
    assert lint(draft, token_freq=tmp_path / "f.json").facts["coverage"] == float(0 in chosen_ids().tolist())
    (tmp_path / "f.json").write_text(json.dumps({"300": 1}))
    with pytest.raises(DraftscopeError, match="vocabulary has 300"):
        lint(draft, token_freq=tmp_path / "f.json")


@pytest.mark.parametrize(("keys", "consumers", "differs"), [
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("sglang@0.5.5",), ("sglang@0.5.5",)),
    ({"rope_theta": 5e5, "rope_parameters": None}, ("sglang@0.5.5", "vllm@0.33", "sglang@0.5.23"), ()),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("sglang@0.5.5", "vllm@0.33"),
     ("sglang@0.5.5",)),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
      "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, ("vllm@0.33",), ("vllm@0.33",)),
])
def test_rope_is_read_in_one_spelling_or_the_other(
    draft: Path, target: Path, keys: dict, consumers: tuple[str, ...], differs: tuple[str, ...],
) -> None:
    change(draft, keys)
    for name in consumers:
        result = lint(draft, [name], target_config=target)
        assert set(faults(result)) == ({"pos-id"} if name in differs else set()), name
        if name in differs:
            assert "rope_parameters" in result.readings[0].settings
            repaired = result.findings[0].fix.config[result.readings[0].consumer]
            assert lint(change(draft, repaired), [name], target_config=target).verdict == "clean"


def test_positions(draft: Path, tmp_path: Path) -> None:
    long = target_config(tmp_path / "long", max_position_embeddings=131072)
    sglang = only(lint(draft, ["sglang@0.5.23"], target_config=long), "ctx-limit")
    assert sglang.strength == "proven" and "does not start" in sglang.says and "131,072" in sglang.says
    assert "no longer drafted" in only(lint(draft, ["vllm@0.33"], target_config=long), "ctx-limit").says
    assert lint(draft, ["specforge"], target_config=long).verdict == "clean"


def test_a_tied_flag(draft: Path, target: Path) -> None:
    change(draft, {"tie_word_embeddings": True})
    result = lint(draft, ["sglang@0.5.14"], target_config=target)
    assert only(result, "tied-head").fix.config == {"sglang@0.5.14": {"tie_word_embeddings": False}}
    assert result.readings[0].head == "embedding"
    assert lint(draft, ["vllm@0.33"], target_config=target).verdict == "clean"


def test_a_missing_key_and_a_foreign_architecture(draft: Path, target: Path) -> None:
    full = healthy(draft.parent / "full", draft_vocab=VOCAB)
    change(full, {"draft_vocab_size": None})
    result = lint(full, ["sglang@0.5.23"], target_config=target)
    assert not result.readings[0].loads and "draft_vocab_size" in only(result, "config-flag").says
    assert lint(full, ["vllm@0.33"], target_config=target).verdict == "clean"
    change(draft, {"architectures": ["Eagle3LlamaForCausalLM"]})
    assert "knows no architecture" in only(lint(draft, ["sglang@0.5.23"], target_config=target), "config-flag").says
    assert lint(draft, ["vllm@0.33"], target_config=target).verdict == "clean"


def test_quantisation(draft: Path, target: Path, tmp_path: Path) -> None:
    made = change(draft, {"quantization_config": {"quant_method": "fp8"}})
    found = only(lint(made, ["vllm@0.33"], target_config=target), "quant-inherit")
    assert "plain" in found.says and found.where == ["config quantization_config"]
    change(draft, {"quantization_config": None})
    quantised = target_config(tmp_path / "q", quantization_config={"quant_method": "fp8"})
    result = lint(draft, ["sglang@0.5.23"], target_config=quantised)
    assert result.verdict == "clean" and result.facts["target"]["quantised"] == "fp8"
    row = next(r for r in result.readings[0].rows if r.question == "quantisation")
    assert "speculative-draft-model-quantization" in row.says


@pytest.mark.parametrize(("put", "fault", "says"), [
    ({"norm.weight": torch.ones(WIDTH)}, "weight-missing", "exactly 1"),
    ({"fc.weight": torch.zeros(WIDTH, 3 * WIDTH)}, "weight-missing", "zeros"),
    ({"fc.weight": torch.full((WIDTH, 3 * WIDTH), torch.nan)}, "nonfinite", "NaN"),
    ({"fc.weight": 0.02 * torch.randn(WIDTH, 3 * WIDTH, generator=torch.Generator().manual_seed(2))}, "weight-missing", "drawn"),
    ({"lm_head.weight": (torch.rand(DRAFT_VOCAB, WIDTH, generator=torch.Generator().manual_seed(2)) * 2 - 1) / WIDTH**0.5},
     "weight-missing", "drawn"),
])
def test_values_that_betray_an_unfilled_tensor(draft: Path, put: dict, fault: str, says: str) -> None:
    (name,) = put
    finding = only(lint(change(draft, put=put)), fault)
    assert says in finding.says and finding.where == [f"tensor {name}"]


def test_widths_and_sizes_against_the_target(draft: Path, tmp_path: Path) -> None:
    assert "128" in only(lint(draft, target_config=target_config(tmp_path / "w", hidden_size=128)), "schema-width").says
    smaller = only(lint(draft, target_config=target_config(tmp_path / "v", vocab_size=200)), "vocab-map")
    assert "do not exist" in smaller.says
    assert only(lint(draft, target_config=target_config(tmp_path / "p", vocab_size=320)), "schema-width").strength == "supported"
    shallow = target_config(tmp_path / "n", num_hidden_layers=5)
    assert "coincide" in only(lint(draft, target_config=shallow), "layer-set").says
    deep = lint(change(draft, {IDS: [2, 15, 40]}), target_config=target_config(tmp_path / "d"))
    assert "do not exist" in only(deep, "layer-set").says


def test_a_configuration_beside_other_weights_is_a_finding(draft: Path) -> None:
    change(draft, {IDS: [2, 10, 20, 27]})
    result = lint(draft, ["vllm@0.33"])
    assert "3 slots of 64; config.json names 4" in only(result, "schema-width").says and not result.readings and result.next


def test_slots_counted_by_another_key(tmp_path: Path, target: Path) -> None:
    made = healthy(tmp_path / "four", slots=4)
    change(made, {IDS: [2, 10, 20, 27], "num_aux_hidden_states": None})
    llama = lint(made, ["vllm@0.33"], target_config=target)
    assert "builds fc for 3 slots" in only(llama, "schema-width").says and not llama.readings[0].loads
    change(made, llama.findings[0].fix.config["vllm@0.33"])
    assert lint(made, ["vllm@0.33"], target_config=target).verdict == "clean"
    assert not lint(made, ["vllm@0.20"], target_config=target).readings[0].loads


@pytest.fixture
def whole_target(tmp_path: Path) -> Path:
    model = random_target(width=WIDTH, vocab=VOCAB, tied=False)
    model.load_state_dict(trained_looking(model.state_dict()))
    model.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def test_a_head_cut_at_offsets_as_if_they_were_ids(draft: Path, whole_target: Path) -> None:
    head, ids = load_file(whole_target / "model.safetensors")["lm_head.weight"], chosen_ids()
    right = change(draft, put={"lm_head.weight": head[ids].bfloat16()})
    result = lint(right, target=whole_target)
    assert result.verdict == "clean" and result.facts["head_rows_of_target"]["offset"] == 1.0
    offsets = ids - torch.arange(DRAFT_VOCAB)
    finding = only(lint(change(draft, put={"lm_head.weight": head[offsets].bfloat16()}), target=whole_target), "vocab-map")
    assert "offsets were taken for ids" in finding.says and finding.where == ["tensor lm_head.weight"]
    absolute = change(draft, put={"d2t": ids, "lm_head.weight": head[ids].bfloat16()})
    assert all(f.fault == "vocab-map" for f in lint(absolute, target=whole_target).findings)
    unmapped = change(draft, put={"d2t": offsets, "lm_head.weight": head[:DRAFT_VOCAB].bfloat16()})
    assert "first rows" in only(lint(unmapped, target=whole_target), "vocab-map").says


def test_an_embedding_of_its_own(draft: Path, whole_target: Path) -> None:
    theirs = load_file(whole_target / "model.safetensors")["model.embed_tokens.weight"]
    change(draft, put={"embed_tokens.weight": theirs.bfloat16()})
    assert lint(draft, ["sglang"], target=whole_target).verdict == "clean"
    change(draft, put={"embed_tokens.weight": (1.5 * theirs).bfloat16()})
    finding = only(lint(draft, ["sglang"], target=whole_target), "weight-missing")
    assert finding.where == ["tensor embed_tokens.weight"] and "100%" in finding.says
    assert lint(draft, ["vllm"], target=whole_target).verdict == "clean"
    assert any("--target" in line for line in lint(draft, ["sglang"]).unknown)


def test_a_version_between_two_known_ones(draft: Path, target: Path) -> None:
    change(draft, rename={"midlayer.": "layers.0."})
    result = lint(draft, ["sglang@0.5.12"], target_config=target)
    assert result.readings[0].consumer == "sglang@0.5.10"
    finding = only(result, "weight-missing")
    assert finding.strength == "supported" and any("nearest lower version" in caveat for caveat in finding.caveats)


def test_what_stays_unknown_is_said(draft: Path) -> None:
    said = " ".join(lint(draft, ["vllm"]).unknown)
    assert "--target-config" in said and "default" in said and "training states" in said


def test_the_command_line(draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "lint.json"
    assert run(["lint", str(draft), "--for", "sglang@0.5.23", "--target-config", str(target), "--json", str(out)]) == 0
    clean = json.loads(out.read_text())
    assert clean["schema"] == "draftscope.lint/1" and clean["verdict"] == "clean" and clean["findings"] == []
    text = capsys.readouterr().out
    assert "{2, 15, 27}" in text and "in effect" in text and "as trained" in text
    change(draft, {"eagle_config": {IDS: [3, 9, 19]}})
    assert run(["lint", str(draft), "--for", "vllm@0.33:v1", "--target-config", str(target), "--json", str(out)]) == 1
    Lint.model_validate(json.loads(out.read_text()))
    found = capsys.readouterr().out
    assert "layer-offset" in found and '{"eagle_aux_hidden_state_layer_ids": [4, 10, 20]}' in found
    assert run(["lint", str(draft), "--for", "nobody"]) == 2
    assert run(["lint", str(tmp_path / "absent"), "--json", str(out)]) == 3
    assert json.loads(out.read_text())["verdict"] == "undecided"


def test_the_matrix(draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "lint.json"
    change(draft, {"eagle_config": {IDS: [3, 9, 19]}})
    assert run(["lint", str(draft), "--for", "all", "--target-config", str(target), "--json", str(out)]) == 0
    readings = {r["asked"]: r for r in json.loads(out.read_text())["readings"]}
    assert len(readings) == 16
    assert readings["sglang@0.5.5"]["boundaries"] == [4, 10, 20] and readings["vllm@0.33:v1"]["boundaries"] == [3, 9, 19]
    assert readings["sglang@0.5.14:eagle"]["boundaries"] == [] and not readings["speculators@0.9"]["loads"]
    assert [r["findings"][0]["fault"] for r in readings.values() if r["asked"].startswith("vllm@0.33")] == [
        "layer-set", "layer-offset"]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["vllm@0.33:v1", "yes"] and "{3, 9, 19}" in line for line in lines)


@pytest.mark.parametrize("broken", ["not json", "no weights", "cut"])
def test_unreadable_files_are_refused(draft: Path, broken: str) -> None:
    if broken == "not json":
        (draft / "config.json").write_text("{")
    elif broken == "no weights":
        (draft / "model.safetensors").unlink()
    else:
        whole = (draft / "model.safetensors").read_bytes()
        (draft / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DraftscopeError) as error:
        lint(draft, ["vllm"])
    assert str(draft) in str(error.value) and not isinstance(error.value, UsageError)


def test_nothing_is_read_twice_or_changed(draft: Path, target: Path) -> None:
    before: dict[str, Any] = {path.name: path.read_bytes() for path in draft.iterdir()}
    lint(draft, ["all"], target_config=target)
    assert before == {path.name: path.read_bytes() for path in draft.iterdir()}


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_all_consumers_are_read_at_any_width(width: int, draft: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run(["lint", str(draft), "--for", "all"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = set(" ".join(lines).replace(",", " ").split())
    assert {reading.asked for reading in lint(draft, ["all"]).readings} <= words
    assert {"loads", "boundaries", "switches", "tensors", "embedding", "head", "map", "rope", "trained"} <= words
