"""The time left follows from the work done, and every stage has its line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from linattn_lab.commands.stages import Stages, stages
from linattn_lab.pace import Pace


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self):
        return self.now


def test_the_time_left_is_in_proportion_to_the_work_left():
    clock = Clock()
    pace = Pace(100, clock=clock)
    clock.now += 5
    assert pace.left is None
    assert pace.words == "0%, 0:05 passed, time left not known yet"
    pace.advance(20)
    clock.now += 35
    assert (pace.passed, pace.left) == (40, 160)
    assert pace.words == "20%, 0:40 passed, about 2:40 left"
    pace.advance(80)
    assert pace.left == 0


def test_what_an_earlier_run_did_took_this_one_no_time():
    clock = Clock()
    pace = Pace(100, done=60, clock=clock)
    clock.now += 10
    pace.advance(10)
    assert pace.left == 30


def test_an_expectation_serves_until_something_is_done():
    clock = Clock()
    pace = Pace(7200, seconds_per_unit=1.0, clock=clock)
    assert pace.words == "0%, 0:00 passed, about 2:00:00 left"
    clock.now += 10
    pace.advance(20)
    assert pace.left == 3590


@pytest.fixture
def told():
    """A `Stages`, its clock, and what it prints."""
    clock, out = Clock(), io.StringIO()
    return Stages(Console(file=out, width=200), lambda words, pace: None, clock=clock), clock, out


def test_a_stage_is_told_when_it_begins(told):
    watch, clock, out = told
    watch.begin("Loading")
    assert out.getvalue() == "Loading\n"
    watch.pace = Pace(10, clock=clock)
    clock.now += 4
    watch.advance(1)
    watch.begin("Measuring")
    assert out.getvalue().endswith("Measuring (10%, 0:04 passed, about 0:36 left)\n")


def test_a_long_stage_is_told_of_in_between(told):
    watch, clock, out = told
    watch.begin("Measuring")
    for layer in range(60):
        clock.now += 5
        watch.pass_by(f"layer {layer}")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["Measuring", "layer 3"]
    # 300 seconds: a line for each 20.
    assert len(lines) == 1 + 15


def test_lines_are_printed_under_a_bar_too():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    with stages(console) as watch:
        watch.pace = Pace(2)
        watch.begin("First")
        watch.advance(1)
        watch.begin("Second")
    assert "First (0%" in out.getvalue()
    assert "Second (50%" in out.getvalue()
