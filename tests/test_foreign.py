"""Input that nothing here wrote: states of vLLM, a draft of speculators, and that draft at work in vLLM.

The other stacks run in environments of their own (scripts/env-vllm, scripts/env-speculators) through recipes/foreign; what
they make is kept in the cache and used again. `make test-foreign` runs this.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peers import run_recipe
from safetensors.torch import load_file

from draftscope.counterfactual import counterfactuals
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.model import StepMask
from draftscope.engines.counters import read_counters
from draftscope.inspecting.inspect import inspect_path
from draftscope.inspecting.placing import know
from draftscope.states.opening import open_source
from draftscope.states.types import Trace
from draftscope.target.embedded import cache_directory, ensure_target
from draftscope.target.parts import read_parts

WIRED = [2, 15, 27]

pytestmark = pytest.mark.timeout(3600)


def made_by(stack: str, made: Path, recipe: str, *arguments: str | Path) -> Path:
    """What a recipe makes, from the cache where it is there already; skips where the stack's environment is not."""
    if not made.exists():
        run_recipe(stack, recipe, *arguments, threads=2)
    assert made.exists()
    return made


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(report=lambda _: None)


@pytest.fixture(scope="module")
def kept() -> Path:
    folder = cache_directory() / "foreign"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def states(target: Path, kept: Path) -> Path:
    return made_by("vllm", kept / "states" / "requests.json", "extract.py", target, kept / "states").parent


@pytest.fixture(scope="module")
def trained(target: Path, kept: Path, states: Path) -> Path:
    draft = kept / "trained" / "draft" / "model.safetensors"
    made_by("speculators", draft, "train.py", target, states, kept / "trained", "--epochs", "2")
    return kept / "trained"


@pytest.fixture(scope="module")
def served(target: Path, kept: Path, trained: Path) -> Path:
    made_by("vllm", kept / "served" / "counters.txt", "serve.py", target, trained / "draft", kept / "served")
    return kept / "served"


@pytest.mark.vllm
def test_vllm_states_are_where_vllm_was_asked_to_take_them(states: Path, target: Path) -> None:
    answer = inspect_path(states, known=know(target), samples=4)
    assert answer.report.what == "training data"
    assert answer.report.files == len(json.loads((states / "requests.json").read_text()))
    places = [entry.placed for entry in answer.report.entries]
    assert [(p.boundary, p.norm, p.kind) for p in places if p is not None] == [(b, "pre", "stream") for b in [*WIRED, 30]]
    assert all(min(p.errors) < 1e-4 for p in places if p is not None)


@pytest.mark.vllm
@pytest.mark.peers
def test_first_step_is_that_of_speculators(trained: Path, target: Path, tmp_path: Path) -> None:
    file = trained / "data" / "hidden_states" / "hs_0.safetensors"
    made = trained / "first_step.safetensors"
    theirs = load_file(made_by("speculators", made, "first_step.py", trained / "draft", file, made))
    held = load_file(file)
    parts = read_parts(target)
    draft = build_draft(load_checkpoint(trained / "draft", target_layers=parts.layers), parts)
    rows = len(held["token_ids"]) - 1
    with torch.no_grad():
        projected = draft.project(held["hidden_states"][None, :-1, :-1])
        positions = 1 + torch.arange(rows)[None]
        output = draft(projected, draft.embed(held["token_ids"][None, 1:]), positions, StepMask())
        ours = {"input": projected[0], "output": output[0], "logits": draft.logits(output)[0]}
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        assert (tensor - theirs[name]).norm() / theirs[name].norm() < 1e-4, name


@pytest.mark.vllm
@pytest.mark.peers
def test_replay_gives_the_counts_of_vllm(served: Path, trained: Path, target: Path) -> None:
    traces = list(open_source(served / "capture"))
    assert all(isinstance(trace, Trace) for trace in traces)
    counted = torch.cat([trace.accepted_counts for trace in traces])
    counters = read_counters(served / "counters.txt")
    assert counters.drafts == len(counted)
    assert list(counters.accepted) == [int((counted > k).sum()) for k in range(3)]

    run = counterfactuals([trained / "draft"], served / "capture", target=target, consumer="vllm@0.32", readout="engine")
    rung = run.rungs[0]
    assert rung.gate is not None
    assert rung.gate.passed, rung.gate
    assert rung.length == pytest.approx(counters.length, abs=0.02)


@pytest.mark.vllm
@pytest.mark.peers
def test_nothing_is_wrong_with_it(served: Path, trained: Path, target: Path) -> None:
    found = diagnose(Inputs(
        train=trained / "data" / "hidden_states", serve=served / "capture", draft=trained / "draft", target=target,
        metrics=served / "counters.txt", consumer="vllm@0.32", max_tokens=1024,
    ))
    assert [p.boundary for p in found.placement.train] == [*WIRED, 30]
    assert [p.boundary for p in found.placement.serve] == WIRED
    assert not [f.fault for f in found.findings if f.strength == "proven"]
