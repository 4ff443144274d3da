"""Taking the figures of claims: in order, once each, whatever happens in between."""

from __future__ import annotations

import pytest

from linattn_lab.experiments import reproduction
from linattn_lab.experiments.experiment import UNIFORM, FigureRow
from linattn_lab.experiments.records import Decision
from linattn_lab.experiments.reproduction import Reproduction
from trials import Trial


@pytest.fixture
def trials(monkeypatch):
    """Two experiments in the place of the real ones."""
    found = {"first": Trial(), "second": Trial(status="fails")}
    monkeypatch.setattr(reproduction, "EXPERIMENTS", found)
    return found


def keys(records):
    """Figures by claim, series and abscissa, verdicts by claim and status."""
    return [
        (record.claim, record.series, record.x) if isinstance(record, FigureRow) else (record.claim, record.status)
        for record in records
    ]


WHOLE = [("first", "area", 1), ("first", "area", 2), ("first", "area", 3), ("first", UNIFORM, 1), ("first", "holds")]


def test_every_figure_then_the_verdict(trials):
    records = list(Reproduction([], "quick").records([]))
    assert keys(records) == [*WHOLE, *(("second", *key[1:]) for key in WHOLE[:-1]), ("second", "fails")]
    row, decision = records[1], records[4]
    assert (row.value, row.standard_error, row.expected) == (4.0, 0.5, 4.25)
    assert isinstance(decision, Decision)
    assert (decision.sentence, decision.source) == (Trial.CLAIM, Trial.SOURCE)
    assert decision.figure == "the largest area is 9"
    assert (decision.x, decision.y, decision.log_x, decision.log_y, decision.names) == ("side", "area", True, False, [])


def test_only_what_was_chosen_at_the_setting_chosen(trials):
    run = Reproduction(["second"], "full")
    assert {record.claim for record in run.records([])} == {"second"}
    assert trials["second"].taken == [1, 2, 3, 4, 5]
    assert trials["first"].taken == []


@pytest.mark.parametrize("cut", range(11))
def test_nothing_is_taken_twice(trials, cut):
    whole = list(Reproduction([], "quick").records([]))
    for trial in trials.values():
        trial.taken.clear()
    run = Reproduction([], "quick")
    kept = whole[:cut]
    assert sum(run.missing(kept).values()) == 8 - sum(isinstance(record, FigureRow) for record in kept)
    new = list(run.records(kept))
    assert keys([*kept, *new]) == keys(whole)
    assert len(trials["first"].taken) + len(trials["second"].taken) == sum(
        isinstance(record, FigureRow) and record.series == "area" for record in whole[cut:]
    )


def test_a_crash_costs_one_claim_its_verdict_and_no_other(trials):
    trials["first"].raises[2] = ArithmeticError("no square of two")
    run = Reproduction([], "quick")
    records = list(run.records([]))
    assert keys(records)[:2] == [("first", "area", 1), ("second", "area", 1)]
    assert keys(records)[-1] == ("second", "fails")
    (crash,) = run.crashes
    assert crash.claim == "first"
    assert "ArithmeticError: no square of two" in crash.trace
    del trials["first"].raises[2]
    again = Reproduction([], "quick")
    assert keys(again.records(records)) == WHOLE[1:]
    assert again.crashes == []


def test_an_interrupt_is_no_crash(trials):
    trials["first"].raises[2] = KeyboardInterrupt()
    run = Reproduction([], "quick")
    with pytest.raises(KeyboardInterrupt):
        list(run.records([]))
    assert run.crashes == []


def test_circumstances_do_not_depend_on_the_choice_but_on_settings(trials):
    header = Reproduction([], "quick").header
    assert Reproduction(["first"], "quick").header == header
    assert Reproduction([], "full").header != header
    assert header.configs == dict.fromkeys(trials, "Config(sizes=(1, 2, 3), seconds=1.0)")


def test_an_unknown_claim(trials):
    with pytest.raises(ValueError, match=r"no claim is called third; `linattn reproduce --list` names them all"):
        Reproduction(["first", "third"], "quick")
