"""Results in a notebook: the page in a frame that may do nothing, figures by name, tables as rows and as DataFrames."""

from __future__ import annotations

from html import unescape

import pytest
from diagnoses import case, clean, hostile

from draftscope.counterfactual import ReplayRung, Replays
from draftscope.errors import UsageError
from draftscope.report.html import page
from draftscope.report.notebook import TABLES


def test_a_diagnosis_shows_its_page_in_a_frame() -> None:
    shown = case()._repr_html_()
    assert shown.startswith('<iframe sandbox="" srcdoc="')
    assert unescape(shown.split('srcdoc="')[1].split('"')[0]) == page(case())
    bad = hostile()._repr_html_()
    assert bad.count("<iframe") == 1
    assert bad.count("<") == 2  # the frame's own tag and its end


def test_figures_by_name_and_all() -> None:
    one = case().plot("channels")
    assert str(one).count("<figure>") == 1
    assert "Size of single channels" in str(one)
    assert one._repr_html_().startswith("<iframe")
    assert str(case().plot()).count("<figure>") == 11
    assert str(clean().plot()).count("<figure>") == 2
    with pytest.raises(UsageError, match="There are: ladder, positions"):
        clean().plot("channels")


def test_tables_hold_the_figures() -> None:
    diagnosis = case()
    ladder = diagnosis.rows()
    assert [row["rung"] for row in ladder] == ["trained", "served", "as read", "measured"]
    assert (ladder[0]["length"], ladder[0]["low"], ladder[0]["joint 2"]) == (2.31, 2.22, 0.41)
    tokens = diagnosis.rows("tokens")
    assert (tokens[5]["from"], tokens[5]["rejected"], tokens[5]["cosine 0"]) == ("instead", 77, 0.5)
    assert len(diagnosis.rows("channels")) == 32
    assert sum(row["outlier"] for row in diagnosis.rows("channels")) == 1
    assert len(diagnosis.rows("components")) == 100
    assert [row["is"] for row in diagnosis.rows("placement")][3] == "embedding (boundary 0)"
    for name in TABLES:
        rows = diagnosis.rows(name)
        assert rows
        assert {tuple(row) for row in rows} == {tuple(rows[0])} or name == "tokens"
    with pytest.raises(UsageError, match="There are: acceptance"):
        diagnosis.rows("nothing")


def test_tables_become_frames() -> None:
    pandas = pytest.importorskip("pandas")
    for name in TABLES:
        frame = case().frame(name)
        assert isinstance(frame, pandas.DataFrame)
        assert len(frame) == len(case().rows(name))
    assert case().frame().set_index("rung").loc["measured", "length"] == 1.30
    assert clean().frame("findings").empty


def test_a_replay_is_a_table() -> None:
    rung = ReplayRung(k=3, length=1.9, joint=[0.5, 0.3, 0.1], conditional=[0.5, 0.6, 0.3], rounds=8, rows=20, readout="walk",
                      draft="<b>d</b>", set=["shift=-1"], sequences=4, tokens=1.9, text={})
    found = Replays(states="capture/", k=3, rungs=[rung])
    assert found.rows()[0]["joint 3"] == 0.1
    assert "&lt;b&gt;d&lt;/b&gt;" in unescape(found._repr_html_())
    assert "nothing" not in Replays()._repr_html_()


def test_printed_it_is_what_a_terminal_shows() -> None:
    told = str(case())
    assert told.startswith("wiring") and "Acceptance" in told and "1. layer-set" in told
    assert "\x1b" not in str(hostile()) and max(map(len, told.splitlines())) <= 100
