"""What a conversion is to do, and numbers that mean nothing."""

from __future__ import annotations

import math

import pytest

from linattn.convert import DEFAULT_MAP, ConvertConfig
from linattn.planning.methods import parse_method


@pytest.mark.parametrize("minutes", [-1.0, math.nan, math.inf])
def test_minutes(minutes):
    with pytest.raises(ValueError, match="minutes must be a finite number of 0 or more, got"):
        ConvertConfig(minutes=minutes)


@pytest.mark.parametrize("name", ["num_tokens", "batch_size", "learning_rate", "map_learning_rate"])
@pytest.mark.parametrize("value", [0, -2, math.nan, math.inf])
def test_other_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got"):
        ConvertConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 17])
def test_the_shortest_text_is_no_longer_than_the_longest(value):
    with pytest.raises(ValueError, match=rf"min_tokens must lie in \[1, num_tokens=16\], got {value}"):
        ConvertConfig(num_tokens=16, min_tokens=value)


def test_the_default_is_a_method():
    assert parse_method(DEFAULT_MAP).label == DEFAULT_MAP
