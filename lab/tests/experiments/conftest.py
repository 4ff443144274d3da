"""Experiments taken at their quick size, once per process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from linattn_lab.experiments import EXPERIMENTS
from linattn_lab.experiments.experiment import FigureRow


@cache
def _quick(name):
    """All rows of one experiment."""
    experiment = EXPERIMENTS[name]
    found = []
    for measurement in experiment.rows(experiment.QUICK):
        figure = measurement.take()
        found.append(
            FigureRow(
                name, measurement.series, measurement.x, figure.value, figure.standard_error, figure.expected, 0.0
            )
        )
    return tuple(found)


@pytest.fixture
def taken():
    """A function from an experiment's name to its rows at the quick size."""
    return _quick


@pytest.fixture
def decided():
    """A function from a name and rows to the status of the verdict."""
    return lambda name, rows: EXPERIMENTS[name].verdict(rows).status


@pytest.fixture
def doctored():
    """A function that gives rows with the values changed by a function of the row, where it does not give None."""

    def change(rows, new_value):
        values = [new_value(row) for row in rows]
        return tuple(
            row if value is None else replace(row, value=value) for row, value in zip(rows, values, strict=True)
        )

    return change
