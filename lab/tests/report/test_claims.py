"""The report's claims: their summary, their charts and their section of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn_lab.experiments import reproduction
from linattn_lab.experiments.experiment import EXACT, UNIFORM, FigureRow
from linattn_lab.experiments.records import CLAIMS
from linattn_lab.experiments.reproduction import Reproduction
from linattn_lab.report import Report, write_page, write_report
from linattn_lab.report.claims.figures import alternative, claim_chart
from linattn_lab.report.claims.summary import summarise_claims, verdict_table
from pages import Page
from trials import Trial


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder with a run of three claims, the last one unfinished."""
    found = {"first": Trial(), "second": Trial(status="fails"), "third": Trial(raises={3: ArithmeticError()})}
    monkeypatch.setattr(reproduction, "EXPERIMENTS", found)
    run = Reproduction([], "full")
    CLAIMS.write(tmp_path / "claims.jsonl", run.header, run.records([]))
    return tmp_path


@pytest.fixture
def summary(folder):
    """That run, summed up."""
    return summarise_claims(folder / "claims.jsonl")


def test_the_summary(summary):
    assert [claim.name for claim in summary.claims] == ["first", "second"]
    assert [summary.count(status) for status in ("holds", "fails", "undecided")] == [1, 1, 0]
    assert summary.unfinished == ("third",)
    assert summary.claims[0].command == "linattn reproduce first --full --again"
    assert len(summary.claims[0].rows) == 6


def test_the_table(summary):
    table = verdict_table(summary, ("second",))
    assert table.rows == (("fails", f"{Trial.CLAIM}\nthe largest area is 25", "second"),)


def test_a_file_that_is_no_run(tmp_path):
    (tmp_path / "claims.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="is not a run of linattn reproduce"):
        summarise_claims(tmp_path / "claims.jsonl")


def test_the_chart(summary):
    chart = claim_chart(summary.claims[0])
    area, expected, uniform, exact = chart.curves
    assert area.x == (1, 2, 3, 4, 5)
    assert area.y == (1, 4, 9, 16, 25)
    assert area.low == (0, 3, 8, 15, 24)  # two standard errors of a half
    assert area.high == (2, 5, 10, 17, 26)
    assert expected.y == (1.25, 4.25, 9.25, 16.25, 25.25)
    assert (expected.dash, expected.is_listed, expected.colour) == ("dash", False, area.colour)
    assert (uniform.name, uniform.y, uniform.colour) == (UNIFORM, (7.0,), None)
    assert (chart.x.is_logarithmic, chart.y.is_logarithmic) == (True, False)
    # Exact attention, the other baseline, is the line at 0.
    assert (exact.name, exact.x, exact.y) == (EXACT, (1, 5), (0, 0))


def test_a_chart_of_cases_and_of_what_is_not_finite(summary):
    claim = summary.claims[0]
    decision = replace(claim.decision, names=["small & <wide>", "large"], log_x=False, log_y=True)
    rows = (
        FigureRow("first", "a<b", 0, float("inf"), None, None, 0.0),
        FigureRow("first", "a<b", 1, 2.0, None, None, 0.0),
    )
    chart = claim_chart(replace(claim, decision=decision, rows=rows))
    (curve,) = chart.curves
    assert (curve.dash, curve.marks) == (None, "shape")
    assert curve.y == (None, 2.0)
    assert curve.tips == ("a<b, small & <wide>: inf", "a<b, large: 2")
    assert chart.x.ticks == ((0, "small & <wide>"), (1, "large"))
    assert chart.x.ends == (-0.5, 1.5)


def test_the_chart_in_words(summary):
    assert alternative(summary.claims[0]) == (
        "Chart of area against side: area, averaging the values. the largest area is 25"
    )


def test_the_page(summary, folder):
    path = write_report(folder)
    page = Page(path.read_text(encoding="utf-8"))
    page.check_that_nothing_is_loaded()
    assert "Of 2 claims made for linear attention: 1 hold, 1 fail." in page.text
    assert "A square grows with its side <for certain>." in page.text
    assert "Begun and not finished: third." in page.text
    assert "Not measured here: linattn audit." in page.text
    statuses = [at["data-of"] for tag, at in page.tags if tag == "tr" and "data-of" in at]
    assert statuses == ["holds", "fails"]
    links = {at["href"] for tag, at in page.tags if tag == "a" and at["href"].startswith("#claim-")}
    assert links == {"#claim-first", "#claim-second"}
    ids = {at.get("id") for _, at in page.tags}
    assert {"claim-first", "chart-first", "claim-second", "chart-second"} <= ids
    labels = [at["aria-label"] for _, at in page.tags if at.get("role") == "img"]
    assert all(label.startswith("Chart of area") for label in labels)


def test_a_file_that_cannot_be_read_is_named_on_the_page(folder):
    (folder / "audit.jsonl").write_text('{"kind": "of another time"}\n')
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "audit.jsonl could not be read." in page.text
    assert "Of 2 claims" in page.text


def test_a_page_of_nothing(tmp_path):
    write_page(Report(), tmp_path / "index.html")
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    for command in ("reproduce", "audit", "bench"):
        assert f"Not measured here: linattn {command}." in page.text
