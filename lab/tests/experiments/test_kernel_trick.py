"""Claims of the kernel trick: what the figures say, and that other figures would say otherwise."""

from __future__ import annotations

import math

import pytest

from linattn_lab.experiments import EXPERIMENTS
from linattn_lab.experiments.experiment import EXACT
from linattn_lab.experiments.judging import STANDARD_ERRORS, value_at
from linattn_lab.experiments.kernel_trick._ranks import ATTENTION, WEIGHTS
from linattn_lab.experiments.kernel_trick.any_map_averages import IDENTITY, TRIGONOMETRIC
from linattn_lab.experiments.kernel_trick.product_is_free_of_n import OPERATIONS

# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("reassociation-is-exact", "holds", "fails", lambda row: 1e-12 if row.x == 256 else None),
    ("product-is-free-of-n", "fails", "holds", lambda row: 8192.0 if row.series == OPERATIONS else None),
    ("product-is-free-of-n", "fails", "undecided", lambda row: row.x**0.5 if row.series == OPERATIONS else None),
    ("rank-of-attention", "holds", "fails", lambda row: 9.0 if (row.series, row.x) == (WEIGHTS, 8) else None),
    ("rank-of-attention", "holds", "fails", lambda row: 9.0 if (row.series, row.x) == (ATTENTION, 8) else None),
    ("rank-of-causal-attention", "fails", "holds", lambda row: row.x),
    ("a-finite-map-of-exp", "fails", "holds", lambda row: min(row.value, 30.0)),
    ("any-map-averages", "fails", "holds", lambda row: 0.0),
    ("any-map-averages", "fails", "undecided", lambda row: row.standard_error),
]


@pytest.mark.parametrize(("name", "status", "other", "new_value"), CASES, ids=[case[0] for case in CASES])
def test_the_figures_decide(taken, decided, doctored, name, status, other, new_value) -> None:
    rows = taken(name)
    assert decided(name, rows) == status
    assert decided(name, doctored(rows, new_value)) == other


def test_ranks_are_those_of_the_factors_until_a_mask_makes_them_full(taken) -> None:
    full, causal = taken("rank-of-attention"), taken("rank-of-causal-attention")
    assert value_at(full, EXACT, 8).value == 64
    for series in (WEIGHTS, ATTENTION):
        assert value_at(full, series, 8).value == 8
        assert value_at(causal, series, 8).value == 64


# Ranks of one set of 60 points in an independent calculation.
@pytest.mark.parametrize(("dimension", "printed"), [(1, 16), (2, 51), (4, 60)])
def test_ranks_of_exponentials_are_those_of_another_calculation(taken, dimension, printed) -> None:
    row = value_at(taken("a-finite-map-of-exp"), f"d = {dimension}", 60)
    sets = EXPERIMENTS["a-finite-map-of-exp"].QUICK.sets
    assert abs(row.value - printed) <= STANDARD_ERRORS * row.standard_error * math.sqrt(sets)


# Shares of negative denominators in another implementation, of one draw each.
REFERENCE = [
    (IDENTITY, 16, 0.504),
    *((TRIGONOMETRIC.format(1), width, share) for width, share in ((16, 0.22), (64, 0.12), (256, 0.03))),
    *((TRIGONOMETRIC.format(1.5), width, share) for width, share in ((16, 0.48), (64, 0.50), (256, 0.45))),
]


@pytest.mark.parametrize(("series", "width", "printed"), REFERENCE)
def test_negative_denominators_are_as_many_as_in_another_implementation(taken, series, width, printed) -> None:
    row = value_at(taken("any-map-averages"), series, width)
    trials = EXPERIMENTS["any-map-averages"].QUICK.trials
    rounding, one_draw = 0.005, row.standard_error * math.sqrt(trials)
    assert abs(row.value - printed) <= rounding + STANDARD_ERRORS * one_draw
