"""inspect on files whose content is known: made from a transformers model's own hidden states, or planted by hand."""

from __future__ import annotations

import json
import os
import random
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROWS, Inspect, Places, inspect_fixture, parts_fixture, places_fixture, write  # noqa: F401 (fixtures)
from safetensors.torch import load_file, save_file
from state_files import write_one
from support import LAYERS, VOCAB, WIDTH, random_draft, random_target
from torch import Tensor

from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import save_native
from draftscope.states.capture import write_trace
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample, Trace


def faults(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(f["fault"], where) for f in found["findings"] for where in f["where"]}


# --- the block of norms ---------------------------------------------------------------------------------------------------

HEAD = re.compile(r"  hs\[(\d+)\] \((.+); inferred: (.+)\): shape=(torch\.Size\(\[\d+, \d+\]\)), dtype=(torch\.\w+)")
NORMS = re.compile(r"    per-token norms: mean=(-?\d+\.\d{4}), first5=\[(.+)\]")
FIRST = re.compile(r"    first token, first5 values: \[(.+)\]")


def figures(text: str) -> list[float]:
    values = text.split(", ")
    assert all(re.fullmatch(r"-?\d+\.\d{4}|nan|-?inf", value) for value in values)
    return [float(value) for value in values]


def test_the_block_is_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample as in the first case, figures against float64."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1281, 4, 96, generator=draw) * torch.tensor([0.1, 3.8, 74.0, 90.0])[:, None]
    entries = [entry.to(torch.bfloat16) for entry in states.unbind(1)]
    labels = ["embed", "layer 3", "layer 31", "layer 59"]
    torch.save({"input_ids": torch.randint(0, 500, (1281,), generator=draw), "loss_mask": torch.ones(1281).long(),
                "hidden_states": entries, "labels": labels}, tmp_path / "data_0.pt")
    assert run(["inspect", "--norms", str(tmp_path / "data_0.pt")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "input_ids shape: torch.Size([1281])"
    assert lines[1] == "Number of hidden state layers: 4"
    for i, entry in enumerate(entries):
        head, norms, first = (pattern.fullmatch(lines[2 + 3 * i + k]) for k, pattern in enumerate((HEAD, NORMS, FIRST)))
        assert head and norms and first, lines[2 + 3 * i : 5 + 3 * i]
        assert head.groups()[:2] == (str(i), labels[i]) and head.groups()[3:] == ("torch.Size([1281, 96])", "torch.bfloat16")
        true = entry.double().norm(dim=-1)
        assert float(norms[1]) == pytest.approx(float(true.mean()), rel=1e-5, abs=1e-4)
        assert figures(norms[2]) == pytest.approx(true[:5].tolist(), rel=1e-5, abs=1e-4)
        assert figures(first[1]) == pytest.approx(entry[0, :5].double().tolist(), abs=6e-5)
    assert not lines[14].startswith("  hs[")


def test_the_block_of_short_and_broken_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = torch.tensor([[[3.0, 4.0]], [[torch.nan, 1.0]]]).repeat(1, 2, 1)
    write_sample(tmp_path / "hs_0.safetensors", Sample("", torch.tensor([1, 2]), states, None, ("", "")))
    assert run(["inspect", "--norms", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "    per-token norms: mean=nan, first5=[5.0000, nan]"
    assert lines[4] == "    first token, first5 values: [3.0000, 4.0000]"


def test_the_block_of_a_capture_names_its_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace("", torch.arange(24.0).reshape(4, 6), torch.arange(4), torch.ones(4).bool(), meta={"layer_ids": [2, 30, 58]})
    write_trace(tmp_path / "r.safetensors", trace)
    run(["inspect", "--norms", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Number of hidden state layers: 3"
    assert HEAD.fullmatch(lines[2])[2] == "layer id 2"  # type: ignore[index]
    assert HEAD.fullmatch(lines[2])[4] == "torch.Size([4, 2])"  # type: ignore[index]


# --- what entries are -----------------------------------------------------------------------------------------------------


def test_a_healthy_data_set_is_clean(inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(2, 4, 5, 8), ("layer 2", "layer 4", "layer 5", "layer 8"))
    code, found = inspect(folder)
    assert (code, found["verdict"], found["findings"]) == (0, "clean", [])
    (report,) = found["inspected"]
    assert (report["what"], report["format"], report["items"], report["tokens"]) == ("training data", "plain", 4, 4 * ROWS)
    assert report["answer_tokens"] == 4 * (ROWS - 20) and report["widths"] == {f"4 x {WIDTH}": 4}
    assert [entry["rank"] for entry in report["entries"]] == [1, 2, 3, 4]
    assert [entry["token_alone"] for entry in report["entries"]] == [False] * 4
    for entry, b in zip(report["entries"], (2, 4, 5, 8), strict=True):
        norms = places.stream[b].to(torch.bfloat16).double().norm(dim=-1)
        assert entry["norm_mean"] == pytest.approx(float(norms.mean()), rel=1e-5)
        assert entry["norm_first"] == pytest.approx(float(norms[:, 0].median()), rel=1e-5)
        assert entry["inferred"] == f"not the embedding; {['1st', '2nd', '3rd', '4th'][(2, 4, 5, 8).index(b)]} of 4 by depth"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_target_says_what_each_entry_is(dtype: torch.dtype, inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(0, 3, 6, 8), dtype=dtype)
    code, found = inspect(folder, "--target", places.folder)
    entries = found["inspected"][0]["entries"]
    assert [entry["placed"]["boundary"] for entry in entries] == [0, 3, 6, 8]
    assert [entry["inferred"] for entry in entries] == ["embedding (boundary 0)", "boundary 3", "boundary 6", "boundary 8"]
    assert (code, faults(found)) == (1, {("layer-set", "entry 0")})  # an embedding in a slot


def test_labels_are_not_believed(inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    """The first case: four entries called embed, 3, 31, 59 are three slots and the last state."""
    folder = write(tmp_path / "d", places, places.entries(3, 5, 6, 8), ("embed", "layer 3", "layer 5", "layer 7"))
    for more in ((), ("--target", parts), ("--target", places.folder)):
        code, found = inspect(folder, *more)
        assert (code, faults(found)) == (1, {("layer-set", "entry 0")}), more
        assert "labelled “embed”" in found["findings"][0]["says"]
    assert found["inspected"][0]["entries"][0]["inferred"] == "boundary 3"


def test_the_embedding_is_recognised_with_and_without_parts(inspect: Inspect, places: Places, parts: Path,
                                                            tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, [8 * places.stream[0], *places.entries(2, 4, 8)])
    code, found = inspect(folder)
    entry = found["inspected"][0]["entries"][0]
    assert code == 1 and entry["token_alone"] is True and entry["rank"] == 1
    assert entry["inferred"] == "depends on the token alone, as the embedding does; 1st of 4 by depth"
    assert found["findings"][0]["strength"] == "suspected"
    code, found = inspect(folder, "--target", parts)
    entry = found["inspected"][0]["entries"][0]
    assert entry["inferred"] == "embedding (boundary 0) times 8" and entry["embedding_factor"] == pytest.approx(8, rel=1e-2)
    assert found["findings"][0]["strength"] == "supported"
    others = found["inspected"][0]["entries"][1:]
    assert all(other["embedding_error"] > 0.2 for other in others)


def test_an_embedding_that_is_called_so_is_no_finding(inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(0, 2, 4, 8), ("embed_tokens", "layer 2", "layer 4", "layer 8"))
    assert inspect(folder)[0] == 0


def test_constant_text_says_nothing_about_tokens(inspect: Inspect, tmp_path: Path) -> None:
    """A run of one token has equal states at every depth."""
    states = torch.randn(1, 4, 16).repeat(12, 1, 1)
    write_sample(tmp_path / "d" / "hs_0.safetensors", Sample("", torch.full((12,), 7), states, None, ("",) * 4))
    _, found = inspect(tmp_path / "d")
    assert [entry["token_alone"] for entry in found["inspected"][0]["entries"]] == [None] * 4


@pytest.mark.parametrize("whole", [True, False])
def test_a_last_state_after_the_norm_is_found(whole: bool, inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, [*places.entries(2, 4, 5), places.post])
    _, found = inspect(folder, "--target", places.folder if whole else parts)
    assert ("final-norm", "entry 3") in faults(found)
    assert found["inspected"][0]["entries"][3]["rms_post"] == pytest.approx(1, rel=1e-2)
    healthy = write(tmp_path / "h", places, places.entries(2, 4, 5, 8))
    assert inspect(healthy, "--target", places.folder if whole else parts)[0] == 0


def test_own_text_is_read_from_the_last_state_alone(inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    """Tokens that the head gives from the row before: the last state reproduces them, a middle one does not."""
    model = random_target(3, tied=False)
    model.load_state_dict(load_file(places.folder / "model.safetensors"))
    with torch.no_grad():
        ids = model.generate(places.ids[:1, :8], max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
        last: list[Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
        states = model(ids, output_hidden_states=True).hidden_states
        hook.remove()
    end = last[0] if isinstance(last[0], Tensor) else last[0][0]
    mask = torch.arange(ids.shape[1]) >= 8
    for name, order in (("right", [states[2], states[4], states[5], end]), ("wrong", [states[2], end, states[4], states[5]])):
        sample = Sample("", ids[0], torch.stack([s[0] for s in order], 1), mask, ("",) * 4)
        write_sample(tmp_path / name / "hs_0.safetensors", sample)
    code, found = inspect(tmp_path / "right", "--target", parts)
    entries = found["inspected"][0]["entries"]
    assert (code, entries[3]["text_pre"]) == (0, 1.0)
    assert entries[3]["inferred"] == "last state, before the final norm (head gives 100 % of the text)"
    code, found = inspect(tmp_path / "wrong", "--target", parts)
    assert (code, faults(found)) == (1, {("layer-set", "entry 3")})
    assert found["inspected"][0]["entries"][1]["text_pre"] == 1.0


@pytest.mark.parametrize(("made", "fault"), [
    ("shift", "token-shift"), ("branch", "residual-missing"), ("scale", "scale-mult"), ("order", "layer-set"),
    ("teacher", "layer-set"),
])
def test_what_no_healthy_entry_shows_is_proven_by_placement(made: str, fault: str, inspect: Inspect, places: Places,
                                                            tmp_path: Path) -> None:
    low, middle, high, last = places.entries(2, 4, 5, 8)
    entries = {
        "shift": [low, torch.roll(middle, -1, 1), high, last], "branch": [low, places.stream[4] - places.stream[3], high, last],
        "scale": [low, 3 * middle, high, last], "order": [high, low, middle, last],
        "teacher": [low, middle, high, places.stream[7]],
    }[made]
    code, found = inspect(write(tmp_path / "d", places, entries, dtype=torch.float32), "--target", places.folder)
    assert code == 1 and {f["fault"] for f in found["findings"]} == {fault}


def test_another_targets_width_is_a_finding(inspect: Inspect, parts: Path, tmp_path: Path) -> None:
    write_sample(tmp_path / "d" / "hs_0.safetensors", Sample("", torch.arange(9), torch.randn(9, 4, 32), None, ("",) * 4))
    code, found = inspect(tmp_path / "d", "--target", parts)
    assert (code, faults(found)) == (1, {("schema-width", "tensor hidden_states")})


# --- what is wrong with files ---------------------------------------------------------------------------------------------


def plain(rows: int = 12, entries: int = 4, width: int = 16, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    depth = torch.tensor([1.0, 5.0, 20.0, 60.0, 90.0])[:entries, None]
    return {"hidden_states": torch.randn(rows, entries, width, generator=draw) * depth,
            "token_ids": torch.randint(0, 90, (rows,), generator=draw), "loss_mask": (torch.arange(rows) > 4).long()}


def put(folder: Path, number: int, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / f"hs_{number}.safetensors")
    return folder


def test_non_finite_values_are_counted_by_entry_sample_and_row(inspect: Inspect, tmp_path: Path) -> None:
    for number in range(3):
        tensors = plain(seed=number)
        if number:
            tensors["hidden_states"][3, 1, :2] = torch.nan
            tensors["hidden_states"][7, 1, 5] = -torch.inf
        if number == 2:
            tensors["hidden_states"][0, 3, 0] = torch.inf
        put(tmp_path / "d", number, tensors)
    code, found = inspect(tmp_path / "d")
    assert (code, faults(found)) == (1, {("nonfinite", "entry 1"), ("nonfinite", "entry 3")})
    bad = [entry["nonfinite"] for entry in found["inspected"][0]["entries"]]
    assert bad[1] == {"values": 6, "rows": 4, "items": 2, "first": "hs_1.safetensors", "first_row": 3}
    assert bad[3] == {"values": 1, "rows": 1, "items": 1, "first": "hs_2.safetensors", "first_row": 0}
    assert bad[0]["values"] == bad[2]["values"] == 0
    assert found["findings"][0]["strength"] == "proven"


def test_huge_finite_values_are_no_nan(inspect: Inspect, tmp_path: Path) -> None:
    tensors = plain()
    tensors["hidden_states"] = (tensors["hidden_states"] * 1e30).to(torch.bfloat16)
    code, found = inspect(put(tmp_path / "d", 0, tensors))
    assert code == 0
    true = tensors["hidden_states"].double().norm(dim=-1).mean(0)
    assert [e["norm_mean"] for e in found["inspected"][0]["entries"]] == pytest.approx(true.tolist(), rel=1e-6)


def test_shapes_that_differ_and_files_that_do_not_fit(inspect: Inspect, tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / "d", number, plain(seed=number))
    put(tmp_path / "d", 3, plain(width=24))
    put(tmp_path / "d", 4, {**plain(), "token_ids": torch.arange(5)})
    put(tmp_path / "d", 5, {"hidden_states": torch.ones(3, 8), "token_ids": torch.arange(3)})
    (tmp_path / "d" / "hs_6.safetensors").write_bytes((tmp_path / "d" / "hs_0.safetensors").read_bytes()[:300])
    (tmp_path / "d" / "notes.txt").write_text("x")
    code, found = inspect(tmp_path / "d")
    assert code == 1
    assert {f["fault"] for f in found["findings"]} == {"schema-width", "req-mix", "run-ops"}
    report = found["inspected"][0]
    assert report["widths"] == {"4 x 16": 3, "4 x 24": 1} and (report["files"], report["items"]) == (7, 4)
    assert {group["cause"]: group["files"] for group in report["skipped"]} == {"foreign": 1, "rows": 1, "layout": 1, "broken": 1}
    assert report["entries"][0]["rows"] == 36  # of the common shape


def test_what_a_trainer_left_beside_its_data_is_no_finding(inspect: Inspect, tmp_path: Path) -> None:
    write_one("speculators-v1", tmp_path / "d", 0)
    torch.save({"python": random.getstate(), "arguments": Namespace(lr=1e-4)}, tmp_path / "d" / "rng_state.pth")
    code, found = inspect(tmp_path / "d")
    assert code == 0 and found["findings"] == [] and [group["cause"] for group in found["inspected"][0]["skipped"]] == ["foreign"]


@pytest.mark.parametrize(("mask", "fault", "strength"), [
    ([0, 0, 0], "lossmask-empty", "proven"), ([1, 0, 1], "lossmask-empty", "supported"),
    ([2, 2, 2], "lossmask-span", "suspected"),
    ([1, 2, 1], None, None), ([None, None, None], None, None),
])
def test_loss_masks(mask: list[int | None], fault: str | None, strength: str | None, inspect: Inspect, tmp_path: Path) -> None:
    """0: all zero, 1: some, 2: all one, None: absent."""
    for number, kind in enumerate(mask):
        tensors = plain(seed=number)
        if kind is None:
            del tensors["loss_mask"]
        else:
            tensors["loss_mask"] = [torch.zeros(12).long(), tensors["loss_mask"], torch.ones(12).long()][kind]
        put(tmp_path / "d", number, tensors)
    code, found = inspect(tmp_path / "d")
    assert [(f["fault"], f["strength"]) for f in found["findings"]] == ([] if fault is None else [(fault, strength)])
    assert code == (0 if fault is None else 1)
    assert any("no loss_mask" in note for note in found["inspected"][0]["notes"]) == (mask[0] is None)


def test_equal_entries_are_found_and_told_from_stray_ones(inspect: Inspect, tmp_path: Path) -> None:
    for number in range(3):
        tensors = plain(seed=number)
        tensors["hidden_states"][:, 2] = tensors["hidden_states"][:, 0]
        if number == 1:
            tensors["hidden_states"][:, 3] = tensors["hidden_states"][:, 1]
        put(tmp_path / "d", number, tensors)
    code, found = inspect(tmp_path / "d")
    assert code == 1
    assert {f["fault"]: f["where"] for f in found["findings"]} == {
        "layer-set": ["entry 0", "entry 2"], "capture-alias": ["entry 1", "entry 3"]}


def test_an_entry_of_one_vector_and_rows_of_zeros(inspect: Inspect, tmp_path: Path) -> None:
    tensors = plain()
    tensors["hidden_states"][:, 1] = tensors["hidden_states"][0, 1]
    tensors["hidden_states"][4:6, 2] = 0
    code, found = inspect(put(tmp_path / "d", 0, tensors))
    assert (code, faults(found)) == (1, {("capture-alias", "entry 1"), ("req-mix", "entry 2")})


def test_labels_in_the_wrong_order_of_depth(inspect: Inspect, places: Places, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", places, places.entries(2, 5, 6, 8), ("layer 30", "layer 3", "layer 58", "layer 61"))
    code, found = inspect(folder)
    assert (code, faults(found)) == (1, {("layer-set", "entry 0"), ("layer-set", "entry 1")})


def test_ids_outside_the_vocabulary(inspect: Inspect, parts: Path, tmp_path: Path) -> None:
    folder = put(tmp_path / "d", 0, {**plain(width=WIDTH), "token_ids": torch.arange(12) - 2})
    assert faults(inspect(folder)[1]) == {("schema-width", "tensor token_ids")}
    folder = put(tmp_path / "e", 0, {**plain(width=WIDTH), "token_ids": torch.arange(12) + VOCAB - 3})
    assert inspect(folder)[0] == 0
    assert ("schema-width", "tensor token_ids") in faults(inspect(folder, "--target", parts)[1])


def test_only_some_files_are_read_where_there_are_many(inspect: Inspect, tmp_path: Path) -> None:
    for number in range(7):
        put(tmp_path / "d", number, plain(seed=number))
    code, found = inspect(tmp_path / "d", "--samples", 3)
    report = found["inspected"][0]
    assert (code, report["files"], report["items"], report["read"]) == (0, 7, 3, 3)
    assert any("3 of 7 files" in note for note in report["notes"])
    assert report["tokens"] == 36


# --- captures -------------------------------------------------------------------------------------------------------------


def capture(counts: list[int], k: int = 3, width: int = 8, *, wrong: int = 0) -> Trace:
    draw = torch.Generator().manual_seed(1)
    prompt = 6
    step = torch.cat([torch.full((prompt,), -1), torch.arange(len(counts)).repeat_interleave(k + 1)])
    within = torch.cat([torch.zeros(prompt).long(), torch.arange(k + 1).repeat(len(counts))])
    limit = torch.cat([torch.full((prompt,), k), torch.tensor(counts).repeat_interleave(k + 1)])
    rows = len(step)
    return Trace(
        "", torch.randn(rows, 3, width, generator=draw).mul(torch.tensor([[1.0], [4.0], [9.0]])).flatten(1),
        torch.randint(0, 99, (rows,), generator=draw), within <= limit,
        phase=(step >= 0).to(torch.uint8), step=step, last_hidden=torch.randn(rows, width, generator=draw),
        accepted_counts=torch.tensor([counts[0] + wrong, *counts[1:]]), meta={"engine": "vllm", "layer_ids": [2, 4, 5]},
    )


def test_a_capture_is_counted(inspect: Inspect, tmp_path: Path) -> None:
    for number, counts in enumerate(([3, 0, 1], [2, 2])):
        write_trace(tmp_path / "c" / f"r{number}.safetensors", capture(counts))
    code, found = inspect(tmp_path / "c")
    report = found["inspected"][0]
    assert (code, report["what"], report["items"]) == (0, "capture", 2)
    facts = report["facts"]
    assert (facts["verify_steps"], facts["accepted_tokens"], facts["accept_length"]) == (5, 8, 8 / 5 + 1)
    assert facts["rows"] == {"accepted": 12 + 13, "rejected": 20 - 13, "prefill": 12, "verify": 20}
    assert facts["slots"] == "3 (last_hidden is 8 wide)"
    assert [e["name"] for e in report["entries"]] == ["slot 0", "slot 1", "slot 2", "last"]
    assert [e["label"] for e in report["entries"]] == ["layer id 2", "layer id 4", "layer id 5", ""]
    assert set(report["entries"][0]["norm_by_phase"]) == {"prefill", "verify"}
    assert report["entries"][0]["rows"] == 25  # rejected rows are out
    assert report["claims"] == {"engine": "vllm", "layer_ids": [2, 4, 5]}


def test_counts_that_contradict_the_rows(inspect: Inspect, tmp_path: Path) -> None:
    write_trace(tmp_path / "c" / "r.safetensors", capture([1, 0, 2], wrong=1))
    code, found = inspect(tmp_path / "c")
    assert (code, faults(found)) == (1, {("metric", "tensor accepted_counts")})


def test_a_captures_slots_are_placed(inspect: Inspect, places: Places, tmp_path: Path) -> None:
    """Slots one boundary low: placed as what they are, whatever the metadata claim."""
    for i in range(2):
        trace = Trace("", torch.cat([s[i] for s in places.entries(1, 3, 4)], -1), places.ids[i], torch.ones(ROWS).bool(),
                      meta={"layer_ids": [2, 4, 5]})
        write_trace(tmp_path / "c" / f"r{i}.safetensors", trace)
    code, found = inspect(tmp_path / "c", "--target", places.folder)
    entries = found["inspected"][0]["entries"]
    assert [e["placed"]["boundary"] for e in entries] == [1, 3, 4] and code == 0


# --- checkpoints, targets, other files ------------------------------------------------------------------------------------


def test_a_draft_checkpoint_is_told_from_a_target(inspect: Inspect, places: Places, parts: Path, tmp_path: Path) -> None:
    save_native(tmp_path / "draft", random_draft(draft_vocab=120), torch.arange(120))
    code, found = inspect(tmp_path / "draft", places.folder, parts)
    draft, whole, only = found["inspected"]
    assert code == 0 and [draft["what"], whole["what"], only["what"]] == ["draft checkpoint", "target", "target"]
    assert (draft["facts"]["slots"], draft["facts"]["draft_vocab_size"], draft["facts"]["d2t"]) == (3, 120, "offsets 0..119")
    assert whole["facts"]["weights"] == f"{LAYERS} of {LAYERS} layers" and only["facts"]["weights"].startswith("parts only")
    assert (whole["facts"]["layers"], whole["facts"]["hidden_size"], whole["facts"]["vocab_size"]) == (LAYERS, WIDTH, VOCAB)


@pytest.mark.parametrize(("change", "expected"), [
    ({"fc.weight": None}, ("weight-missing", "tensor fc.weight")),
    ({"d2t": None}, ("vocab-map", "tensor d2t")),
    ({"d2t": torch.zeros(120).long()}, ("vocab-map", "tensor d2t")),
    ({"d2t": torch.arange(120) + 250}, ("vocab-map", "tensor d2t")),
    ({"norm.weight": torch.full((WIDTH,), torch.nan)}, ("nonfinite", "tensor norm.weight")),
    ({"midlayer.mlp.up_proj.weight": torch.zeros(2 * WIDTH, WIDTH)}, ("weight-missing", "tensor midlayer.mlp.up_proj.weight")),
])
def test_what_is_wrong_with_a_checkpoint(change: dict[str, Tensor | None], expected: tuple[str, str], inspect: Inspect,
                                         tmp_path: Path) -> None:
    save_native(tmp_path / "draft", random_draft(draft_vocab=120), torch.arange(120))
    held = {**load_file(tmp_path / "draft" / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, tmp_path / "draft" / "model.safetensors")
    code, found = inspect(tmp_path / "draft")
    assert (code, faults(found)) == (1, {expected})


def test_any_tensor_file_and_own_reports(inspect: Inspect, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "b": torch.tensor([torch.inf])}, tmp_path / "x.safetensors")
    code, found = inspect(tmp_path / "x.safetensors")
    assert (code, faults(found)) == (1, {("nonfinite", "tensor b")})
    assert found["inspected"][0]["facts"]["shapes"] == {"a": "float32 [2, 3]", "b": "float32 [1]"}
    (tmp_path / "r.json").write_text(json.dumps({"schema": "draftscope.diagnosis/1", "verdict": "wiring",
                                                "findings": [{"fault": "layer-offset"}]}))
    code, found = inspect(tmp_path / "r.json")
    assert code == 0 and found["inspected"][0]["facts"]["findings"] == ["layer-offset"]


# --- the command itself ---------------------------------------------------------------------------------------------------


def test_one_unreadable_path_among_others_is_named_and_the_rest_still_told(inspect: Inspect, tmp_path: Path,
                                                                           capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "d", 0, plain())
    code, found = inspect(tmp_path / "d", tmp_path / "nowhere")
    assert (code, found["verdict"], len(found["inspected"])) == (3, "undecided", 1)
    assert "nowhere" in found["next"][0] and "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(("names", "code", "verdict"), [
    (["good", "junk"], 0, "clean"), (["junk", "other"], 3, "undecided"), (["good", "nowhere"], 3, "undecided"),
    (["nowhere", "elsewhere"], 3, "undecided")])
def test_only_what_was_inspected_is_clean(names: list[str], code: int, verdict: str, tmp_path: Path) -> None:
    put(tmp_path / "good", 0, plain())
    for name in ("junk", "other"):
        (tmp_path / name).write_bytes(b"no states")
    out = tmp_path / "out.json"
    assert run(["inspect", *(str(tmp_path / name) for name in names), "--skip-bad", "--quiet", "--json", str(out)]) == code
    held = json.loads(out.read_text())
    assert held["verdict"] == verdict and len(held["next"]) == sum(name != "good" for name in names)


def test_json_on_stdout_is_alone_there(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    put(tmp_path / "d", 0, plain())
    assert run(["inspect", str(tmp_path / "d"), "--norms", "--json", "-"]) == 0
    out, err = capfdbinary.readouterr()
    held = json.loads(out)
    assert held["schema"] == "draftscope.inspect/1" and held["norms"][0].startswith("input_ids shape")
    assert b"input_ids shape" in err
    assert run(["inspect", str(tmp_path / "d"), "--norms", "--quiet"]) == 0
    assert capfdbinary.readouterr() == (b"", b"")


@pytest.mark.parametrize("command", [["inspect"], ["scan", "-o", "x.fp"]])
def test_what_is_neither_file_nor_folder_is_said_to_be_so(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for odd in ("pipe", "/dev/zero"):
        assert run([*command, odd]) == 3
        assert f"{odd}: is no regular file" in " ".join(capsys.readouterr().err.split())


def test_names_that_are_not_utf_8_are_the_reason_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    put(folder, 0, plain())
    assert run(["inspect", str(folder)]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "not UTF-8" in said and "Rename" in said and "Copy or write" not in said
    put(tmp_path / "d", 0, plain())
    (tmp_path / "d" / "hs_0.safetensors").rename(tmp_path / "d" / os.fsdecode(b"hs_1\xff.safetensors"))
    put(tmp_path / "d", 0, plain())
    assert run(["inspect", str(tmp_path / "d"), "--quiet"]) == 0


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_entries_are_read_at_any_width(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    labels = ("after layer 2 of the target", "layer 15", "layer 27", "last")
    for i in range(2):
        write_sample(tmp_path / f"hs_{i}.safetensors", Sample(
            f"hs_{i}", torch.arange(20), torch.randn(20, 4, 16, dtype=torch.bfloat16), torch.arange(20) > 4, labels))
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["inspect", str(tmp_path), "--json", str(tmp_path / "o.json")]) == 0
    entries = json.loads((tmp_path / "o.json").read_text())["inspected"][0]["entries"]
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert max(map(len, lines)) <= width
    for entry in entries:
        row = next(line for line in lines if line.startswith(f"  {entry['name']} "))
        assert " bfloat16 " in row and f"{entry['norm_median']:.4g}" in row
        assert (f"{entry['norm_mean']:.4g}" in row) == (width >= 100) or entry["norm_mean"] == entry["norm_median"]
        if width < 100:
            assert f"    {entry['inferred']}" in lines
    assert "layer 15" in told and "layer 27" in told
    # No word stands letter by letter down a column.
    assert all(len(line.strip()) > 2 for line in lines)
