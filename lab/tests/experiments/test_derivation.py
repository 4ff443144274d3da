"""Claims of the derivation: what the figures say, and that other figures would say otherwise."""

from __future__ import annotations

import pytest

from linattn_lab.experiments.derivation.a_draw_is_typical import BELOW, MEDIAN
from linattn_lab.experiments.derivation.constant_time_lookup import NUMBERS, OPERATIONS
from linattn_lab.experiments.derivation.linear_time import LINEAR
from linattn_lab.experiments.derivation.query_costs_r import QUERY
from linattn_lab.experiments.experiment import EXACT, FigureRow
from linattn_lab.experiments.judging import STANDARD_ERRORS, value_at

# A process takes each experiment's figures once.
pytestmark = pytest.mark.xdist_group("figures of derivation")

# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("output-converges", "holds", "fails", lambda row: 1.0),
    ("exact-expectation", "holds", "fails", lambda row: 1e-12 if row.x == 24 and row.series == "d = 2" else None),
    ("unbiased-kernel", "holds", "fails", lambda row: 1 + 9 * row.standard_error if row.x == 90 else None),
    ("unbiased-kernel", "holds", "undecided", lambda row: 1 + 6 * row.standard_error if row.x == 90 else None),
    ("a-draw-is-typical", "fails", "holds", lambda row: 1.1 if row.series == MEDIAN else None),
    ("a-draw-is-typical", "fails", "undecided", lambda row: max(row.value, 0.5) if row.series == MEDIAN else None),
    ("query-costs-r", "fails", "holds", lambda row: 1000.0 if row.series == QUERY else None),
    ("query-costs-r", "fails", "undecided", lambda row: row.x**0.5 if row.series == QUERY else None),
    ("constant-time-lookup", "holds", "fails", lambda row: row.x if row.series == NUMBERS else None),
    ("constant-time-lookup", "holds", "fails", lambda row: row.x if row.series == OPERATIONS else None),
]


@pytest.mark.parametrize(("name", "status", "other", "new_value"), CASES, ids=[case[0] for case in CASES])
def test_the_figures_decide(taken, decided, doctored, name, status, other, new_value) -> None:
    rows = taken(name)
    assert decided(name, rows) == status
    assert decided(name, doctored(rows, new_value)) == other


def test_lognormal_tails_put_the_median_far_below_the_mean(taken) -> None:
    rows = taken("a-draw-is-typical")
    for series, printed in ((MEDIAN, 0.20), (BELOW, 0.78)):
        row = value_at(rows, series, 16)
        assert abs(row.value - printed) < 0.005 + STANDARD_ERRORS * row.standard_error


@pytest.mark.parametrize(
    ("linear", "exact", "status"),
    [(1.0, 2.0, "holds"), (1.2, 1.7, "holds"), (2.0, 2.0, "fails"), (1.0, 1.0, "fails"), (1.4, 2.0, "undecided")],
)
def test_powers_of_time_decide(decided, linear, exact, status) -> None:
    powers = ((LINEAR, linear), (EXACT, exact))
    rows = [
        FigureRow("linear-time", name, n, n**power, None, None, 0.0) for name, power in powers for n in (64, 128, 256)
    ]
    assert decided("linear-time", rows) == status
