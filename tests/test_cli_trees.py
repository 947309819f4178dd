"""`generate`, `capture` and `replay` on the command line: trees, sampling, stop strings, and what is counted apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import DRAFT, TARGET, tiny_prompts, tiny_target

from draftscope.cli.main import run
from draftscope.eagle3.counting import Acceptance, by_context, by_kind, contexts
from draftscope.eagle3.generated import Generated
from draftscope.eagle3.stopping import StopStrings
from draftscope.engines.counters import read_counters
from draftscope.errors import UsageError

PAIR = ["--target", str(TARGET), "--draft", str(DRAFT)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    held = tiny_prompts()["heldout"][:6]
    rows = [{"token_ids": ids, "kind": "odd" if i % 2 else "even"} for i, ids in enumerate(held)]
    del rows[5]["kind"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answered(prompts: Path, *options: str, code: int = 0, command: tuple[str, ...] = ("generate",)) -> dict[str, Any]:
    out = prompts.parent / "out.json"
    assert run([*command, str(prompts), *PAIR, "--max-new", "24", "--rows", "3", "--json", str(out), *options]) == code
    return json.loads(out.read_text())


def test_trees_are_counted_by_depth_context_and_kind(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(prompts, "--topk", "3", "--steps", "4", "--nodes", "9", "--compare-plain")
    printed = capsys.readouterr().out
    told = " ".join(printed.split())
    assert found["tree"] == {"topk": 3, "steps": 4, "nodes": 9} and found["k"] == 4 and found["sampling"] is None
    assert all(d["near_tie"] for d in found["plain"]["divergences"])
    counts = [c for r in found["requests"] for c in r["accepted_counts"]]
    assert found["drafts"] == len(counts) and found["accepted_per_position"] == [sum(c > d for c in counts) for d in range(4)]
    assert found["tokens_per_verify"] == found["accept_length"] == pytest.approx(1 + sum(counts) / len(counts))
    for groups in (found["by_context"], [r["acceptance"] for r in found["requests"]]):
        assert sum(g["drafts"] for g in groups) == len(counts)
        assert [sum(column) for column in zip(*(g["accepted_per_position"] for g in groups), strict=True)] == (
            found["accepted_per_position"])
    assert list(found["by_kind"]) == ["even", "odd"]
    assert sum(g["drafts"] for g in found["by_kind"].values()) == sum(len(r["accepted_counts"]) for r in found["requests"][:5])
    assert "trees of topk 3, 4 steps, 9 nodes" in told and "\ndepth " in printed and "\nkind " in printed
    counters = read_counters(prompts.parent / "out.json")
    assert (counters.drafts, list(counters.accepted)) == (len(counts), found["accepted_per_position"])


def test_what_is_left_out_of_a_tree_is_sglangs_choice_for_llama(prompts: Path) -> None:
    assert answered(prompts, "--topk", "4", "--limit", "1")["tree"] == {"topk": 4, "steps": 5, "nodes": 8}
    assert answered(prompts, "--topk", "2", "--steps", "1", "--limit", "1")["tree"] == {"topk": 2, "steps": 1, "nodes": 3}


def test_sampling_is_repeated_by_its_seed_and_not_by_company(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "40", "--draft-sampling", "probabilistic"]
    one = answered(prompts, *options, "--seed", "3", "--compare-plain")
    assert "the texts are drawn from one distribution" in capsys.readouterr().out
    assert one["sampling"] == {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "draft": "probabilistic", "seed": 3}
    assert one["plain"]["divergences"] is None
    again = answered(prompts, *options, "--seed", "3", "--rows", "1")
    assert [r["token_ids"] for r in again["requests"]] == [r["token_ids"] for r in one["requests"]]
    assert len({r["seed"] for r in one["requests"]}) == 6
    other = answered(prompts, *options, "--seed", "4")
    assert [r["token_ids"] for r in other["requests"]] != [r["token_ids"] for r in one["requests"]]
    tree = answered(prompts, "--temperature", "0.9", "--topk", "2")
    assert tree["sampling"]["draft"] == "greedy" and tree["tree"]["topk"] == 2 and tree["accept_length"] > 1


def test_a_stop_string_ends_the_text_before_it(prompts: Path) -> None:
    whole = answered(prompts)["requests"]
    text = next(r["text"] for r in whole if len(r["text"]) > 12)
    string = text[6:9]
    for options in ([], ["--topk", "3", "--steps", "3", "--nodes", "8"], ["--plain"]):
        arguments = ["--stop", "\0 never", "--stop", string, *options]
        if options == ["--plain"]:
            out = prompts.parent / "plain.json"
            plain = ["generate", str(prompts), "--target", str(TARGET), "--max-new", "24"]
            assert run([*plain, "--json", str(out), *arguments]) == 0
            found = json.loads(out.read_text())["requests"]
        else:
            found = answered(prompts, *arguments)["requests"]
        stopped = 0
        for before, after in zip(whole, found, strict=True):
            place = before["text"].find(string)
            assert after["text"] == (before["text"] if place < 0 else before["text"][:place])
            assert after["token_ids"] == before["token_ids"][: len(after["token_ids"])]
            if place >= 0:
                stopped += 1
                assert (after["finish"], after["stopped_by"]) == ("stop", string)
                decode = tiny_target().tokenizer.decode
                assert string in decode(after["token_ids"], skip_special_tokens=True)
                assert string not in decode(after["token_ids"][:-1], skip_special_tokens=True)
        assert stopped > 0


def test_stop_strings_lie_across_tokens_and_the_first_in_the_text_counts() -> None:
    words = ["a", "b", "END", "c", "EN", "D"]
    stop = StopStrings(["bE", "END"], lambda ids: "".join(words[i] for i in ids))
    assert stop.found([0, 4]) is None
    assert stop.found([0, 4, 5]) == "END" and stop.cut("aEND") == "a"
    assert stop.found([1, 4, 5]) == "bE" and stop.cut("xbEND") == "x"
    assert stop.cut("nothing") == "nothing"
    generated = Generated(0)
    generated.append([0, 0, 4, 5, 3, 3], frozenset(), 99, 99, stop)
    assert (generated.token_ids, generated.finish, generated.stopped_by, generated.cut) == ([0, 0, 4, 5], "stop", "END", True)
    with pytest.raises(UsageError, match="empty stop string"):
        StopStrings(["x", ""], str)


def test_steps_are_told_apart_by_what_was_read_before_them() -> None:
    results = [Generated(0, accepted_counts=[2, 0, 3]), Generated(1, accepted_counts=[1]), Generated(2)]
    assert contexts(results[0], 61) == [61, 64, 65] and contexts(results[2], 5) == []
    buckets = by_context(results, [61, 300, 5], 3)
    assert [(b.low, b.high, b.acceptance.accepted) for b in buckets] == [
        (0, 64, (1, 1, 0)), (64, 128, (1, 1, 1)), (256, 512, (1, 0, 0))]
    assert by_kind(results, ["x", None, "y"], 3) == {"x": Acceptance(3, (2, 2, 1)), "y": Acceptance(0, (0, 0, 0))}
    assert Acceptance(4, (3, 2, 1)).length == 2.5 and Acceptance(0, (0,)).length is None
    assert Acceptance(4, (2, 0, 0)).conditional == [0.5, 0.0, None]


def test_the_context_is_a_limit(prompts: Path) -> None:
    longest = max(len(ids) for ids in tiny_prompts()["heldout"][:6])
    found = answered(prompts, "--context", str(longest + 3), "--topk", "2")
    assert all(r["prompt_tokens"] + len(r["token_ids"]) <= longest + 3 for r in found["requests"])
    assert "context" in {r["finish"] for r in found["requests"]}


def test_a_captured_tree_is_replayed_as_one(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--topk", "3", "--steps", "3", "--nodes", "8"]
    counted = answered(prompts, "-o", str(tmp_path / "cap"), *shape, command=("capture", "transformers"))
    said = json.loads((tmp_path / "cap" / "capture.json").read_text())
    assert {k: said[k] for k in ("num_spec_tokens", "topk", "num_steps", "num_draft_tokens")} == {
        "num_spec_tokens": 7, "topk": 3, "num_steps": 3, "num_draft_tokens": 8}
    arguments = ["replay", "--states", str(tmp_path / "cap"), *PAIR, "--json", str(tmp_path / "r.json")]
    assert run([*arguments, "--readout", "engine"]) == 0
    assert "trees of topk 3, 3 steps, 8 nodes" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    (rung,) = found["rungs"]
    assert found["tree"] == counted["tree"] and found["k"] == 3
    assert rung["gate"]["share"] > 0.95 and rung["length"] == pytest.approx(counted["accept_length"], abs=0.1)
    assert run([*arguments, *shape[:4], "--nodes", "5"]) == 0
    smaller = json.loads((tmp_path / "r.json").read_text())
    assert smaller["rungs"][0]["length"] < rung["length"] and smaller["rungs"][0]["gate"] is None
    assert any("another shape" in note for note in smaller["notes"])
    assert run([*arguments, "-k", "3"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["tree"] is None
    capsys.readouterr()


@pytest.mark.parametrize(("options", "says"), [
    (["-k", "2", "--topk", "2"], "-k asks for chains"),
    (["--topk", "2", "--steps", "2", "--nodes", "8"], "has 7 nodes at most, not 8"),
    (["--top-p", "0.5"], "--top-p says how tokens are drawn"),
    (["--draft-sampling", "greedy"], "--draft-sampling says how"),
    (["--temperature", "1", "--top-p", "0"], "cannot sample with"),
    (["--stop", ""], "empty stop string"),
])
def test_options_that_do_not_go_together(
    prompts: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str,
) -> None:
    assert run(["generate", str(prompts), *PAIR, *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("fault", [[], ["--boundaries", "1,3,4"]], ids=["healthy", "layer-offset"])
def test_a_diagnosis_of_a_captured_tree_replays_trees(prompts: Path, tmp_path: Path, fault: list[str]) -> None:
    shape = ["--topk", "3", "--steps", "3", "--nodes", "8"]
    counted = answered(prompts, "-o", str(tmp_path / "cap"), *shape, *fault, command=("capture", "transformers"))
    found_at = tmp_path / "d.json"
    metrics = str(prompts.parent / "out.json")
    run(["diagnose", "--serve", str(tmp_path / "cap"), *PAIR, "--metrics", metrics, "--json", str(found_at)])
    found = json.loads(found_at.read_text())
    as_read, measured = found["acceptance"]["as_read"], found["acceptance"]["measured"]
    assert as_read["k"] == measured["k"] == 3
    assert measured["length"] == pytest.approx(counted["accept_length"])
    assert as_read["length"] == pytest.approx(measured["length"], abs=0.15)
    assert found["verdict"] not in {"runtime", "measurement"}
    assert any("drafted trees (topk 3, 3 steps, 8 nodes)" in step for step in found["steps"] + found["next"])
