"""What a clean verdict excludes, and what confidence rests on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import TARGET, tiny_rig

from draftscope.diagnose import verdict
from draftscope.diagnose.case import Inputs, open_case
from draftscope.diagnose.confidence import EDGES, FEWEST, Calibration, Cell, amount, calibration, confidence_of
from draftscope.diagnose.power import NOTICEABLE, paired, power_of
from draftscope.diagnose.run import Examination
from draftscope.drilling.calibrating import calibrate
from draftscope.drilling.report import CaseKind, Named, Outcome
from draftscope.faults.plant import Plant
from draftscope.findings import Strength
from draftscope.target.spoiling import Scaled


def examined(plant: Plant, folder: Path) -> Examination:
    run = tiny_rig().run(plant, folder)
    examination = Examination(open_case(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=TARGET)), lambda _: None)
    examination.conclude()
    return examination


def test_what_a_clean_verdict_excludes(tmp_path: Path) -> None:
    examination = examined(Plant.healthy((2, 4, 5)), tmp_path)
    power = power_of(examination)
    rows, steps = power["rows"]["serve"], power["steps"]
    assert rows > 1000
    assert steps > 100
    # Nothing amiss in n trials: 1 - 0.05 ** (1 / n), by hand.
    assert power["rows_amiss"]["serve"] == pytest.approx(1 - 0.05 ** (1 / rows))
    assert power["steps_amiss"] == pytest.approx(1 - 0.05 ** (1 / steps))
    # In health every sequence replays alike on both rungs, where one rung's own spread is wide.
    assert power["smallest_length_difference"] < 3 * NOTICEABLE
    rung = examination.rungs["as_read"]
    assert rung.interval is not None
    assert (rung.interval[1] - rung.interval[0]) / 2 > 5 * power["smallest_length_difference"]
    assert any("steps" in one for one in power["excludes"])
    difference = paired(examination, "reference", "as_read")
    assert difference is not None
    assert difference.value == pytest.approx(0, abs=NOTICEABLE)
    assert paired(examination, "as_read", "measured") is None
    assert verdict._gaps(examination) == []


def test_a_small_loss_is_seen_because_rungs_are_paired(tmp_path: Path) -> None:
    healthy = Plant.healthy((2, 4, 5))
    wiring = healthy.serve
    spoilt = Plant(serve=type(wiring)(wiring.slots, spoilers=(Scaled(2.7, (1,)),)), train=healthy.train)
    examination = examined(spoilt, tmp_path)
    upper, lower = examination.rungs["reference"], examination.rungs["served"]
    assert upper.interval is not None
    assert lower.interval is not None
    difference = paired(examination, "reference", "served")
    assert difference is not None
    assert difference.interval is not None
    assert upper.length is not None
    assert lower.length is not None
    assert difference.value == pytest.approx(lower.length - upper.length)
    assert difference.interval[1] < -NOTICEABLE
    assert upper.interval[0] < lower.interval[1]
    assert any("(reference)" in gap and "(served)" in gap for gap in verdict._gaps(examination))


def outcome(key: str, kind: CaseKind, pair: str, rows: int, *named: tuple[str, Strength, bool]) -> Outcome:
    return Outcome(key=key, kind=kind, pair=pair, rows={"train": rows, "serve": 9 * rows},
                   findings=[Named(fault=f, strength=s, right=r) for f, s, r in named])


def test_confidence_counts_what_the_rules_were_not_tuned_on() -> None:
    few, many = EDGES[0] - 1, EDGES[-1]
    found = calibrate([
        outcome("tuned", "single", "tiny", many, ("layer-set", "proven", False)),
        outcome("a", "other strength", "tiny", many, ("layer-set", "proven", True)),
        outcome("b", "single", "other", few, ("layer-set", "proven", False), ("metric", "suspected", False)),
        outcome("b", "single", "other", many, ("layer-set", "proven", True)),
        outcome("health", "clean", "other", many, ("layer-set", "proven", False)),
    ])
    cells = {(c.fault, c.strength, c.rows): (c.right, c.of) for c in found.cells}
    assert cells == {
        ("layer-set", "proven", None): (2, 3), ("layer-set", "proven", 0): (0, 1), ("layer-set", "proven", len(EDGES)): (2, 3),
        ("metric", "suspected", 0): (0, 1),
    }
    assert (found.pairs, found.cases, found.healthy) == (["other", "tiny"], 3, 1)
    assert next(c for c in found.cells if c.rows is None).confidence == pytest.approx(2.5 / 4, abs=1e-3)


def test_confidence_is_null_where_too_little_was_seen() -> None:
    def cell(rows: int | None, of: int) -> Cell:
        return Cell(fault="layer-set", strength="proven", rows=rows, right=of, of=of, confidence=0.9, interval=(0.7, 1.0))

    table = Calibration(schema="draftscope.confidence/1", cells=[cell(None, FEWEST), cell(0, FEWEST - 1), cell(1, FEWEST)])
    assert confidence_of("layer-set", "proven", EDGES[0] - 1, table) == cell(None, FEWEST)
    assert confidence_of("layer-set", "proven", EDGES[0], table) == cell(1, FEWEST)
    assert confidence_of("layer-set", "suspected", EDGES[0], table) is None
    assert confidence_of("metric", "proven", EDGES[0], table) is None
    assert [amount(rows) for rows in (0, EDGES[0], EDGES[-1] + 1)] == [0, 1, len(EDGES)]


def test_the_packages_table_reads() -> None:
    table = calibration()
    assert all(0 <= c.interval[0] <= c.interval[1] <= 1 and c.right <= c.of for c in table.cells)
