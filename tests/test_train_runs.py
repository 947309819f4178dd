"""How a run ends and goes on: killed, out of patience, on a full disk, spoilt, among several processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import disk_of
from learnable import QUICK, learnable, shape
from safetensors.torch import load_file, save_file
from support import save_target
from test_train_data import conversations
from training_process import trained

from draftscope.boundaries import default_boundaries
from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.collate import Collate
from draftscope.eagle3.corpus import Held
from draftscope.eagle3.examples import load_examples
from draftscope.eagle3.heldout import evaluate
from draftscope.eagle3.parallel import joined
from draftscope.eagle3.replay import replay
from draftscope.eagle3.train import Settings, Watch, train
from draftscope.errors import DraftscopeError, UsageError
from draftscope.pipeline.conversations import Conversation
from draftscope.pipeline.extract import extract
from draftscope.states.types import from_sample
from draftscope.target.model import Target, load_target

TESTS = Path(__file__).parent
DRIVER = TESTS / "training_process.py"
QUIET = replace(QUICK, epochs=2)


def processes(arguments: list[list[str]], env: list[dict[str, str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of processes that run at once."""
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    running = [subprocess.Popen(a, env=own | e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for a, e in zip(arguments, env, strict=True)]
    return [(process.returncode, err) for process in running for _, err in [process.communicate(timeout=600)]]


def driven(folder: Path, **choices: Any) -> list[str]:
    return [sys.executable, str(DRIVER), str(folder), json.dumps(choices)]


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_killed_and_started_again_it_comes_to_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL in the midst of step 5, the state saved after every step before."""
    trained(tmp_path / "whole", {})
    ((code, err),) = processes([driven(tmp_path / "killed", kill=5)], [{}])
    assert code == -signal.SIGKILL, err
    log = tmp_path / "killed" / "log.jsonl"
    assert len(losses_of(tmp_path / "killed")) == 4
    log.write_text(log.read_text() + '{"step": 5, "lo')  # cut off as a kill may leave it
    trained(tmp_path / "killed", {})
    for name in ("training.safetensors", "draft/model.safetensors"):
        one, two = (load_file(tmp_path / folder / name) for folder in ("whole", "killed"))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "killed")
    assert len(losses_of(tmp_path / "whole")) == 12


def its_own(target: Target, begun: list[Conversation]) -> list[Conversation]:
    """The target's own greedy text after the first five tokens."""
    ids = torch.stack([c.token_ids[:5] for c in begun]).long()
    for _ in range(14):
        ids = torch.cat([ids, target.logits(target.forward(ids, []).post[:, -1:]).argmax(-1)], 1)
    return [Conversation(c.index, row.int(), torch.arange(len(row)) >= 5) for c, row in zip(begun, ids, strict=True)]


def meeting() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Started by torchrun, gloo; gradients add up in another order, so losses agree to 1e-5 and weights nearly so."""
    target = save_target(tmp_path / "target")
    model = load_target(target)
    extract(model, conversations(14), tmp_path / "states", dtype=torch.float32)
    extract(model, its_own(model, conversations(6, seed=1)), tmp_path / "aside", dtype=torch.float32)
    arguments = ["train", str(tmp_path / "states"), "--target", str(target), "--draft-vocab", "120", "--epochs", "2",
                 "--batch-tokens", "64", "--heldout", str(tmp_path / "aside"), "--noise", "0.02", "--normaliser", "positions"]
    assert run([*arguments, "--out", str(tmp_path / "one"), "--quiet"]) == 0
    ((code, err),) = processes([[
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", meeting()["MASTER_PORT"],
        "-m", "draftscope", *arguments, "--out", str(tmp_path / "two"), "--timeout", "300",
    ]], [{}])
    assert code == 0, err
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(one) == len(two) > 5 and one == pytest.approx(two, rel=1e-5)
    logs = [[json.loads(line) for line in (tmp_path / n / "log.jsonl").read_text().splitlines()] for n in ("one", "two")]
    for a, b in zip(*logs, strict=True):
        assert a.get("rows") == b.get("rows") and a["step"] == b["step"]
        if "heldout" in a:
            assert a["heldout"]["rows"] == b["heldout"]["rows"] > 20 and a["heldout"]["rounds"] == b["heldout"]["rounds"] > 20
    states = [load_file(tmp_path / name / "training.safetensors") for name in ("one", "two")]
    for key, tensor in states[0].items():
        if key.startswith("weight."):
            assert float((tensor - states[1][key]).abs().max()) < 1e-3, key
    # The state of two processes is one process's too.
    assert run([*arguments, "--out", str(tmp_path / "two"), "--quiet"]) == 0
    assert len(losses_of(tmp_path / "two")) == len(two)


def test_a_process_that_dies_ends_the_other_with_an_error_and_a_state(tmp_path: Path) -> None:
    place = meeting()
    env = [place | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    found = processes([driven(tmp_path / "run", kill=5 if rank else 0, joined=True) for rank in (0, 1)], env)
    assert found[1][0] == -signal.SIGKILL
    assert found[0][0] == 3
    assert "process 0 of 2: another process of this run ended or does not answer" in found[0][1]
    for folder in ("run", "whole"):
        trained(tmp_path / folder, {})
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


def test_a_process_that_hangs_ends_the_other_after_its_wait(tmp_path: Path) -> None:
    place = meeting()
    env = [place | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    hanging = subprocess.Popen(driven(tmp_path / "run", stop=3, joined=True, wait=8), env=own | env[1])
    try:
        ((code, err),) = processes([driven(tmp_path / "run", joined=True, wait=8)], env[:1])
        assert code == 3 and "another process of this run ended or does not answer" in err
    finally:
        hanging.kill()
        hanging.wait()


def test_half_of_what_torchrun_sets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR is not"), joined("cpu", 1):
        pass


def test_one_process_s_bad_sample_is_named_by_all(tmp_path: Path) -> None:
    place = meeting()
    env = [place | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    found = processes([driven(tmp_path / "run", joined=True, spoil=7) for _ in (0, 1)], env)
    for code, err in found:
        assert code == 3 and "text 7: the states of token 9 are not finite (slot 1)" in err, err


@pytest.mark.parametrize("limit", [100_000, 1000])
def test_a_full_disk_loses_nothing_that_was_saved(limit: int, tmp_path: Path) -> None:
    """The state of this draft is about 2 MB, its exported draft 350 kB, its log some kB."""
    parts, samples = learnable(24)
    examples = load_examples(samples, parts)

    def watch(event: Any) -> None:
        if event["step"] == 4:
            raise KeyboardInterrupt

    assert not train(examples, parts, shape(24, 24), None, tmp_path / "run", settings=QUIET, on_event=watch).finished
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.safetensors")}
    with disk_of(limit), pytest.raises(DraftscopeError, match="cannot be written") as told:
        train(examples, parts, shape(24, 24), None, tmp_path / "run", settings=QUIET, watch=Watch(save_minutes=-1))
    assert "run the same command again" in str(told.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.safetensors")} == before
    assert not [path.name for path in (tmp_path / "run").rglob("*") if path.name.endswith((".tmp", ".part"))]
    rest = train(examples, parts, shape(24, 24), None, tmp_path / "run", settings=QUIET)
    whole = train(examples, parts, shape(24, 24), None, tmp_path / "whole", settings=QUIET)
    assert losses_of(tmp_path / "run") == whole.losses and rest.finished


def test_a_loss_that_overflows_is_told_and_the_state_kept(tmp_path: Path) -> None:
    parts, samples = learnable(12)
    examples = load_examples(samples, parts)
    wild = replace(QUIET, learning_rate=1e30, clip=1e30)
    with pytest.raises(DraftscopeError, match=r"the loss is not finite at step \d+: .*lower learning rate") as told:
        train(examples, parts, shape(24, 24), None, tmp_path, settings=wild, watch=Watch(save_minutes=1e9))
    assert "text " in told.value.where
    last = examples[2]
    last.states = last.states.clone()
    last.states[11, -1, 3] = torch.inf
    with pytest.raises(DraftscopeError, match=r"text 2: the states of token 11 are not finite \(the last state\)"):
        train(examples, parts, shape(24, 24), None, tmp_path / "other", settings=QUIET)


def test_nothing_that_can_be_taught_is_an_error(tmp_path: Path) -> None:
    """Every answer token's target lies outside the draft vocabulary."""
    parts, samples = learnable(6)
    examples = load_examples(samples, parts)
    for example in examples:
        example.best[example.best >= 0] = 23
    with pytest.raises(DraftscopeError, match="no row of the data can be taught"):
        train(examples, parts, shape(12, 24), torch.zeros(12, dtype=torch.int64), tmp_path, settings=QUIET)
    assert not (tmp_path / "training.safetensors").exists() and not (tmp_path / "draft").exists()


def test_data_without_an_answer_token_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    extract(load_target(target), conversations(3), tmp_path / "states", dtype=torch.float32)
    for file in (tmp_path / "states").glob("hs_*"):
        held = load_file(file)
        save_file(held | {"loss_mask": torch.zeros_like(held["loss_mask"])}, file)
    assert run(["train", str(tmp_path / "states"), "--target", str(target), "--out", str(tmp_path / "run")]) == 3
    assert "nothing to train on: no sample has two answer tokens in a row" in capsys.readouterr().err
    assert not (tmp_path / "run" / "training.safetensors").exists()


def test_a_run_with_other_settings_is_told_what_changed(tmp_path: Path) -> None:
    parts, samples = learnable(6)
    examples = load_examples(samples, parts)
    train(examples, parts, shape(24, 24), None, tmp_path, settings=QUIET)
    with pytest.raises(DraftscopeError, match=r"decay was 0\.8 and is now 0\.5; seed was 0 and is now 2"):
        train(examples, parts, shape(24, 24), None, tmp_path, settings=replace(QUIET, seed=2, decay=0.5))
    with pytest.raises(DraftscopeError, match="other config: fc_norm was False and is now True"):
        train(examples, parts, shape(24, 24, fc_norm=True), None, tmp_path, settings=QUIET)


@pytest.mark.parametrize("layers", [3, 4, 5, 6])
def test_a_target_without_default_boundaries_is_told(layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target", layers=layers)
    line = json.dumps({"token_ids": list(range(3, 20)), "prompt_length": 4})
    (tmp_path / "c.jsonl").write_text("\n".join([line] * 3))
    arguments = ["train", str(tmp_path / "c.jsonl"), "--online", "--target", str(target), "--out", str(tmp_path / "run"),
                 "--draft-vocab", "50", "--epochs", "1"]
    assert run(arguments) == 3
    said = capsys.readouterr().err
    assert f"{layers} layers has no three default boundaries: 2, n/2 and n-3 are" in said and "--boundaries" in said
    assert not (tmp_path / "run").exists()
    assert len(set(default_boundaries(layers))) < 3 or list(default_boundaries(layers)) != sorted(default_boundaries(layers))
    assert run([*arguments, "--boundaries", "1,2,3"]) == 0
    assert load_checkpoint(tmp_path / "run" / "draft").config.boundaries == (1, 2, 3)


def test_out_of_patience_it_ends_and_keeps_the_best(tmp_path: Path) -> None:
    parts, samples = learnable(30)
    examples, held = load_examples(samples[:24], parts), load_examples(samples[24:], parts)
    # A rate at which nothing is learnt after the first steps: the figure stays where it was.
    settings = replace(QUICK, epochs=40, learning_rate=1e-12, warmup=1)
    events: list[dict[str, Any]] = []
    watch = Watch(evaluate_every=2, patience=3)

    def again() -> Any:
        return train(examples, parts, shape(24, 24), None, tmp_path, settings=settings, heldout=held, watch=watch,
                     on_event=lambda e: events.append(dict(e)))

    result = again()
    evaluations = [e for e in events if "heldout" in e]
    assert result.finished and result.stopped and result.steps < 40 * 6
    assert [e["stale"] for e in evaluations] == [0, 1, 2, 3]
    assert {e["best"] for e in evaluations} == {evaluations[0]["heldout"]["walk"]}
    assert (tmp_path / "best" / "model.safetensors").exists() and (tmp_path / "draft" / "model.safetensors").exists()
    count = len(events)
    rest = again()
    assert rest.stopped and rest.steps == result.steps and len(events) == count, "a run that ended stays ended"
    best = evaluate(build_draft(load_checkpoint(tmp_path / "best", target_layers=8), parts), Held(held),
                    Collate.of(parts, torch.arange(24), Settings()), 3)
    assert best.walk == pytest.approx(evaluations[0]["best"], abs=0.06), "bfloat16, factors folded in"


def test_the_walk_is_that_of_replay(tmp_path: Path) -> None:
    parts, samples = learnable(20)
    train(load_examples(samples[:14], parts), parts, shape(24, 24), None, tmp_path, settings=QUICK)
    draft = build_draft(load_checkpoint(tmp_path / "draft", target_layers=8), parts)
    spoilt = samples[19]
    spoilt.token_ids[10:] = spoilt.token_ids[10:].flip(0)  # not the target's text: no walk
    samples[18].loss_mask[12:14] = False  # two answers
    held = samples[14:]
    found = evaluate(draft, Held(load_examples(held, parts)), Collate.of(parts, torch.arange(24), Settings()), 3)
    rung = replay(draft, [from_sample(s) for s in held], k=3, parts=parts).rung("walk")
    assert found.rounds > 20 and found.walk is not None and found.walk > 1.5
    assert (found.rounds, found.walk) == (rung.rounds, pytest.approx(rung.length))
