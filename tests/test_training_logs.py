"""Trainers' logs become one curve; event files are read without TensorBoard; nothing in a hostile one does more than fail."""

from __future__ import annotations

import json
import math
import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftscope.cli.main import run
from draftscope.diagnose.eventfile import scalars
from draftscope.diagnose.learning import Budget, budget_facts, curve_facts, read_budget
from draftscope.diagnose.traininglog import Curve, Point, read_curve
from draftscope.errors import DraftscopeError
from draftscope.faults import fault
from draftscope.faults.facts_data import CurveFacts
from draftscope.faults.measurements import Measurements, RungFacts
from draftscope.findings import Finding


def field(number: int, kind: int, payload: bytes) -> bytes:
    return bytes([number << 3 | kind]) + payload


def block(payload: bytes) -> bytes:
    length, head = len(payload), b""
    while length > 127:
        head, length = head + bytes([length & 127 | 128]), length >> 7
    return head + bytes([length]) + payload


def event(step: int, values: dict[str, float], *, tensor: bool = False) -> bytes:
    """An event as TensorBoard's writer lays it out."""
    summary = b""
    for tag, value in values.items():
        number = struct.pack("<f", value)
        told = field(8, 2, block(field(1, 0, b"\x01") + field(4, 2, block(number)))) if tensor else field(2, 5, number)
        summary += field(1, 2, block(field(1, 2, block(tag.encode())) + told))
    message = field(1, 1, struct.pack("<d", 1.7e9)) + field(2, 0, bytes([step])) + field(5, 2, block(summary))
    return struct.pack("<Q", len(message)) + b"crc1" + message + b"crc2"


@pytest.mark.parametrize("tensor", [False, True])
def test_event_file(tmp_path: Path, tensor: bool) -> None:
    file = tmp_path / "events.out.tfevents.1.host"
    rows = [(step, {"train/loss": 8.0 - step, "train/acc_0": step / 10, "eval/simulated_acc_len": 1 + step / 10})
            for step in range(1, 9)]
    file.write_bytes(b"".join(event(step, values, tensor=tensor) for step, values in rows))
    found = list(scalars(file))
    assert [step for step, _ in found] == list(range(1, 9))
    assert found[3][1] == pytest.approx(rows[3][1], rel=1e-6)
    curve = read_curve((file,))
    assert curve.format == "TensorBoard"
    assert curve.points[-1].held["length"] == pytest.approx(1.8)
    assert curve.points[0].accuracy[0] == pytest.approx(0.1)


def test_event_file_cut_off_ends_there(tmp_path: Path) -> None:
    file = tmp_path / "events.out.tfevents.1"
    whole = event(1, {"loss": 3.0}) + event(2, {"loss": 2.0})
    file.write_bytes(whole[:-9])
    assert [step for step, _ in scalars(file)] == [1]


@settings(max_examples=120, deadline=None)
@given(data=st.binary(max_size=400), flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4))
def test_event_file_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, flips: list[tuple[int, int]]) -> None:
    file = tmp_path_factory.getbasetemp() / "events.out.tfevents.any"
    whole = bytearray(event(1, {"loss": 3.0}) * 3)
    for at, value in flips:
        whole[at % len(whole)] = value
    for content in (data, bytes(whole)):
        file.write_bytes(content)
        with suppress(DraftscopeError):
            assert all(isinstance(value, float) for _, values in scalars(file) for value in values.values())


def test_huge_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "events.out.tfevents.2"
    file.write_bytes(struct.pack("<Q", 1 << 40) + b"crc1" + b"x" * 100)
    with pytest.raises(DraftscopeError, match="record 0"):
        list(scalars(file))


def test_specforge_console(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    lines = ["Loading checkpoint shards: 100%",
             "step 10: {'acc_0': 0.31, 'acc_1': 0.2, 'ploss_0': 2.5, 'acc': 0.25, 'loss': 4.5, 'lr': 0.0001, 'perf/x': 1}",
             "Successfully loaded optimizer state_dict.",
             "step 20: {'train/acc_0': 0.41, 'train/loss': 3.5, 'train/lr': 5e-05}",
             "step 20: {'eval/avg_loss': 3.1, 'eval/avg_acc': 0.44, 'eval/per_position_acc': [0.44, 0.3], "
             "'eval/simulated_acc_len': 1.6}"]
    file.write_text("\n".join(lines))
    curve = read_curve((tmp_path,))
    assert curve.format == "SpecForge"
    assert [(p.step, p.loss, p.rate) for p in curve.points] == [(10, 4.5, 1e-4), (20, 3.5, 5e-5), (20, None, None)]
    assert curve.points[0].accuracy == {0: 0.31, 1: 0.2}
    assert curve.points[1].resumed == "Successfully loaded optimizer state_dict"
    assert curve.points[2].held == {"length": 1.6, "accuracy": 0.44, "loss": 3.1}


def test_speculators_console(tmp_path: Path) -> None:
    """Rich breaks a record over lines and puts the place at the end of the first."""
    file = tmp_path / "out.txt"
    file.write_text(
        "[12:00:01] INFO     Training epoch 1/5 started                 trainer.py:737\n"
        "           INFO     train/loss_0=3.101, train/full_acc_0=0.301,  trainer.py:587\n"
        "                    train/full_acc_1=0.102, train/loss=7.5,                  \n"
        "                    epoch=0, lr=1.00e-04, global_step=40                     \n"
        "[12:00:09] INFO     Resuming mid-epoch from epoch=0 local_step=40.   trainer.py:284\n"
        "           INFO     train/loss=7.25, train/full_acc_0=0.33, epoch=0, trainer.py:587\n"
        "                    lr=1.00e-04, global_step=41\n"
        "           INFO     val/loss_epoch=6.75, val/full_acc_0_epoch=0.35,  trainer.py:671\n"
        "                    epoch=0\n")
    curve = read_curve((file,))
    assert curve.format == "speculators"
    assert [(p.step, p.loss, p.accuracy.get(0)) for p in curve.points] == [(40, 7.5, 0.301), (41, 7.25, 0.33), (41, None, None)]
    assert curve.points[0].rate == 1e-4
    assert curve.points[1].resumed.startswith("Resuming mid-epoch")
    assert curve.points[2].held == {"accuracy": 0.35, "loss": 6.75}


@pytest.mark.parametrize("dump", ['{"target_model": "x"}', '{"step": null, "heldout": {}}', '{"config": {"step": 3}}'])
@pytest.mark.parametrize(("format", "line"), [
    ("SpecForge", "step {}: {{'train/loss': 3.5, 'train/lr': 5e-05}}"),
    ("speculators", "[12:00:01] INFO     train/loss=3.5, lr=5e-05, global_step={}"),
    ("JSON lines", '{{"step": {}, "loss": 3.5, "lr": 5e-05}}'),
    ("draftscope", '{{"step": {}, "loss": 3.5, "learning_rate": 5e-05, "answer_tokens_per_s": 9.0}}'),
])
def test_a_configuration_shown_first_is_no_record(format: str, line: str, dump: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join([dump, *(line.format(step) for step in (10, 20))]) + "\n")
    curve = read_curve((tmp_path,))
    assert curve.format == format
    assert [(p.step, p.loss, p.rate) for p in curve.points] == [(10, 3.5, 5e-5), (20, 3.5, 5e-5)]


def test_trainer_state(tmp_path: Path) -> None:
    history = [{"step": 10, "loss": 5.0, "learning_rate": 1e-4, "epoch": 0.1}, {"step": 20, "eval_loss": 4.0, "epoch": 0.2}]
    for name, count in (("checkpoint-10", 1), ("checkpoint-20", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": history[:count]}))
    curve = read_curve((tmp_path,))
    assert curve.format == "transformers Trainer"
    assert [(p.step, p.loss, p.held) for p in curve.points] == [(10, 5.0, {}), (20, None, {"loss": 4.0})]


def test_own_log(tmp_path: Path) -> None:
    rows = [{"step": 1, "of": 2, "loss": 3.0, "accuracy": [0.5, None], "rows": [40, 38], "learning_rate": 1e-3,
             "answer_tokens_per_s": 9.0}, {"step": 1, "heldout": {"length": 1.5, "walk": 1.75, "rows": 9}, "best": 1.75}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read_curve((tmp_path / "log.jsonl",))
    assert curve.format == "draftscope"
    assert (curve.points[0].accuracy, curve.points[0].tokens) == ({0: 0.5}, 40)
    twice = Curve("draftscope", [Point(i, 3.0, tokens=40, epoch=i // 5) for i in range(10)])
    assert curve_facts(twice, None).tokens == 200
    assert curve.points[1].held == {"length": 1.75}


@pytest.mark.parametrize(("name", "content"), [
    ("log.jsonl", b'{"step": 1, "loss": 2.0}\n{"step": 2, "los'), ("trainer_state.json", b"[" * 100_000),
    ("trainer_state.json", b'{"log_history": 4}'), ("notes.txt", b"nothing to see"), ("log.jsonl", b"\xff\xfe\x00")])
def test_what_is_no_log_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DraftscopeError) as error:
        read_curve((file,))
    assert name in str(error.value)
    if b"los" in content[-8:]:
        assert "line 2" in str(error.value)


def test_no_such_log(tmp_path: Path) -> None:
    with pytest.raises(DraftscopeError, match="no such file"):
        read_curve((tmp_path / "none",))


def noisy(count: int, start: float = 9.0, end: float = 2.0, spread: float = 0.12, seed: int = 0) -> list[Point]:
    draw = random.Random(seed)
    return [Point(i + 1, end + (start - end) * math.exp(-6 * i / count) + draw.gauss(0, spread)) for i in range(count)]


def told(curve: list[Point], vocabulary: int = 32000) -> list[tuple[str, str]]:
    m = Measurements()
    m.data.curve = curve_facts(Curve("draftscope", curve), vocabulary)
    rules = [fault(name) for name in ("train-budget", "run-ops", "lossmask-empty", "leak")]
    return [(s.fault, s.strength) for rule in rules for s in rule.recognise(m)]


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_curve_says_nothing(seed: int) -> None:
    points = noisy(400, seed=seed, spread=0.05 + 0.1 * (seed % 3))
    draw = random.Random(seed)
    held = [Point(step, held={"length": 2.4 - 1.2 * math.exp(-step / 120) + draw.gauss(0, 0.03)}) for step in range(40, 401, 40)]
    assert told(sorted(points + held, key=lambda point: point.step)) == []


def test_a_resume_that_goes_on_says_nothing() -> None:
    points = noisy(200)
    points[120].resumed = "Resuming training"
    again = [Point(p.step, p.loss) for p in points[90:121]]
    assert told(points) == []
    assert told(points[:121] + again + points[121:]) == []


def test_a_resume_without_the_optimizer_is_told() -> None:
    points = noisy(200)
    for i, point in enumerate(points[120:140]):
        assert point.loss is not None
        point.loss += 3.0 * math.exp(-i / 8)
    assert told(points) == [("run-ops", "suspected")]
    points[120].resumed = "Resuming training"
    assert told(points) == [("run-ops", "supported")]


def test_nothing_learned_and_nothing_supervised() -> None:
    flat = [Point(i, 10.3 + 0.02 * (i % 3)) for i in range(60)]
    assert told(flat) == [("train-budget", "supported")]
    # A total over several positions is above ln of the vocabulary for long: it has to stand still, or position 0 to say so.
    total = [Point(i, 22.0 - i / 10) for i in range(60)]
    assert told(total) == []
    assert told([Point(i, 12.0, position_loss=10.2) for i in range(60)]) == [("train-budget", "supported")]
    assert told([Point(i, 12.0, position_loss=3.2) for i in range(60)]) == []
    holes = [Point(p.step, 0.0 if i % 10 == 3 else p.loss) for i, p in enumerate(noisy(200))]
    assert ("lossmask-empty", "suspected") in told(holes)


def test_over_training_needs_a_fall_beyond_the_scatter() -> None:
    points = noisy(400)
    length = [1.6, 2.1, 2.4, 2.5, 2.45, 2.38, 2.3, 2.22]
    falling = [Point(50 * (i + 1), held={"length": x}) for i, x in enumerate(length)]
    assert told(sorted(points + falling, key=lambda p: p.step)) == [("train-budget", "supported")]
    scattered = [Point(50 * (i + 1), held={"length": x}) for i, x in enumerate([2.2, 2.4, 2.25, 2.5, 2.3, 2.45, 2.28, 2.4])]
    assert told(sorted(points + scattered, key=lambda p: p.step)) == []


def test_budget_is_read_and_bounds(tmp_path: Path) -> None:
    assert read_budget(tmp_path / "none.json") is None
    file = tmp_path / "budget.json"
    held = {"schema": "draftscope.budget/1", "target": "a pair", "k": 3, "held_out_samples": 9, "points": [
        {"answer_tokens": 400_000, "length": 2.2, "interval": [2.1, 2.3]},
        {"answer_tokens": 100_000, "length": 1.8, "interval": [1.7, 1.9]},
        {"answer_tokens": 25_000, "length": 1.4, "interval": [1.3, 1.5], "draft": "25000", "joint": [0.3], "passes": 4}]}
    file.write_text(json.dumps(held))
    budget = read_budget(file)
    assert isinstance(budget, Budget)
    facts = budget_facts(budget, 50_000, 1.6)
    assert facts.reached == pytest.approx((1.6, 1.5, 1.7))
    assert facts.more == pytest.approx((2.0, 1.9, 2.1))
    m = Measurements()
    m.data.budget = facts
    (found,) = fault("train-budget").recognise(m)
    assert "with 50,000 answer tokens drafts of this kind reach about 1.60 (1.50 to 1.70); yours has 1.60" in found.says
    m.data.budget = budget_facts(budget, 50_000, 1.05)  # worse than so little data gives: something else
    assert fault("train-budget").recognise(m) == []
    m.data.budget = budget_facts(budget, 5_000_000, 2.2)
    assert fault("train-budget").recognise(m) == []
    file.write_text("{}")
    with pytest.raises(DraftscopeError, match=r"budget\.json"):
        read_budget(file)


def test_a_log_better_than_replay_is_a_leak_only_where_the_checkpoint_is_whole() -> None:
    from draftscope.faults.facts_data import LeakFacts

    m = Measurements()
    m.data.leak = LeakFacts(logged=0.9, replayed=0.4)
    assert [s.fault for s in fault("leak").recognise(m)] == ["leak"]
    m.missing = ("lm_head.weight",)
    assert fault("leak").recognise(m) == []
    m.missing, m.data.leak = (), LeakFacts(logged=0.6, replayed=0.5)
    assert fault("leak").recognise(m) == []


def test_findings_are_of_the_contract() -> None:
    m = Measurements(rungs={"trained": RungFacts(1.1, [0.1], 5.0, 1.0, 100)})
    m.data.curve = CurveFacts("draftscope", 60, 60, first_loss=10.3, last_loss=10.3, uniform=10.37, accuracy=0.0)
    (found,) = fault("train-budget").recognise(m)
    Finding(fault=found.fault, where=found.where, says=found.says, strength=found.strength, recovery=found.recovery,
            evidence=found.evidence, fix=found.fix)


def test_a_log_alone_is_diagnosed(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {i}: {{'acc_0': 0.0, 'loss': 0.0, 'lr': 0.0001}}\n" if i % 4 == 0 else
                           f"step {i}: {{'acc_0': 0.3, 'loss': {5 - i / 100:.3f}, 'lr': 0.0001}}\n" for i in range(1, 101)))
    out = tmp_path / "found.json"
    assert run(["diagnose", "--log", str(log), "--json", str(out), "--quiet"]) == 1
    found = json.loads(out.read_text())
    assert [finding["fault"] for finding in found["findings"]] == ["lossmask-empty"]
    assert found["verdict"] == "data"
    assert found["provenance"]["inputs"] == {"logs": str(log)}
    log.write_text("nothing")
    assert run(["diagnose", "--log", str(log), "--json", str(out), "--quiet"]) == 3
    assert "no training log" in json.loads(out.read_text())["next"][0]
    assert run(["diagnose", "--log", str(log), "--conversations", str(log), "--quiet"]) == 2
