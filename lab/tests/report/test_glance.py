"""An audit at a glance: which methods decide, in the picture as in the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn_lab.audit.records import AUDIT, Header, HeadRow, ModelRow, TimeRow
from linattn_lab.report.audit.glance import decisive, glance_chart, glance_table
from linattn_lab.report.audit.summary import summarise_audit

HEADER = Header({}, "m", "M", False, 1, 1, 2, 2, "t", "", 8, 0, 8, ["EluPlusOne", "FavorPlus"], [64], 1, 0)


@pytest.fixture
def summary(tmp_path):
    """One method on one head, of which tests make others."""
    head = HeadRow(0, 0, "EluPlusOne", 2, 0, None, 0.5, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, 6, 20)
    models = [ModelRow("exact", None, 0, 1.0, 1.0), ModelRow("uniform", None, 0, 0.5, 0.4)]
    rows = [*models, head, TimeRow("EluPlusOne", 2, (1.0,), (1.0,), 1), ModelRow("EluPlusOne", 2, 0, 0.9, 0.9)]
    AUDIT.write(tmp_path / "audit.jsonl", HEADER, rows)
    return summarise_audit(tmp_path / "audit.jsonl")


def line(summary, label, error, time, numbers=6):
    """A method with another error, time and state."""
    (one,) = summary.lines
    return replace(one, map=label, error=replace(one.error, mean=error), time_ratio=time, state_numbers=numbers)


def test_few_methods_are_all_shown_the_least_error_first(summary):
    lines = (line(summary, "EluPlusOne", 0.7, 0.5), line(summary, "merged 64", 0.1, 2.0))
    assert [one.map for one in decisive(replace(summary, lines=lines))] == ["merged 64", "EluPlusOne"]


def test_of_many_methods_those_decide_that_no_other_beats_and_the_textbook_s_stands_beside_them(summary):
    """Twelve of which each is better and slower than the last, and twelve that are worse than all of them."""
    front = [line(summary, f"merged {n}", 0.8 - 0.05 * n, 1.0 + n, numbers=100 - n) for n in range(1, 13)]
    beaten = [line(summary, f"window {n}", 0.9, 20.0, numbers=200) for n in range(1, 12)]
    every = replace(summary, lines=(*beaten, *front, line(summary, "FavorPlus", 1.1, 30.0)))
    assert [one.map for one in decisive(every)] == [*(f"merged {n}" for n in range(12, 6, -1)), "FavorPlus"]
    # A decoder keeps its state: the smallest is the best one here, and beats all others.
    causal = replace(every, header=replace(every.header, is_causal=True))
    assert [one.map for one in decisive(causal)] == ["merged 12", "FavorPlus"]


def test_the_picture_and_the_table_have_the_same_methods(summary):
    lines = (line(summary, "EluPlusOne", 0.7, 0.5), line(summary, "merged 64", 0.1, 2.0))
    found = replace(summary, lines=lines)
    chart, names = glance_chart(found), [row[0] for row in glance_table(found).rows[2:]]
    marks = [
        (x, y, label) for curve in chart.curves for x, y, label in zip(curve.x, curve.y, curve.labels, strict=False)
    ]
    assert marks == [(2.0, 0.1, names[0]), (0.5, 0.7, names[1])]
    averaging, softmax = chart.curves[-2:]
    assert (set(averaging.y), softmax.x) == ({0.8}, (1.0, 1.0))
    decoder = glance_chart(replace(found, header=replace(HEADER, is_causal=True)))
    # Keys and values of 8 tokens, 2 wide each.
    assert decoder.curves[-1].x == (32.0, 32.0)
    assert decoder.x.title == "numbers kept per head"


def test_a_method_that_was_not_timed_has_no_mark(summary):
    found = replace(summary, lines=(line(summary, "EluPlusOne", 0.7, None), line(summary, "merged 64", 0.1, 2.0)))
    assert [curve.labels for curve in glance_chart(found).curves if curve.labels] == [("merged 64 (2 features)",)]
    assert len(glance_table(found).rows) == 4
