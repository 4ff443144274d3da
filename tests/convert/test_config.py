"""What a conversion is to do, and what is no map or no number."""

from __future__ import annotations

import math

import pytest

from converted import state, unchanged
from linattn.convert import DEFAULT_MAP, ConvertConfig, convert_
from linattn.methods.method import parse_method

MAP = "LearnedExponential"


@pytest.mark.parametrize("minutes", [-1.0, math.nan, math.inf, "5", True])
def test_minutes(minutes):
    with pytest.raises(ValueError, match="minutes must be a finite number >= 0, got"):
        ConvertConfig(minutes=minutes)


@pytest.mark.parametrize("name", ["num_tokens", "batch_size", "learning_rate", "map_learning_rate"])
@pytest.mark.parametrize("value", [0, -2, math.nan, math.inf])
def test_other_numbers(name, value):
    words = "a finite number > 0" if name.endswith("rate") else "an integer of at least 1"
    with pytest.raises(ValueError, match=f"{name} must be {words}, got"):
        ConvertConfig(**{name: value})


@pytest.mark.parametrize(
    "name", ["num_features", "num_tokens", "min_tokens", "adapter_rank", "batch_size", "texts", "layers"]
)
def test_what_is_no_integer_or_one_for_several(name):
    values = {"texts": ["abc"], "layers": ["0", 1]}.get(name, [2.5, True])
    are_many = name in ("texts", "layers")
    error, words = (TypeError, "several") if are_many else (ValueError, "an integer of at least 1")
    for value in values:
        with pytest.raises(error, match=f"{name} must be {words}, got"):
            ConvertConfig(**{name: value})


@pytest.mark.parametrize(("value", "words"), [(0, "an integer of at least 1"), (17, "at most num_tokens=16")])
def test_the_shortest_text_is_no_longer_than_the_longest(value, words):
    with pytest.raises(ValueError, match=f"min_tokens must be {words}, got {value}"):
        ConvertConfig(num_tokens=16, min_tokens=value)


@pytest.mark.parametrize("written", ["window 4 + merged 16", "merged 8", (MAP, "window 4 + merged 16 in 4 bits")])
def test_merged_keys_need_no_training(written):
    with pytest.raises(ValueError, match=r"must be a map.*got '(window 4 \+ )?merged .*linattn\.hf\.BoundedCache"):
        ConvertConfig(written)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ((), r"feature_map must name a method, got \(\); None is 'Expansion"),
        ("", "feature_map must name a method, got ''"),
        ("Perfomer", "feature_map: 'Perfomer': there is no feature map 'Perfomer'"),
        ((MAP, "Expansion + window 3"), "feature_map: .* the window must be a power of two"),
    ],
)
def test_what_is_no_method(written, words):
    with pytest.raises(ValueError, match=words):
        ConvertConfig(written)


@pytest.mark.parametrize(
    ("written", "number", "words"),
    [
        ("FavorPlus", None, "is None, and FavorPlus needs a number of features; give one"),
        (("Taylor(order=1)", MAP), None, f"is None, and {MAP} needs a number of features"),
        (None, 64, r"is 64, and Expansion\(num_centres=16\) has a width of its own"),
    ],
)
def test_a_number_of_features_where_a_map_takes_one_and_nowhere_else(written, number, words):
    with pytest.raises(ValueError, match=f"^num_features {words}"):
        ConvertConfig(written, num_features=number)


def test_the_default_is_a_map():
    assert parse_method(DEFAULT_MAP).label == DEFAULT_MAP
    assert [method.label for method in ConvertConfig().methods] == [DEFAULT_MAP]


def test_the_order_of_layers_is_that_of_their_methods(build, batches):
    """One method is for all of them, in any order."""
    made = [
        convert_(build("bert"), batches, ConvertConfig("Taylor(order=2)", minutes=0, layers=layers))
        for layers in ((0, 1), (1, 0))
    ]
    assert made[0] == made[1]
    several = ConvertConfig(("Taylor(order=1)", "Taylor(order=2)"), minutes=0, layers=(1, 0))
    model, before = build("bert"), state(build("bert"))
    with pytest.raises(ValueError, match=r"in ascending order, got layers=\[1, 0\]"):
        convert_(model, batches, several)
    assert unchanged(model, before)


def test_a_named_layer_whose_window_texts_exceed_is_refused(build, batches):
    """Before anything is trained."""
    model = build("gemma3", num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    before = state(model)
    with pytest.raises(ValueError, match=r"longer than the sliding window of model\.layers\.0\.self_attn"):
        convert_(model, batches, ConvertConfig("FavorPlus(num_features=8)", minutes=0, layers=(0,)))
    assert unchanged(model, before)
