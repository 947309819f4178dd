"""A capture tested: real captures of the tiny pair alone, in a batch and with rows spoilt as engines spoil them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import DRAFT, tiny_prompts, tiny_target
from torch import Tensor

from draftscope import diagnose
from draftscope.boundaries import default_boundaries
from draftscope.cli.main import run
from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.engines.transformers import Capture, description
from draftscope.errors import DraftscopeError
from draftscope.inspecting.placing import know
from draftscope.inspecting.verify import MARK, Verified, read_mark, verify
from draftscope.states import capture as plain_capture
from draftscope.states.types import Trace
from draftscope.target.wiring import Wiring

SLOTS, K = 3, 3
ROW_TENSORS = ("fc_input", "token_ids", "accepted", "positions", "phase", "step", "verified_ids", "last_hidden", "fc_output")
SERVED = default_boundaries(tiny_target().layers)
Spoil = Callable[[list[Trace]], None]


def record(out: Path, *, rows: int, wiring: Wiring | None = None) -> Path:
    target = tiny_target()
    draft = build_draft(load_checkpoint(DRAFT), target.parts)
    capture = Capture(out, description(model="tiny", draft="tiny", layer_ids=list(SERVED), k=K))
    prompts = [*tiny_prompts()["heldout"][:5], tiny_prompts()["heldout"][0]]
    generate(target, draft, prompts, wiring=wiring or Wiring.of(SERVED), k=K, max_new=24, rows=rows, stop_ids=target.stop_ids,
             observer=capture)
    capture.close()
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("verify") / "alone", rows=1)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("verify") / "batch", rows=6)


def spoilt(batch: Path, out: Path, spoil: Spoil) -> Path:
    traces = [plain_capture.read_trace(file, []) for file in sorted(batch.glob("*.safetensors"))]
    for trace in traces:
        trace.fc_input = trace.fc_input.clone()
    spoil(traces)
    out.mkdir()
    (out / "capture.json").write_text((batch / "capture.json").read_text())
    for trace in traces:
        plain_capture.write_trace(out / trace.name, trace)
    return out


def slot(trace: Trace, number: int) -> Tensor:
    width = trace.fc_input.shape[1] // SLOTS
    return trace.fc_input[:, number * width : (number + 1) * width]


def faults(result: Verified) -> list[str]:
    return [finding.fault for finding in result.findings]


def test_alone_and_in_a_batch_agree(alone: Path, batch: Path) -> None:
    result = verify([alone, batch])
    assert result.verdict == "clean" and not result.findings
    compared = result.comparisons[0]
    assert compared.matched == compared.requests == 6 and compared.rows > 200
    assert max(compared.largest_error) < 1e-3
    assert result.captures[1].prefix_rows > 0 and result.captures[1].chained_rows > 50


def test_rows_compared_are_rows_of_the_same_tokens(alone: Path, tmp_path: Path) -> None:
    """Requests in another order under other names are found by their tokens, one by one."""
    other = tmp_path / "renamed"
    other.mkdir()
    for number, file in enumerate(sorted(alone.glob("*.safetensors"), reverse=True)):
        (other / f"x{number}.safetensors").write_bytes(file.read_bytes())
    compared = verify([alone, other]).comparisons[0]
    accepted = sum(int(plain_capture.read_trace(file, []).accepted.sum()) for file in alone.glob("*.safetensors"))
    assert compared.rows == accepted and compared.largest_error == [0.0] * SLOTS


def verify_rows(trace: Trace) -> Tensor:
    assert trace.phase is not None
    return (trace.accepted & (trace.phase == 1)).nonzero().squeeze(-1)


def other_request(traces: list[Trace]) -> None:
    rows = verify_rows(traces[1])[:6]
    traces[1].fc_input[rows] = traces[2].fc_input[verify_rows(traces[2])[:6]]


def stale(traces: list[Trace]) -> None:
    """The rows of a step hold those of the step three before."""
    for trace in traces[1:3]:
        rows = verify_rows(trace)
        trace.fc_input[rows[6:]] = trace.fc_input[rows[:-6]].clone()


def padding(traces: list[Trace]) -> None:
    for trace in traces[:4]:
        trace.fc_input[verify_rows(trace)[-3:]] = traces[0].fc_input[0] * 0.5 + 1


def zeros(traces: list[Trace]) -> None:
    traces[3].fc_input[verify_rows(traces[3])] = 0


def nonfinite(traces: list[Trace]) -> None:
    slot(traces[2], 1)[4] = torch.nan


def alias(traces: list[Trace]) -> None:
    for trace in traces:
        slot(trace, 0)[:] = slot(trace, 2).clone()


def shift(traces: list[Trace]) -> None:
    for trace in traces:
        trace.fc_input[trace.accepted] = trace.fc_input[trace.accepted].roll(1, 0)


def scale(traces: list[Trace]) -> None:
    for trace in traces:
        slot(trace, 1)[:] *= 8


@pytest.mark.parametrize(("spoil", "fault", "kind"), [
    (other_request, "req-mix", "another request"), (stale, "graph-capture", "stale"), (padding, "graph-capture", "padding"),
    (zeros, "graph-capture", "zeros"), (nonfinite, "nonfinite", "not finite"), (alias, "capture-alias", "another slot"),
    (shift, "token-shift", "shifted"), (scale, "scale-mult", "scaled"),
])
def test_what_rows_hold_instead_is_named(alone: Path, batch: Path, tmp_path: Path, spoil: Spoil, fault: str, kind: str) -> None:
    result = verify([alone, spoilt(batch, tmp_path / "spoilt", spoil)])
    unlike = result.comparisons[0].unlike
    assert fault in faults(result)
    assert max(unlike, key=lambda name: unlike[name]) == kind, unlike
    named = next(finding for finding in result.findings if finding.fault == fault)
    assert named.strength in ("proven", "supported") and named.fix.says


def test_half_of_a_residual_pair_is_named_with_the_target(alone: Path, batch: Path, tmp_path: Path) -> None:
    """What a fused norm leaves of the pair: the last layer's branch without the stream it is added to."""
    target = tiny_target()

    def half(traces: list[Trace]) -> None:
        for trace in traces:
            tokens = trace.token_ids[trace.accepted]
            run = target.run(tokens[None], {SERVED[2], SERVED[2] - 1}, set())
            slot(trace, 2)[trace.accepted] = run.streams[SERVED[2]][0] - run.streams[SERVED[2] - 1][0]

    broken = spoilt(batch, tmp_path / "half", half)
    blind = verify([alone, broken])
    assert faults(blind) == ["capture-alias"] and blind.findings[0].strength == "suspected"
    told = verify([alone, broken], known=know(target.folder))
    assert "residual-missing" in faults(told) and told.findings[0].fault == "residual-missing"


def test_a_cached_prefix_is_counted_not_accused(alone: Path, batch: Path, tmp_path: Path) -> None:
    def cut(traces: list[Trace]) -> None:
        for trace in traces[1:4]:
            for name in ROW_TENSORS:
                held = getattr(trace, name)
                setattr(trace, name, None if held is None else held[5:])

    result = verify([alone, spoilt(batch, tmp_path / "cached", cut)])
    assert result.verdict == "clean"
    assert result.comparisons[0].missing_rows == 15
    assert any("15 rows at the beginning" in remark for remark in result.next)
    turned = verify([tmp_path / "cached", alone])
    assert turned.comparisons[0].missing_here == 15 and not turned.comparisons[0].beyond[0]


def test_one_capture_alone(batch: Path, tmp_path: Path) -> None:
    assert verify([batch]).verdict == "undecided"
    assert "graph-capture" in faults(verify([spoilt(batch, tmp_path / "padding", padding)]))

    def prefix(traces: list[Trace]) -> None:
        traces[5].fc_input[2] = traces[1].fc_input[9]

    assert "req-mix" in faults(verify([spoilt(batch, tmp_path / "prefix", prefix)]))

    def chained(traces: list[Trace]) -> None:
        traces[0].token_ids = traces[0].token_ids.clone()
        traces[0].token_ids[verify_rows(traces[0])[3]] += 1

    assert "req-mix" in faults(verify([spoilt(batch, tmp_path / "chained", chained)]))

    def gap(traces: list[Trace]) -> None:
        positions = traces[0].positions
        assert positions is not None
        traces[0].positions = positions + (torch.arange(len(positions)) > 8)

    assert "req-mix" in faults(verify([spoilt(batch, tmp_path / "gap", gap)]))


def test_other_prompts_are_refused(alone: Path, batch: Path, tmp_path: Path) -> None:
    def others(traces: list[Trace]) -> None:
        for trace in traces:
            trace.token_ids = (trace.token_ids + 7) % 200

    with pytest.raises(DraftscopeError, match="no request has the tokens of one in"):
        verify([alone, spoilt(batch, tmp_path / "others", others)])


def test_the_command_leaves_a_mark(batch: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = spoilt(alone, tmp_path / "used", lambda traces: None)
    assert not read_mark(used)[0]
    assert run(["capture", "verify", str(used), str(batch), "--json", str(tmp_path / "v.json")]) == 0
    assert "the same tokens have the same states" in capsys.readouterr().out
    assert json.loads((tmp_path / "v.json").read_text())["verdict"] == "clean"
    assert read_mark(used)[0] and "rows agree" in read_mark(used)[1]
    (used / "another.safetensors").write_bytes(b"x")
    assert "have changed since" in read_mark(used)[1]
    (used / MARK).write_text("[" * 10)
    assert "cannot be read" in read_mark(used)[1]
    bad = spoilt(batch, tmp_path / "bad", zeros)
    assert run(["capture", "verify", str(bad), str(alone)]) == 1
    assert "did not pass" in read_mark(bad)[1]
    assert run(["capture", "verify", str(alone), "--no-mark"]) == 5
    assert run(["capture", "verify", str(tmp_path / "nowhere"), "--json", str(tmp_path / "n.json")]) == 3
    assert json.loads((tmp_path / "n.json").read_text())["verdict"] == "undecided"


def test_a_mark_that_cannot_be_written_loses_no_verdict(batch: Path, alone: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    for good, code, verdict in ((alone, 0, "clean"), (spoilt(batch, tmp_path / "bad", zeros), 1, None)):
        used = tmp_path / f"used-{code}"
        shutil.copytree(good, used)
        (used / MARK).mkdir()  # root writes where others may not
        out = tmp_path / f"{code}.json"
        assert run(["capture", "verify", str(used), str(batch if code == 0 else alone), "--json", str(out)]) == code
        found = json.loads(out.read_text())
        assert found["verdict"] == verdict and found["comparisons"] and bool(found["findings"]) == bool(code)
        assert "a diagnosis will not know of this" in capsys.readouterr().err


def test_a_diagnosis_says_whether_its_capture_was_verified(batch: Path, alone: Path, tmp_path: Path) -> None:
    used = spoilt(alone, tmp_path / "used", lambda traces: None)
    before = diagnose(serve=used)
    assert before.matched["serve"]["verified"] is False and any("was not verified" in step for step in before.steps)
    assert run(["capture", "verify", str(used), str(batch), "-q"]) == 0
    after = diagnose(serve=used)
    assert after.matched["serve"]["verified"] is True and any("rows agree" in step for step in after.steps)
