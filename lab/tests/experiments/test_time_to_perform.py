"""Claims of "Time to Perform": what the figures say, and that other figures would say otherwise."""

from __future__ import annotations

import math

import pytest

from linattn_lab.experiments.experiment import UNIFORM
from linattn_lab.experiments.judging import STANDARD_ERRORS, deviation, value_at
from linattn_lab.experiments.time_to_perform.johnson_lindenstrauss import KERNEL
from linattn_lab.experiments.time_to_perform.normaliser_sums_over_d import PRINTED, RIGHT
from linattn_lab.experiments.time_to_perform.one_random_matrix import BOTH, KEYS

# A process takes each experiment's figures once.
pytestmark = pytest.mark.xdist_group("figures of time_to_perform")

# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("normaliser-sums-over-d", "fails", "holds", lambda row: 1e-16 if row.series == PRINTED else None),
    ("one-random-matrix", "fails", "holds", lambda row: 0.001 if row.series == KEYS and row.x == 1000 else None),
    ("one-random-matrix", "fails", "undecided", lambda row: 0.05 if row.series == KEYS and row.x == 1000 else None),
    ("one-random-matrix", "fails", "holds", lambda row: 0.5 if row.series == BOTH else None),
    ("johnson-lindenstrauss", "fails", "holds", lambda row: math.sqrt(2 / 64) if row.series == KERNEL else None),
    ("fewer-samples-than-tokens", "fails", "holds", lambda row: 0.2 if row.series == UNIFORM else None),
    (
        "fewer-samples-than-tokens",
        "fails",
        "undecided",
        lambda row: row.standard_error if row.series == "512 samples" else None,
    ),
]


@pytest.mark.parametrize(("name", "status", "other", "new_value"), CASES, ids=[case[0] for case in CASES])
def test_the_figures_decide(taken, decided, doctored, name, status, other, new_value) -> None:
    rows = taken(name)
    assert decided(name, rows) == status
    assert decided(name, doctored(rows, new_value)) == other


def test_the_sum_over_all_keys_is_right(taken) -> None:
    assert all(row.value < row.x * 2.0**-52 for row in taken("normaliser-sums-over-d") if row.series == RIGHT)


@pytest.mark.parametrize("name", ["one-random-matrix", "johnson-lindenstrauss"])
def test_closed_forms_say_the_same(taken, name) -> None:
    sampled = [row for row in taken(name) if row.standard_error and (name, row.x) != ("one-random-matrix", 1)]
    assert len(sampled) > 8
    assert all(deviation(row) <= STANDARD_ERRORS for row in sampled)


# Mean square errors of an independent implementation, L = 1024, D = 64, of few trials.
REFERENCE = [
    (UNIFORM, 0.5, 6.3e-5),
    (UNIFORM, 1, 1.7e-3),
    ("256 samples", 0.5, 1.8e-4),
    ("256 samples", 1, 3.7e-2),
]


@pytest.mark.parametrize(("series", "sigma", "printed"), REFERENCE)
def test_errors_are_those_of_another_implementation(taken, series, sigma, printed) -> None:
    row = value_at(taken("fewer-samples-than-tokens"), series, sigma)
    rounding = 0.5 * 10 ** (math.floor(math.log10(printed)) - 1)
    assert abs(row.value - printed) < rounding + STANDARD_ERRORS * row.standard_error
