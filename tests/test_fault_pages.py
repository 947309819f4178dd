"""Every fault says what each variant leaves behind; docs/ says what the faults say; `--explain` says why not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from draftscope.cli.main import run
from draftscope.diagnose.explain import explain
from draftscope.faults import FAULTS, fault
from draftscope.faults.base import Fault
from draftscope.faults.measurements import Measurements
from draftscope.faults.pages import ELSEWHERE
from draftscope.findings import Diagnosis, Effect, Finding, Fix

ROOT = Path(__file__).parent.parent
CLASSES = [
    "LAYER-OFFSET", "LAYER-SET", "RESIDUAL-MISSING", "CAPTURE-ALIAS", "FINAL-NORM", "RECUR-STATE", "SCALE-MULT",
    "ROTATED-SPACE", "GRAPH-CAPTURE", "SCHEMA-WIDTH", "PARALLEL-SHARD", "REQ-MIX", "NONFINITE", "LOSSMASK-EMPTY",
    "LOSSMASK-SPAN", "TEMPLATE", "DATA-OFFPOLICY", "TRAIN-BUDGET", "TOKEN-SHIFT", "ATTN-MASK", "LEAK", "WEIGHT-MISSING",
    "VOCAB-MAP", "TIED-HEAD", "QUANT-INHERIT", "TARGET-QUANT", "CONFIG-FLAG", "ROPE", "POS-ID", "CTX-LIMIT", "DRAFT-KV",
    "SAMPLER", "METRIC", "RUN-OPS", "UNRESOLVED",
]
"""What the public reports fall into."""


def test_every_class_of_the_reports_is_a_fault_or_said_not_to_be() -> None:
    assert {f.id.upper() for f in FAULTS} | set(ELSEWHERE) == set(CLASSES)


@pytest.mark.parametrize("known", FAULTS, ids=lambda f: f.id)
def test_every_variant_has_its_row(known: Fault) -> None:
    assert known.page is not None
    assert set(known.page.traces) == set(known.variants)
    assert known.page.symptom
    assert known.page.lookalikes
    assert set(known.page.lookalikes) <= {f.id for f in FAULTS} - {known.id}
    for name, trace in known.page.traces.items():
        assert trace.says, name
        assert trace.shows, name
        assert trace.input.startswith("--"), trace.input


@pytest.mark.parametrize("known", FAULTS, ids=lambda f: f.id)
def test_without_measurements_it_says_what_to_hand_over(known: Fault) -> None:
    said = known.why_not(Measurements())
    assert said != Fault.why_not(known, Measurements())
    assert "--" in said
    assert not said.endswith(".")


def test_docs_are_current() -> None:
    wanted = runpy.run_path(str(ROOT / "scripts" / "fault-pages"))["texts"]()
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make docs-faults`"
    assert {p.name for p in (ROOT / "docs" / "faults").glob("*.md")} == {p.name for p in wanted if p.parent.name == "faults"}


def finding(name: str, strength: str, gain: float | None) -> Finding:
    effect = None if gain is None else Effect(k=3, length_now=1.0, length_if_fixed=1.0 + gain, gain=gain)
    return Finding(fault=name, where=[], says=f"{name} it is", strength=strength, recovery="replayed",  # type: ignore[arg-type]
                   acceptance=effect, fix=Fix(says="mend it"))


def test_a_second_finding_is_told_from_the_first_by_strength_or_cost() -> None:
    both = Diagnosis(verdict="wiring", findings=[finding("layer-set", "proven", 0.9), finding("scale-mult", "proven", 0.2)])
    assert "0.90" in explain(Measurements(), both, "scale-mult")
    assert "0.20" in explain(Measurements(), both, "scale-mult")
    weaker = Diagnosis(verdict="wiring", findings=[finding("layer-set", "proven", 0.9), finding("metric", "suspected", None)])
    assert "it is proven, this one suspected" in explain(Measurements(), weaker, "metric")
    assert explain(Measurements(), weaker, "layer-set").startswith("Named, first of 2")


def test_what_was_not_named_is_told_from_what_was() -> None:
    found = Diagnosis(verdict="measurement", findings=[finding("sampler", "proven", None)])
    said = explain(Measurements(), found, "metric")
    assert said.startswith("Not named: no counters were given")
    assert fault("metric").page.lookalikes["sampler"] in said  # type: ignore[union-attr]


def test_an_unknown_fault_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", "--draft", "x", "--explain", "gremlins"]) == 2
    assert "layer-offset" in capsys.readouterr().err
