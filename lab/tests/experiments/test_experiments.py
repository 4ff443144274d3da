"""What every experiment owes, whatever it claims."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass
from types import ModuleType

import pytest
import torch

from linattn_lab.experiments import EXPERIMENTS, ROOMS
from linattn_lab.experiments.counting import operations
from linattn_lab.experiments.experiment import FigureRow
from linattn_lab.experiments.judging import decide, deviation, slope

LEAST_CLAIMS, MOST_QUICK_SECONDS, MOST_FULL_SECONDS = 25, 180, 2700


def test_there_are_enough_and_they_take_no_longer_than_promised():
    assert len(EXPERIMENTS) >= LEAST_CLAIMS
    assert sum(experiment.QUICK.seconds for experiment in EXPERIMENTS.values()) <= MOST_QUICK_SECONDS
    assert sum(experiment.FULL.seconds for experiment in EXPERIMENTS.values()) <= MOST_FULL_SECONDS


def test_products_are_counted_wherever_they_are_written():
    first, second, sums = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)
    of_one = 2 * 3 * 4 * 5
    assert operations(lambda: torch.bmm(first, second)) == 2 * of_one
    assert operations(lambda: torch.bmm(first, second, out=sums)) == 2 * of_one
    assert operations(lambda: torch.baddbmm(sums, first, second, alpha=3)) == 2 * of_one
    assert operations(lambda: sums.baddbmm_(first, second, alpha=3)) == 2 * of_one
    assert operations(lambda: sums[0].addmm_(first[0], second[0])) == of_one
    assert operations(lambda: torch.addmm(sums[0], first[0], second[0])) == of_one


def test_every_room_has_some():
    rooms = {experiment.__name__.split(".")[-2] for experiment in EXPERIMENTS.values()}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_and_where_and_measures_nothing_twice(name):
    experiment = EXPERIMENTS[name]
    assert isinstance(experiment, ModuleType)
    assert experiment.CLAIM.endswith(".")
    assert experiment.SOURCE
    for config in (experiment.QUICK, experiment.FULL):
        assert is_dataclass(config)
        with pytest.raises(FrozenInstanceError):
            config.seconds = 0.0
        keys = [(measurement.series, measurement.x) for measurement in experiment.rows(config)]
        assert keys
        assert len(set(keys)) == len(keys)
        if experiment.AXES.names:
            assert {x for _, x in keys} <= set(range(len(experiment.AXES.names)))
    quick, full = (list(experiment.rows(config)) for config in (experiment.QUICK, experiment.FULL))
    assert len(quick) <= len(full)
    assert experiment.QUICK.seconds <= experiment.FULL.seconds


def test_a_verdict_is_one_of_three():
    assert decide(holds=True, fails=False, figure="", tolerance="").status == "holds"
    assert decide(holds=False, fails=True, figure="", tolerance="").status == "fails"
    assert decide(holds=False, fails=False, figure="", tolerance="").status == "undecided"
    with pytest.raises(ValueError, match="cannot both"):
        decide(holds=True, fails=True, figure="", tolerance="")


def test_slopes_and_deviations():
    def row(x, value, error=None, expected=None):
        return FigureRow("", "", x, value, error, expected, 0.0)

    steepness, error = slope([row(1, 5.0, 0.5), row(2, 20.0, 2.0), row(4, 80.0, 8.0)])
    assert steepness == pytest.approx(2.0)
    # Two outer points log 4 apart, each with a relative error of a tenth.
    assert error == pytest.approx(0.1 * 2**0.5 / 1.3862943611)
    assert deviation(row(1, 3.0, 0.5, 2.0)) == 2.0
    assert deviation(row(1, 1.0 + 2**-52, None, 1.0)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="nothing to be compared"):
        deviation(row(1, 1.0))
