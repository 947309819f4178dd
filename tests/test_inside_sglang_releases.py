"""The capture inside released SGLang: the wheels' own workers, inputs and verification, driven over a toy pair.

Whatever a release does inside, a recorded row must hold the toy target's state of its token at its position, a step the toy
draft's guesses, and a count how many of them the toy target follows.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_driver import DRAFT_WIDTH, draft_state, following, guesses, state_of
from tiny import DRAFT, TARGET, tiny_prompts

import draftscope
from draftscope.counterfactual import counterfactuals
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.stages import stages
from draftscope.engines import inside
from draftscope.states.types import from_trace
from draftscope.target.parts import read_parts

pytestmark = pytest.mark.sglang

RELEASES = [("0.5.5", "v1"), ("0.5.10", "v1"), ("0.5.10", "v2"), ("0.5.12", "v1"), ("0.5.12", "v2"), ("0.5.14", "v2"),
            ("0.5.23", "v2")]
TREES = [("0.5.5", "v1"), ("0.5.12", "v1"), ("0.5.14", "v2"), ("0.5.23", "v2")]
CHUNK = 5
REQUESTS = [
    {"rid": "a", "prompt": [3, 9, 27, 4, 11, 8, 2], "answer": 14},
    {"rid": "b", "prompt": [7, 1, 2, 5, 20, 6, 30, 31], "answer": 31, "cached": 1},
    {"rid": "c", "prompt": [40, 41, 42, 43, 44, 45], "answer": 40, "stop": 24},
]


def before(version: str, patch: int) -> bool:
    return int(version.split(".")[2]) < patch


def wheel(version: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("DRAFTSCOPE_CACHE") or home / "draftscope")
    folder = Path(os.environ.get("DRAFTSCOPE_ENVS") or cache / "envs") / "sglang-wheels" / version
    if not (folder / "sglang").is_dir():
        pytest.skip(f"no unpacked wheel in {folder}; scripts/env-sglang-wheels fetches it")
    return folder


def drive(version: str, kind: str, folder: Path, **plan: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    plan = {"topk": 1, "steps": 3, "nodes": 4, "chunk": CHUNK, "requests": REQUESTS} | plan
    root = Path(__file__).parents[1]
    source = str(Path(draftscope.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(root / "tests/sglang_driver.py"), str(wheel(version)), kind, str(folder), json.dumps(plan)],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    about = json.loads((folder / "capture.json").read_text())
    assert about["stopped"] is None and about["closed"], about
    traces = {trace.meta["request"]: trace for trace in draftscope.open(folder)}
    assert set(traces) == {one["rid"] for one in plan["requests"]}
    return json.loads(done.stdout.splitlines()[-1]), traces, about


@pytest.mark.parametrize("version", sorted({version for version, _ in RELEASES}))
def test_every_worker_has_the_calls_and_what_is_read_of_them(version: str) -> None:
    """Of the workers that are not driven (several draft layers) too: names and arguments, as the sources have them."""
    folder, found = wheel(version), set()
    for module, (name, calls) in inside._WORKERS.items():
        path = folder / Path(*module.split(".")).with_suffix(".py")
        if not path.exists():
            continue
        tree = ast.parse(path.read_text())
        kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        methods = {node.name: [a.arg for a in node.args.args] for node in kind.body if isinstance(node, ast.FunctionDef)}
        for call, handler in calls.items():
            assert methods[call][:2] in (["self", "batch"], ["self", "model_worker_batch"]), (name, call)
            if handler == "prefill":
                assert {"next_token_ids"} < set(methods[call]) & {"next_token_ids", "hidden_states", "target_hidden_states"}
            if handler == "decode":
                assert "batch_result" in methods[call]
        assigned = {node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute)}
        assert {"server_args", "topk", "speculative_num_steps", "speculative_num_draft_tokens", "speculative_algorithm",
                "target_worker"} <= assigned
        assert assigned & {"draft_runner", "draft_runner_list", "mtp_model_runner", "draft_model_runner"}
        found.add(name)
    assert found >= {"EagleDraftWorker", *(["EAGLEWorker"] if before(version, 14) else [])}, found


@pytest.fixture(scope="module", params=RELEASES, ids="-".join)
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    version, kind = request.param
    return (version, kind, *drive(version, kind, tmp_path_factory.mktemp("capture") / "out"))


@pytest.fixture(scope="module", params=TREES, ids="-".join)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    version, kind = request.param
    return (version, kind, *drive(version, kind, tmp_path_factory.mktemp("capture") / "out", topk=2, nodes=7))


def check_rows(told: dict[str, Any], traces: dict[str, Any]) -> None:
    weight = torch.tensor(told["fc"], dtype=torch.float64)
    for one in REQUESTS:
        trace, text = traces[one["rid"]], told["texts"][one["rid"]]
        want = torch.tensor([state_of(*pair) for pair in zip(trace.token_ids.tolist(), trace.positions.tolist(), strict=True)])
        assert torch.equal(trace.fc_input, want)
        assert torch.allclose(trace.fc_output.double(), trace.fc_input.double() @ weight.T, atol=1e-3)
        places, kept = trace.positions[trace.accepted].tolist(), trace.token_ids[trace.accepted].tolist()
        first = one.get("cached", 0)
        assert places == list(range(first, first + len(places)))
        known = min(len(text), first + len(kept))  # an overlapped pass may go on beyond the end
        assert kept[: known - first] == text[first:known]
        assert known >= len(text) - 5  # the last step of V1 is not drafted on
        prompt = len(one["prompt"])
        assert trace.phase.tolist() == [int(place >= prompt) for place in trace.positions.tolist()]
        chosen = trace.verified_ids[trace.accepted].tolist()
        assert chosen == [-1 if place < prompt - 1 else following(token, place)
                          for token, place in zip(kept, places, strict=True)]
        given = dict(zip(places, trace.draft_input_ids[trace.accepted].tolist(), strict=True))
        ends = {first + CHUNK - 1}  # a chunk's last row is given the target's own choice in place of the prompt's next token
        assert all(given[place] == text[place + 1] for place in places if place + 1 < known and place not in ends)


def test_rows_hold_the_target_s_state_of_their_token(chain: Any) -> None:
    _, kind, told, traces, about = chain
    check_rows(told, traces)
    assert about["captured"]["prefix_rows_missing"] == 1
    assert about["captured"].get("last_steps_not_drafted", 0) == (3 if kind == "v1" else 0)
    assert about["layer_ids"] == [2, 5, 8] and about["layer_ids_configured"] == [1, 4, 7]
    assert about["draft_in_effect"]["slots"] == 3 and about["draft_in_effect"]["fc_applied"]


def test_steps_are_the_draft_s_guesses_and_what_became_of_them(chain: Any) -> None:
    version, kind, told, traces, _ = chain
    late = int(before(version, 12))  # these move on before a draft step, not after it
    for one in REQUESTS:
        trace, text = traces[one["rid"]], told["texts"][one["rid"]]
        position = len(one["prompt"])  # of the step's row 0
        for step, count in enumerate(trace.accepted_counts.tolist()):
            rows = trace.step == step
            assert trace.positions[rows][0] == position
            root = int(trace.token_ids[rows][0])
            drafts, states, given, at = [], [], root, position - 1
            for k in range(3):
                drafts.append(guesses(given, at)[0])
                states.append(draft_state(given, at))
                given, at = drafts[-1], position + k + late
            assert trace.draft_token_ids[step].tolist() == drafts
            assert torch.equal(trace.draft_states[step], torch.tensor(states)), (step, position)
            token, right = root, 0
            while right < 3 and drafts[right] == following(token, position + right):
                token, right = drafts[right], right + 1
            ended = position + 1 + count >= len(text)
            assert count == right or ended
            kept = trace.accepted[rows].tolist()
            assert kept[: count + 1] == [True] * (count + 1) and not any(kept[count + 1 :])
            assert len(kept) == (4 if kind == "v2" else count + 1)
            if kind == "v2":
                assert trace.token_ids[rows][1:].tolist() == drafts
            position += count + 1
        assert position >= len(text) - 5


def test_trees(tree: Any) -> None:
    version, _, told, traces, about = tree
    check_rows(told, traces)
    late = int(before(version, 12))
    branched = 0
    for one in REQUESTS:
        trace = traces[one["rid"]]
        position = len(one["prompt"])
        assert trace.draft_states is None
        for step, count in enumerate(trace.accepted_counts.tolist()):
            rows = trace.step == step
            ids, parents = trace.draft_token_ids[step].tolist(), trace.draft_parents[step].tolist()
            root = int(trace.token_ids[rows][0])
            depth = []
            for i, above in enumerate(parents):
                assert -1 <= above < i
                depth.append(0 if above < 0 else depth[above] + 1)
                token, at = (root, position - 1) if above < 0 else (ids[above], position + depth[above] + late)
                assert ids[i] in guesses(token, at)[:2]
            branched += len(set(parents)) < len(parents)
            node, token, path = -1, root, []
            while True:
                wanted = following(token, position + len(path))
                below = [i for i, above in enumerate(parents) if above == node and ids[i] == wanted]
                if not below:
                    break
                node, token = below[0], wanted
                path.append(wanted)
            assert trace.token_ids[rows].tolist() == [root, *path][: count + 1] and bool(trace.accepted[rows].all())
            assert count == len(path) or position + 1 + count >= len(told["texts"][one["rid"]])
            position += count + 1
    assert branched and about["topk"] == 2


def test_one_drafted_token(tmp_path: Path) -> None:
    _, traces, _ = drive("0.5.12", "v1", tmp_path / "out", steps=1, nodes=2)
    assert all(trace.draft_states.shape[1:] == (1, DRAFT_WIDTH) for trace in traces.values())


@pytest.mark.parametrize(("version", "kind"), [("0.5.5", "v1"), ("0.5.12", "v1"), ("0.5.12", "v2"), ("0.5.23", "v2")])
def test_a_replay_gives_the_server_s_counts(version: str, kind: str, tmp_path: Path) -> None:
    """With the tiny pair in place of the toys. To 0.5.11 every draft step but the first is a position too far on."""
    requests = [{"rid": f"r{i}", "prompt": prompt, "answer": 24} for i, prompt in enumerate(tiny_prompts()["heldout"][:4])]
    _, traces, about = drive(version, kind, tmp_path / "out", requests=requests, target=str(TARGET), draft=str(DRAFT),
                             slots=[2, 4, 5], chunk=512)
    captured = about["captured"]
    assert captured["accepted"] > captured["steps"] * 0.8
    rung = counterfactuals([DRAFT], tmp_path / "out", target=TARGET, consumer=f"sglang@{version}", readout="engine", k=3).rungs[0]
    assert rung.gate is not None
    assert rung.gate.steps == captured["steps"] > 20
    assert rung.gate.passed is not before(version, 12), rung.gate
    parts = read_parts(TARGET)
    draft = build_draft(load_checkpoint(DRAFT, target_layers=parts.layers), parts)
    found = stages(draft, [from_trace(trace, 3) for trace in traces.values()])
    assert found is not None and found.fc_error is not None and found.fc_error < 1e-5
    assert found.layer_error is not None and found.layer_error < 1e-4
    assert found.head_agreement["offset"] == 1.0
